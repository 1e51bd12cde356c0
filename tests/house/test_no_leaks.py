"""The repository says nothing about the machine it was written on."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEAKS = {
    "an absolute path": re.compile(r"(?<![\w.~$}])/(?:work|root|home|Users)/[\w.]"),
    "a package registry's host": re.compile(r"(?:pypi|pythonhosted|debian|npmjs|conda|anaconda)" + r"\.(?:org|com)\b"),
}


def tracked_texts() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and path.stat().st_size < 1_000_000 and b"\0" not in path.read_bytes()[:4096]]


@pytest.mark.parametrize("what", LEAKS)
def test_no_leaks(what: str) -> None:
    files = tracked_texts()
    assert len(files) > 20
    found = [f"{path.relative_to(ROOT)}: {match[0]}" for path in files for match in [LEAKS[what].search(path.read_text())] if match]
    assert found == []


@pytest.mark.parametrize(
    "text, leaks",
    [
        ("open('/" + "work/main/x')", True),
        ("/" + "root/.cache", True),
        ("https://" + "pypi" + ".org/simple", True),
        ("arxiv.org/abs/2207.00032 and models/work/x and ~/models", False),
    ],
)
def test_what_counts_as_a_leak(text: str, leaks: bool) -> None:
    assert any(pattern.search(text) for pattern in LEAKS.values()) == leaks
