from __future__ import annotations

import math

import numpy as np
import pytest

from l1_kernels.activation import reference
from l1_kernels.activation.cpu import KINDS, SERIAL_SIZE
from l1_kernels.device import Device
from tests.l1_kernels import operation_checks as checks

FORMULAS = {
    "gelu": lambda x: x * 0.5 * math.erfc(-x / 2**0.5),
    "gelu_new": lambda x: 0.5 * x * (1 + math.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "relu": lambda x: max(x, 0.0),
    "silu": lambda x: x / (1 + math.exp(-x)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_reference_is_the_formula(kind: str) -> None:
    x = np.linspace(-12, 12, 97).reshape(1, -1)
    got = reference.activate(x, kind)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got[0], [FORMULAS[kind](v) for v in x[0]], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 7, 37])
@pytest.mark.parametrize("width", [1, 7, 37, 199])
def test_cpu(cpu: Device, kind: str, num_tokens: int, width: int) -> None:
    checks.check_activation(cpu, kind, num_tokens, width)


@pytest.mark.parametrize("kind", KINDS)
def test_all_threads(cpu: Device, kind: str) -> None:
    checks.check_activation(cpu, kind, SERIAL_SIZE // 1000 + 8, 1000)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_is_not_lost(cpu: Device, kind: str) -> None:
    x = np.ones((1, 64), np.float32)
    x[0, [3, 40]] = np.nan
    assert np.flatnonzero(np.isnan(cpu.kernels.activate(x, kind))).tolist() == [3, 40]
    assert np.flatnonzero(np.isnan(cpu.kernels.gate(x, kind))).tolist() == [3, 8]
