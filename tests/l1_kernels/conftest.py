"""sim/, ptx/ and gpu/ hold tests for a process of their own (tests/conftest.py): others do not even import them, for they
would import numba.cuda, or the simulator in its place."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from l1_kernels.device import Device, open_device

FOLDERS = {"sim": {"sim"}, "ptx": {"ptx"}, "gpu": {"gpu", "gpu2"}}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    kinds = FOLDERS.get(collection_path.parent.name)
    if kinds is None or collection_path.suffix != ".py" or collection_path.name == "__init__.py":
        return None
    asked = set(re.findall(r"\w+", config.option.markexpr))
    if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
        asked.add("sim")
    return None if kinds & asked else True


@pytest.fixture(scope="session")
def cpu() -> Device:
    return open_device("cpu")
