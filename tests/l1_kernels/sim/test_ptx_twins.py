"""Every instruction's twin, against NumPy. The same checks run on a GPU (gpu/test_ptx_gpu.py)."""

import numpy as np
import pytest

from l1_kernels import ptx
from l1_kernels.cuda_api import cuda
from l1_kernels.simulator.errors import DivergenceError, SimulatorError
from tests.l1_kernels.instruction_checks import INSTRUCTIONS, Check, run

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("check", INSTRUCTIONS, ids=str)
def test_twin(check: Check) -> None:
    run(check, 3, np.copy, np.asarray)


@cuda.jit
def load_at(source, index, out):
    a, b, c, d = ptx.load16(source, index)
    out[0], out[1], out[2], out[3] = a, b, c, d


@pytest.mark.parametrize(("index", "message"), [(8, "outside"), (-8, "outside"), (2, "misaligned")])
def test_load16_refuses(index: int, message: str) -> None:
    source = np.zeros(12, np.uint16)
    with pytest.raises((IndexError, ValueError), match=message):
        load_at[1, 1](source, index, np.zeros(4, np.uint32))


def test_load16_refuses_gaps() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        load_at[1, 1](np.zeros((16, 2), np.uint16)[:, 0], 0, np.zeros(4, np.uint32))


@cuda.jit
def half_warp_mma(out):
    zero = np.uint32(0)
    out[cuda.threadIdx.x] = ptx.mma_f16((zero, zero, zero, zero), (zero, zero), (0.0, 0.0, 0.0, 0.0))[0]


def test_mma_needs_a_whole_warp() -> None:
    with pytest.raises(DivergenceError, match="16 lanes"):
        half_warp_mma[1, 16](np.zeros(16, np.float32))


@cuda.jit
def give_up():
    ptx.trap()


def test_trap() -> None:
    with pytest.raises(SimulatorError, match="gave up"):
        give_up[1, 1]()
