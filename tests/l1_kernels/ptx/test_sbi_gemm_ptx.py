"""What the SBI-GeMM kernels compile to: barriers of the two reductions, width of the loads, nothing in local memory."""

from __future__ import annotations

import pytest

from l1_kernels.carrier import F32_1D, F32_2D
from l1_kernels.compile_ptx import compile_to_ptx
from l1_kernels.sbi_gemm.job import Job, signature
from l1_kernels.sbi_gemm.layout import packed_type
from l1_kernels.sbi_gemm.tensor import Tensor, make_tensor
from l1_kernels.sbi_gemm.transpose import make_transpose
from l1_kernels.sbi_gemm.tree import make_tree
from l1_kernels.sbi_gemm.wide import Wide, make_wide

pytestmark = pytest.mark.ptx
SIGNATURE = (F32_2D, packed_type("fp16", 1), F32_1D, F32_2D)


@pytest.mark.parametrize(("warps", "levels"), [(2, 1), (8, 3), (32, 5)])
def test_barriers(warps: int, levels: int) -> None:
    """The tree: one for the partial sums, one a level. The transpose: two, however many warps."""
    assert compile_to_ptx(make_tree("fp16", 1, warps), SIGNATURE, "90").count("bar.sync") == 1 + levels
    assert compile_to_ptx(make_transpose("fp16", 1, warps), SIGNATURE, "90").count("bar.sync") == 2


def test_loads_of_weights() -> None:
    """All of them 16 bytes, past L1, their cache line for L2: ROWS * UNROLL to begin with, as many in the loop of whole steps, and in each
    copy of the loop of the last ones."""
    job, plan = Job("fp16", carried=True, add=True), Wide(2, 1, 4, 2)
    text = compile_to_ptx(make_wide(job, plan), signature(job), "90")
    count, step = text.count("ld.global.nc.L1::no_allocate.L2::128B.v4.u32"), plan.rows * plan.unroll
    assert count >= 3 * step and count % step == 0 and text.count("ld.global.nc") == count
    assert text.count("@inside ld.global.nc") == count - step  # the loop of whole steps compares nothing
    assert ".local" not in text and "bar.sync" not in text


def test_one_mma_for_16_rows_and_16_k() -> None:
    job, plan = Job("fp16", carried=True, add=True), Tensor(tiles=1, splits=8, unroll=1, columns=1)
    text = compile_to_ptx(make_tensor(job, plan), signature(job), "90")
    count = text.count("mma.sync.aligned.m16n8k16")
    assert count >= 8 and count % 4 == 0  # of a piece of 64 k, in the loop of whole steps and in each copy of the last ones
    assert ".local" not in text and text.count("bar.sync") == 1
