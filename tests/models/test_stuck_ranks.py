"""A tensor-parallel rank that stops taking part ends the run within 30 s, by name; one that is slow does not. On two GPUs, and what a host can show on the CPU.

Without GPUs: test_watched_waits.py, tests/l2_dense_parallel/test_device_watch.py."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest

from tests.l2_dense_parallel.launch import Ended, environment, mpirun, start

STOPS = "nothing has moved for 20 s, for want of rank "


def on_ranks(what: str, device: str, *arguments: str, limit: float = 240.0) -> tuple[Ended, float]:
    """And how many seconds after rank 1 stopped it ended (0: it did not stop)."""
    program = str(Path(__file__).with_name("stuck_program.py"))
    command = [*mpirun(), "-n", "2", sys.executable, program, what, "run", "--tp", "2", "--device", device, "--json", "--ignore-eos", *arguments]
    ended = start(command, environment(), limit)
    over = time.monotonic()
    said = re.search(rf"^{what} at ([0-9.]+)$", ended.err, re.MULTILINE)
    return ended, over - float(said[1]) if said else 0.0


@pytest.fixture
def long_prompts(tmp_path: Path) -> list[str]:
    """Two passes of eight prompts, longer than what goes without marks."""
    file = tmp_path / "ids.jsonl"
    file.write_text("".join(json.dumps([1 + (7 * i + j) % 900 for j in range(90)]) + "\n" for i in range(16)))
    return ["--ids", str(file), "--batch-size", "8", "--max-new-tokens", "4"]


@pytest.mark.gpu2
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("barrier", STOPS + "1; rank 0 in the device (tp), rank 1 in barrier (tp)"),
        ("sleep", STOPS + "1; rank 0 in the device (tp), rank 1 in the device (tp)"),
        ("device", STOPS + "0, 1; rank 0 in the device (tp), rank 1 in the device (tp)"),  # a step is one launch: who is first in it nobody sees
        ("leave", "rank 1 has ended while rank 0 waits in the device (tp)"),
    ],
)
@pytest.mark.parametrize("all_reduce", ["auto", "nccl"])
def test_a_rank_that_stops_in_decode(what: str, error: str, all_reduce: str) -> None:
    ended, seconds = on_ranks(what, "cuda", "--max-new-tokens", "60", "--all-reduce", all_reduce)
    assert ended.status != 0 and 0.0 < seconds < 30.0, (seconds, ended.err)
    assert len(ended.errors) == 1 and ended.errors[0].startswith("error: " + error), ended.err
    assert ended.left_behind == []


@pytest.mark.gpu2
@pytest.mark.mpi
def test_a_device_that_stops_in_a_long_prompt(long_prompts: list[str]) -> None:
    ended, seconds = on_ranks("layer", "cuda", *long_prompts)
    assert ended.status != 0 and 0.0 < seconds < 30.0, (seconds, ended.err)
    assert len(ended.errors) == 1 and ended.errors[0].startswith("error: " + STOPS + "1;"), ended.err


@pytest.mark.gpu2
@pytest.mark.mpi
@pytest.mark.parametrize("what", ["slow", "layers"])
def test_the_slow_are_waited_for(what: str, long_prompts: list[str]) -> None:
    """A rank at its own work for 25 s, and devices at a pass of 32 s, layer by layer."""
    ended, _ = on_ranks(what, "cuda", *(long_prompts if what == "layers" else ["--max-new-tokens", "60"]))
    assert ended.status == 0 and ended.seconds > 25.0, ended.err
    assert all(len(result["token_ids"]) in (4, 60) for result in json.loads(ended.out)["results"])


@pytest.mark.mpi
@pytest.mark.parametrize("what", ["barrier", "leave"])
def test_the_same_on_hosts(what: str) -> None:
    """Where sums are the hosts' own waits: the program's faults are what they say."""
    ended, seconds = on_ranks(what, "cpu", "--max-new-tokens", "60", "--graph", limit=60.0)
    assert ended.status != 0 and 0.0 < seconds < 30.0, (seconds, ended.err)
    wanted = {"barrier": "the ranks wait in different calls and none can go on", "leave": "rank 1 has ended while rank 0 waits in all_reduce (tp)"}
    assert len(ended.errors) == 1 and ended.errors[0].startswith("error: " + wanted[what]), ended.err
