"""Launching a job: arguments filled in, the grid counted, shared memory asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from l1_kernels.cuda_api import allow_shared
from l1_kernels.gpu_kernels import GpuKernels, ceil_div
from l1_kernels.sbi_gemm.job import Job, signature
from l1_kernels.sbi_gemm.plans import Plan
from l1_kernels.sbi_gemm.prologue import make_norm_rows, pieces_of
from l1_kernels.sbi_gemm.tensor import Tensor, make_tensor
from l1_kernels.sbi_gemm.wide import make_wide
from l1_kernels.weight import CARRIER, Array, Weight

STATIC_LIMIT = 48 * 1024  # bytes that a block gets without asking


@dataclass(frozen=True, slots=True)
class Operand:
    """One product of a job: x [T, K], its norm's vectors and eps, w [N, K], bias [N], and where the result goes."""

    x: Array
    weight: Weight
    bias: Array | None
    y: Array
    gain: Array | None = None
    shift: Array | None = None
    eps: float = 0.0


def tiles_of(job: Job, plan: Plan, outputs: int, second: bool) -> int:
    """Tiles of a matrix of `outputs` rows."""
    gated = job.gated and (second or job.pair != "rows")
    slots = ceil_div(outputs // 2, 8) * 16 if gated and isinstance(plan, Tensor) else outputs
    return ceil_div(slots, plan.tile)


def run(
    kernels: GpuKernels, job: Job, plan: Plan, multiprocessors: int, a: Operand, b: Operand | None = None,
    ahead: Array | None = None, ahead_width: int = 0,
) -> None:  # fmt: skip
    """Launches `job` on the current stream. b: the second product of a pair."""
    num_tokens, size = a.x.shape
    kernel = _kernel(job, plan, num_tokens, size)
    num_tiles = tiles_of(job, plan, a.weight.data.shape[0], False)
    most = plan.blocks * multiprocessors or 1 << 30
    blocks, blocks_a = min(num_tiles, most), 0
    if job.pair == "rows":
        assert b is not None
        others = tiles_of(job, plan, b.weight.data.shape[0], True)
        # A block stays on its side, so that it makes one norm: the blocks are dealt out as the tiles are.
        blocks_a = min(num_tiles, max(1, most * num_tiles // (num_tiles + others)))
        blocks = blocks_a + min(others, max(1, most - blocks_a))
    shared_bytes = plan.shared_bytes(job, num_tokens, size)
    if shared_bytes > STATIC_LIMIT:
        allow_shared(kernel, signature(job), shared_bytes)
    b = b or a
    if ahead is None or ahead.dtype != a.weight.data.dtype:
        ahead, ahead_width = a.weight.data, 0
    kernels.launch(
        kernel, blocks, plan.threads, shared_bytes,
        a.x, b.x, *_vector(kernels, a.gain, a.shift), *_vector(kernels, b.gain, b.shift), np.float32(a.eps), np.float32(b.eps),
        a.weight.data, *_vector(kernels, a.weight.scale, a.bias), a.y,
        b.weight.data, *_vector(kernels, b.weight.scale, b.bias if job.pair else None), b.y, blocks_a, ahead, ahead_width,
        kernels.zero_counts(), 1,
    )  # fmt: skip


def run_experts(kernels: GpuKernels, job: Job, plan: Plan, routes: Array, count: int, share: int, a: Operand) -> None:
    """Launches a job with experts: a.weight.data [E * N, K] is their stack, a.bias and its scale [E * N]. routes int32 and count, the rows of blocks, as the
    job says."""
    outputs = a.y.shape[1] * (2 if job.gated else 1)
    plan = replace(plan, blocks=0)
    kernels.launch(
        _kernel(job, plan, 1, a.x.shape[1]), (tiles_of(job, plan, outputs, False), count), plan.threads, 0,
        a.x, a.x, *_vector(kernels, None, None), *_vector(kernels, None, None), np.float32(0), np.float32(0),
        a.weight.data, *_vector(kernels, a.weight.scale, a.bias), a.y,
        a.weight.data, *_vector(kernels, None, None), a.y, 0, a.weight.data, 0, routes, share,
    )  # fmt: skip


def _kernel(job: Job, plan: Plan, num_tokens: int, size: int) -> Any:
    single = job.norm is not None and num_tokens == 1
    pieces = pieces_of(size, plan.threads) if single else 0
    return make_tensor(job, plan, single, pieces) if isinstance(plan, Tensor) else make_wide(job, plan, pieces)


def norm_rows(kernels: GpuKernels, x: Array, kind: str, gain: Array, shift: Array | None, eps: float, dtype: str) -> Array:
    """The norm as a launch of its own: x float32 [T, D] -> the carrier of `dtype` ("fp16", "bf16"); D a multiple of 8."""
    out = kernels.new(x.shape, CARRIER[dtype])
    block = min(1024, ceil_div(x.shape[1], 256) * 32)
    held = block if x.shape[1] <= 8 * block else 0
    kernels.launch(make_norm_rows(kind, dtype, held), x.shape[0], block, 0, x, gain, *_vector(kernels, None, shift)[1:], np.float32(eps), out)
    return out


def _vector(kernels: GpuKernels, first: Array | None, second: Array | None) -> tuple[Any, Any, bool]:
    return kernels.or_absent(first), kernels.or_absent(second), second is not None
