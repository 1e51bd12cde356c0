from __future__ import annotations

import pytest

from l1_kernels.device import Device
from tests.l1_kernels import sampling_checks as checks

pytestmark = pytest.mark.gpu
SIZES = [(1, 1), (7, 37), (64, 199), (1, 50257), (16, 151936)]


@pytest.mark.parametrize(("size", "width"), SIZES)
def test_greedy(device: Device, size: int, width: int) -> None:
    checks.check_greedy(device, size, width)


def test_broken_logits_are_no_token(device: Device) -> None:
    checks.check_broken_logits(device)


def test_bad_arguments_are_named(device: Device) -> None:
    checks.check_rejections(device)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("size", "width"), [(1, 1), (7, 37), (3, 199), (2, 50257), (3, 151936)])
@pytest.mark.parametrize("case", checks.DRAWS)
def test_sample(device: Device, case: str, size: int, width: int, ties: bool) -> None:
    checks.check_sample(device, case, size, width, ties)


def test_bad_draws_are_named(device: Device) -> None:
    checks.check_bad_draws(device)
