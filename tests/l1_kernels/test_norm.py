from __future__ import annotations

import numpy as np
import pytest

from l1_kernels.device import Device
from l1_kernels.norm import reference
from tests.l1_kernels import operation_checks as checks

SIZES = [1, 7, 37, 199]


def test_layer_norm_reference_gives_mean_0_and_variance_1() -> None:
    x = checks.fresh().normal(5.0, 3.0, (4, 199))
    y = reference.layer_norm(x, np.ones(199), np.full(199, 2.0), 0.0)
    np.testing.assert_allclose(y.mean(axis=1), 2, atol=1e-12)
    np.testing.assert_allclose(y.var(axis=1), 1, atol=1e-12)


def test_rms_norm_reference_is_the_formula() -> None:
    x, w = np.array([[3.0, 4.0]]), np.array([1.0, 10.0])
    np.testing.assert_allclose(reference.rms_norm(x, w, 0.5), [[3 / 13**0.5, 40 / 13**0.5]], rtol=1e-14)


def test_span_norm_of_one_head_is_head_norm() -> None:
    rng = checks.fresh()
    qkv, w = rng.standard_normal((3, 5, 8)), rng.standard_normal(8)
    other = qkv.copy()
    reference.head_norm(qkv, 1, 1, w, 1e-6)
    reference.span_norm(other, 1, 1, reference.sum_squares(other, 1, 1), 8, w, 1e-6)
    np.testing.assert_allclose(other, qkv, rtol=1e-13)


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize("width", SIZES)
def test_cpu(cpu: Device, num_tokens: int, width: int) -> None:
    checks.check_layer_norm(cpu, num_tokens, width, with_bias=True)
    checks.check_layer_norm(cpu, num_tokens, width, with_bias=False)
    checks.check_rms_norm(cpu, num_tokens, width)


@pytest.mark.parametrize("num_tokens", [1, 37])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(3, 1), (6, 7), (9, 64)])
def test_cpu_heads(cpu: Device, num_tokens: int, num_heads: int, head_dim: int) -> None:
    checks.check_qkv_norms(cpu, num_tokens, num_heads, head_dim)


def test_nan_is_not_lost(cpu: Device) -> None:
    x = np.ones((2, 40), np.float32)
    x[1, 39] = np.nan
    ones = np.ones(40, np.float32)
    for y in (cpu.kernels.layer_norm(x, ones, ones, 1e-5), cpu.kernels.rms_norm(x, ones, 1e-5)):
        assert np.isfinite(y[0]).all() and np.isnan(y[1]).all()
