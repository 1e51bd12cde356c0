"""Which tests a pytest process runs.

numba decides when it is imported whether kernels compile or are simulated, and a process that has touched a GPU is not
one that can prove that the CPU path needs none. So four kinds of test have processes of their own:

    pytest            everything that needs neither kernels nor a GPU
    pytest -m sim     numba.cuda kernels on the simulator
    pytest -m ptx     kernels compiled to PTX (extra cuda12, no GPU)
    pytest -m gpu     on a GPU; -m gpu2 on two

A kind that was asked for is never skipped: where it cannot run, its tests fail and say why.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil

import pytest

KINDS = ("sim", "ptx", "gpu", "gpu2")


def asked_for(markexpr: str) -> set[str]:
    """The kinds that `-m` names without "not": "gpu and not slow" -> {"gpu"}."""
    return {word for word in re.findall(r"\w+", re.sub(r"\bnot\s+\w+", "", markexpr)) if word in KINDS}


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import settings

        settings.register_profile("no deadline", deadline=None)  # a busy machine is no fault of an example's
        settings.load_profile("no deadline")
    if "sim" in asked_for(config.option.markexpr):
        os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # before any test module imports numba


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kinds = asked_for(config.option.markexpr)
    if not kinds and os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
        kinds = {"sim"}

    def belongs(item: pytest.Item) -> bool:
        own = {kind for kind in KINDS if item.get_closest_marker(kind)}
        return bool(own & kinds) if kinds else not own

    others = [item for item in items if not belongs(item)]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if belongs(item)]

    if shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None:
        for item in items:
            if item.get_closest_marker("mpi"):
                item.add_marker(pytest.mark.skip(reason="no mpirun with mpi4py (extra mpi)"))
