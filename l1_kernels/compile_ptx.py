"""Compile every kernel of the project to PTX and assemble it, with no GPU: `python -m l1_kernels.compile_ptx [--cc 80 --cc 90]`.

A module takes part by offering

    def variants() -> Iterator[tuple[str, kernel, signature]]

with a name for the table, the kernel that @cuda.jit made (its options, fastmath and so on, are used), and the types of its
arguments: a tuple of numba types, a numba signature, or its text, "void(float32[:, ::1], int64)". All modules of the packages
whose text holds such a function are asked; in l1_kernels every gpu.py must offer it.

Prints a line for each kernel and compute capability: registers, shared bytes and spilled bytes. Exits with 1 if one does not
compile, does not assemble, or spills. numba-cuda[cu12] brings `ptxas`; without it kernels are compiled to PTX only.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from l1_kernels.cuda_api import SIMULATED, as_if_on, cuda

PACKAGES = ("l1_kernels", "l2_dense_parallel", "l3_moe", "l4_offload", "layers", "models")
CAPABILITIES = ("80", "90")
OFFER = re.compile(r"^def variants\(\)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel takes on one GPU."""

    registers: int
    shared_bytes: int
    spilled_bytes: int


class PtxasError(Exception):
    """ptxas refused; the text is what it said."""


def find_modules() -> list[ModuleType]:
    """The modules that offer `variants`. Raises ValueError for a gpu.py of l1_kernels that does not."""
    root = Path(__file__).resolve().parents[1]
    found = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            offers = OFFER.search(path.read_text(encoding="utf-8")) is not None
            if offers and path != Path(__file__).resolve():
                found.append(importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts)))
            elif package == "l1_kernels" and path.name == "gpu.py" and not offers:
                raise ValueError(f"{path.relative_to(root)} has no `def variants()`")
    return found


def find_ptxas() -> str | None:
    """The assembler of the pip package nvidia-cuda-nvcc, or the one on PATH, or None."""
    with contextlib.suppress(ModuleNotFoundError):
        spec = importlib.util.find_spec("nvidia.cuda_nvcc")
        for folder in (spec.submodule_search_locations or []) if spec else []:
            path = Path(folder) / "bin" / "ptxas"
            if path.exists():
                return str(path)
    return shutil.which("ptxas")


def compile_to_ptx(kernel: Any, signature: Any, cc: str) -> str:
    """The PTX of a kernel for compute capability `cc`, "80" for 8.0. Raises numba's errors."""
    capability = (int(cc[:-1]), int(cc[-1]))
    options = getattr(kernel, "targetoptions", {})
    with as_if_on(capability):
        ptx, _ = cuda.compile(
            getattr(kernel, "py_func", kernel),
            signature,
            cc=capability,
            output="ptx",
            device=False,
            abi="numba",
            fastmath=bool(options.get("fastmath")),
            launch_bounds=options.get("launch_bounds"),
        )
    return ptx if isinstance(ptx, str) else ptx.decode()


def assemble(ptx: str, cc: str, ptxas: str) -> Resources:
    """Assemble the PTX of one kernel. Raises PtxasError."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        command = [ptxas, f"-arch=sm_{cc}", "-v", str(source), "-o", str(Path(folder) / "kernel.cubin")]
        run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise PtxasError(run.stderr.strip())

    def total(pattern: str) -> int:
        return sum(int(number) for number in re.findall(pattern, run.stderr))

    return Resources(total(r"Used (\d+) registers"), total(r"(\d+) bytes smem"), total(r"(\d+) bytes spill stores"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m l1_kernels.compile_ptx", description="Compile every kernel with no GPU.")
    parser.add_argument("--cc", action="append", metavar="NN", help=f"compute capability, repeatable; default {' and '.join(CAPABILITIES)}")
    capabilities = parser.parse_args(arguments).cc or list(CAPABILITIES)
    if SIMULATED:
        print("error: NUMBA_ENABLE_CUDASIM=1 gives the simulator, which compiles nothing: unset it", file=sys.stderr)
        return 2
    ptxas = find_ptxas()
    if ptxas is None:
        print("no ptxas (numba-cuda[cu12] brings one): kernels are compiled to PTX, and neither assembled nor counted")
    failures = 0
    print(f"{'kernel':60} {'cc':>3} {'registers':>9} {'shared':>7} {'spilled':>7}")
    for module in find_modules():
        for name, kernel, signature in module.variants():
            label = f"{module.__name__}:{name}"
            for cc in capabilities:
                try:
                    ptx = compile_to_ptx(kernel, signature, cc)
                    used = assemble(ptx, cc, ptxas) if ptxas else None
                except Exception as error:
                    failures += 1
                    print(f"{label:60} {cc:>3} FAILED: {type(error).__name__}: {error}")
                    continue
                if used is None:
                    print(f"{label:60} {cc:>3} {'-':>9} {'-':>7} {'-':>7}")
                    continue
                failures += used.spilled_bytes > 0
                note = "  SPILLS" if used.spilled_bytes else ""
                print(f"{label:60} {cc:>3} {used.registers:>9} {used.shared_bytes:>7} {used.spilled_bytes:>7}{note}", flush=True)
    if failures:
        print(f"{failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
