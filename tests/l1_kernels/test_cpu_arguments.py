"""What the CPU's kernels refuse, and what their import costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from l1_kernels.device import Device
from l1_kernels.waiting import SPIN_ROUNDS
from tests.l1_kernels import operation_checks as checks

ROOT = Path(__file__).parents[2]


def test_bad_arguments_are_named(cpu: Device) -> None:
    checks.check_rejections(cpu)


def test_no_tokens(cpu: Device) -> None:
    checks.check_no_tokens(cpu)


def test_the_cpu_needs_neither_cuda_nor_mpi() -> None:
    """A fresh process that has used the kernels has imported nothing of the GPU's or the launcher's."""
    program = """
import sys
import numpy as np
from l1_kernels.device import open_device
x = np.ones((1, 40), np.float32)
assert (open_device("cpu").kernels.rms_norm(x, x[0], 0.0) == 1).all()
print(*sorted({"cupy", "numba.cuda", "numba_cuda", "mpi4py", "greenlet", "scipy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == ""


def test_what_the_user_says_of_waiting_stays() -> None:
    """numba's threads must not spin for long (waiting.py), unless the user has set how they wait."""
    program = "import os, l1_kernels.cpu_kernels; print(os.environ.get('GOMP_SPINCOUNT'))"
    for asked, want in (({}, str(SPIN_ROUNDS)), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")):
        environment = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT, env=environment | asked)
        assert done.stdout.strip() == want
