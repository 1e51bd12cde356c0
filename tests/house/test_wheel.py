"""The wheel: built, installed where nothing else of Strata is, and run from another folder."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("l1_kernels", "layers", "l2_dense_parallel", "l3_moe", "l4_offload", "models")

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command run in `cwd`, with no path of the checkout in its environment."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NUMBA_ENABLE_CUDASIM")}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def files_of_a_clone() -> list[str]:
    listing = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    return [name for name in listing.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what a clone holds, so that the checkout stays as it is."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in files_of_a_clone():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", out, source, cwd=out)
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_the_packages_whole_and_nothing_else(wheel: Path) -> None:
    """A data file that package-data does not name is missed here."""
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {name for name in files_of_a_clone() if name.split("/")[0] in PACKAGES}
    wanted = {name for name in wanted if not name.endswith(".md") or name.startswith("models/bundled/")}  # pages for a clone's readers
    assert "models/bundled/shakespeare/model.safetensors" in wanted and "l1_kernels/kernels.py" in wanted
    assert held == wanted


def test_installed_wheel_runs_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    """In an environment that has Strata from the wheel and the dependencies from this one's site-packages.

    The folder that it runs in has a `models/` of its own, which is what `python -m models.gpt` trips over.
    """
    environment, elsewhere = tmp_path / "env", tmp_path / "elsewhere"
    venv.create(environment, with_pip=False, symlinks=True)
    (site,) = environment.glob("lib/python*/site-packages")
    run(sys.executable, "-m", "pip", "--python", environment / "bin/python", "install", "-q", "--no-deps", wheel, cwd=tmp_path)
    # A plain path line adds the folder but not the .pth files in it: an editable install of the checkout stays out.
    (site / "dependencies.pth").write_text("".join(f"{path}\n" for path in sys.path if Path(path).name == "site-packages"))
    (elsewhere / "models").mkdir(parents=True)
    (elsewhere / "models" / "__init__.py").write_text("raise ImportError('the models/ of another project')")

    python = environment / "bin" / "python"
    where = run(python, "-P", "-c", "import models, layers; print(models.__file__, layers.__file__)", cwd=elsewhere).split()
    assert all(Path(path).is_relative_to(site) for path in where)
    command = [environment / "bin" / "strata", "run", "--device", "cpu", "--max-new-tokens", "4", "--prompt", "To be"]
    assert len(run(*command, "--no-stream", cwd=elsewhere).strip()) > 4
