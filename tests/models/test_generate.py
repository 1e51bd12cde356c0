"""The generation loop over a model whose logits are a fixed function of the prefix: rows, positions, ends, seeds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from l1_kernels.errors import UserError
from models.generate import GenerateOptions, Timing, check_prompts, generate
from models.sampling import Sampling
from tests.models.fake_runner import VOCAB, FakeRunner, logits_after, tiny_config

prompt_lists = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), min_size=1, max_size=9)


def by_hand(prompt, steps, eos=()):
    """Greedy, one whole prefix at a time."""
    ids = list(prompt)
    for _ in range(steps):
        ids.append(int(np.argmax(logits_after(ids))))
        if ids[-1] in eos:
            break
    return ids[len(prompt) :]


@settings(max_examples=25, deadline=None)
@given(prompt_lists, st.integers(1, 5), st.integers(1, 7), st.sets(st.integers(0, VOCAB - 1), max_size=12))
def test_rows_reused_equal_each_prompt_alone(prompts, batch_size, steps, eos):
    options = GenerateOptions(max_new_tokens=steps, batch_size=batch_size, eos_ids=tuple(eos))
    results = generate(FakeRunner(), prompts, options)
    assert [r.index for r in results] == list(range(len(prompts)))
    for prompt, result in zip(prompts, results, strict=True):
        expected = by_hand(prompt, steps, eos)
        assert result.prompt_ids == prompt and result.token_ids == expected
        assert result.finish_reason == ("eos" if expected[-1] in eos else "length")
        assert len(result.token_times) == len(expected) and result.token_times == sorted(result.token_times)


@settings(max_examples=15, deadline=None)
@given(prompt_lists, st.integers(1, 4), st.integers(0, 1000))
def test_a_seed_gives_the_same_tokens_at_any_batch_size(prompts, batch_size, seed):
    sampling = Sampling(temperature=1.3, top_k=20, top_p=0.95, repetition_penalty=1.2, seed=seed)
    together = generate(FakeRunner(), prompts, GenerateOptions(max_new_tokens=5, batch_size=batch_size, sampling=sampling))
    for index, prompt in enumerate(prompts):
        alone = generate(FakeRunner(), [prompt], GenerateOptions(max_new_tokens=5, sampling=sampling), indices=[index])
        assert alone[0].token_ids == together[index].token_ids


def test_equal_prompts_draw_differently_by_their_number():
    sampling = Sampling(temperature=2.0)
    results = generate(FakeRunner(), [[1, 2]] * 6, GenerateOptions(max_new_tokens=8, sampling=sampling))
    assert len({tuple(r.token_ids) for r in results}) > 1


def test_a_freed_row_goes_to_the_next_prompt_at_once():
    """Rows hold 2; prompts end after different counts. No step may run with a row idle while a prompt waits."""
    runner = FakeRunner()
    prompts = [[i] for i in range(8)]
    eos = tuple(by_hand([0], 1) + by_hand([3], 2)[-1:] + by_hand([5], 3)[-1:])
    results = generate(runner, prompts, GenerateOptions(max_new_tokens=6, batch_size=2, eos_ids=eos))
    tokens = sum(len(r.token_ids) for r in results)
    idle = 2 * len(runner.batches) - tokens  # rows without a sequence, over all steps
    assert idle <= 6  # only at the end, when nothing waits
    assert any(len(set(batch.positions.tolist())) > 1 for batch in runner.batches)  # a prompt beside a later token


def test_no_padding():
    runner = FakeRunner()
    generate(runner, [[1] * 3, [2] * 8, [3]], GenerateOptions(max_new_tokens=4))
    assert [len(batch.tokens) for batch in runner.batches] == [12, 3, 3, 3]
    assert [len(batch.outputs) for batch in runner.batches] == [3, 3, 3, 3]


def test_text_streams_by_prompt_and_adds_up():
    class Letters:
        def token_bytes(self, token):
            return bytes([97 + token % 26])

    pieces: dict[int, str] = {}
    options = GenerateOptions(max_new_tokens=9, batch_size=2, stop=("zz", "a"))
    results = generate(FakeRunner(), [[1], [2], [3]], options, Letters(), lambda i, text: pieces.update({i: pieces.get(i, "") + text}))
    for result in results:
        assert pieces.get(result.index, "") == result.text
        whole = "".join(chr(97 + t % 26) for t in result.token_ids)
        assert whole.startswith(result.text) and "a" not in result.text
        assert (result.finish_reason == "stop") == ("a" in whole or "zz" in whole)


def test_nothing_to_do_is_done():
    assert generate(FakeRunner(), [], GenerateOptions()) == []
    assert Timing.of([]) == Timing(0.0, 0.0, 0.0)


def test_timing_counts_steps_not_prompts():
    results = generate(FakeRunner(), [[1, 2]], GenerateOptions(max_new_tokens=3))
    results[0].token_times = [0.5, 0.6, 0.9]
    timing = Timing.of(results)
    assert timing.first_token_ms == 500 and timing.token_ms == pytest.approx(200) and timing.tokens_per_s == pytest.approx(3 / 0.9)


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([], "is empty"),
        ([1, VOCAB], f"token id {VOCAB} is outside the vocabulary of {VOCAB}"),
        ([-1], "token id -1 is outside"),
        ([0] * 17, "17 tokens are more than the model's 16 positions"),
        ([0] * 13, "--max-new-tokens can be 3 at most"),
    ],
)
def test_prompts_that_cannot_be_continued(prompt, message):
    with pytest.raises(UserError, match="second") as caught:
        check_prompts(tiny_config(max_positions=16), [[1], prompt], 4, ["first", "second"])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_last_position_can_be_filled():
    results = generate(FakeRunner(max_positions=16), [[1] * 12], GenerateOptions(max_new_tokens=4))
    assert len(results[0].token_ids) == 4


def test_check_nan_names_prompt_and_step():
    class Broken(FakeRunner):
        def forward(self, batch, cache):
            logits = super().forward(batch, cache)
            if len(self.batches) == 3:
                logits[1, 5] = -np.inf  # never the largest: only --check-nan sees it
            return logits

        def first_not_finite(self, batch, cache):
            return f"a pass of {len(batch.tokens)} tokens"

    options = GenerateOptions(max_new_tokens=4, check_nan=True)
    with pytest.raises(UserError, match="prompt 2 .*new token 3, first in a pass of 2 tokens"):
        generate(Broken(), [[1], [2]], options)
    generate(Broken(), [[1], [2]], GenerateOptions(max_new_tokens=4))


@pytest.mark.parametrize("wrong", [{"max_new_tokens": 0}, {"batch_size": 0}, {"batch_size": -3}])
def test_wrong_options_name_their_flag(wrong):
    with pytest.raises(UserError, match="--" + next(iter(wrong)).replace("_", "-")):
        GenerateOptions(**wrong)
