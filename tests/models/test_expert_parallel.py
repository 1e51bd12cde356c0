"""`--ep`: the commands with experts on several ranks give the bundled model's golden text and losses; bad input is one line."""

from __future__ import annotations

import json
import sys

import pytest

from tests.golden.opened import golden
from tests.l2_dense_parallel.launch import Ended, environment, mpirun, start

FACTS = golden("golden/shakespeare_moe/golden.json")
PROMPTS = [argument for prompt in FACTS["prompts"] for argument in ("--prompt", prompt["prompt"])]
NEW = 24


def strata(ranks: int, *arguments: str) -> Ended:
    return start([*mpirun(), "-n", str(ranks), sys.executable, "-m", "models.gpt", *arguments, "--device", "cpu"], environment(OMP_NUM_THREADS="1"), 120)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "flags", "mesh"),
    [
        (2, "", "tp 2 dp 1 ep 2 es 1"),  # the default: as many owners as divide ranks and experts
        (2, "--tp 1", "tp 1 dp 2 ep 2 es 1"),
        (2, "--tp 1 --all-to-all flat --batch-size 2", "tp 1 dp 2 ep 2 es 1"),
        (2, "--ep 1", "tp 2 dp 1 ep 1 es 2"),
        (2, "--pp 2", "tp 1 dp 1 ep 1 es 1"),
        (3, "", "tp 1 dp 3 ep 1 es 3"),  # slices of every expert over groups of different prompts
        (4, "--tp 2 --ep 4", "tp 2 dp 2 ep 4 es 1"),
        (4, "--tp 2 --ep 2 --all-to-all hierarchical", "tp 2 dp 2 ep 2 es 2"),
        (4, "--tp 4 --ep 2", "tp 4 dp 1 ep 2 es 2"),
        (4, "--tp 1 --ep 4 --batch-size 1", "tp 1 dp 4 ep 4 es 1"),  # more groups than some steps have prompts
    ],
)
def test_the_golden_text(ranks: int, flags: str, mesh: str) -> None:
    ended = strata(ranks, "run", "--model", "shakespeare_moe", *PROMPTS, "--max-new-tokens", str(NEW), "--json", *flags.split())
    assert ended.status == 0, ended.err
    found = json.loads(ended.out)
    assert [result["token_ids"] for result in found["results"]] == [prompt["greedy_ids"][:NEW] for prompt in FACTS["prompts"]]
    assert " ".join(f"{axis} {found['mesh'][axis]}" for axis in ("tp", "dp", "ep", "es")) == mesh


@pytest.mark.mpi
def test_a_group_without_prompts_serves_the_others() -> None:
    ended = strata(3, "run", "--model", "shakespeare_moe", *PROMPTS[:2], "--max-new-tokens", "8", "--json")
    assert ended.status == 0, ended.err
    assert json.loads(ended.out)["results"][0]["token_ids"] == FACTS["prompts"][0]["greedy_ids"][:8]


@pytest.mark.mpi
def test_score_over_groups_with_different_numbers_of_windows(tmp_path) -> None:
    ids = tmp_path / "ids.jsonl"
    ids.write_text("".join(json.dumps(prompt["ids"] + prompt["greedy_ids"]) + "\n" for prompt in FACTS["prompts"]))
    ask = ("score", "--model", "shakespeare_moe", "--ids", str(ids), "--json")
    alone = json.loads(strata(1, *ask).out)
    for flags in ("--tp 1", "--tp 2"):
        found = json.loads(strata(2, *ask, *flags.split()).out)
        assert found["tokens"] == alone["tokens"] and found["mean_nll"] == pytest.approx(alone["mean_nll"], rel=1e-5)


@pytest.mark.mpi
@pytest.mark.parametrize("flags", ["--tp 2 --ep 2", "--tp 1 --ep 2", "--ep 1"])
def test_a_capacity_limit_drops_and_says_so(flags: str) -> None:
    """A wide one drops nothing and gives the golden text; a narrow one drops some, and on ranks with the same tokens the same as alone."""
    ask = ("run", "--model", "shakespeare_moe", *PROMPTS, "--max-new-tokens", "8", "--json", "--capacity-factor")
    wide, narrow = strata(2, *ask, "8", *flags.split()), strata(2, *ask, "0.5", *flags.split())
    assert [result["token_ids"] for result in json.loads(wide.out)["results"]] == [prompt["greedy_ids"][:8] for prompt in FACTS["prompts"]]
    assert "--capacity-factor 8: 0 of " in wide.err and "--capacity-factor 0.5: 0 of" not in narrow.err and "dropped" in narrow.err
    if "--tp 1" not in flags:
        alone = strata(1, *ask, "0.5")
        assert json.loads(narrow.out)["results"] == json.loads(alone.out)["results"]
        assert [line for line in narrow.err.splitlines() if "dropped" in line] == [line for line in alone.err.splitlines() if "dropped" in line]


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "flags", "words"),
    [
        (2, "--model shakespeare_moe --ep 3", ["--ep 3", "2 ranks", "8 experts", "1 or 2"]),
        (3, "--model shakespeare_moe --ep 2", ["--ep 2", "3 ranks", "8 experts", "--ep may be 1"]),
        (2, "--model shakespeare --ep 2", ["--ep 2", "no experts"]),
        (2, "--model shakespeare --all-to-all flat", ["--all-to-all flat", "no experts"]),
        (1, "--model shakespeare_moe --capacity-factor 0", ["--capacity-factor must be above 0, got 0"]),
        (1, "--model shakespeare_moe --capacity-factor nan", ["--capacity-factor must be above 0"]),
        (1, "--model shakespeare --capacity-factor 1.5", ["--capacity-factor 1.5", "no experts"]),
        (2, "--model shakespeare_moe --ep 1 --all-to-all flat", ["--all-to-all flat", "--ep"]),
        (4, "--model shakespeare_moe --pp 2 --tp 1", ["--pp 2", "one data-parallel group", "--tp 2"]),
    ],
)
def test_a_mesh_that_cannot_be(ranks: int, flags: str, words: list[str]) -> None:
    ended = strata(ranks, "run", *flags.split())
    assert ended.status != 0 and len(ended.errors) == 1, ended.err
    for word in words:
        assert word in ended.errors[0]


@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "ep", "batch"), [(2, 2, 8), (2, 1, 1), (4, 4, 8)])
def test_groups_replay_their_steps_together(ranks: int, ep: int, batch: int) -> None:
    """As many prompts as the golden case has, over 2 groups and over 4, where a group has fewer than the others or none."""
    command = [*mpirun(), "-n", str(ranks), sys.executable, "-m", "tests.models.lockstep_program", "12", str(ep), str(batch)]
    ended = start(command, environment(OMP_NUM_THREADS="1"), 120)
    assert ended.status == 0, ended.err
    found = json.loads(ended.out)
    assert found["tokens"] == [prompt["greedy_ids"][:12] for prompt in FACTS["prompts"]]
    assert found["replayed"] >= 11
