"""Checks of region 2 as one launch (attention/decode_region.py), for the simulator and the GPU: against float64, and against the
three launches that it replaces, whose cache it must leave bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from l1_kernels.attention import decode_region, reference
from l1_kernels.attention.decode import lanes_a_key
from l1_kernels.device import Device
from l1_kernels.fused_regions import FusedRegions
from l1_kernels.kv_write import reference as write_kv
from l1_kernels.regions import CacheArgs, RotaryArgs, UnfusedRegions
from l1_kernels.rotary import reference as rotate
from l1_kernels.weight import decode, encode
from tests.l1_kernels import operation_checks as checks

ROUNDING = {"fp32": 0.0, "fp16": 2**-11, "bf16": 2**-8}  # of an output that goes on in the cache's dtype, as a part of itself


class Step:
    """A decode step's arrays: token t in row rows[t] of its own, its key the ends[t]-th. The caches hold NaN wherever no token may
    look, and where the new keys and values belong."""

    def __init__(
        self, device: Device, dtype: str, ends: list[int], num_heads: int, num_kv_heads: int, head_dim: int, rotated_dim: int = 0,
        interleaved: bool = False, window: int = 0, alibi: bool = False, places: int | None = None,
    ) -> None:  # fmt: skip
        rng = checks.fresh()
        self.device, self.dtype, self.num_heads, self.window, self.scale = device, dtype, num_heads, window, head_dim**-0.5
        num_tokens, places = len(ends), max(ends) + 3 if places is None else places
        self.rows = rng.permutation(num_tokens + 1)[:num_tokens].astype(np.int32)
        self.ends = np.array(ends, np.int32)
        self.qkv = checks.normal(rng, num_tokens, num_heads + 2 * num_kv_heads, head_dim) * np.float32(2)
        self.caches = []
        for _ in range(2):
            numbers = checks.normal(rng, num_tokens + 1, num_kv_heads, places, head_dim)
            old = np.zeros((num_tokens + 1, places), bool)
            for row, end in zip(self.rows, ends, strict=True):
                old[row, max(0, end - window) if window else 0 : end - 1] = True
            numbers[np.broadcast_to(~old[:, None], numbers.shape[:3])] = np.nan
            self.caches.append(encode(numbers, dtype))
        self.slopes = rng.uniform(0.01, 0.5, num_heads).astype(np.float32) if alibi else None
        angles = rng.uniform(-4, 4, (num_tokens + 5, rotated_dim // 2))
        self.tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.index = rng.integers(0, num_tokens + 5, num_tokens).astype(np.int32)
        self.rotated_dim, self.interleaved = rotated_dim, interleaved

    def run(self, regions: Any, distinct: bool) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
        """mixed on the device; qkv and both caches as they are afterwards, on the host."""
        device, up = self.device, self.device.to_device
        qkv, k, v = up(self.qkv.copy()), up(self.caches[0].copy()), up(self.caches[1].copy())
        rotary = RotaryArgs(*map(up, self.tables), up(self.index), self.interleaved) if self.rotated_dim else None
        cache = CacheArgs(k, v, self.dtype, up(self.rows), up(self.ends - 1), up(self.ends), distinct)
        slopes = None if self.slopes is None else up(self.slopes)
        for _ in range(2 if distinct else 1):  # the second finds the counts that the first left, and writes the same into the cache
            mixed = checks.poisoned(device, regions.attend, qkv, self.num_heads, rotary, cache, self.window, self.scale, slopes)
        device.synchronize()
        return mixed, *(device.to_host(array) for array in (qkv, k, v))

    def wanted(self, cache_k: np.ndarray, cache_v: np.ndarray) -> np.ndarray:
        """By float64, from what the caches hold after the step: new keys are rounded after a rotation in float32."""
        turned = checks.wide(self.qkv)
        if self.rotated_dim:
            rotate.rotary(turned, self.num_heads, *map(checks.wide, self.tables), self.index, self.interleaved)
        arguments = self.dtype, self.rows, self.ends, self.window, self.scale, self.slopes
        return reference.attention(turned, self.num_heads, cache_k, cache_v, *arguments)


def check_step(device: Device, *arguments: Any, multiprocessors: int = 12, **options: Any) -> None:
    """12 multiprocessors: more than 12 (token, key head)s have smaller blocks, fewer than 7 are split where they have the keys."""
    step = Step(device, *arguments, **options)
    kernels: Any = device.kernels
    before = kernels.launches
    mixed, qkv, k, v = step.run(FusedRegions(kernels, multiprocessors), True)
    assert kernels.launches == before + 2, "not one launch a step"
    assert (qkv == step.qkv).all()
    three, _, three_k, three_v = step.run(UnfusedRegions(kernels), False)

    for one, other in ((k, three_k), (v, three_v)):  # bit for bit, what was not written and must not have been included
        assert (one.view(np.uint8) == other.view(np.uint8)).all()

    width = mixed.shape[1]
    carried = step.dtype if width % 16 == 0 else "fp32"
    host = device.to_host(mixed)
    assert host.dtype == (np.float32 if carried == "fp32" else np.uint16) and host.shape == (len(step.ends), width)
    numbers = checks.wide(decode(host, carried))
    largest = float(np.nanmax(np.abs(decode(v, step.dtype))))
    for want, what in ((step.wanted(k, v), "float64"), (checks.wide(device.to_host(three)), "three launches")):
        bar = 1.01 * ROUNDING[carried] * np.abs(want) + checks.TOLERANCE["attention"] * largest
        error = np.abs(numbers - want)
        assert (error <= bar).all(), f"off by {(error / bar).max():.3g} times the bar from {what}"  # a NaN fails too


def check_one_row(device: Device, num_tokens: int) -> None:
    """Tokens that read each other's keys: three launches, in order, whatever the region could do."""
    step = Step(device, "fp16", [num_tokens], 2, 1, 16, rotated_dim=16)
    step.qkv = checks.normal(checks.fresh(), num_tokens, 4, 16)
    step.rows = np.repeat(step.rows, num_tokens)
    step.ends = np.arange(1, num_tokens + 1, dtype=np.int32)
    step.index = np.arange(num_tokens, dtype=np.int32) % step.tables[0].shape[0]
    step.caches = [encode(np.full((2, 1, num_tokens, 16), np.nan, np.float32), "fp16") for _ in range(2)]
    kernels: Any = device.kernels
    before = kernels.launches
    mixed, _, k, v = step.run(FusedRegions(kernels, 12), False)
    assert kernels.launches == before + 3
    checks.close(device, mixed, step.wanted(k, v), "attention")


