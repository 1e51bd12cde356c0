from __future__ import annotations

import pytest

from l1_kernels.device import Device, open_device


@pytest.fixture(scope="session")
def device() -> Device:
    """The GPU's kernels in the simulator (tests/conftest.py has set its variable where `-m sim` asks for it)."""
    return open_device("sim")
