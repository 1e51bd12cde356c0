"""The gate of few tokens, one launch: norm, gate product, softmax and top k; and the normed rows in 16 bits, which the experts read.

    rows[t] = norm(x[t])     logits = norm(x[t]) @ gate^T, all float32     experts, share = the top k of the logits

x float32 [T, D], gate float32 [E, D], rows [T, D] in the carrier of `dtype`, experts int32 [T, k], share float32 [T, k]: all in global memory.
Reads 4*E*D bytes a token (one token's block reads the whole gate), so it is for few tokens: 8 experts of D = 2048 are 64 KB, which the block's threads
hold in registers before their turn comes; the rest of a larger gate they ask L2 for. Bound by latency: a block is one chain of two barriers
for the norm, one for the logits, and k rounds of one warp (paper, Section V-C: the gate as one kernel).

    block t, warp w -> the parts w, w + WARPS, ... of E * SPLITS: (expert, every SPLITS-th piece of 1024 numbers)
    lane            -> 4 numbers of PIECES pieces of 128 at a time
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import checks, groups, ptx
from l1_kernels.carrier import F32_1D, F32_2D, I32_2D, array_type, storer
from l1_kernels.checks import FLOAT32
from l1_kernels.cuda_api import cuda, early
from l1_kernels.gpu_kernels import GpuKernels
from l1_kernels.regions import NormArgs
from l1_kernels.sbi_gemm.prologue import HELD_PIECES, make_ask, make_norm_held, pieces_of
from l1_kernels.weight import CARRIER, Array, Weight
from l3_moe.choose import make_choose

THREADS = 512
WARPS = THREADS // 32
PIECES = 8
STEP = PIECES * 128  # numbers of a warp's step
LINE = 32  # float32 of a cache line
SHARED_LIMIT = 48 * 1024
ZERO = np.float32(0)
reduce_sum, lane_index, warp_index = groups.reduce_sum, groups.lane, groups.warp


def splits_of(num_experts: int) -> int:
    """Warps that share an expert's row, where there are more warps than experts."""
    return 1 << max(0, (WARPS // num_experts).bit_length() - 1)


def takes(size: int, num_experts: int) -> bool:
    """Whether the kernel does a gate [E, D]."""
    return size % 8 == 0 and pieces_of(size, THREADS) > 0 and shared_bytes(size, num_experts) <= SHARED_LIMIT


def shared_bytes(size: int, num_experts: int) -> int:
    """Dynamic shared memory: the normed row, and a sum for each part."""
    return 4 * (size + num_experts * splits_of(num_experts))


@cache
def make_gate(kind: str, dtype: str, pieces: int, splits: int) -> Callable[..., Any]:
    """kernel(x, gain, shift, has_shift, eps, gate, over_all, rows, experts, share)[T, THREADS, stream, shared_bytes(D, E)]"""
    ask, ask_x = make_ask(pieces, THREADS)
    norm_held = make_norm_held(kind, "fp32", pieces, THREADS)
    choose, store = make_choose(), storer(dtype)
    norm_size, held_size = pieces * 24, PIECES * 4

    @cuda.jit(device=True, forceinline=True)
    def fetch(held, gate, part, base, size):
        """Asks for a step of a part's row; zeros beyond its end."""
        row = np.int64(part // splits) * size
        for p in range(PIECES):
            k = base + p * 128 + lane_index() * 4
            held[p * 4], held[p * 4 + 1], held[p * 4 + 2], held[p * 4 + 3] = ZERO, ZERO, ZERO, ZERO
            if k < size:
                a, b, c, d = ptx.load16_floats(gate, row + k)
                held[p * 4], held[p * 4 + 1], held[p * 4 + 2], held[p * 4 + 3] = a, b, c, d

    @cuda.jit(device=True, forceinline=True)
    def multiply(held, shared, base, size):
        total = ZERO
        for p in range(PIECES):
            k = base + p * 128 + lane_index() * 4
            if k < size:
                for i in range(4):
                    total += held[p * 4 + i] * shared[k + i]
        return total

    @early()
    @cuda.jit(launch_bounds=(THREADS, 1))
    def gate_few(x, gain, shift, has_shift, eps, gate, over_all, rows, experts, share):
        shared = cuda.shared.array(0, types.float32)
        held_norm = cuda.local.array(norm_size, types.float32)
        held = cuda.local.array(held_size, types.float32)
        lane, warp, t = lane_index(), warp_index(), cuda.blockIdx.x
        num_experts, size = gate.shape
        parts = num_experts * splits
        ask(held_norm, size, gain, shift, has_shift)
        if warp < parts:
            fetch(held, gate, warp, (warp % splits) * STEP, size)
        if t == 0:  # what is not held; every block reads the same
            for i in range(cuda.threadIdx.x * LINE, num_experts * size, THREADS * LINE):
                ptx.prefetch_l2(gate, i)
        ptx.take_turn()
        ask_x(held_norm, x, t)
        norm_held(held_norm, size, eps, shared, 0)
        for k in range(cuda.threadIdx.x, size, THREADS):
            rows[t, k] = store(shared[k])
        for part in range(warp, parts, WARPS):
            total = ZERO
            for base in range((part % splits) * STEP, size, splits * STEP):
                if part != warp or base != (part % splits) * STEP:
                    fetch(held, gate, part, base, size)
                total += multiply(held, shared, base, size)
            total = reduce_sum(total)
            if lane == 0:
                shared[size + part] = total
        cuda.syncthreads()
        if splits > 1:
            total = ZERO
            e = cuda.threadIdx.x
            if e < num_experts:
                for s in range(splits):
                    total += shared[size + e * splits + s]
            cuda.syncthreads()
            if e < num_experts:
                shared[size + e] = total
            cuda.syncthreads()
        if warp == 0:
            choose(shared, size, num_experts, over_all, experts, share, t)

    return gate_few


def gate_few(
    kernels: GpuKernels, x: Array, norm: NormArgs, gate: Weight, top_k: int, over_all: bool, dtype: str
) -> tuple[Array, Array, Array]:
    """(rows [T, D] in the carrier of `dtype`, experts int32 [T, k], share float32 [T, k])."""
    checks.matrix(gate, "gate")
    num_experts, size = gate.data.shape
    checks.ranked(x, "x", FLOAT32, 2)
    checks.array(x, "x", FLOAT32, (x.shape[0], size))
    checks.array(norm.weight, "norm.weight", FLOAT32, (size,))
    if norm.bias is not None:
        checks.array(norm.bias, "norm.bias", FLOAT32, (size,))
    if not 1 <= top_k <= num_experts:
        checks.reject("top_k", f"in 1..{num_experts} (gate's E)", top_k)
    if not takes(size, num_experts) or gate.dtype != "fp32":
        checks.reject("gate", f"float32 [E, D], D a multiple of 8 and up to {8 * THREADS * HELD_PIECES}", checks.describe(gate.data))
    rows = kernels.new(x.shape, CARRIER[dtype])
    experts, share = kernels.new((x.shape[0], top_k), np.int32), kernels.new((x.shape[0], top_k), np.float32)
    kernels.launch(
        make_gate(norm.kind, dtype, pieces_of(size, THREADS), splits_of(num_experts)), x.shape[0], THREADS, shared_bytes(size, num_experts),
        x, norm.weight, kernels.or_absent(norm.bias), norm.bias is not None, np.float32(norm.eps), gate.data, over_all, rows, experts, share,
    )  # fmt: skip
    return rows, experts, share


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for kind in ("layernorm", "rmsnorm"):
        for dtype in ("fp32", "fp16", "bf16"):
            for pieces, splits in ((1, 2), (HELD_PIECES, 1)):
                out = array_type(dtype, 2)
                norm = (F32_2D, F32_1D, F32_1D, types.boolean, types.float32)
                yield f"gate_{kind}_{dtype}_{pieces}", make_gate(kind, dtype, pieces, splits), (*norm, F32_2D, types.boolean, out, I32_2D, F32_2D)
