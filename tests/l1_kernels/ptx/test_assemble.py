"""Every instruction compiles to the PTX that it promises, and ptxas takes it; so do the project's kernels. No GPU needed."""

from __future__ import annotations

import re

import numpy as np
import pytest

from l1_kernels import compile_ptx, ptx
from l1_kernels.carrier import F32_1D, F32_2D
from l1_kernels.compile_ptx import CAPABILITIES, Resources, assemble, compile_to_ptx, find_modules, find_ptxas, front_end
from l1_kernels.cuda_api import as_if_on, at_most, cuda
from l1_kernels.sbi_gemm.layout import packed_type
from l1_kernels.sbi_gemm.transpose import make_transpose
from tests.l1_kernels.instruction_checks import GROUPS, INSTRUCTIONS, Check

pytestmark = pytest.mark.ptx


@pytest.fixture(scope="session")
def ptxas() -> str:
    path = find_ptxas()
    assert path is not None, "no ptxas: install numba-cuda[cu12]"
    return path


@pytest.mark.parametrize("cc", CAPABILITIES)
@pytest.mark.parametrize("check", [check for check in (*INSTRUCTIONS, *GROUPS) if check.ptx], ids=str)
def test_instruction(check: Check, cc: str, ptxas: str) -> None:
    text = compile_to_ptx(check.kernel, check.signature, cc)
    assert check.ptx in text
    assert f".target sm_{cc}" in text
    used = assemble(text, cc, ptxas)
    assert used.spilled_bytes == 0 and used.registers <= 64


def test_every_instruction_has_a_check() -> None:
    """An instruction that no check's kernel uses would be tested nowhere."""
    made = {name for name in dir(ptx) if hasattr(getattr(ptx, name), "twin")}
    used = {name for check in (*INSTRUCTIONS, *GROUPS) for name in check.kernel.py_func.__code__.co_names}
    assert len(made) >= 28
    assert made - used == {"trap"}  # which groups.grid_sync uses


def test_an_instruction_that_is_too_new_is_left_out() -> None:
    """One lowering serves both: libNVVM knows which GPU it writes for."""
    kernel = next(check for check in INSTRUCTIONS if check.name == "take_turn").kernel
    make = front_end(kernel, "void(float32[::1])", "80")
    assert "griddepcontrol" not in make((8, 0)) and "__nvvm_reflect" not in make((8, 0))
    assert "griddepcontrol.wait; griddepcontrol.launch_dependents;" in make((9, 0))


def test_resources_are_read(ptxas: str) -> None:
    @cuda.jit
    def hungry(x):
        kept = cuda.shared.array(32, np.float32)
        kept[cuda.laneid] = x[cuda.laneid]
        cuda.syncthreads()
        x[cuda.laneid] = kept[31 - cuda.laneid]

    used = assemble(compile_to_ptx(hungry, "void(float32[::1])", "90"), "90", ptxas)
    assert used.shared_bytes == 128 and used.spilled_bytes == 0 and 4 <= used.registers <= 40


@cuda.jit
def one_load(source, out):
    out[0] = ptx.load16(source, 0)[0]


def test_an_array_with_gaps_is_refused() -> None:
    with pytest.raises(Exception, match="load16: array is .* not a C-contiguous array"):
        compile_to_ptx(one_load, "void(float32[:], uint32[::1])", "90")


def test_a_wait_needs_a_constant() -> None:
    @cuda.jit
    def wait(n):
        ptx.wait_async(n)

    with pytest.raises(Exception, match="wait_async: groups must be a number known when the kernel is compiled"):
        compile_to_ptx(wait, "void(int64)", "90")


def test_fastmath_is_used() -> None:
    def divide(x):
        x[0] = x[0] / x[1]

    exact = compile_to_ptx(cuda.jit(divide), "void(float32[::1])", "90")
    fast = compile_to_ptx(cuda.jit(fastmath=True)(divide), "void(float32[::1])", "90")
    assert re.search(r"div\.(full|approx)", fast) and not re.search(r"div\.(full|approx)", exact)


