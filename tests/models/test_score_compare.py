"""`score --compare`: two ways of holding the weights on the same text, in one process."""

import io
import json
import math
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from l1_kernels.errors import UserError
from l2_dense_parallel.ranks import Launch
from l2_dense_parallel.world import World
from models.gpt import command_line
from models.scoring import change_of

CASE = Path(__file__).parents[1] / "conformance" / "gpt2_outliers"


def score(*arguments: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        assert command_line(World(Launch()), ["score", "--model", str(CASE), *arguments, "--device", "cpu"]) == 0
    return out.getvalue()


@pytest.fixture
def ids(tmp_path):
    file = tmp_path / "ids.jsonl"
    file.write_text(json.dumps(np.load(CASE / "golden.npz")["ppl_input_ids"].tolist()))
    return ("--ids", str(file))


def test_both_are_what_each_is_alone(ids):
    alone = {dtype: json.loads(score(*ids, "--dtype", dtype, "--json")) for dtype in ("int8", "fp32", "fp16")}
    for other in ("fp32", "fp16"):
        found = json.loads(score(*ids, "--dtype", "int8", "--compare", other, "--json"))
        compared = found.pop("compared")
        assert found == alone["int8"]
        assert compared.pop("dtype") == other and compared.pop("standard_error_percent") > 0
        assert compared.pop("change_percent") == pytest.approx(100 * (found["mean_nll"] / alone[other]["mean_nll"] - 1), rel=1e-6)
        assert compared == {name: alone[other][name] for name in ("mean_nll", "perplexity")}


def test_a_line_for_people(ids):
    _, first, second = score(*ids, "--dtype", "int8", "--compare", "fp32").splitlines()
    golden = float(np.load(CASE / "golden.npz")["ppl_nll"])
    assert first.startswith("119 predicted tokens: mean NLL 2.4")
    assert second.startswith(f"fp32: mean NLL {golden:.4f}; int8 (w8a16) is ") and "% from it (standard error " in second


def test_the_logits_dumped_are_those_of_dtype(ids, tmp_path):
    score(*ids, "--dtype", "int8", "--dump-logits", str(tmp_path / "alone.npz"))
    score(*ids, "--dtype", "int8", "--compare", "fp32", "--dump-logits", str(tmp_path / "both.npz"))
    alone, both = (np.load(tmp_path / name)["logits_0"] for name in ("alone.npz", "both.npz"))
    np.testing.assert_array_equal(alone, both)


@pytest.mark.parametrize("arguments, message", [(("--compare", "int8"), "--compare int8: have"), (("--compare", "fp32"), "--compare fp32: the weights are held in fp32")])
def test_nothing_to_compare_is_refused(ids, arguments, message):
    with pytest.raises(UserError, match=message):
        score(*ids, *arguments)


def test_change_and_its_standard_error():
    rng = np.random.default_rng()
    other = rng.random(10_000) + 2
    losses = other + rng.normal(0.05, 0.5, len(other))
    change, error = change_of(losses, other)
    assert change == pytest.approx(losses.mean() / other.mean() - 1, rel=1e-9)
    assert error == pytest.approx(0.5 / 100 / other.mean(), rel=0.05)
    assert all(math.isnan(number) for number in change_of(np.ones(1), np.ones(1)))
