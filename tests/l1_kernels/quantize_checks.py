"""W8A8 against float64, for any device. A number that lies half-way between two steps may go to either, so errors are also
allowed in steps: `STEPS` of a token's K roundings may differ from the reference's."""

from __future__ import annotations

from typing import Any

import numpy as np

from l1_kernels.activation import reference as activation
from l1_kernels.device import Device
from l1_kernels.linear import reference as linear
from l1_kernels.norm import reference as norms
from l1_kernels.quantize import reference
from l1_kernels.regions import NormArgs
from l1_kernels.weight import Weight, decode, encode, host_weight
from tests.l1_kernels.operation_checks import fresh, normal, poisoned, wide

ROUNDING = 2e-6  # of sum |x w|: float32
FLIPS = 0.002  # of a row's numbers, and one more, may be a step away


def activations(rng: np.random.Generator, kind: str, num_tokens: int, size: int) -> np.ndarray:
    """float32 [T, K]: "normal"; "outliers": in six channels, or fewer, 130 and more; "huge": one number of a token 1000 times the
    others; "sparse": as a ReLU leaves them; "zeros"."""
    x = normal(rng, num_tokens, size)
    if kind == "outliers":
        places = rng.permutation(size)[:6]
        x[:, places] = np.sign(x[:, places]) * rng.uniform(130, 370, (num_tokens, len(places)))
    elif kind == "huge":
        x[:, size // 2] *= 1000
    elif kind == "sparse":
        x = np.maximum(x - 1.5, 0)
    elif kind == "zeros":
        x[:] = 0
    return x


def slack(x: np.ndarray, matrix: np.ndarray, fine: bool = False) -> np.ndarray:
    """What flips of roundings of x [T, K] may add to x @ matrix^T [T, N], of each output."""
    _, _, scale = reference.quantize_rows(x, fine)
    flips = 1 + int(FLIPS * x.shape[1])
    return scale[:, None] * np.sort(np.abs(matrix), axis=1)[:, -flips:].sum(1)


def check_linear_w8a8(device: Device, kind: str, num_tokens: int, num_out: int, size: int, rounding: float = ROUNDING) -> None:
    rng = fresh()
    x, matrix = activations(rng, kind, num_tokens, size), normal(rng, num_out, size)
    plain = host_weight(matrix, "int8")
    weight = Weight(plain.data, "int8", plain.scale, "int8")
    bias = normal(rng, num_out)
    got = poisoned(device, device.kernels.linear, device.to_device(x), device.weight(weight), device.to_device(bias))
    device.synchronize()
    got = device.to_host(got)
    want = linear.linear(wide(x), weight, wide(bias))
    held = wide(plain.data) * plain.scale[:, None]
    bar = rounding * (np.abs(wide(x)) @ np.abs(held).T + np.abs(bias)) + slack(wide(x), held)
    error = np.abs(got - want)
    assert got.dtype == np.float32 and (error <= bar).all(), f"off by {(error / bar).max():.3g} times the bar"
    exact = error <= rounding * (np.abs(wide(x)) @ np.abs(held).T + np.abs(bias)) + 1e-6
    assert exact.mean() > 0.5 or size * num_tokens < 200, "most outputs have no flip"


class Region:
    """Regions with W8A8 matrices (act None: W8A16's, whose x is rounded finely), and what float64 makes of the same inputs."""

    def __init__(self, device: Device, kind: str, num_tokens: int, size: int, gemm: Any = None, act: str | None = "int8") -> None:
        from l1_kernels.fused_regions import FusedRegions  # numba.cuda: not for the CPU's tests

        self.device, self.rng, self.act = device, fresh(), act
        self.x = activations(self.rng, kind, num_tokens, size)
        self.regions = FusedRegions(device.kernels, 2, gemm=gemm)  # type: ignore[arg-type]

    def norm(self, kind: str | None, size: int) -> tuple[NormArgs | None, np.ndarray]:
        """Its arguments on the device, and norm(x) in float64; six gains are 60 times the others."""
        if kind is None:
            return None, wide(self.x)
        gain = normal(self.rng, size) * 0.1 + 1
        gain[self.rng.permutation(size)[:6]] *= 60
        shift = normal(self.rng, size) if kind == "layernorm" else None
        on_device = NormArgs(kind, self.device.to_device(gain), None if shift is None else self.device.to_device(shift), 1e-5)
        if kind == "rmsnorm":
            return on_device, norms.rms_norm(wide(self.x), wide(gain), 1e-5)
        assert shift is not None
        return on_device, norms.layer_norm(wide(self.x), wide(gain), wide(shift), 1e-5)

    def matrix(self, num_out: int, size: int) -> tuple[Weight, Any, Weight, np.ndarray]:
        plain = host_weight(normal(self.rng, num_out, size), "int8")
        weight, bias = Weight(plain.data, "int8", plain.scale, self.act), normal(self.rng, num_out)
        return self.device.weight(weight), self.device.to_device(bias), weight, wide(bias)

    def product(self, x: np.ndarray, held: Weight, bias: np.ndarray | None = None) -> np.ndarray:
        return linear.linear(x if self.act else reference.rounded(x, fine=True), held, bias)

    def check(self, got: Any, want: np.ndarray, x: np.ndarray, held: Weight, factor: np.ndarray | float = 1.0) -> None:
        """x: what was rounded, in float64; factor: by how much what follows the product may stretch an error."""
        self.device.synchronize()
        host = self.device.to_host(got)
        assert host.dtype == np.float32 and host.shape == want.shape
        numbers = wide(held.data) * held.scale[:, None]
        error = np.abs(host - want)
        terms = np.abs(x) @ np.abs(numbers).T
        rounding, flips = factor * (5e-6 * terms), factor * slack(x, numbers, self.act is None)
        if rounding.shape != want.shape:  # gated: of the gate and of the up half
            half = want.shape[1]
            rounding, flips = rounding[:, :half] + rounding[:, half:], flips[:, :half] + flips[:, half:]
        rounding = rounding + 1e-5 * (1 + np.abs(want))
        bar = rounding + flips
        assert (error <= bar).all(), f"off by {(error / bar).max():.3g} times the bar"
        assert (error <= rounding).mean() > 0.4 or want.size < 100, "most outputs have no flip"


def check_norm_linear(device: Device, kind: str, norm: str | None, num_tokens: int, num_out: int, size: int, gemm: Any = None, act: str | None = "int8") -> None:
    case = Region(device, kind, num_tokens, size, gemm, act)
    arguments, x = case.norm(norm, size)
    weight, bias, held, shift = case.matrix(num_out, size)
    y = poisoned(device, case.regions.norm_linear, device.to_device(case.x), arguments, weight, bias)
    case.check(y, case.product(x, held, shift), x, held)


def check_feed_forward(device: Device, num_tokens: int, width: int, size: int, kind: str, gated: bool, gemm: Any = None, act: str | None = "int8") -> None:
    case = Region(device, "normal", num_tokens, size, gemm, act)
    arguments, x = case.norm("rmsnorm", size)
    weight, bias, held, shift = case.matrix(2 * width if gated else width, size)
    hidden = poisoned(device, case.regions.norm_feed_forward, device.to_device(case.x), arguments, weight, bias, kind, gated)
    y = case.product(x, held, shift)
    if not gated:
        case.check(hidden, activation.activate(y, kind), x, held, 1.2)
        return
    gate, up = y[:, :width], y[:, width:]
    stretch = np.concatenate([1.2 * np.abs(up), np.abs(activation.activate(gate, kind))], axis=1)
    case.check(hidden, activation.gate(y, kind), x, held, 1.5 * stretch + 0.5)


def check_linear_add(device: Device, kind: str, num_tokens: int, num_out: int, size: int, carried: bool, add: bool, gemm: Any = None, act: str | None = "int8") -> None:
    case = Region(device, kind, num_tokens, size, gemm, act)
    weight, bias, held, shift = case.matrix(num_out, size)
    x, given = case.x, device.to_device(case.x)
    if carried:
        bits = encode(case.x, "fp16")
        x, given = decode(bits, "fp16"), device.to_device(bits)
    before = normal(case.rng, num_tokens, num_out)
    residual = device.to_device(before.copy()) if add else None
    y = poisoned(device, case.regions.linear_add, given, weight, bias, residual)
    assert y is residual or not add
    case.check(y, case.product(wide(x), held, shift) + (before if add else 0), wide(x), held)


def check_norm_pair(device: Device, num_tokens: int, shared: bool, gated: bool, gemm: Any = None) -> None:
    case = Region(device, "normal", num_tokens, 48, gemm)
    first, x = case.norm("layernorm", 48)
    second, other = (first, x) if shared else case.norm("layernorm", 48)
    weight, bias, held, shift = case.matrix(37, 48)
    weight_up, bias_up, held_up, shift_up = case.matrix(40, 48)
    y, hidden = poisoned(device, case.regions.norm_pair, device.to_device(case.x), (first, second), (weight, bias), (weight_up, bias_up), "relu", gated)
    case.check(y, linear.linear(x, held, shift), x, held)
    product = linear.linear(other, held_up, shift_up)
    if gated:
        stretch = np.concatenate([np.abs(product[:, 20:]), np.abs(product[:, :20])], axis=1)
        case.check(hidden, activation.gate(product, "relu"), other, held_up, 1.5 * stretch + 0.5)
    else:
        case.check(hidden, activation.activate(product, "relu"), other, held_up)


def check_linear_add_pair(device: Device, num_tokens: int, gemm: Any = None) -> None:
    case = Region(device, "outliers", num_tokens, 48, gemm)
    weight, bias, held, shift = case.matrix(19, 48)
    down, _, held_down, _ = case.matrix(19, 32)
    other = activations(case.rng, "sparse", num_tokens, 32)
    before = normal(case.rng, num_tokens, 19)
    residual = device.to_device(before.copy())
    y = poisoned(device, case.regions.linear_add_pair, device.to_device(case.x), (weight, bias), device.to_device(other), (down, None), residual)
    assert y is residual
    first, second = linear.linear(wide(case.x), held, shift) + before, linear.linear(wide(other), held_down)
    numbers = wide(held_down.data) * held_down.scale[:, None]
    spare = (slack(wide(other), numbers) + 5e-6 * np.abs(other) @ np.abs(numbers).T).max()
    error = np.abs(device.to_host(y) - (first + second))
    held_numbers = wide(held.data) * held.scale[:, None]
    bar = slack(wide(case.x), held_numbers) + 5e-6 * np.abs(wide(case.x)) @ np.abs(held_numbers).T + spare + 1e-4
    assert (error <= bar).all(), f"off by {(error / bar).max():.3g} times the bar"
