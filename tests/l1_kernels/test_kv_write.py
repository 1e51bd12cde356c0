from __future__ import annotations

import numpy as np
import pytest

from l1_kernels.device import Device
from l1_kernels.kv_write import reference
from l1_kernels.weight import CARRIER
from tests.l1_kernels import operation_checks as checks


def test_reference_puts_each_head_in_its_place() -> None:
    qkv = checks.normal(checks.fresh(), 2, 3 + 2 * 2, 5)
    cache_k, cache_v = np.full((2, 2, 2, 4, 5), np.nan, np.float32)
    reference.write_kv(qkv, 3, cache_k, cache_v, "fp32", np.array([1, 0]), np.array([3, 2]))
    for t, (row, position) in enumerate([(1, 3), (0, 2)]):
        for g in range(2):
            assert (cache_k[row, g, position] == qkv[t, 3 + g]).all()
            assert (cache_v[row, g, position] == qkv[t, 5 + g]).all()
    assert np.isnan(cache_k).sum() == cache_k.size - 2 * 2 * 5


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("num_tokens", [1, 7, 37, 199])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(1, 1, 1), (6, 2, 7), (9, 3, 64)])
def test_cpu(cpu: Device, dtype: str, num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    checks.check_write_kv(cpu, dtype, num_tokens, num_heads, num_kv_heads, head_dim)


@pytest.mark.parametrize(("name", "row", "position"), [("rows", 2, 0), ("rows", -1, 0), ("positions", 0, 5), ("positions", 1, -1)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_place_outside_the_cache_is_refused(cpu: Device, dtype: str, name: str, row: int, position: int) -> None:
    cache = np.zeros((2, 1, 5, 8), CARRIER[dtype])
    with pytest.raises(ValueError, match=f"argument {name}"):
        cpu.kernels.write_kv(
            np.ones((2, 4, 8), np.float32), 2, cache, cache, dtype, np.array([0, row], np.int32), np.array([4, position], np.int32)
        )
    assert not cache.any()  # refused before anything was written
