"""Compile every kernel of the project to PTX and assemble it, with no GPU: `python -m l1_kernels.compile_ptx [--cc 80 --cc 90]`.

A module takes part by offering

    def variants() -> Iterator[tuple[str, kernel, signature]]

with a name for the table, the kernel that @cuda.jit made (its options, fastmath and so on, are used), and the types of its
arguments: a tuple of numba types, a numba signature, or its text, "void(float32[:, ::1], int64)". All modules of the packages
whose text holds such a function are asked; in l1_kernels every gpu.py must offer it.

Prints a line for each kernel and compute capability: the most threads of a block (`launch_bounds`, cuda_api.at_most, or what CUDA allows),
registers, shared bytes and spilled bytes. Exits with 1 if one does not compile, does not assemble, spills, or takes more registers
than there are for a block of so many threads, which a GPU would refuse to launch. numba-cuda[cu12] brings `ptxas`; without it kernels are compiled to
PTX only.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from l1_kernels.cuda_api import SIMULATED, lowered

PACKAGES = ("l1_kernels", "l2_dense_parallel", "l3_moe", "l4_offload", "layers", "models")
CAPABILITIES = ("80", "90")
OFFER = re.compile(r"^def variants\(\)", re.MULTILINE)
MAX_THREADS = 1024  # of a block
BLOCK_REGISTERS = 65536  # that a block can have, dealt out to its warps by 256


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel takes on one GPU."""

    registers: int
    shared_bytes: int
    spilled_bytes: int

    def fit(self, threads: int) -> bool:
        """Whether a GPU has registers for a block of so many threads."""
        of_a_warp = -(-self.registers * 32 // 256) * 256
        return -(-threads // 32) * of_a_warp <= BLOCK_REGISTERS


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
    return front_end(kernel, signature, cc)(_capability(cc))


def front_end(kernel: Any, signature: Any, cc: str) -> Callable[[tuple[int, int]], str]:
    """What makes the PTX for (major, minor) from `cc` on (cuda_api.lowered)."""
    options = getattr(kernel, "targetoptions", {})
    return lowered(
        getattr(kernel, "py_func", kernel), signature, _capability(cc),
        fastmath=bool(options.get("fastmath")), launch_bounds=options.get("launch_bounds"),
    )  # fmt: skip


def most_threads(kernel: Any) -> int:
    """Of a block, as far as the kernel says."""
    bounds = getattr(kernel, "targetoptions", {}).get("launch_bounds")
    if bounds is None:
        return getattr(kernel, "most_threads", MAX_THREADS)
    return bounds[0] if isinstance(bounds, tuple) else bounds


def _capability(cc: str) -> tuple[int, int]:
    return int(cc[:-1]), int(cc[-1])


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


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel for one compute capability."""

    label: str
    kernel: Any
    signature: Any
    cc: str


def report(job: Job, ptxas: str | None) -> tuple[bool, str]:
    """Whether the kernel is as it should be, and its line of the table."""
    return report_together([job], ptxas)[0]


def report_together(jobs: list[Job], ptxas: str | None) -> list[tuple[bool, str]]:
    """`report` of each of one kernel's jobs, the oldest GPU's first: what does not depend on the GPU is done once."""
    found, make = [], None
    for job in jobs:
        threads = most_threads(job.kernel)
        start = f"{job.label:60} {job.cc:>3} {threads:>7}"
        try:
            make = make or front_end(job.kernel, job.signature, job.cc)
            ptx = make(_capability(job.cc))
            found.append(_line(start, threads, assemble(ptx, job.cc, ptxas) if ptxas else None))
        except Exception as error:
            found.append((False, f"{start} FAILED: {type(error).__name__}: {error}"))
    return found


def _line(start: str, threads: int, used: Resources | None) -> tuple[bool, str]:
    if used is None:
        return True, f"{start} {'-':>9} {'-':>7} {'-':>7}"
    fault = "  SPILLS" if used.spilled_bytes else "" if used.fit(threads) else "  TOO MANY REGISTERS for so many threads"
    return not fault, f"{start} {used.registers:>9} {used.shared_bytes:>7} {used.spilled_bytes:>7}{fault}"


def report_all(jobs: list[list[Job]], ptxas: str | None) -> Iterator[tuple[bool, str]]:
    """`report_together` of each kernel's, in order, on all usable cores. Workers are forked, since a kernel cannot be sent to another process."""
    workers = max(1, min(len(os.sched_getaffinity(0)), len(jobs)))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), initializer=_inherited.extend, initargs=(jobs,)) as pool:
        for found in pool.map(functools.partial(_report_at, ptxas), range(len(jobs))):
            yield from found


_inherited: list[list[Job]] = []  # a worker's jobs; empty in the process that forks them


def _report_at(ptxas: str | None, index: int) -> list[tuple[bool, str]]:
    return report_together(_inherited[index], ptxas)


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
    capabilities = sorted(capabilities, key=int)
    jobs = []
    for module in find_modules():
        jobs += [[Job(f"{module.__name__}:{name}", kernel, signature, cc) for cc in capabilities] for name, kernel, signature in module.variants()]
    print(f"{'kernel':60} {'cc':>3} {'threads':>7} {'registers':>9} {'shared':>7} {'spilled':>7}", flush=True)
    failures = 0
    for good, line in report_all(jobs, ptxas):
        print(line, flush=True)
        failures += not good
    if failures:
        print(f"{failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
