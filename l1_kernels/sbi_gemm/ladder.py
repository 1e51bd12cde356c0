"""The rungs by name, each as `multiply(x float32 [T, K]) -> y float32 [T, N]`: for tests, the benchmark and readers.

    naive coalesced tree transpose split_k layout wide tensor

A rung prepares a weight once (rungs 3 to 6 re-lay it), as a model would when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from l1_kernels.gpu_kernels import GpuKernels, ceil_div
from l1_kernels.sbi_gemm import coalesced, launch, layout, naive, plans, split_k, tree
from l1_kernels.sbi_gemm.job import Job
from l1_kernels.sbi_gemm.tensor import Tensor
from l1_kernels.sbi_gemm.transpose import make_transpose
from l1_kernels.sbi_gemm.wide import Wide
from l1_kernels.weight import Array, Weight

WARPS = 8
SPLITS = 4
Multiply = Callable[[Array], Array]


def prepare(rung: str, kernels: GpuKernels, weight: Weight) -> Multiply:
    """multiply(x) of one rung for one weight. ValueError where the rung does not take it."""
    return RUNGS[rung](kernels, weight)


def _rows(make: Callable[[str], Any], threads: int, outputs: int) -> Callable[[GpuKernels, Weight], Multiply]:
    """Rungs on w as it is: `outputs` of a block."""

    def prepare(kernels: GpuKernels, weight: Weight) -> Multiply:
        def multiply(x: Array) -> Array:
            y = _out(kernels, weight, x)
            grid = (ceil_div(y.shape[1], outputs), y.shape[0])
            kernels.launch(make(weight.dtype), grid, threads, 0, x, weight.data, kernels.or_absent(weight.scale), y)
            return y

        return multiply

    return prepare


def _tiles(make: Callable[[str, int, int], Any], full_line: bool) -> Callable[[GpuKernels, Weight], Multiply]:
    """Rungs on w re-laid: 32 outputs a block."""

    def prepare(kernels: GpuKernels, weight: Weight) -> Multiply:
        m = layout.FULL_LINE[weight.dtype] if full_line else 1
        packed = layout.relay(weight, m)

        def multiply(x: Array) -> Array:
            y = _out(kernels, weight, x)
            grid = (ceil_div(y.shape[1], 32), y.shape[0])
            kernels.launch(make(weight.dtype, m, WARPS), grid, 32 * WARPS, 0, x, packed, kernels.or_absent(weight.scale), y)
            return y

        return multiply

    return prepare


def _split_k(kernels: GpuKernels, weight: Weight) -> Multiply:
    m = layout.FULL_LINE[weight.dtype]
    packed = layout.relay(weight, m)

    def multiply(x: Array) -> Array:
        y = _out(kernels, weight, x)
        partial = kernels.new((SPLITS, *y.shape), np.float32)
        grid = (ceil_div(y.shape[1], 32), y.shape[0], SPLITS)
        kernels.launch(split_k.make_partial(weight.dtype, m, WARPS), grid, 32 * WARPS, 0, x, packed, partial)
        sums = (ceil_div(y.shape[1], split_k.THREADS), y.shape[0])
        kernels.launch(split_k.make_sum(weight.dtype), sums, split_k.THREADS, 0, partial, kernels.or_absent(weight.scale), y)
        return y

    return multiply


def _planned(plan_of: Callable[[int], plans.Plan]) -> Callable[[GpuKernels, Weight], Multiply]:
    """The production kernels, without prologue and epilogue."""

    def prepare(kernels: GpuKernels, weight: Weight) -> Multiply:
        job = Job(weight.dtype)
        if not plans.takes(job, 1, weight.data.shape[1]):
            raise ValueError(f"argument weight must have a K of whole 16 bytes, got {list(weight.data.shape)}")

        def multiply(x: Array) -> Array:
            y = _out(kernels, weight, x)
            launch.run(kernels, job, plan_of(x.shape[0]), 1, launch.Operand(x, weight, None, y))
            return y

        return multiply

    return prepare


def _out(kernels: GpuKernels, weight: Weight, x: Array) -> Array:
    return kernels.new((x.shape[0], weight.data.shape[0]), np.float32)


RUNGS: dict[str, Callable[[GpuKernels, Weight], Multiply]] = {
    "naive": _rows(naive.make_naive, naive.THREADS, naive.THREADS),
    "coalesced": _rows(coalesced.make_coalesced, 32 * coalesced.WARPS, coalesced.WARPS),
    "tree": _tiles(tree.make_tree, False),
    "transpose": _tiles(make_transpose, False),
    "split_k": _split_k,
    "layout": _tiles(layout.make_layout, True),
    "wide": _planned(lambda tokens: Wide(2, 1, 4, 2)),
    "tensor": _planned(lambda tokens: Tensor(1, 8, 1, 1, 1 if tokens <= 8 else 2)),
}
