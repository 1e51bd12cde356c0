"""Sampling against plain definitions: which tokens may come, how often, and that nothing but its name moves a random number."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from l1_kernels.errors import UserError
from models.sampling import Sampling, next_token, penalise, top_k, top_p, uniform

logits_lists = st.lists(st.sampled_from([-3.0, -1.5, 0.0, 0.25, 1.0, 2.0, 7.5]) | st.floats(-20, 20, width=32), min_size=1, max_size=60)


@given(logits_lists)
def test_greedy_takes_the_largest_and_of_equals_the_lowest_id(values):
    logits = np.array(values, np.float32)
    token = next_token(logits, (), Sampling(), 0, 0)
    assert logits[token] == logits.max() and not (logits[:token] == logits.max()).any()


@given(logits_lists, st.integers(0, 70))
def test_top_k_keeps_k_and_the_lowest_ids_of_equals(values, k):
    logits = np.array(values, np.float32)
    best_first = sorted(range(len(values)), key=lambda i: (-logits[i], i))
    assert list(top_k(logits, k)) == sorted(best_first[: k or len(values)])


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.floats(0.01, 0.999))
def test_top_p_is_the_smallest_set_that_reaches_p(weights, p):
    probabilities = np.array(weights) / sum(weights)
    kept = top_p(probabilities, p)
    assert probabilities[kept].sum() >= p - 1e-12
    rest = np.delete(probabilities, kept)
    assert rest.size == 0 or rest.max() <= probabilities[kept].min()
    assert len(kept) == 1 or probabilities[kept].sum() - probabilities[kept].min() < p + 1e-12


@settings(max_examples=30)
@given(st.integers(0, 2**64 - 1), st.integers(0, 50), st.integers(0, 50))
def test_a_random_number_has_a_name(seed, prompt, step):
    value = uniform(seed, prompt, step)
    assert 0 <= value < 1 and value == uniform(seed, prompt, step)
    assert len({value, uniform(seed ^ 1, prompt, step), uniform(seed, prompt + 1, step), uniform(seed, prompt, step + 1)}) == 4


def test_frequencies_follow_the_softmax():
    logits = np.array([1.0, 0.0, 2.0, -1.0, 2.0], np.float32)
    temperature, draws = 0.7, 20_000
    expected = np.exp(logits.astype(float) / temperature)
    expected /= expected.sum()
    counts = np.bincount([next_token(logits, (), Sampling(temperature=temperature, seed=5), 3, i) for i in range(draws)], minlength=5)
    assert np.abs(counts / draws - expected).max() < 4 * np.sqrt(0.25 / draws)


def test_top_k_and_top_p_bound_what_is_drawn():
    logits = np.log(np.array([0.05, 0.4, 0.1, 0.3, 0.15], np.float32))
    drawn = {next_token(logits, (), Sampling(temperature=1.0, top_k=3), 0, i) for i in range(400)}
    assert drawn == {1, 3, 4}
    drawn = {next_token(logits, (), Sampling(temperature=1.0, top_p=0.65), 0, i) for i in range(400)}
    assert drawn == {1, 3}
    assert {next_token(logits, (), Sampling(temperature=1.0, top_p=1e-9), 0, i) for i in range(50)} == {1}


def test_the_last_bit_of_a_logit_does_not_reorder_the_draw():
    """Other ranks, other order of summation: two equal logits differ by an ulp. The drawn tokens must not change places."""
    logits = np.zeros(8, np.float32)
    noisy = logits.copy()
    noisy[::2] += np.float32(1e-6)
    same = [next_token(logits, (), Sampling(temperature=1.0), 0, i) == next_token(noisy, (), Sampling(temperature=1.0), 0, i) for i in range(2000)]
    assert sum(same) >= 1999


def test_repetition_penalty_moves_seen_tokens_down_once():
    logits = np.array([2.0, -2.0, 1.5, 0.0], np.float32)
    assert penalise(logits, [0, 1, 0, 0], 2.0).tolist() == [1.0, -4.0, 1.5, 0.0]
    assert logits.tolist() == [2.0, -2.0, 1.5, 0.0]
    assert next_token(logits, [0], Sampling(repetition_penalty=2.0), 0, 0) == 2
    assert next_token(logits, [], Sampling(repetition_penalty=2.0), 0, 0) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_refused(bad, temperature):
    with pytest.raises(UserError, match="--dtype"):
        next_token(np.array([0.0, bad, 1.0], np.float32), (), Sampling(temperature=temperature), 0, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"top_k": -1}, {"top_p": 0.0},
        {"top_p": 1.5}, {"top_p": float("nan")}, {"repetition_penalty": 0.0}, {"repetition_penalty": float("nan")}, {"seed": -1}, {"seed": 2**64},
    ],
)  # fmt: skip
def test_wrong_settings_name_their_flag(wrong):
    flag = "--" + next(iter(wrong)).replace("_", "-")
    with pytest.raises(UserError, match=flag):
        Sampling(**wrong)
