"""Every file, folder and module that README and docs/ name exists, and every command line they show is one that parses."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "models/bundled/README.md"]
TOPS = ("l1_kernels", "layers", "l2_dense_parallel", "l3_moe", "l4_offload", "models", "benchmarks", "tests", "docs", ".ci")
IN_BACKTICKS = re.compile(r"`((?:" + "|".join(map(re.escape, TOPS)) + r")/[\w./\-]*)`")
LINKS = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")
MODULES = re.compile(r"python -m ((?:" + "|".join(map(re.escape, TOPS)) + r")[\w.]*)")


def named(page: Path) -> list[Path]:
    text = page.read_text()
    return [ROOT / name for name in IN_BACKTICKS.findall(text)] + [page.parent / name for name in LINKS.findall(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    assert [str(path.relative_to(ROOT)) for path in named(page) if not path.exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_modules_exist(page: Path) -> None:
    assert [name for name in MODULES.findall(page.read_text()) if importlib.util.find_spec(name) is None] == []


def test_the_search_finds_names() -> None:
    """layout.md is a list of files: a search that found none there would prove nothing."""
    assert len(named(ROOT / "docs/layout.md")) >= 8
