"""y[t, n] = sum_k x[t, k] * w[n, k] + b[n] on the CPU: every weight is read once, by all threads together.

Few rows of x (a decode step): numba. Each thread takes a run of weight rows; 16-bit and int8 weights become float32 in
registers (one row of x) or in a scratch row that stays in the L1 cache (several). Bytes N*K*(4, 2 or 1): bound by DRAM.
Many rows (a prompt): BLAS, on weights decoded a tile at a time. Operations 2*T*N*K: bound by the cores.

Measured on 2 cores at 1.3-113 MB a matrix, T = 8 rows, fp32: 29 ms against 61 ms of BLAS for all of SmolLM2's matrices;
they meet between 16 and 32 rows. Below SERIAL_BYTES waking the other threads (3-9 us) costs more than they bring.
"""

from __future__ import annotations

import numpy as np
from numba import get_num_threads, njit, prange

from l1_kernels.quantize.cpu import rounded
from l1_kernels.weight import Weight

FEW_ROWS = 16  # up to so many rows of x numba beats BLAS
SERIAL_BYTES = 1 << 16  # below, one thread does it all
TILE_BYTES = 4 << 20  # of float32 weights decoded at a time for BLAS

# Sums may be reordered (that is what vectorises them); NaN and infinity keep their meaning.
SUMS = {"reassoc", "contract", "nsz"}
_NONE = np.empty(0, np.float32)


def linear(x: np.ndarray, weight: Weight, bias: np.ndarray | None, y: np.ndarray) -> None:
    """x [T, K] float32, weight [N, K] of any dtype, bias [N] -> y [T, N] float32. Arguments are checked by the caller."""
    if weight.act is not None:  # W8A8: the numbers that int8 leaves of x, multiplied in float32 as everything is here
        whole, x = x, np.empty_like(x)
        rounded(whole, x)
    if x.shape[0] > FEW_ROWS:
        _many_rows(x, weight, bias, y)
        return
    data = weight.data
    b = _NONE if bias is None else bias
    parts = get_num_threads() if data.nbytes >= SERIAL_BYTES else 1
    if weight.dtype == "fp32":
        if parts == 1:
            _rows_fp32(x, data, b, y, 0, data.shape[0])
        else:
            _spread_fp32(x, data, b, y, parts)
    elif weight.dtype == "int8":
        if parts == 1:
            _rows_int8(x, data, weight.scale, b, y, 0, data.shape[0])
        else:
            _spread_int8(x, data, weight.scale, b, y, parts)
    elif parts == 1:
        _rows_16(x, data, weight.dtype == "bf16", b, y, 0, data.shape[0])
    else:
        _spread_16(x, data, weight.dtype == "bf16", b, y, parts)


