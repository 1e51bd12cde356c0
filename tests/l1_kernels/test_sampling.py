from __future__ import annotations

import pytest

from l1_kernels.device import Device
from tests.l1_kernels import sampling_checks as checks

SIZES = [(1, 1), (7, 37), (37, 199), (2, 5000)]


@pytest.mark.parametrize(("size", "width"), SIZES)
def test_greedy(cpu: Device, size: int, width: int) -> None:
    checks.check_greedy(cpu, size, width)


def test_broken_logits_are_no_token(cpu: Device) -> None:
    checks.check_broken_logits(cpu)


def test_bad_arguments_are_named(cpu: Device) -> None:
    checks.check_rejections(cpu)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("size", "width"), [(1, 1), (3, 37), (2, 199)])
@pytest.mark.parametrize("case", checks.DRAWS)
def test_sample(cpu: Device, case: str, size: int, width: int, ties: bool) -> None:
    checks.check_sample(cpu, case, size, width, ties)


def test_bad_draws_are_named(cpu: Device) -> None:
    checks.check_bad_draws(cpu)
