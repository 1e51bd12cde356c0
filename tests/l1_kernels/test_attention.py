from __future__ import annotations

import math

import numpy as np
import pytest

from l1_kernels.attention import reference
from l1_kernels.attention.cpu import BLOCK, KEYS, PROMPT_TOKENS
from l1_kernels.device import Device
from l1_kernels.weight import decode, encode
from tests.l1_kernels import operation_checks as checks

DTYPES = ["fp32", "fp16", "bf16"]


@pytest.mark.parametrize("window", [0, 3])
def test_reference_is_the_formula(window: int) -> None:
    """Against loops over plain numbers: two key heads for four query heads, ALiBi, window."""
    rng = checks.fresh()
    qkv, slopes = rng.standard_normal((3, 4 + 2 * 2, 5)), rng.uniform(0.1, 0.5, 4)
    cache_k, cache_v = rng.standard_normal((2, 2, 2, 9, 5))
    rows, ends, scale = [1, 0, 1], [1, 6, 9], 0.7
    want = np.zeros((3, 4, 5))
    for t, (row, end) in enumerate(zip(rows, ends, strict=True)):
        for h in range(4):
            keys = range(max(0, end - window) if window else 0, end)
            weights = [
                math.exp(scale * sum(qkv[t, h, i] * cache_k[row, h // 2, j, i] for i in range(5)) + slopes[h] * (j - end + 1)) for j in keys
            ]
            for j, weight in zip(keys, weights, strict=True):
                want[t, h] += weight / sum(weights) * cache_v[row, h // 2, j]
    got = reference.attention(qkv, 4, cache_k, cache_v, "fp32", np.array(rows), np.array(ends), window, scale, slopes)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want.reshape(3, 20), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ends", [[1], [7, 0, 2], [KEYS, KEYS + 1, 199, 37]], ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(1, 1, 1), (2, 2, 37), (9, 3, 64), (4, 1, 199)])
def test_decode(cpu: Device, dtype: str, ends: list[int], num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    checks.check_attention(cpu, dtype, ends, num_heads, num_kv_heads, head_dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("window", [1, 5, 100, 1000])
def test_decode_window(cpu: Device, dtype: str, window: int, alibi: bool) -> None:
    checks.check_attention(cpu, dtype, [1, 6, 9, 199, 150, 0, 37], 6, 3, 8, window=window, alibi=alibi)


def test_decode_all_threads(cpu: Device) -> None:
    checks.check_attention(cpu, "fp32", [300 + 7 * t for t in range(5)], 6, 3, 64)


def prompts(lengths: list[int], past: int, dtype: str, window: int, alibi: bool, causal: bool) -> tuple[list, float]:
    """Arguments for sequences of these lengths one after the other, `past` keys of each in the cache before; NaN wherever
    no token of a sequence may look. And the largest value, for the bar."""
    rng = checks.fresh()
    num_heads, num_kv_heads, head_dim, places = 6, 2, 16, past + max(lengths) + 3
    caches = checks.normal(rng, 2, len(lengths), num_kv_heads, places, head_dim)
    rows, ends = [], []
    for row, length in enumerate(lengths):
        last = past + length
        rows += [row] * length
        ends += range(past + 1, last + 1) if causal else [last] * length
        caches[:, row, :, last:] = np.nan
        if window:
            caches[:, row, :, : max(0, (past + 1 if causal else last) - window)] = np.nan
    slopes = rng.uniform(0.01, 0.5, num_heads).astype(np.float32) if alibi else None
    qkv = checks.normal(rng, len(rows), num_heads + 2 * num_kv_heads, head_dim) * 2
    cache_k, cache_v = encode(caches[0], dtype), encode(caches[1], dtype)
    largest = float(np.nanmax(np.abs(decode(cache_v, dtype))))
    return [qkv, num_heads, cache_k, cache_v, dtype, np.array(rows, np.int32), np.array(ends, np.int32), window, 0.25, slopes], largest


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 20])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [[PROMPT_TOKENS - 1], [199], [7, 37, 1, BLOCK + 1, PROMPT_TOKENS, 37]], ids=str)
@pytest.mark.parametrize("past", [0, 13])
def test_prompts(cpu: Device, lengths: list[int], past: int, dtype: str, window: int, causal: bool) -> None:
    arguments, largest = prompts(lengths, past, dtype, window, alibi=window != 1, causal=causal)
    want = reference.attention(checks.wide(arguments[0]), *arguments[1:])
    got = checks.poisoned(cpu, cpu.kernels.attention, *arguments)
    checks.close(cpu, got, want, "attention", largest)


def test_keys_that_nobody_reads_may_be_nan(cpu: Device) -> None:
    """One sequence's tokens in two far stretches: what lies between them was never written."""
    arguments, largest = prompts([300], 0, "fp32", 5, alibi=False, causal=True)
    keep = np.r_[0 : PROMPT_TOKENS + 6, 200:300]
    arguments[0], arguments[5], arguments[6] = (np.ascontiguousarray(arguments[i][keep]) for i in (0, 5, 6))
    for cache in arguments[2:4]:
        cache[:, :, PROMPT_TOKENS + 6 : 195] = np.nan
    want = reference.attention(checks.wide(arguments[0]), *arguments[1:])
    checks.close(cpu, cpu.kernels.attention(*arguments), want, "attention", largest)


@pytest.mark.parametrize("num_tokens", [2, PROMPT_TOKENS + 9])
def test_a_nan_key_is_not_lost(cpu: Device, num_tokens: int) -> None:
    arguments, _ = prompts([num_tokens], 0, "fp32", 0, alibi=False, causal=True)
    arguments[2][0, 1, num_tokens - 1, 3] = np.nan  # the last key, head 1: only the last token's heads 3..5 read it
    out = cpu.kernels.attention(*arguments).reshape(num_tokens, 6, 16)
    assert np.isnan(out[-1, 3:]).all() and np.isfinite(out[-1, :3]).all()
    assert np.isfinite(out[:-1]).all()


def test_large_scores(cpu: Device) -> None:
    """Scores of some thousands: without the running maximum exp would overflow; the largest key wins alone."""
    for num_tokens in (1, PROMPT_TOKENS):
        arguments, largest = prompts([num_tokens], 70, "fp32", 0, alibi=False, causal=True)
        arguments[0] *= 500
        want = reference.attention(checks.wide(arguments[0]), *arguments[1:])
        got = cpu.kernels.attention(*arguments)
        # a score of 2000 is rounded by 1e-4 in float32, and so are the probabilities of near ties
        assert np.abs(got - want).max() <= 1e-3 * largest


@pytest.mark.parametrize(("name", "row", "end"), [("rows", 1, 1), ("rows", -1, 1), ("ends", 0, 6), ("ends", 0, -1)])
def test_a_place_outside_the_cache_is_refused(cpu: Device, name: str, row: int, end: int) -> None:
    cache = np.zeros((1, 1, 5, 8), np.float32)
    rows, ends = np.array([0, row], np.int32), np.array([5, end], np.int32)
    with pytest.raises(ValueError, match=f"argument {name}"):
        cpu.kernels.attention(np.zeros((2, 4, 8), np.float32), 2, cache, cache, "fp32", rows, ends, 0, 1.0, None)