def product_operations(num_tokens: int, weight: Weight) -> int:
    """Of one BLAS product in `linear`; 0 where it is numba's."""
    if num_tokens <= FEW_ROWS:
        return 0
    size = weight.data.size if weight.dtype == "fp32" else min(weight.data.size, TILE_BYTES // 4)
    return 2 * num_tokens * size


def _many_rows(x: np.ndarray, weight: Weight, bias: np.ndarray | None, y: np.ndarray) -> None:
    if weight.dtype == "fp32":
        np.matmul(x, weight.data.T, out=y)
    else:
        num_out, num_in = weight.data.shape
        step = max(1, min(num_out, TILE_BYTES // (4 * num_in)))
        tile = np.empty((step, num_in), np.float32)
        for first in range(0, num_out, step):
            data = weight.data[first : first + step]
            rows = tile[: len(data)]
            if weight.dtype == "int8":
                rows[...] = data
            else:
                _decode_16(data, weight.dtype == "bf16", rows)
            np.matmul(x, rows.T, out=y[:, first : first + step])
        if weight.scale is not None:
            y *= weight.scale
    if bias is not None:
        y += bias


@njit
def _fp16(bits):
    """The number that 16 bits mean, without branches so that it vectorises: exponent and mantissa moved to their float32
    place are the number / 2^112 (subnormals too); exponent 31 is infinity or NaN."""
    magnitude = np.uint32(np.uint32(bits & np.uint16(0x7FFF)) << 13)
    number = magnitude.view(np.float32) * np.float32(2.0**112)
    special = np.uint32(0x7F800000) if magnitude >= np.uint32(0x0F800000) else np.uint32(0)
    sign = np.uint32(np.uint32(bits & np.uint16(0x8000)) << 16)
    return np.uint32(np.float32(number).view(np.uint32) | special | sign).view(np.float32)


@njit
def _bf16(bits):
    return np.uint32(np.uint32(bits) << 16).view(np.float32)


@njit(fastmath=SUMS)
def _dots(x, row, scale, offset, y, n):
    """y[t, n] = x[t] . row * scale + offset for every t, four t at a time so that `row` is loaded once for them."""
    num_rows, size = x.shape
    t = 0
    while t + 4 <= num_rows:
        a = b = c = d = np.float32(0)
        for k in range(size):
            v = row[k]
            a += v * x[t, k]
            b += v * x[t + 1, k]
            c += v * x[t + 2, k]
            d += v * x[t + 3, k]
        y[t, n] = a * scale + offset
        y[t + 1, n] = b * scale + offset
        y[t + 2, n] = c * scale + offset
        y[t + 3, n] = d * scale + offset
        t += 4
    while t < num_rows:
        a = np.float32(0)
        for k in range(size):
            a += row[k] * x[t, k]
        y[t, n] = a * scale + offset
        t += 1


@njit(fastmath=SUMS, cache=True)
def _rows_fp32(x, w, bias, y, first, last):
    for n in range(first, last):
        _dots(x, w[n], np.float32(1), bias[n] if bias.size else np.float32(0), y, n)


@njit(fastmath=SUMS, cache=True)
def _rows_16(x, w, is_bf16, bias, y, first, last):
    size = w.shape[1]
    row = np.empty(size, np.float32)
    for n in range(first, last):
        offset = bias[n] if bias.size else np.float32(0)
        if x.shape[0] == 1:
            a = np.float32(0)
            if is_bf16:
                for k in range(size):
                    a += _bf16(w[n, k]) * x[0, k]
            else:
                for k in range(size):
                    a += _fp16(w[n, k]) * x[0, k]
            y[0, n] = a + offset
        else:
            _decode(w[n], is_bf16, row)
            _dots(x, row, np.float32(1), offset, y, n)


@njit(fastmath=SUMS, cache=True)
def _rows_int8(x, w, scale, bias, y, first, last):
    size = w.shape[1]
    row = np.empty(size, np.float32)
    for n in range(first, last):
        offset = bias[n] if bias.size else np.float32(0)
        if x.shape[0] == 1:
            a = np.float32(0)
            for k in range(size):
                a += np.float32(w[n, k]) * x[0, k]
            y[0, n] = a * scale[n] + offset
        else:
            for k in range(size):
                row[k] = w[n, k]
            _dots(x, row, scale[n], offset, y, n)


@njit
def _decode(bits, is_bf16, out):
    if is_bf16:
        for k in range(bits.size):
            out[k] = _bf16(bits[k])
    else:
        for k in range(bits.size):
            out[k] = _fp16(bits[k])


@njit(parallel=True, cache=True)
def _spread_fp32(x, w, bias, y, parts):
    for p in prange(parts):
        _rows_fp32(x, w, bias, y, w.shape[0] * p // parts, w.shape[0] * (p + 1) // parts)


@njit(parallel=True, cache=True)
def _spread_16(x, w, is_bf16, bias, y, parts):
    for p in prange(parts):
        _rows_16(x, w, is_bf16, bias, y, w.shape[0] * p // parts, w.shape[0] * (p + 1) // parts)


@njit(parallel=True, cache=True)
def _spread_int8(x, w, scale, bias, y, parts):
    for p in prange(parts):
        _rows_int8(x, w, scale, bias, y, w.shape[0] * p // parts, w.shape[0] * (p + 1) // parts)


@njit(parallel=True, cache=True)
def _decode_16(bits, is_bf16, out):
    """bits [N, K] uint16 -> out [N, K] float32."""
    for n in prange(bits.shape[0]):
        _decode(bits[n], is_bf16, out[n])
