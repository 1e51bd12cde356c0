"""What the W8A8 kernel compiles to: integer products alone, and nothing in local memory."""

from __future__ import annotations

import pytest

from l1_kernels.compile_ptx import compile_to_ptx
from l1_kernels.sbi_gemm.int8_tensor import Int8Tensor, make_int8_tensor, signature
from l1_kernels.sbi_gemm.job import Job

pytestmark = pytest.mark.ptx


@pytest.mark.parametrize("columns", [1, 2])
def test_products_and_loads(columns: int) -> None:
    plan = Int8Tensor(unroll=2, columns=columns)
    text = compile_to_ptx(make_int8_tensor(Job("int8", add=True), plan), signature(), "90")
    assert text.count("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32") == plan.unroll * columns * 2 * 2  # planes, halves of 64 k
    assert text.count("ld.global.nc.L1::no_allocate.L2::128B.v4.u32") == 2 * plan.unroll * 2  # two rows, to begin with and in the loop
    assert "mma.sync.aligned.m16n8k16" not in text and "f16x2" not in text
    assert ".local" not in text and text.count("bar.sync") == 1
