"""What a layer asks of its ranks, with a collective that is no more than its word."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from l1_kernels.device import open_device
from l1_kernels.regions import NormArgs
from l2_dense_parallel.collectives import NoCollective
from l2_dense_parallel.tensor_reduce import TensorReduce


class Twins(NoCollective):
    """Two ranks that hold the same numbers. fuses: sums and adds in one call."""

    size = 2

    def __init__(self, fuses: bool) -> None:
        super().__init__()
        self.fuses, self.calls = fuses, []  # type: ignore[var-annotated]

    def all_reduce(self, x: Any) -> Any:
        self.calls.append("all_reduce")
        x *= 2
        return x

    def reduce_add(self, x: Any, residual: Any) -> Any:
        if not self.fuses:
            return None
        self.calls.append("reduce_add")
        residual += 2 * x
        return residual

    def reduce_add_norm(self, x: Any, residual: Any, norm: Any, dtype: str) -> Any:
        return None if self.reduce_add(x, residual) is None else (norm, dtype)


@pytest.mark.parametrize("fuses", [False, True])
def test_add(fuses: bool) -> None:
    collective = Twins(fuses)
    reduce = TensorReduce(collective, open_device("cpu").kernels)
    residual, part = np.full((2, 3), 5, np.float32), np.arange(6, dtype=np.float32).reshape(2, 3)
    wanted = 5 + 2 * part
    assert reduce.add(residual, part) is residual
    np.testing.assert_array_equal(residual, wanted)
    assert collective.calls == ["reduce_add" if fuses else "all_reduce"]


@pytest.mark.parametrize("fuses", [False, True])
def test_add_norm(fuses: bool) -> None:
    """Whether or not the norm is made with it, the sum is, once."""
    collective = Twins(fuses)
    reduce = TensorReduce(collective, open_device("cpu").kernels)
    residual, part, norm = np.full((2, 3), 5, np.float32), np.ones((2, 3), np.float32), NormArgs("rmsnorm", np.ones(3, np.float32), None, 1e-5)
    given, rows = reduce.add_norm(residual, part, norm, "fp16")
    assert given is residual and (residual == 7).all()
    assert rows == ((norm, "fp16") if fuses else None)
    assert collective.calls == ["reduce_add" if fuses else "all_reduce"]


def test_one_rank_sums_nothing() -> None:
    reduce = TensorReduce(NoCollective(), open_device("cpu").kernels)
    x = np.ones(3, np.float32)
    assert reduce(x) is x and (x == 1).all()
    assert (reduce.add(np.ones(3, np.float32), x) == 2).all()
