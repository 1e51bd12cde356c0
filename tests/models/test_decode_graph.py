"""Generation by replays gives the tokens of generation step by step, and launches no more than it must.

On the CPU a replay calls the step; `-m gpu` runs the same on CUDA graphs.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from l1_kernels.device import open_device
from l1_kernels.errors import UserError
from l2_dense_parallel.collectives import NoCollective
from l2_dense_parallel.slicing import Shard
from models.build import build_runner
from models.decode_graph import Decoder
from models.generate import GenerateOptions, cache_size, generate
from models.loading import open_checkpoint
from models.sampling import Sampling

CASES = Path(__file__).parents[1] / "conformance"
SAMPLED = Sampling(temperature=1.2, top_k=20, top_p=0.9, repetition_penalty=1.3, seed=5)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return open_device(request.param)


def build(device, case="gpt2"):
    return build_runner(open_checkpoint(CASES / case), device, "fp32", Shard(), NoCollective())


@pytest.fixture(scope="module")
def runner(device):
    return build(device)


def some_prompts(runner, lengths=(3, 9, 1, 5, 2, 7)):
    return [np.random.default_rng(n).integers(0, runner.config.vocab_size, n).tolist() for n in lengths]


class Counting(Decoder):
    """Notes what is done, in order."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.log: list[str] = []

    def begin(self, *arguments):
        self.log.append("begin")
        return super().begin(*arguments)

    def launch(self):
        self.log.append("launch")
        return super().launch()

    def read(self, turn):
        self.log.append("read")
        return super().read(turn)


def replayed(runner, prompts, options, kind=Decoder, **more):
    sampling = Sampling() if options.check_nan else options.sampling
    decoder = kind(runner, runner.new_cache(*cache_size(prompts, options)), sampling)
    return generate(runner, prompts, options, decoder=decoder, **more), decoder


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 6])
def test_the_same_tokens_and_ends(runner, batch_size, sampling):
    prompts = some_prompts(runner)
    whole = generate(runner, prompts, GenerateOptions(10, sampling, batch_size=batch_size))
    eos = whole[1].token_ids[3], whole[4].token_ids[6]  # some end early, at different steps
    options = GenerateOptions(10, sampling, eos_ids=eos, stop_ids=(whole[0].token_ids[8],), batch_size=batch_size)
    want = generate(runner, prompts, options)
    assert len({len(r.token_ids) for r in want}) > 1
    got, decoder = replayed(runner, prompts, options)
    for a, b in zip(want, got, strict=True):
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
        assert len(b.token_times) == len(b.token_ids) and b.token_times == sorted(b.token_times)
    on_host = Decoder(runner, runner.new_cache(*cache_size(prompts, options)))  # its steps choose the likeliest
    assert [r.token_ids for r in generate(runner, prompts, options, decoder=on_host)] == [r.token_ids for r in want]
    again = generate(runner, prompts, options, decoder=decoder)  # the same graphs over a used cache
    assert [r.token_ids for r in again] == [r.token_ids for r in want]


def test_stop_strings_are_noticed_though_a_step_is_ahead(runner):
    class Letters:
        def token_bytes(self, token):
            return bytes([97 + token % 26])

    prompts = some_prompts(runner)
    whole = generate(runner, prompts, GenerateOptions(10), Letters())
    options = GenerateOptions(10, stop=(whole[2].text[3:5], whole[5].text[6]), batch_size=4)
    want = generate(runner, prompts, options, Letters())
    assert {r.finish_reason for r in want} == {"stop", "length"} or all(r.finish_reason == "stop" for r in want)
    shown: dict[int, str] = {}
    got, _ = replayed(runner, prompts, options, tokenizer=Letters(), on_text=lambda i, text: shown.update({i: shown.get(i, "") + text}))
    for a, b in zip(want, got, strict=True):
        assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
        assert shown.get(b.index, "") == b.text


def test_each_step_is_launched_before_the_last_ones_tokens_are_read(runner):
    _, decoder = replayed(runner, some_prompts(runner, (4, 6)), GenerateOptions(6), Counting)
    assert " ".join(decoder.log) == "begin launch launch read launch read launch read launch read read"  # 5 after the prompts'


def test_one_recording_a_bucket(runner):
    prompts = some_prompts(runner, (2, 3, 4, 5, 6))
    whole = generate(runner, prompts, GenerateOptions(9))
    _, decoder = replayed(runner, prompts, GenerateOptions(9, eos_ids=(whole[0].token_ids[2],), batch_size=5), Counting)
    assert 1 <= len(decoder._graphs) <= 3 and set(decoder._graphs) <= {1, 2, 4, 5}
    assert decoder.recording_s >= 0 and decoder.failure is None


def test_a_step_that_cannot_be_recorded_runs_without(runner, capsys, monkeypatch):
    def refuse(step):
        raise RuntimeError("no capture today\nand more")

    prompts, options = some_prompts(runner), GenerateOptions(5, batch_size=3)
    want = generate(runner, prompts, options)
    monkeypatch.setattr(runner.device, "capture", refuse)
    got, decoder = replayed(runner, prompts, options)
    assert [r.token_ids for r in got] == [r.token_ids for r in want]
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("warning: ") and "no capture today" in error and decoder.failure


@pytest.mark.parametrize("check_nan", [False, True])
def test_logits_that_are_no_numbers_end_the_run(device, check_nan):
    broken = build(device)
    head = broken.head.weights.head.weight.data
    prompts, options = some_prompts(broken, (3, 2)), GenerateOptions(6, check_nan=check_nan)
    decode = broken.decode

    def poisoned(slots, cache):
        head[0, 0] = np.nan
        return decode(slots, cache)

    broken.decode = poisoned
    with pytest.raises(UserError, match="--check-nan: logits of prompt 1 .* new token 2, first in the head" if check_nan else "prompt 0 .* new token 1"):
        replayed(broken, prompts, options)


def test_lengths_on_the_host_follow(runner):
    prompts = some_prompts(runner, (3, 5))
    _, decoder = replayed(runner, prompts, GenerateOptions(4))
    assert decoder.cache.lengths.tolist() == [5 + 3, 3 + 3] or decoder.cache.lengths.tolist() == [3 + 3, 5 + 3]


@pytest.mark.gpu
def test_a_launch_a_token_and_little_work_on_the_host():
    runner = build(open_device("cuda"), "gptj")
    prompts, options = some_prompts(runner, (4,)), GenerateOptions(48)
    _, decoder = replayed(runner, prompts, options)
    generate(runner, prompts, GenerateOptions(1), decoder=decoder)  # the second prompt of its length: recorded
    before = runner.device.launches()
    generate(runner, prompts, GenerateOptions(1), decoder=decoder)
    of_prompt = runner.device.launches() - before
    start = runner.device.launches()
    results = generate(runner, prompts, options, decoder=decoder)
    assert runner.device.launches() - start - of_prompt == 47
    step = (results[0].token_times[-1] - results[0].token_times[0]) / 47
    decoder.begin([1], [0], [4])
    runner.device.synchronize()
    begun = time.perf_counter()
    for _ in range(3):
        decoder.launch()
    host = (time.perf_counter() - begun) / 3
    print(f"recording {decoder.recording_s:.3f} s, {1e6 * step:.0f} us a token, of which {1e6 * host:.0f} us launch on the host")
    assert host < 100e-6
