"""Fused regions against float64, for the simulator and the GPU: every prologue and epilogue, poisoned outputs, fresh numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from l1_kernels.activation import reference as activation
from l1_kernels.device import Device
from l1_kernels.fused_regions import FusedRegions
from l1_kernels.norm import reference as norms
from l1_kernels.regions import NormArgs
from l1_kernels.sbi_gemm.job import CARRIED
from l1_kernels.weight import Weight, decode, encode, host_weight
from tests.l1_kernels.operation_checks import fresh, normal, poisoned, wide

# Parts of sum |x w| (the terms may cancel): x is rounded once to the weights' dtype (for int8 to fp16), sums are float32.
ROUNDING = {"fp32": 2e-6, "fp16": 2**-11, "bf16": 2**-8, "int8": 2**-11}


class Case:
    """One region's inputs on the host and on the device."""

    def __init__(self, device: Device, dtype: str, num_tokens: int, size: int, norm_tokens: int = 1) -> None:
        self.device, self.dtype, self.rng = device, dtype, fresh()
        self.x = normal(self.rng, num_tokens, size) * 2 + 1
        # Two multiprocessors, so that blocks come by several tiles; ahead_bytes, so that weights are fetched ahead too.
        self.regions = FusedRegions(device.kernels, 2, ahead_bytes=1 << 16, norm_tokens=norm_tokens)  # type: ignore[arg-type]

    def norm(self, kind: str | None, size: int, with_bias: bool = True) -> tuple[NormArgs | None, Callable[[np.ndarray], np.ndarray]]:
        if kind is None:
            return None, lambda x: x
        gain = normal(self.rng, size) * 0.1 + 1
        shift = normal(self.rng, size) if kind == "layernorm" and with_bias else None
        on_device = NormArgs(kind, self.device.to_device(gain), None if shift is None else self.device.to_device(shift), 1e-5)

        def reference(x: np.ndarray) -> np.ndarray:
            if kind == "rmsnorm":
                return norms.rms_norm(x, wide(gain), 1e-5)
            return norms.layer_norm(x, wide(gain), None if shift is None else wide(shift), 1e-5)

        return on_device, reference

    def matrix(self, num_out: int, size: int, with_bias: bool = True) -> tuple[Weight, Any, np.ndarray, np.ndarray]:
        host = host_weight(normal(self.rng, num_out, size), self.dtype)
        bias = normal(self.rng, num_out) if with_bias else None
        numbers = wide(decode(host.data, host.dtype, host.scale))
        shift = np.zeros(num_out) if bias is None else wide(bias)
        return self.device.weight(host), None if bias is None else self.device.to_device(bias), numbers, shift

    def numbers(self, y: Any) -> np.ndarray:
        self.device.synchronize()
        host = self.device.to_host(y)
        return host if host.dtype == np.float32 else decode(host, CARRIED[self.dtype])

    def assert_close(self, got: Any, want: np.ndarray, magnitude: np.ndarray, factor: float = 1) -> None:
        """magnitude: sum |x w| for each output."""
        host = self.numbers(got)
        assert host.shape == want.shape
        bar = factor * ROUNDING[self.dtype] * (magnitude + np.abs(want)) + 1e-5
        error = np.abs(host - want)
        assert (error <= bar).all(), f"off by {(error / bar).max():.3g} times the bar"  # a NaN fails too


def check_norm_linear(
    device: Device, dtype: str, num_tokens: int, num_out: int, size: int, kind: str | None, with_bias: bool = True, norm_tokens: int = 1
) -> None:
    case = Case(device, dtype, num_tokens, size, norm_tokens)
    norm, reference = case.norm(kind, size, with_bias)
    weight, bias, w, b = case.matrix(num_out, size, with_bias)
    y = poisoned(device, case.regions.norm_linear, device.to_device(case.x), norm, weight, bias)
    x = reference(wide(case.x))
    assert device.to_host(y).dtype == np.float32
    case.assert_close(y, x @ w.T + b, np.abs(x) @ np.abs(w).T)


