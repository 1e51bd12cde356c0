"""What the CPU's kernels refuse, and what their import costs."""

from __future__ import annotations

import subprocess
import sys

from l1_kernels.device import Device
from tests.l1_kernels import operation_checks as checks


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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
