"""One check for each operation, for any device: against the float64 reference, on fresh random numbers.

The simulator and the GPU run the same checks (sim/, gpu/), the simulator on the small sizes. Outputs come from memory that
was filled with NaN, so a number that a kernel does not write is seen; what lies around an in-place change must stay.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from l1_kernels.activation import reference as activation
from l1_kernels.attention import reference as attend
from l1_kernels.device import Device
from l1_kernels.embedding import reference as embedding
from l1_kernels.kv_write import reference as kv_write
from l1_kernels.linear import reference as linear
from l1_kernels.norm import reference as norm
from l1_kernels.rotary import reference as rotate
from l1_kernels.routing import reference as routing
from l1_kernels.weight import Weight, decode, encode, host_weight

# The bar, as a part of the largest output, or where terms may cancel of what `magnitude` says. It is float32's rounding
# alone, 6e-8 a step: the reference takes the weights, caches and x as the dtype holds them, so one bar serves every dtype.
TOLERANCE = {
    "embedding": 0.0,  # a copy, exact
    "embedding int8": 1e-7,  # one product
    "norm": 3e-6,
    "linear": 1e-6,  # of the sum of |x w|
    "activation": 5e-7,  # of the largest x: erf, tanh and exp of the device are good to a few units in the last place
    "rotary": 1e-6,
    "attention": 5e-6,  # exponentials of differences of scores of some tens
    "routing": 2e-6,
    "elementwise": 1e-7,
}


def fresh() -> np.random.Generator:
    """Other numbers every run; the seed stands in the failure's captured output."""
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def close(device: Device, got: Any, want: np.ndarray, operation: str, magnitude: float | None = None) -> None:
    device.synchronize()
    host = device.to_host(got)
    assert host.dtype == np.float32 and host.shape == want.shape
    error = np.abs(host - want).max(initial=0)
    bar = TOLERANCE[operation] * (np.abs(want).max(initial=0) if magnitude is None else magnitude)
    assert error <= bar, f"{operation}: off by {error:.3g}, the bar is {bar:.3g}"  # a NaN fails too


def poisoned(device: Device, call: Callable[..., Any], *arguments: Any) -> Any:
    """call(*arguments), with every array that the kernels ask for filled with NaN (or with the bits of one) first."""
    kernels: Any = device.kernels
    plain = kernels._empty

    def empty(shape: Any, dtype: Any) -> Any:
        array = plain(shape, dtype)
        array.fill(np.nan if np.dtype(dtype).kind == "f" else np.iinfo(dtype).max)
        return array

    kernels._empty = empty
    try:
        return call(*arguments)
    finally:
        kernels._empty = plain


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """x as a GPU multiplies it: in the weight's dtype where that is 16-bit."""
    return wide(decode(encode(x, dtype), dtype) if dtype in ("fp16", "bf16") else x)


def check_embed(device: Device, dtype: str, num_tokens: int, num_rows: int, width: int) -> None:
    rng = fresh()
    table = host_weight(normal(rng, num_rows, width), dtype)
    first = 5
    ids = rng.integers(first - 2, first + num_rows + 2, num_tokens).astype(np.int32)  # some before, some behind
    if num_tokens > 2:
        ids[:3] = first, first + num_rows - 1, first + num_rows  # the edges
    got = poisoned(device, device.kernels.embed, device.weight(table), device.to_device(ids), first)
    close(device, got, wide(embedding.embed(table, ids, first)), "embedding int8" if dtype == "int8" else "embedding")


def check_layer_norm(device: Device, num_tokens: int, width: int, with_bias: bool) -> None:
    rng = fresh()
    x = normal(rng, num_tokens, width) * 3 + 10  # a mean far from 0 tells mean(x^2) - mean^2 from the real variance
    weight, bias = normal(rng, width), normal(rng, width) if with_bias else None
    on_device = None if bias is None else device.to_device(bias)
    got = poisoned(device, device.kernels.layer_norm, device.to_device(x), device.to_device(weight), on_device, 1e-5)
    want = norm.layer_norm(wide(x), wide(weight), None if bias is None else wide(bias), 1e-5)
    if width > 1:
        close(device, got, want, "norm")
    else:  # x - mean is 0
        assert (device.to_host(got) == (0 if bias is None else bias)).all()


