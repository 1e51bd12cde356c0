from __future__ import annotations

import numpy as np
import pytest

from l1_kernels.device import Device
from l1_kernels.embedding import reference
from l1_kernels.weight import host_weight
from tests.l1_kernels import operation_checks as checks


def test_reference_takes_rows_and_gives_zeros_outside() -> None:
    table = np.arange(12, dtype=np.float32).reshape(4, 3) + 1
    got = reference.embed(host_weight(table, "fp32"), np.array([10, 13, 9, 14, -1]), first=10)
    np.testing.assert_array_equal(got, [[1, 2, 3], [10, 11, 12], [0, 0, 0], [0, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("num_tokens", [1, 7, 37])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (7, 37), (199, 7)])
def test_cpu(cpu: Device, dtype: str, num_tokens: int, num_rows: int, width: int) -> None:
    checks.check_embed(cpu, dtype, num_tokens, num_rows, width)
