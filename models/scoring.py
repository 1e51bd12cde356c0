"""How well a model predicts given texts: mean negative log-likelihood a token (natural logarithm), and its logits.

A text's tokens are cut into windows of the model's context, one after the other; each window is read on its own, from
position 0. Every token predicts the next one of the text: a window's last predicts the next window's first, and the
last, shorter window counts too. So a text of n tokens has n - 1 predictions wherever the cuts fall.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from l1_kernels.errors import UserError
from layers.batch import Batch
from models.generate import Model, context_limit
from models.groups import Groups, OneGroup, serve

LOGITS_AT_ONCE = 1 << 26  # numbers (256 MiB): longer windows of large vocabularies go through the head in parts


@dataclass(frozen=True, slots=True)
class Window:
    """tokens [S] of text `text`, beginning at its token `start`; targets [S] are what follows each, one fewer at the text's end."""

    text: int
    start: int
    tokens: list[int]
    targets: list[int]


def windows(texts: Sequence[Sequence[int]], context: int) -> Iterator[Window]:
    for index, ids in enumerate(texts):
        for start in range(0, len(ids), context):
            yield Window(index, start, list(ids[start : start + context]), list(ids[start + 1 : start + context + 1]))


def negative_log_likelihoods(logits: np.ndarray, targets: Sequence[int]) -> np.ndarray:
    """logits float32 [S, V], targets [n <= S] -> -log softmax(logits[i])[targets[i]], float64 [n]."""
    rows = logits[: len(targets)].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    return np.log(np.exp(rows).sum(axis=1)) - rows[np.arange(len(targets)), np.asarray(targets, np.int64)]


def score(runner: Model, parts: Sequence[Window]) -> tuple[float, int]:
    """Sum of the negative log-likelihoods of these windows, and how many predictions it sums. Raises as `token_losses`."""
    losses = token_losses(runner, parts)
    return float(losses.sum()), len(losses)


def token_losses(
    runner: Model, parts: Sequence[Window], on_window: Callable[[Window], None] | None = None, keep: dict[tuple[int, int], np.ndarray] | None = None,
    groups: Groups | None = None,
) -> np.ndarray:  # fmt: skip
    """The negative log-likelihood of every prediction of these windows, in their order, float64 [n].

    on_window  called after each window
    keep       receives each window's logits float32 [S, V], under (text, start)
    groups     the data-parallel groups that this one shares experts with: they call this together, with windows or without
    Raises UserError where the logits are not numbers any more (a 16-bit dtype overflowed, or the checkpoint is broken).
    """
    found = [np.empty(0)]
    for window in parts:
        logits = window_logits(runner, window.tokens, groups)
        if keep is not None:
            keep[window.text, window.start] = logits
        losses = negative_log_likelihoods(logits, window.targets)
        if np.isnan(losses).any():
            raise UserError(f"the logits of text {window.text} became NaN in its tokens from {window.start}: try --dtype fp32 (or bf16)")
        found.append(losses)
        if on_window is not None:
            on_window(window)
    if groups is not None:
        serve(groups)
    return np.concatenate(found)


def change_of(losses: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """How far the mean of `losses` lies from that of `other`, and the standard error of that, both as shares of the mean of `other`.

    The same predictions, in the same order, by two ways of holding the weights: each token's losses are compared, so what both find
    hard cancels. A text is a sample. With n predictions the change is known to about its standard error, and no text of a few
    hundred tokens tells apart two dtypes whose changes differ by less. NaN where the mean of `other` is 0 or there is one prediction."""
    mean, differences = float(other.mean()), losses - other
    if mean == 0 or len(losses) < 2:
        return math.nan, math.nan
    return float(differences.mean()) / mean, float(differences.std(ddof=1)) / math.sqrt(len(losses)) / mean


def window_logits(runner: Model, tokens: Sequence[int], groups: Groups | None = None) -> np.ndarray:
    """Logits float32 [S, V] at every position of one sequence, on the host.

    A long window is read in chunks that go on in the same cache row. Dynamic rotary scaling depends on the length of the
    pass, so there the window is always one pass.
    """
    config = runner.config
    chunk = max(1, LOGITS_AT_ONCE // config.vocab_size)
    if config.rope is not None and config.rope.kind == "dynamic":
        chunk = len(tokens)
    cache = runner.new_cache(1, len(tokens))
    cache.lengths[0] = 0
    parts = []
    for start in range(0, len(tokens), chunk):
        ids = np.asarray(tokens[start : start + chunk], np.int32)
        positions = np.arange(start, start + len(ids), dtype=np.int32)
        (groups or OneGroup()).agree([1])
        batch = Batch(ids, np.zeros(len(ids), np.int32), positions, positions + 1, np.arange(len(ids), dtype=np.int32))
        found = runner.forward(batch, cache)
        with runner.collective.watched():
            parts.append(np.array(runner.device.to_host(found), np.float32))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


__all__ = ["Window", "change_of", "context_limit", "negative_log_likelihoods", "score", "token_losses", "window_logits", "windows"]
