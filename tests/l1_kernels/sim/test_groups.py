"""Cooperative groups against float64. The same checks run on a GPU (gpu/test_ptx_gpu.py)."""

import numpy as np
import pytest

from l1_kernels import groups
from l1_kernels.cuda_api import cuda
from l1_kernels.simulator.errors import DivergenceError
from tests.l1_kernels.instruction_checks import GROUPS, Check, run

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("check", GROUPS, ids=str)
def test_groups(check: Check) -> None:
    run(check, 5, np.copy, np.asarray)


@cuda.jit
def row_sums(x, out):
    """A block a row, threads striding over it; the reduction of every norm and softmax."""
    part = np.float32(0)
    for i in range(cuda.threadIdx.x, x.shape[1], cuda.blockDim.x):
        part += x[cuda.blockIdx.x, i]
    total = groups.block_sum(part)
    if cuda.threadIdx.x == 0:
        out[cuda.blockIdx.x] = total


@pytest.mark.parametrize("width", [1, 7, 37, 199, 1000])
def test_row_sums(width: int) -> None:
    x = np.random.default_rng(width).standard_normal((3, width)).astype(np.float32)
    out = np.full(3, np.nan, np.float32)
    row_sums[3, 128](x, out)
    exact = x.astype(np.float64)
    assert np.abs(out - exact.sum(1)).max() <= 1e-6 * np.abs(exact).sum(1).max()


@cuda.jit
def divergent_sums(x, out):
    i = cuda.threadIdx.x
    if i < 16:
        out[i] = groups.reduce_sum(x[i])
    else:
        out[i] = groups.reduce_sum(-x[i])


def test_the_same_word_at_two_places_is_divergent() -> None:
    """Both branches shuffle at one line of groups.py, but they are two operations."""
    with pytest.raises(DivergenceError, match="divergent"):
        divergent_sums[1, 32](np.ones(32, np.float32), np.zeros(32, np.float32))
