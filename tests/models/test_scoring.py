"""Scoring against its definition, on a model whose logits are a fixed function of the window's prefix."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import scoring
from models.scoring import negative_log_likelihoods, score, token_losses, window_logits, windows
from tests.models.fake_runner import VOCAB, FakeRunner, logits_after


def by_definition(ids, context):
    """Every token predicts the next; it sees its own window only."""
    losses = []
    for i in range(len(ids) - 1):
        row = logits_after(ids[i - i % context : i + 1]).astype(np.float64)
        losses.append(np.log(np.exp(row).sum()) - row[ids[i + 1]])
    return losses


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), min_size=1, max_size=3), st.integers(1, 9))
def test_every_token_predicts_the_next(texts, context):
    total, count = score(FakeRunner(), list(windows(texts, context)))
    losses = [loss for ids in texts for loss in by_definition(ids, context)]
    assert count == len(losses) == sum(len(ids) - 1 for ids in texts)
    assert total == pytest.approx(sum(losses), rel=1e-9)


def test_logits_are_kept_by_place():
    ids = list(range(11))
    kept = {}
    token_losses(FakeRunner(), list(windows([ids, [3, 4]], 4)), keep=kept)
    assert list(kept) == [(0, 0), (0, 4), (0, 8), (1, 0)]
    assert [len(kept[place]) for place in kept] == [4, 4, 3, 2]
    assert np.array_equal(kept[0, 8][2], logits_after([8, 9, 10]))


def test_a_long_window_in_chunks_is_the_same(monkeypatch):
    ids = list(range(20))
    whole = window_logits(FakeRunner(), ids)
    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", 3 * VOCAB)
    runner = FakeRunner()
    assert np.array_equal(window_logits(runner, ids), whole)
    assert [len(batch.tokens) for batch in runner.batches] == [3] * 6 + [2]


def test_large_logits_do_not_overflow():
    logits = np.array([[3e4, -3e4, 0.0], [0.0, 0.0, 0.0]], np.float32)
    assert negative_log_likelihoods(logits, [1, 2]) == pytest.approx([6e4, np.log(3)])
    assert negative_log_likelihoods(logits, [0]) == pytest.approx([0.0])
