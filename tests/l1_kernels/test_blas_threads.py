"""BLAS takes one thread for small products and all of them for large ones."""

from __future__ import annotations

import numpy as np
import pytest

from l1_kernels.blas_threads import MANY_OPERATIONS, BlasThreads
from l1_kernels.cpu_kernels import CpuKernels
from l1_kernels.linear.cpu import FEW_ROWS, product_operations
from l1_kernels.weight import host_weight

threadpoolctl = pytest.importorskip("threadpoolctl")


def blas_threads() -> set[int]:
    return {library["num_threads"] for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"}


def test_a_small_product_takes_one_thread_and_a_large_one_all() -> None:
    with threadpoolctl.threadpool_limits(limits=2, user_api="blas"):
        if blas_threads() != {2}:
            pytest.skip("this BLAS has no threads to give")
        threads = BlasThreads()
        threads.serve(MANY_OPERATIONS - 1)
        assert blas_threads() == {1}
        threads.serve(MANY_OPERATIONS)
        assert blas_threads() == {2}
        threads.serve(0)
        assert blas_threads() == {1}


def test_the_kernels_ask_for_the_product_that_they_make() -> None:
    with threadpoolctl.threadpool_limits(limits=2, user_api="blas"):
        if blas_threads() != {2}:
            pytest.skip("this BLAS has no threads to give")
        kernels, rng = CpuKernels(), np.random.default_rng()
        small, large = (host_weight(rng.standard_normal((n, 512), np.float32), "fp32") for n in (64, 4096))
        x = rng.standard_normal((64, 512), np.float32)
        kernels.linear(x, small)
        assert blas_threads() == {1}
        np.testing.assert_allclose(kernels.linear(x, large), x @ large.data.T, rtol=1e-3, atol=1e-3)
        assert blas_threads() == {2}


def test_operations_of_numba_s_products_are_none_of_blas_s() -> None:
    weight = host_weight(np.ones((8, 4), np.float32), "fp32")
    assert product_operations(FEW_ROWS, weight) == 0
    assert product_operations(FEW_ROWS + 1, weight) == 2 * (FEW_ROWS + 1) * 32
