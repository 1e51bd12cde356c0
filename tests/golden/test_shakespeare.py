"""The two bundled models: their greedy text, and how well they predict the validation text."""

import json

import numpy as np
import pytest

from layers.batch import Batch
from models.find import BUNDLED
from models.generate import GenerateOptions, generate
from models.scoring import score, windows
from tests.golden.opened import command, golden, opened

NAMES = ("shakespeare", "shakespeare_moe")
VALIDATION = BUNDLED / "shakespeare" / "validation.txt"


@pytest.mark.parametrize("name", NAMES)
def test_logits_after_each_prompt(name):
    runner, _ = opened(name)
    prompts = golden(f"golden/{name}/golden.json")["prompts"]
    ids = [prompt["ids"] for prompt in prompts]
    logits = runner.device.to_host(runner.forward(Batch.prompts(ids, range(len(ids))), runner.new_cache(len(ids), 32)))
    for row, prompt in zip(logits, prompts, strict=True):
        expected = np.array(prompt["first_logits"])
        assert np.abs(row - expected).max() <= 1e-4 * np.abs(expected).max()  # they have 4 decimals


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_text(name, batch_size):
    runner, tokenizer = opened(name)
    prompts = golden(f"golden/{name}/golden.json")["prompts"]
    results = generate(runner, [prompt["ids"] for prompt in prompts], GenerateOptions(64, batch_size=batch_size), tokenizer)
    for result, prompt in zip(results, prompts, strict=True):
        assert result.token_ids == prompt["greedy_ids"]
        assert prompt["prompt"] + result.text == prompt["text"]
        assert result.finish_reason == "length"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_validation_loss(name):
    """The golden's rule: val_windows windows of `context` tokens and their next tokens; the rest of the text is not in it."""
    runner, tokenizer = opened(name)
    facts = golden(f"golden/{name}/golden.json")
    ids = tokenizer.encode(VALIDATION.read_text(encoding="utf-8"))
    counted = facts["val_windows"] * facts["context"]
    cut = [window for window in windows([ids[: counted + 1]], facts["context"]) if window.targets]
    assert len(cut) == facts["val_windows"] and len(ids) > counted + 1
    total, count = score(runner, cut)
    assert count == counted
    assert abs(total / count - facts["val_nll"]) <= 1e-4


@pytest.mark.slow
def test_score_counts_every_token_of_a_file(capsys):
    """The command reads the whole text, so its mean is the golden's and that of the last, shorter window together."""
    runner, tokenizer = opened("shakespeare")
    facts = golden("golden/shakespeare/golden.json")
    ids = tokenizer.encode(VALIDATION.read_text(encoding="utf-8"))
    counted = facts["val_windows"] * facts["context"]
    rest, more = score(runner, list(windows([ids[counted:]], facts["context"])))
    command("strata", "score", "--text", str(VALIDATION), "--device", "cpu", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == len(ids) - 1 == counted + more
    assert found["mean_nll"] == pytest.approx((facts["val_nll"] * counted + rest) / (counted + more), abs=1e-4)
    assert found["perplexity"] == pytest.approx(np.exp(found["mean_nll"]))
