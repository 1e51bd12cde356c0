"""The PTX of kernels, with no GPU: `python -m l1_kernels.show_ptx coalesced_fp16 [--cc 90] [--lines REGEX] [--count bar.sync]`.

A name is one of those that `python -m l1_kernels.compile_ptx` lists, or the part of it behind the colon. Without more, the whole PTX is
printed. docs/layer1.md reads some of it aloud.
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib.util import find_spec
from typing import Any

from l1_kernels.compile_ptx import assemble, compile_to_ptx, find_modules, find_ptxas
from l1_kernels.cuda_api import SIMULATED


def find_kernel(name: str) -> tuple[Any, Any]:
    """(kernel, signature). KeyError, with the names that begin alike, for a name that no kernel has."""
    alike = []
    for module in find_modules():
        for short, kernel, signature in module.variants():
            if name in (short, f"{module.__name__}:{short}"):
                return kernel, signature
            if short.startswith(name[:4]):
                alike.append(short)
    raise KeyError(f"no kernel {name}; there are {', '.join(alike[:20]) or 'none that begin so'}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m l1_kernels.show_ptx", description="The PTX of kernels, with no GPU.")
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--cc", default="90", help="compute capability, 90 for 9.0 (default)")
    parser.add_argument("--lines", metavar="REGEX", help="only instructions that match")
    parser.add_argument("--count", action="append", metavar="TEXT", help="only how many lines hold TEXT; repeatable")
    parser.add_argument("--resources", action="store_true", help="only registers, shared bytes and spilled bytes, as ptxas counts them")
    given = parser.parse_args(arguments)
    ptxas = find_ptxas() if given.resources else None
    problem = None
    if SIMULATED:
        problem = "NUMBA_ENABLE_CUDASIM=1 gives the simulator, which compiles nothing: unset it"
    elif find_spec("numba_cuda") is None:
        problem = "kernels are compiled by numba-cuda, which is not installed: install this package's extra cuda12 or cuda13 (README)"
    elif given.resources and ptxas is None:
        problem = "--resources: no ptxas (the extra cuda12 brings one)"
    try:
        kernels = {} if problem else {name: find_kernel(name) for name in given.names}
    except KeyError as error:
        problem = error.args[0]
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    for name, (kernel, signature) in kernels.items():
        ptx = compile_to_ptx(kernel, signature, given.cc)
        lines = ptx.splitlines()
        for text in given.count or []:
            print(f"{name:28} {sum(text in line for line in lines):3} {text}")
        if ptxas is not None:
            used = assemble(ptx, given.cc, ptxas)
            print(f"{name:28} {used.registers} registers, {used.shared_bytes} bytes shared, {used.spilled_bytes} bytes spilled")
        if given.lines:
            print("\n".join(line for line in lines if line.startswith("\t") and re.search(given.lines, line)))
        elif not given.count and not given.resources:
            print(ptx)
    return 0


if __name__ == "__main__":
    sys.exit(main())
