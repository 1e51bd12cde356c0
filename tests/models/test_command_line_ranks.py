"""The commands under mpirun: the same tokens as on one rank, whether the ranks share a model or deal out the prompts."""

import json
import sys
from functools import cache

import pytest

from tests.l2_dense_parallel.launch import Ended, environment, mpirun, start

pytestmark = pytest.mark.mpi
PROMPTS = ("ROMEO:\nO, ", "To be", "KING RICHARD:\n", "Enter", "What say you")
OPTIONS = ("--json", "-n", "16", "--device", "cpu", "--temperature", "0.8", "--top-p", "0.9", "--seed", "11")
ASK = ("run", *OPTIONS, *(x for prompt in PROMPTS for x in ("--prompt", prompt)))


def strata(ranks: int, *arguments: str) -> Ended:
    command = [sys.executable, "-m", "models.gpt", *arguments]
    return start(command if ranks == 1 else [*mpirun(), "-n", str(ranks), *command], environment(OMP_NUM_THREADS="1"), 120)


@cache
def one_rank() -> list:
    return json.loads(strata(1, *ASK).out)["results"]


# 8 heads: 2 ranks share them; 3 cannot, so each takes prompts of its own; 4 as 2 x 2
@pytest.mark.parametrize("ranks, more, mesh", [(2, (), (2, 1)), (3, (), (1, 3)), (4, ("--tp", "2", "--batch-size", "2"), (2, 2))])
def test_ranks_give_the_same_tokens(ranks, more, mesh):
    ended = strata(ranks, *ASK, *more)
    assert ended.status == 0, ended.err
    found = json.loads(ended.out)  # one document, from one rank
    assert (found["mesh"]["tp"], found["mesh"]["dp"]) == mesh
    assert found["results"] == one_rank()


def test_bare_run_streams_once():
    ended = strata(2, "run", "-n", "12", "--device", "cpu")
    assert ended.status == 0 and ended.out.count("KING RICHARD:") == 1, ended.err
    assert "2 ranks (tp 2, dp 1)" in ended.out.splitlines()[0] and ended.out.splitlines()[-1].endswith("tokens/s")


@pytest.mark.parametrize("ranks", [2, 3])
def test_score_sums_over_groups(ranks, tmp_path):
    (tmp_path / "text.txt").write_text("What, is the news?\nSay, I will not say. " * 40)
    ask = ("score", "--text", str(tmp_path / "text.txt"), "--json", "--device", "cpu", "--dump-logits")
    alone, together = strata(1, *ask, str(tmp_path / "one.npz")), strata(ranks, *ask, str(tmp_path / "many.npz"))
    one, many = json.loads(alone.out), json.loads(together.out)
    assert many["tokens"] == one["tokens"] and many["mean_nll"] == pytest.approx(one["mean_nll"], rel=1e-5)
    import numpy as np

    first, second = np.load(tmp_path / "one.npz")["logits_0"], np.load(tmp_path / "many.npz")["logits_0"]
    assert first.shape == second.shape == (one["tokens"] + 1, 1024) and np.abs(first - second).max() < 1e-4 * np.abs(first).max()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("run", "--tp", "3"), "--tp 3"),
        (("run", "--prompt", ""), "--prompt: is empty"),
        (("score", "--text", __file__, "--dump-logits", "no/such/folder.npz"), "--dump-logits no/such/folder.npz: cannot be written"),  # rank 0 alone writes
    ],
)
def test_errors_of_all_ranks_are_said_once(arguments, message):
    ended = strata(2, *arguments, "--device", "cpu")
    assert ended.status == 2 and "KING" not in ended.out, ended.err
    assert len(ended.errors) == 1 and message in ended.errors[0] and "Traceback" not in ended.err