def split_from(monkeypatch: pytest.MonkeyPatch, keys: int, head_dim: int, dtype: str) -> None:
    """Tokens of more than `keys` keys are split, so that a small context can be."""
    lanes = lanes_a_key(head_dim)
    size = 2 * lanes * decode_region.PIECE * (4 if dtype == "fp32" else 2)
    monkeypatch.setattr(decode_region, "ONE_BLOCK", keys * size)
    monkeypatch.setattr(decode_region, "make_region", decode_region.make_region.__wrapped__)


def check_what_takes_three_launches(device: Device) -> None:
    """Caches that are not aligned, widths that are no multiple of 8 (with no rotary they are two)."""
    kernels: Any = device.kernels
    regions, rng = FusedRegions(kernels, 12), checks.fresh()

    def launches(head_dim: int, shift: int = 0) -> int:
        rows, ends = np.array([2, 0], np.int32), np.full(2, 3, np.int32)
        qkv, size = checks.normal(rng, 2, 3, head_dim), 3 * 5 * head_dim
        k, v = (device.zeros(shift + size, np.uint16)[shift:].reshape(3, 1, 5, head_dim) for _ in range(2))
        host_k, host_v = (np.zeros((3, 1, 5, head_dim), np.uint16) for _ in range(2))
        write_kv.write_kv(qkv, 1, host_k, host_v, "fp16", rows, ends - 1)
        want = reference.attention(checks.wide(qkv), 1, host_k, host_v, "fp16", rows, ends, 0, 0.3, None)
        before = kernels.launches
        cache = CacheArgs(k, v, "fp16", *map(device.to_device, (rows, ends - 1, ends)), True)
        mixed = device.to_host(regions.attend(device.to_device(qkv), 1, None, cache, 0, 0.3, None))
        numbers = decode(mixed, "fp16") if mixed.dtype == np.uint16 else mixed
        assert np.abs(numbers - want).max() <= 2e-3 * np.abs(want).max()
        return kernels.launches - before

    assert [launches(16), launches(16, shift=1), launches(20)] == [1, 2, 2]


def check_rejections(device: Device) -> None:
    """A bad argument is named, before anything runs."""
    kernels: Any = device.kernels
    regions, i32 = FusedRegions(kernels, 12), np.int32
    qkv, k, places = device.zeros((2, 4, 16)), device.zeros((3, 1, 5, 16), np.uint16), device.zeros(2, i32)
    table = device.zeros((5, 8))

    def attend(
        qkv: Any = qkv, num_heads: int = 2, rotary: Any = (table, table, places), window: int = 0, slopes: Any = None, k: Any = k, v: Any = k,
        dtype: str = "fp16", rows: Any = places, positions: Any = places, ends: Any = places,
    ) -> None:  # fmt: skip
        cache = CacheArgs(k, v, dtype, rows, positions, ends, True)
        regions.attend(qkv, num_heads, RotaryArgs(*rotary, False), cache, window, 1.0, slopes)

    bad: list[tuple[str, dict[str, Any]]] = [
        ("qkv", {"qkv": device.zeros((2, 5, 16))}), ("qkv", {"qkv": device.zeros((2, 4, 16), np.float64)}), ("qkv", {"num_heads": 3}),
        ("dtype", {"dtype": "int8"}), ("cache_k", {"dtype": "fp32"}), ("cache_v", {"v": device.zeros((3, 1, 6, 16), np.uint16)}),
        ("rows", {"rows": device.zeros(3, i32)}), ("positions", {"positions": device.zeros(2)}), ("ends", {"ends": device.zeros(1, i32)}),
        ("cos", {"rotary": (device.zeros((5, 9)), device.zeros((5, 9)), places)}), ("sin", {"rotary": (table, device.zeros((4, 8)), places)}),
        ("index", {"rotary": (table, table, device.zeros(1, i32))}), ("window", {"window": -1}), ("slopes", {"slopes": device.zeros(3)}),
    ]  # fmt: skip
    before = kernels.launches
    for name, arguments in bad:
        with pytest.raises(ValueError, match=rf"argument {name}\b"):
            attend(**arguments)
    assert kernels.launches == before


def check_no_tokens(device: Device) -> None:
    k, none = device.zeros((3, 1, 5, 16), np.uint16), device.zeros(0, np.int32)
    cache, regions = CacheArgs(k, k, "fp16", none, none, none, True), FusedRegions(device.kernels, 12)  # type: ignore[arg-type]
    assert regions.attend(device.zeros((0, 4, 16)), 2, None, cache, 0, 1.0, None).shape == (0, 32)