def check_feed_forward(
    device: Device, dtype: str, num_tokens: int, width: int, size: int, kind: str, gated: bool, norm_tokens: int = 1
) -> None:
    case = Case(device, dtype, num_tokens, size, norm_tokens)
    norm, reference = case.norm("rmsnorm" if gated else "layernorm", size)
    weight, bias, w, b = case.matrix(2 * width if gated else width, size)
    hidden = poisoned(device, case.regions.norm_feed_forward, device.to_device(case.x), norm, weight, bias, kind, gated)
    want, magnitude = feed_forward_reference(reference(wide(case.x)), w, b, kind, gated)
    case.assert_close(hidden, want, magnitude, 2)


def feed_forward_reference(x: np.ndarray, w: np.ndarray, b: np.ndarray, kind: str, gated: bool) -> tuple[np.ndarray, np.ndarray]:
    y, size = x @ w.T + b, np.abs(x) @ np.abs(w).T
    if not gated:
        return activation.activate(y, kind), 1.2 * size  # no activation's slope passes 1.2
    width = y.shape[1] // 2
    gate, up = y[:, :width], y[:, width:]
    return activation.gate(y, kind), 1.2 * size[:, :width] * np.abs(up) + np.abs(activation.activate(gate, kind)) * size[:, width:]


def check_linear_add(device: Device, dtype: str, num_tokens: int, num_out: int, size: int, carried: bool, add: bool = True) -> None:
    case = Case(device, dtype, num_tokens, size)
    weight, bias, w, b = case.matrix(num_out, size)
    x, held = _handed_on(case, case.x, carried)
    before = normal(case.rng, num_tokens, num_out)
    residual = device.to_device(before.copy()) if add else None
    y = poisoned(device, case.regions.linear_add, held, weight, bias, residual)
    if add:
        assert y is residual
    case.assert_close(y, x @ w.T + b + (wide(before) if add else 0), np.abs(x) @ np.abs(w).T)


def _handed_on(case: Case, x: np.ndarray, carried: bool) -> tuple[np.ndarray, Any]:
    """x as a region gets it from the one before: float32, or 16 bits."""
    if not carried or case.dtype == "fp32":
        return wide(x), case.device.to_device(x)
    bits = encode(x, CARRIED[case.dtype])
    return wide(decode(bits, CARRIED[case.dtype])), case.device.to_device(bits)


def check_norm_pair(device: Device, dtype: str, num_tokens: int, num_out: int, width: int, size: int, shared_norm: bool, gated: bool) -> None:
    case = Case(device, dtype, num_tokens, size)
    norm, reference = case.norm("layernorm", size)
    norm_b, reference_b = (norm, reference) if shared_norm else case.norm("layernorm", size)
    weight, bias, w, b = case.matrix(num_out, size)
    weight_up, bias_up, w_up, b_up = case.matrix(2 * width if gated else width, size)
    y, hidden = poisoned(
        device, case.regions.norm_pair, device.to_device(case.x), (norm, norm_b), (weight, bias), (weight_up, bias_up), "gelu", gated
    )
    x = reference(wide(case.x))
    case.assert_close(y, x @ w.T + b, np.abs(x) @ np.abs(w).T)
    case.assert_close(hidden, *feed_forward_reference(reference_b(wide(case.x)), w_up, b_up, "gelu", gated), 2)


def check_linear_add_pair(device: Device, dtype: str, num_tokens: int, num_out: int, size: int, width: int, carried: bool) -> None:
    case = Case(device, dtype, num_tokens, size)
    weight, bias, w, b = case.matrix(num_out, size)
    weight_down, _, w_down, _ = case.matrix(num_out, width, False)
    x, held = _handed_on(case, case.x, carried)
    other, held_other = _handed_on(case, normal(case.rng, num_tokens, width), carried)
    before = normal(case.rng, num_tokens, num_out)
    residual = device.to_device(before.copy())
    y = poisoned(device, case.regions.linear_add_pair, held, (weight, bias), held_other, (weight_down, None), residual)
    assert y is residual
    magnitude = np.abs(x) @ np.abs(w).T + np.abs(other) @ np.abs(w_down).T
    case.assert_close(y, x @ w.T + b + other @ w_down.T + wide(before), magnitude)


__all__ = [name for name in dir() if name.startswith("check_")]