def check_rms_norm(device: Device, num_tokens: int, width: int) -> None:
    rng = fresh()
    x, weight = normal(rng, num_tokens, width), normal(rng, width)
    got = poisoned(device, device.kernels.rms_norm, device.to_device(x), device.to_device(weight), 1e-6)
    close(device, got, norm.rms_norm(wide(x), wide(weight), 1e-6), "norm")


def check_qkv_norms(device: Device, num_tokens: int, num_heads: int, head_dim: int) -> None:
    """Head norm and span norm over heads 1..num_heads - 1: those at both ends must stay as they are."""
    rng = fresh()
    first, count = 1, num_heads - 2
    qkv, weight = normal(rng, num_tokens, num_heads, head_dim), normal(rng, head_dim)
    want = wide(qkv)
    norm.head_norm(want, first, count, wide(weight), 1e-6)
    on_device = device.to_device(qkv.copy())
    device.kernels.head_norm(on_device, first, count, device.to_device(weight), 1e-6)
    close(device, on_device, want, "norm")

    on_device = device.to_device(qkv.copy())
    total = poisoned(device, device.kernels.sum_squares, on_device, first, count)
    close(device, total, norm.sum_squares(wide(qkv), first, count), "norm")
    span, size = normal(rng, count * head_dim), 2 * count * head_dim  # as if another rank held as many
    want = wide(qkv)
    norm.span_norm(want, first, count, norm.sum_squares(want, first, count), size, wide(span), 1e-6)
    device.kernels.span_norm(on_device, first, count, total, size, device.to_device(span), 1e-6)
    close(device, on_device, want, "norm")


def check_linear(device: Device, dtype: str, num_tokens: int, num_out: int, size: int, with_bias: bool = True) -> None:
    rng = fresh()
    x, weight = normal(rng, num_tokens, size), host_weight(normal(rng, num_out, size), dtype)
    bias = normal(rng, num_out) if with_bias else None
    on_device = None if bias is None else device.to_device(bias)
    got = poisoned(device, device.kernels.linear, device.to_device(x), device.weight(weight), on_device)
    # On a GPU int8 weights meet many tokens in cuBLAS, as fp16 on both sides.
    multiplied_as = "fp16" if dtype == "int8" and device.name == "cuda" and num_tokens > 16 else dtype
    multiplied = wide(x) if device.name == "cpu" else rounded(x, multiplied_as)
    want = linear.linear(multiplied, weight, None if bias is None else wide(bias))
    terms = linear.linear(abs(multiplied), host_weight(np.abs(decode(weight.data, dtype, weight.scale)), "fp32"))
    close(device, got, want, "linear", float(terms.max() + (0 if bias is None else np.abs(bias).max())))


def check_activation(device: Device, kind: str, num_tokens: int, width: int) -> None:
    x = normal(fresh(), num_tokens, 2 * width) * 4
    x.flat[: 6 if x.size >= 6 else 0] = (0.0, 40.0, -40.0, 1000.0, -1000.0, 1e-4)[: x.size]
    got = poisoned(device, device.kernels.activate, device.to_device(x), kind)
    largest = float(np.abs(x).max())
    close(device, got, activation.activate(wide(x), kind), "activation", largest)
    got = poisoned(device, device.kernels.gate, device.to_device(x), kind)
    close(device, got, activation.gate(wide(x), kind), "activation", largest * float(np.abs(x[:, width:]).max()))


def check_add(device: Device, *shape: int) -> None:
    rng = fresh()
    x, y = normal(rng, *shape), normal(rng, *shape)
    on_device, other = device.to_device(x.copy()), device.to_device(y)
    assert device.kernels.add(on_device, other) is on_device
    close(device, on_device, wide(x) + y, "elementwise")
    assert (device.to_host(other) == y).all()


