"""benchmarks/moe_routing.py at tiny sizes: its rows are whole, its counts of bytes right, and its bars can fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import moe_routing, record
from benchmarks.moe_routing import bytes_moved, failures, main, measure
from l1_kernels.device import open_device

TINY = ["--device", "cpu", "--tokens", "3,16", "--top-k", "1,2", "--experts", "4", "--width", "64"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(moe_routing, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(record, "RESULTS", tmp_path)


def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TINY) == 0
    document = json.loads((tmp_path / "moe_routing.json").read_text())
    assert [(row["tokens"], row["top_k"]) for row in document["rows"]] == [(3, 1), (16, 1), (3, 2), (16, 2)]
    for row in document["rows"]:
        assert row["bound_us"] == pytest.approx(row["bytes"] / document["copy_gb_s"] / 1e3 + 14)
        assert row["faster"] == pytest.approx(row["einsum_us"] / row["tables_us"]) and row["tables_us"] > 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines[1].split()) == len(lines[2].split()) == 2 + len(moe_routing.COLUMNS)


def test_bytes() -> None:
    """2 tokens, 3 experts, k = 1, 8 numbers: counted by hand."""
    assert bytes_moved(2, 3, 1, 8) == {"gate": 64 + 96 + 24, "tables": 24 + 32 + 16 + 4, "dispatch": 64 + 8 + 32, "combine": 64 + 16 + 128}


def row(tokens: int, faster: float, of_bound: float) -> dict[str, float]:
    return {"tokens": tokens, "top_k": 1, "faster": faster, "of_bound": of_bound}


def test_bars() -> None:
    assert failures([row(8, 6.1, 9.0), row(1024, 6.0, 1.99)]) == []
    assert failures([row(8, 5.9, 1.0), row(1024, 7.0, 2.1)]) == [
        "8 tokens, k = 1: 5.90 times faster than einsums, the bar is 6",
        "1024 tokens, k = 1: 2.10 times the bound, the bar is 2",
    ]


def test_check_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_routing, "measure", lambda device, tokens, *rest: row(tokens, 5.0, 1.0))
    monkeypatch.setattr(moe_routing, "line", str)
    assert main([*TINY, "--out", "", "--check"]) == 1 and main([*TINY, "--out", ""]) == 0


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    found = measure(open_device("cuda"), 37, 8, 2, 256, 4000.0)
    assert set(moe_routing.COLUMNS) <= set(found)
