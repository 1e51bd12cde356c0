"""Passes with prompts by replays give what passes launched one by one give, whatever the lengths and whoever else is in the pass.

On the CPU a replay calls the pass; `-m gpu` runs the same on CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from l1_kernels.device import open_device
from l1_kernels.weight import encode
from layers.batch import Batch
from models.decode_graph import Decoder
from models.generate import GenerateOptions, cache_size, generate
from models.prompt_graph import PromptGraphs
from tests.models.encode_graph_checks import build

BARS = {"fp32": 1e-5, "fp16": 2e-3}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Any:
    return open_device(request.param)


def poisoned_cache(runner: Any, rows: int, context: int) -> Any:
    cache = runner.new_cache(rows, context)
    for layer in cache.layers:
        poison = encode(np.full(1, np.nan, np.float32), layer.dtype)[0]
        layer.k[...] = poison
        layer.v[...] = poison
    return cache


def random_prompts(runner: Any, lengths: tuple[int, ...]) -> list[np.ndarray]:
    return [np.random.default_rng().integers(0, runner.config.vocab_size, n) for n in lengths]


@pytest.mark.parametrize("case", ["gpt2", "gptj", "llama_gqa", "bloom"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_the_same_as_without(device: Any, case: str, dtype: str) -> None:
    """Prompts, then tokens of some rows beside a new prompt in another; buckets 24 and 16, with and without idle tokens."""
    runner = build(device, case, dtype)
    plain, cache = poisoned_cache(runner, 3, 32), poisoned_cache(runner, 3, 32)
    graphs = PromptGraphs(runner, cache)
    for lengths in [(11, 7), (5, 19), (23, 1), (3, 2), (9, 7), (1, 4)]:
        passes = [Batch.prompts(random_prompts(runner, lengths), [2, 0])]
        tokens = random_prompts(runner, (2,))[0]
        passes.append(Batch.join([Batch.step(tokens, [2, 0], list(lengths)), Batch.prompts(random_prompts(runner, (17,)), [1])]))
        for batch in passes:
            want = np.array(device.to_host(runner.forward(batch, plain)))
            got = np.array(device.to_host(graphs.forward(batch)))
            np.testing.assert_allclose(got, want, atol=BARS[dtype] * np.abs(want).max())
            assert cache.lengths.tolist() == plain.lengths.tolist()
    assert graphs.failure is None and graphs.recording_s > 0
    assert {size for size, graph in graphs._graphs.items() if graph is not None} == {16, 24}


def test_generation_gives_the_same_tokens(device: Any) -> None:
    runner = build(device, "gpt2")
    prompts, options = [p.tolist() for p in random_prompts(runner, (3, 9, 1, 5, 2, 7))], GenerateOptions(6, batch_size=2)
    want = [r.token_ids for r in generate(runner, prompts, options)]
    decoder = Decoder(runner, runner.new_cache(*cache_size(prompts, options)))
    for _ in range(2):
        assert [r.token_ids for r in generate(runner, prompts, options, decoder=decoder)] == want
    assert decoder.prompts._graphs[16] is not None


def test_a_bucket_is_recorded_when_it_comes_again_and_long_passes_are_not(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.prompt_graph.MOST_TOKENS", 24)
    runner = build(device, "gpt2")
    graphs = PromptGraphs(runner, runner.new_cache(1, 32))
    for _ in range(3):
        graphs.forward(Batch.prompts(random_prompts(runner, (25,)), [0]))
    assert graphs._graphs == {}
    graphs.forward(Batch.prompts(random_prompts(runner, (20,)), [0]))
    assert graphs._graphs == {24: None} and graphs.recording_s == 0
    graphs.forward(Batch.prompts(random_prompts(runner, (24,)), [0]))
    assert graphs._graphs[24] is not None


def test_a_pass_that_cannot_be_recorded_runs_without(device: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(step: Any) -> None:
        raise RuntimeError("no capture today\nand more")

    runner = build(device, "gpt2")
    cache = runner.new_cache(1, 16)
    graphs, batch = PromptGraphs(runner, cache), Batch.prompts(random_prompts(runner, (7,)), [0])
    want = np.array(device.to_host(runner.forward(batch, cache)))
    monkeypatch.setattr(device, "capture", refuse)
    for _ in range(3):
        np.testing.assert_allclose(np.array(device.to_host(graphs.forward(batch))), want, atol=1e-5 * np.abs(want).max())
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "no capture today" in error and graphs.failure


def test_wrong_batches_do_not_reach_the_device() -> None:
    runner = build(open_device("cpu"), "gpt2")
    graphs = PromptGraphs(runner, runner.new_cache(1, 8))
    batch = Batch.prompts(random_prompts(runner, (9,)), [0])
    with pytest.raises(ValueError, match="position 8 in a context of 8"):
        graphs.forward(batch)


@pytest.mark.gpu
def test_a_prompt_is_a_few_launches() -> None:
    runner = build(open_device("cuda"), "gptj", "fp16")
    graphs, batch = PromptGraphs(runner, runner.new_cache(1, 32)), Batch.prompts(random_prompts(runner, (20,)), [0])
    for _ in range(2):
        graphs.forward(batch)
    before = runner.device.launches()
    graphs.forward(batch)
    assert runner.device.launches() - before <= 4  # the layers, and the head's norm, product and bias