def check_rotary(device: Device, num_tokens: int, num_heads: int, head_dim: int, rotated_dim: int, interleaved: bool) -> None:
    rng = fresh()
    qkv, num_rotated = normal(rng, num_tokens, num_heads, head_dim), max(1, num_heads - 2)
    angle = rng.uniform(-4, 4, (num_tokens + 3, rotated_dim // 2))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    index = rng.integers(0, num_tokens + 3, num_tokens).astype(np.int32)
    want = wide(qkv)
    rotate.rotary(want, num_rotated, wide(cos), wide(sin), index, interleaved)
    on_device = device.to_device(qkv.copy())
    tables = device.to_device(cos), device.to_device(sin), device.to_device(index)
    device.kernels.rotary(on_device, num_rotated, *tables, interleaved)
    close(device, on_device, want, "rotary", float(np.abs(qkv).max()))


def check_write_kv(device: Device, dtype: str, num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Bit for bit, and every other place of the caches keeps its NaN."""
    rng = fresh()
    num_rows, num_places = 3, num_tokens + 2
    qkv = normal(rng, num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    where = rng.choice(num_rows * num_places, num_tokens, replace=False)
    rows, positions = (where // num_places).astype(np.int32), (where % num_places).astype(np.int32)
    empty = encode(np.full((num_rows, num_kv_heads, num_places, head_dim), np.nan, np.float32), dtype)
    want_k, want_v = empty.copy(), empty.copy()
    kv_write.write_kv(qkv, num_heads, want_k, want_v, dtype, rows, positions)
    cache_k, cache_v = device.to_device(empty.copy()), device.to_device(empty.copy())
    places = device.to_device(rows), device.to_device(positions)
    device.kernels.write_kv(device.to_device(qkv), num_heads, cache_k, cache_v, dtype, *places)
    device.synchronize()
    for got, want in ((cache_k, want_k), (cache_v, want_v)):
        assert (device.to_host(got).view(np.uint8) == want.view(np.uint8)).all()


def check_attention(
    device: Device, dtype: str, ends: list[int], num_heads: int, num_kv_heads: int, head_dim: int, window: int = 0, alibi: bool = False
) -> None:
    """Token t has the keys up to ends[t] of a row of its own; what the cache holds behind them is NaN."""
    rng = fresh()
    num_tokens, num_places = len(ends), max(ends) + 1
    qkv = normal(rng, num_tokens, num_heads + 2 * num_kv_heads, head_dim) * 2
    rows = rng.permutation(num_tokens).astype(np.int32)
    caches = []
    for _ in range(2):
        numbers = normal(rng, num_tokens, num_kv_heads, num_places, head_dim)
        for t, end in enumerate(ends):
            numbers[rows[t], :, end:] = np.nan
            if window:
                numbers[rows[t], :, : max(0, end - window)] = np.nan
        caches.append(encode(numbers, dtype))
    slopes = rng.uniform(0.01, 0.5, num_heads).astype(np.float32) if alibi else None
    ends_array, scale = np.array(ends, np.int32), head_dim**-0.5
    want = attend.attention(wide(qkv), num_heads, *caches, dtype, rows, ends_array, window, scale, slopes)
    got = poisoned(
        device, device.kernels.attention, device.to_device(qkv), num_heads, *map(device.to_device, caches), dtype,
        device.to_device(rows), device.to_device(ends_array), window, scale, None if slopes is None else device.to_device(slopes),
    )  # fmt: skip
    close(device, got, want, "attention", float(np.nanmax(np.abs(decode(caches[1], dtype)))))


def check_route(device: Device, num_tokens: int, num_experts: int, top_k: int, softmax_first: bool, renormalise: bool) -> None:
    logits = normal(fresh(), num_tokens, num_experts) * 3
    logits[0] = 1.5  # all equal: the lowest experts win
    logits[-1, -1] = logits[-1].max() + 1  # the last expert is best
    want_experts, want = routing.route(wide(logits), top_k, softmax_first, renormalise)
    experts, weights = poisoned(device, device.kernels.route, device.to_device(logits), top_k, softmax_first, renormalise)
    close(device, weights, want, "routing")
    assert device.to_host(experts).dtype == np.int32 and (device.to_host(experts) == want_experts).all()


def check_rejections(device: Device) -> None:
    """A bad argument is named, before anything runs."""
    kernels, f32, i32 = device.kernels, np.float32, np.int32
    weight = device.weight(host_weight(np.ones((4, 6), f32), "fp32"))
    x, vector = device.zeros((2, 6)), device.zeros(6)
    qkv, cache = device.zeros((2, 4, 8)), device.zeros((1, 1, 5, 8))
    places = device.zeros(2, i32)
    half = Weight(weight.data, "fp16")
    deep = device.zeros((1, 3, 512)), device.zeros((1, 1, 5, 512)), device.zeros(1, i32)
    bad: list[tuple[str, Callable[[], object]]] = [
        ("ids", lambda: kernels.embed(weight, device.zeros(2, np.int64))),
        ("table", lambda: kernels.embed(half, places)),
        ("x", lambda: kernels.linear(device.zeros((2, 5)), weight)),
        ("x", lambda: kernels.linear(device.zeros((6, 2)).T, weight)),
        ("bias", lambda: kernels.linear(x, weight, vector)),
        ("weight", lambda: kernels.layer_norm(x, device.zeros(5), None, 1e-5)),
        ("bias", lambda: kernels.layer_norm(x, vector, device.zeros(5), 1e-5)),
        ("x", lambda: kernels.rms_norm(device.zeros((2, 6), np.float64), vector, 1e-5)),
        ("kind", lambda: kernels.activate(x, "tanh")),
        ("x", lambda: kernels.gate(device.zeros((2, 5)), "silu")),
        ("y", lambda: kernels.add(x, vector)),
        ("num_rotated", lambda: kernels.rotary(qkv, 5, vector, vector, places, False)),
        ("cos", lambda: kernels.rotary(qkv, 2, device.zeros((3, 5)), device.zeros((3, 5)), places, False)),
        ("index", lambda: kernels.rotary(qkv, 2, device.zeros((3, 4)), device.zeros((3, 4)), device.zeros(3, i32), False)),
        ("first", lambda: kernels.head_norm(qkv, 3, 2, device.zeros(8), 1e-5)),
        ("total", lambda: kernels.span_norm(qkv, 0, 1, device.zeros(3), 8, device.zeros(8), 1e-5)),
        ("dtype", lambda: kernels.write_kv(qkv, 2, cache, cache, "int8", places, places)),
        ("positions", lambda: kernels.write_kv(qkv, 2, cache, cache, "fp32", places, device.zeros(1, i32))),
        ("qkv", lambda: kernels.attention(qkv, 3, cache, cache, "fp32", places, places, 0, 1.0, None)),
        ("slopes", lambda: kernels.attention(qkv, 2, cache, cache, "fp32", places, places, 0, 1.0, device.zeros(3))),
        ("window", lambda: kernels.attention(qkv, 2, cache, cache, "fp32", places, places, -1, 1.0, None)),
        ("qkv", lambda: kernels.attention(deep[0], 1, deep[1], deep[1], "fp32", deep[2], deep[2], 0, 1.0, None)),
        ("top_k", lambda: kernels.route(x, 7, True, False)),
    ]
    if device.name == "cpu":  # has no largest head, and looks at the numbers too: they are at hand
        bad = [(name, call) for name, call in bad if "deep" not in call.__code__.co_freevars]
    for name, call in bad:
        with pytest.raises(ValueError, match=rf"argument {name}\b"):
            call()


def check_no_tokens(device: Device) -> None:
    """A rank may have no tokens in a step: shapes come out, nothing runs."""
    kernels, none = device.kernels, device.zeros(0, np.int32)
    weight = device.weight(host_weight(np.ones((4, 6), np.float32), "fp16"))
    x, vector, qkv = device.zeros((0, 6)), device.zeros(6), device.zeros((0, 4, 8))
    cache = device.zeros((1, 1, 5, 8))
    assert kernels.embed(weight, none).shape == (0, 6)
    assert kernels.layer_norm(x, vector, None, 1e-5).shape == (0, 6)
    assert kernels.linear(x, weight).shape == (0, 4)
    assert kernels.gate(x, "gelu").shape == (0, 3)
    assert kernels.add(x, x) is x
    kernels.rotary(qkv, 2, device.zeros((3, 4)), device.zeros((3, 4)), none, False)
    kernels.head_norm(qkv, 0, 2, device.zeros(8), 1e-5)
    assert kernels.sum_squares(qkv, 0, 2).shape == (0,)
    kernels.write_kv(qkv, 2, cache, cache, "fp32", none, none)
    assert kernels.attention(qkv, 2, cache, cache, "fp32", none, none, 0, 1.0, None).shape == (0, 16)
    experts, weights = kernels.route(x, 2, True, False)
    assert experts.shape == weights.shape == (0, 2)
    device.synchronize()