def test_every_operation_offers_its_kernels() -> None:
    names = {module.__name__ for module in find_modules()}
    assert {"l1_kernels.norm.gpu", "l1_kernels.linear.gpu", "l1_kernels.attention.gpu"} <= names


class _Module:
    """Stands in for a gpu.py."""

    __name__ = "l1_kernels.example.gpu"

    def __init__(self, *kernels) -> None:
        self._kernels = kernels

    def variants(self):
        yield from self._kernels


@cuda.jit
def fine(x):
    x[0] = 1


@cuda.jit
def ill_typed(x):
    x[0] = x.no_such_attribute


def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compile_ptx, "find_modules", lambda: [_Module(("fine", fine, "void(float32[::1])"))])
    assert compile_ptx.main(["--cc", "90"]) == 0
    assert re.search(r"^l1_kernels\.example\.gpu:fine +90 +1024 +\d+ +0 +0$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(("registers", "threads", "fit"), [(64, 1024, True), (65, 1024, False), (72, 896, True), (73, 896, False), (255, 256, True), (255, 257, False)])
def test_registers_of_a_block(registers: int, threads: int, fit: bool) -> None:
    """A warp has them by eights a thread, a block whole warps."""
    assert Resources(registers, 0, 0).fit(threads) is fit


def test_a_kernel_says_how_many_threads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One that says nothing may be launched with 1024: then it is refused for 65 registers, and with `at_most(512)` or `launch_bounds` it is not."""
    kernels = [("silent", fine), ("marked", at_most(512)(cuda.jit(fine.py_func))), ("bound", cuda.jit(launch_bounds=(96, 2))(fine.py_func))]
    assert [compile_ptx.most_threads(kernel) for _, kernel in kernels] == [1024, 512, 96]
    monkeypatch.setattr(compile_ptx, "find_modules", lambda: [_Module(*((name, kernel, "void(float32[::1])") for name, kernel in kernels))])
    monkeypatch.setattr(compile_ptx, "assemble", lambda *arguments: Resources(65, 0, 0))
    assert compile_ptx.main(["--cc", "90"]) == 1
    refused = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "TOO MANY REGISTERS" in line]
    assert refused == ["l1_kernels.example.gpu:silent"]


def test_an_error_or_a_spill_exits_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = [("ill_typed", ill_typed, "void(float32[::1])"), ("fine", fine, "void(float32[::1])")]
    monkeypatch.setattr(compile_ptx, "find_modules", lambda: [_Module(*kernels)])
    assert compile_ptx.main(["--cc", "90"]) == 1
    assert "1 failed" in capsys.readouterr().out
    monkeypatch.setattr(compile_ptx, "find_modules", lambda: [_Module(kernels[1])])
    monkeypatch.setattr(compile_ptx, "assemble", lambda *arguments: Resources(255, 0, 16))
    assert compile_ptx.main(["--cc", "90"]) == 1
    assert "SPILLS" in capsys.readouterr().out


def test_one_lowering_serves_all_capabilities() -> None:
    """The same instructions as `cuda.compile` for that GPU alone gives, names aside: they hold the GPU that was lowered for."""

    def instructions(text: str) -> list[str]:
        return [re.sub(r"_Z\w+|_cudapy\w+", "", line) for line in text.splitlines() if line.startswith("\t")]

    kernel, signature = make_transpose("fp16", 1, 8), (F32_2D, packed_type("fp16", 1), F32_1D, F32_2D)
    make = front_end(kernel, signature, "80")
    for cc, capability in (("80", (8, 0)), ("90", (9, 0))):
        with as_if_on(capability):
            alone, _ = cuda.compile(kernel.py_func, signature, cc=capability, output="ptx", device=False, abi="numba")
        assert f".target sm_{cc}" in make(capability)
        assert len(instructions(alone)) > 100 and instructions(make(capability)) == instructions(alone)


def test_without_ptxas(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compile_ptx, "find_modules", lambda: [_Module(("fine", fine, "void(float32[::1])"))])
    monkeypatch.setattr(compile_ptx, "find_ptxas", lambda: None)
    assert compile_ptx.main(["--cc", "80"]) == 0
    assert capsys.readouterr().out.startswith("no ptxas")
