"""Imports point down the floors of the house, and the CPU path is free of what only a GPU needs (docs/layout.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = {"l1_kernels": 1, "layers": 2, "l2_dense_parallel": 3, "l3_moe": 4, "l4_offload": 4, "models": 5}
OUTSIDE = {"tests", "benchmarks", "docs"}  # read the packages, are read by none
CUDA_MODULE = Path("l1_kernels/cuda_api.py")


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every dotted name that a module imports, inside functions and under `if` too: `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; the house names its packages in full"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value), node.lineno


def sources() -> list[Path]:
    return sorted(path.relative_to(ROOT) for package in FLOORS for path in (ROOT / package).rglob("*.py"))


def faults(path: Path, text: str) -> list[str]:
    """What is wrong with the imports of the module at `path`."""
    package = path.parts[0]
    found = []
    for name, line in imported(ast.parse(text)):
        top = name.split(".")[0]
        if top in OUTSIDE:
            found.append(f"{path}:{line} imports {name}")
        elif top in FLOORS and top != package and FLOORS[top] >= FLOORS[package]:
            found.append(f"{path}:{line} (floor {FLOORS[package]}) imports {name} (floor {FLOORS[top]})")
        elif (name + ".").startswith(("numba.cuda.", "numba_cuda.")) and path != CUDA_MODULE:
            found.append(f"{path}:{line} imports {name}; take `cuda` from {CUDA_MODULE}")
    return found


@pytest.mark.parametrize("path", sources(), ids=str)
def test_imports_point_down(path: Path) -> None:
    assert not faults(path, (ROOT / path).read_text())


@pytest.mark.parametrize(
    "path, text",
    [
        ("layers/block.py", "from models.runner import Runner"),
        ("layers/block.py", "def f():\n    import l2_dense_parallel.mesh"),
        ("l3_moe/experts.py", "from l4_offload import resident"),
        ("l4_offload/resident.py", "import l3_moe"),
        ("l1_kernels/norm/gpu.py", "from numba import cuda"),
        ("l1_kernels/norm/gpu.py", "import numba.cuda.cudadrv"),
        ("models/gpt.py", "import importlib\nimportlib.import_module('tests.conformance')"),
    ],
)
def test_a_wrong_import_is_found(path: str, text: str) -> None:
    assert faults(Path(path), text)


def test_every_package_has_a_floor() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - OUTSIDE
    assert packages == set(FLOORS)


RUN_THEN_LIST_MODULES = """
import sys
from models.gpt import main
sys.argv = ["strata", "run", "--device", "cpu", "--max-new-tokens", "2", "--prompt", "To be", "--json"]
try:
    main()
except SystemExit as leaving:
    if leaving.code:
        raise
print("modules", *sys.modules, file=sys.stderr)
"""


def test_cpu_run_imports_nothing_of_a_gpu() -> None:
    """Generates text on the CPU without a launcher, then lists what was imported on the way."""
    run = subprocess.run([sys.executable, "-c", RUN_THEN_LIST_MODULES], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    modules = run.stderr.splitlines()[-1].split()
    assert modules[0] == "modules" and "models.gpt" in modules and "numpy" in modules
    unwanted = ("cupy", "cupy_backends", "nvidia", "numba.cuda", "numba_cuda", "mpi4py", "h5py", "gguf", "greenlet")
    assert [m for m in modules if (m + ".").startswith(tuple(name + "." for name in unwanted))] == []
