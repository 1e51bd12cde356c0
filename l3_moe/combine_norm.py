"""The way back of few tokens and the norm that comes after it, in one launch: a sparse layer's last operation and the next layer's first.

    residual[t] += sum_j share[t, j] * y[slots[t, j]]         rows[t] = norm(residual[t]), in 16 bits

y float32 [T k, D], slots int32 and share float32 [T, k], residual float32 [T, D] in place, rows [T, D] in the carrier of `dtype`: all in global memory. Reads 4 T D (k + 1)
bytes and writes 6 T D; bound by latency, as both launches were that it stands for. Sums and norm are those of routing/layout.py and sbi_gemm/prologue.py.

    block t -> token t; a thread has 8 numbers of D in registers from the first load to the last store

The launcher takes D a multiple of 8 and up to 8192; other sizes, and slots of -1 (dropped pairs), are combine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import checks, ptx
from l1_kernels.carrier import F32_1D, F32_2D, I32_2D, array_type
from l1_kernels.checks import FLOAT32, INT32
from l1_kernels.cuda_api import cuda, early
from l1_kernels.gpu_kernels import GpuKernels, ceil_div
from l1_kernels.regions import NormArgs
from l1_kernels.sbi_gemm.prologue import make_ask, make_norm_held
from l1_kernels.weight import CARRIER, Array

MAX_THREADS = 1024
ZERO = np.float32(0)
MAX_SIZE = 8 * MAX_THREADS


def takes(size: int) -> bool:
    return size % 8 == 0 and size <= MAX_SIZE


@cache
def make_combine_norm(kind: str, dtype: str, top_k: int, threads: int) -> Callable[..., Any]:
    """kernel(y, slots, share, residual, gain, shift, has_shift, eps, rows)[T, threads]; D <= 8 * threads."""
    ask, _ = make_ask(1, threads)
    norm_held = make_norm_held(kind, dtype, 1, threads, True)
    held_y = top_k * 4

    @cuda.jit(device=True, forceinline=True)
    def add_up(held, at, y, slots, share, residual, t, k):
        """residual and held[at .. at + 4): four numbers of token t from k on, with all k experts' loads under way together."""
        width = np.int64(residual.shape[1])
        parts = cuda.local.array(held_y, types.float32)
        before = ptx.load16_floats(residual, t * width + k)
        for j in range(top_k):
            v = ptx.load16_floats(y, slots[t, j] * width + k)
            parts[4 * j], parts[4 * j + 1], parts[4 * j + 2], parts[4 * j + 3] = v[0], v[1], v[2], v[3]
        a, b, c, d = ZERO, ZERO, ZERO, ZERO
        for j in range(top_k):
            part = share[t, j]
            a += part * parts[4 * j]
            b += part * parts[4 * j + 1]
            c += part * parts[4 * j + 2]
            d += part * parts[4 * j + 3]
        a, b, c, d = before[0] + a, before[1] + b, before[2] + c, before[3] + d
        ptx.store16_floats(residual, t * width + k, (a, b, c, d))
        held[at], held[at + 1], held[at + 2], held[at + 3] = a, b, c, d

    @early()
    @cuda.jit(launch_bounds=(threads, 1))
    def combine_norm(y, slots, share, residual, gain, shift, has_shift, eps, rows):
        held = cuda.local.array(24, types.float32)
        t, k, size = cuda.blockIdx.x, cuda.threadIdx.x * 8, residual.shape[1]
        ask(held, size, gain, shift, has_shift)
        ptx.take_turn()
        for i in range(4):
            held[i], held[12 + i] = ZERO, ZERO
        if k < size:
            add_up(held, 0, y, slots, share, residual, t, k)
            add_up(held, 12, y, slots, share, residual, t, k + 4)
        norm_held(held, size, eps, rows, t * size)

    return combine_norm


def combine_norm(kernels: GpuKernels, y: Array, slots: Array, share: Array, residual: Array, norm: NormArgs, dtype: str) -> Array:
    """residual is changed; returns the normed rows, [T, D] in the carrier of `dtype` ("fp16", "bf16"). No slot may be -1."""
    checks.ranked(slots, "slots", INT32, 2)
    num_tokens, top_k = slots.shape
    checks.array(share, "share", FLOAT32, slots.shape)
    checks.ranked(residual, "residual", FLOAT32, 2)
    size = residual.shape[1]
    checks.array(residual, "residual", FLOAT32, (num_tokens, size))
    checks.array(y, "y", FLOAT32, (num_tokens * top_k, size))
    checks.array(norm.weight, "norm.weight", FLOAT32, (size,))
    if norm.bias is not None:
        checks.array(norm.bias, "norm.bias", FLOAT32, (size,))
    if not takes(size):
        checks.reject("residual", f"[T, D], D a multiple of 8 and up to {MAX_SIZE}", checks.describe(residual))
    rows = kernels.new(residual.shape, CARRIER[dtype])
    threads = ceil_div(size, 256) * 32
    kernels.launch(
        make_combine_norm(norm.kind, dtype, top_k, threads), num_tokens, threads, 0,
        y, slots, share, residual, norm.weight, kernels.or_absent(norm.bias), norm.bias is not None, np.float32(norm.eps), rows,
    )  # fmt: skip
    return rows


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for kind, dtype, top_k, threads in (("layernorm", "fp16", 1, 256), ("rmsnorm", "bf16", 2, MAX_THREADS), ("rmsnorm", "fp16", 8, 256)):
        arguments = (F32_2D, I32_2D, F32_2D, F32_2D, F32_1D, F32_1D, types.boolean, types.float32, array_type(dtype, 2))
        yield f"combine_norm_{kind}_{dtype}_{top_k}", make_combine_norm(kind, dtype, top_k, threads), arguments
