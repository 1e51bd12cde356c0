from __future__ import annotations

import numpy as np
import pytest

from l1_kernels.device import Device
from l1_kernels.rotary import reference
from tests.l1_kernels import operation_checks as checks


@pytest.mark.parametrize("interleaved", [True, False])
def test_reference_turns_complex_numbers(interleaved: bool) -> None:
    rng = checks.fresh()
    qkv, angle = rng.standard_normal((5, 4, 10)), rng.uniform(-3, 3, (9, 3))
    index = rng.integers(0, 9, 5)
    real, imaginary = (slice(0, 6, 2), slice(1, 6, 2)) if interleaved else (slice(0, 3), slice(3, 6))
    turned = (qkv[:, :2, real] + 1j * qkv[:, :2, imaginary]) * np.exp(1j * angle[index])[:, None]
    want = qkv.copy()
    want[:, :2, real], want[:, :2, imaginary] = turned.real, turned.imag
    reference.rotary(qkv, 2, np.cos(angle), np.sin(angle), index, interleaved)
    np.testing.assert_allclose(qkv, want, rtol=1e-13)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 7, 37])
@pytest.mark.parametrize(("num_heads", "head_dim", "rotated_dim"), [(3, 2, 2), (5, 37, 8), (12, 64, 64), (3, 199, 198)])
def test_cpu(cpu: Device, num_tokens: int, num_heads: int, head_dim: int, rotated_dim: int, interleaved: bool) -> None:
    checks.check_rotary(cpu, num_tokens, num_heads, head_dim, rotated_dim, interleaved)


@pytest.mark.parametrize("outside", [-1, 3])
def test_index_outside_the_tables_is_refused(cpu: Device, outside: int) -> None:
    table, index = np.zeros((3, 4), np.float32), np.array([0, outside], np.int32)
    with pytest.raises(ValueError, match="argument index"):
        cpu.kernels.rotary(np.zeros((2, 4, 8), np.float32), 2, table, table, index, False)
