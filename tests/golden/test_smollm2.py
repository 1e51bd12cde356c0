"""SmolLM2-135M-Instruct from a Q4_1 GGUF file against values of another implementation."""

import hashlib
import json

import numpy as np
import pytest

from layers.batch import Batch
from models.chat import chat_prompt
from models.generate import GenerateOptions, generate
from models.scoring import negative_log_likelihoods, window_logits
from tests.golden.opened import command, golden, installed, opened

pytestmark = [installed("smollm2"), pytest.mark.slow]
GOLDEN = golden("conformance/smollm2_golden.json")
RUNS = GOLDEN["runs"]
MARGIN = 0.05  # below it another order of sums may rightly choose the other token


def test_text_becomes_the_same_ids_and_comes_back():
    _, tokenizer = opened("smollm2")
    for run in RUNS:
        assert tokenizer.encode(run["prompt"]) == run["prompt_ids"]
        assert tokenizer.decode(run["greedy_ids"]) == run["greedy_text"]


def test_first_step_logits():
    runner, _ = opened("smollm2")
    prompts = [run["prompt_ids"] for run in RUNS]
    cache = runner.new_cache(len(prompts), max(map(len, prompts)))
    logits = np.asarray(runner.device.to_host(runner.forward(Batch.prompts(prompts, range(len(prompts))), cache)))
    for row, run in zip(logits, RUNS, strict=True):
        top = run["first_step_top5"]
        assert np.argsort(-row)[:5].tolist() == top["ids"]
        assert np.abs(row[top["ids"]] - top["logits"]).max() <= 1e-3 * np.abs(row).max()


def test_greedy_tokens_up_to_the_first_narrow_margin():
    runner, _ = opened("smollm2")
    results = generate(runner, [run["prompt_ids"] for run in RUNS], GenerateOptions(32, batch_size=len(RUNS)))
    for result, run in zip(results, RUNS, strict=True):
        sure = next((i for i, margin in enumerate(run["margins"]) if margin < MARGIN), len(run["margins"]))
        assert sure >= 5
        assert result.token_ids[:sure] == run["greedy_ids"][:sure]


def test_negative_log_likelihood():
    runner, tokenizer = opened("smollm2")
    facts = GOLDEN["nll"]
    from pydoc_data.topics import topics

    text = topics["types"][:4096]
    if hashlib.sha256(text.encode()).hexdigest() == facts["text_sha256"]:  # other Python releases word it differently
        assert tokenizer.encode(text)[:512] == facts["ids"]
    losses = negative_log_likelihoods(window_logits(runner, facts["ids"]), facts["ids"][1:])
    assert len(losses) == facts["predicted_tokens"]
    assert np.abs(losses[:8] - facts["first_8_nlls"]).max() <= 5e-3
    assert abs(losses.mean() - facts["mean_nll"]) <= 1e-3


def test_chat_renders_chatml(capsys):
    """The third golden prompt is what the file's own template makes of this question."""
    _, tokenizer = opened("smollm2")
    question, run = "What is the capital of France? Name one famous building there.", RUNS[2]
    assert chat_prompt(tokenizer, question) == run["prompt"]
    command("strata", "run", "--model", "smollm2", "--device", "cpu", "--chat", "--prompt", question, "--max-new-tokens", "12", "--json")
    (found,) = json.loads(capsys.readouterr().out)["results"]
    assert found["prompt_ids"] == run["prompt_ids"]
    assert found["token_ids"][:6] == run["greedy_ids"][:6]
    if found["token_ids"] == run["greedy_ids"][:8]:  # the seventh's margin is 0.036
        assert found["finish_reason"] == "eos" and found["text"] == "The capital of France is Paris."
