"""The checks of the simulator's twins and of cooperative groups, on a GPU."""

from __future__ import annotations

import pytest

from l1_kernels.cuda_api import cuda
from tests.l1_kernels.instruction_checks import GROUPS, INSTRUCTIONS, Check, run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("check", [*INSTRUCTIONS, *GROUPS], ids=str)
def test_on_gpu(check: Check) -> None:
    run(check, 7, cuda.to_device, lambda array: array.copy_to_host())
