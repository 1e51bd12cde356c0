"""Where compiled kernels go: numba's own choice, and a private folder where it has none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from l1_kernels import kernel_cache
from l1_kernels.errors import UserError

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def locked(monkeypatch):
    """Makes folders count as read-only (the tests may run as root, who may write everywhere)."""
    folders: list[Path] = []
    allowed = os.access
    monkeypatch.setattr(kernel_cache.os, "access", lambda path, mode: not any(Path(path).is_relative_to(f) for f in folders) and allowed(path, mode))
    return folders


def test_what_numba_takes_is_left_alone(tmp_path, locked):
    package, home = tmp_path / "package", tmp_path / "home"
    package.mkdir()
    environ = {"XDG_CACHE_HOME": str(home)}
    assert kernel_cache.kernel_cache(environ, package) == package
    locked.append(package)
    assert kernel_cache.kernel_cache(environ, package) == home / "numba"  # made when it is needed
    environ["NUMBA_CACHE_DIR"] = str(tmp_path / "asked")
    assert kernel_cache.kernel_cache(environ, package) == tmp_path / "asked"
    before = dict(environ)
    kernel_cache.ensure_kernel_cache(environ, package)
    assert environ == before


def test_a_private_folder_where_nothing_can_be_written(tmp_path, locked, monkeypatch):
    package, home, temporary = tmp_path / "package", tmp_path / "home", tmp_path / "tmp"
    for folder in (package, home, temporary):
        folder.mkdir()
    locked += [package, home]
    monkeypatch.setattr(kernel_cache.tempfile, "gettempdir", lambda: str(temporary))
    chosen = []
    for _ in range(2):
        environ = {"XDG_CACHE_HOME": str(home)}
        kernel_cache.ensure_kernel_cache(environ, package)
        chosen.append(Path(environ["NUMBA_CACHE_DIR"]))
    assert chosen[0] == chosen[1] and chosen[0].parent == temporary and chosen[0].stat().st_mode & 0o777 == 0o700
    chosen[0].chmod(0o777)  # anybody could put code there
    environ = {"XDG_CACHE_HOME": str(home)}
    kernel_cache.ensure_kernel_cache(environ, package)
    assert environ["NUMBA_CACHE_DIR"] != str(chosen[0]) and Path(environ["NUMBA_CACHE_DIR"]).stat().st_mode & 0o777 == 0o700


def test_nowhere_to_write_is_said(tmp_path, locked, monkeypatch):
    locked.append(tmp_path)

    def none():
        raise FileNotFoundError("no usable temporary directory found")

    monkeypatch.setattr(kernel_cache.tempfile, "gettempdir", none)
    with pytest.raises(UserError, match="NUMBA_CACHE_DIR"):
        kernel_cache.ensure_kernel_cache({"XDG_CACHE_HOME": str(tmp_path)}, tmp_path)


def test_numba_takes_the_private_folder(tmp_path):
    """`ensure_kernel_cache` comes before numba is imported, and numba reads what it has set."""
    code = (
        "from l1_kernels import kernel_cache;"
        "kernel_cache.can_write = lambda folder: False;"
        "kernel_cache.ensure_kernel_cache();"
        "from l1_kernels.device import open_device; open_device('cpu');"
        "from numba import config; print(config.CACHE_DIR)"
    )
    environ = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"} | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).parent == tmp_path
