from __future__ import annotations

import pytest

from l1_kernels.device import Device
from tests.l1_kernels import operation_checks as checks

pytestmark = pytest.mark.gpu


def test_bad_arguments_are_named(device: Device) -> None:
    checks.check_rejections(device)


def test_no_tokens(device: Device) -> None:
    checks.check_no_tokens(device)
