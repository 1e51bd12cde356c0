"""A model for the generation loop's own tests: each position's logits are a fixed function of all tokens up to it.

It keeps the tokens in its cache by (row, position), so a wrong row, position or order of outputs changes the text.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np

from layers.batch import Batch
from layers.config import ModelConfig

VOCAB = 37


def tiny_config(vocab_size: int = VOCAB, max_positions: int = 64) -> ModelConfig:
    return ModelConfig(
        family="fake", vocab_size=vocab_size, hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, ffn_size=8,
        max_positions=max_positions,
    )  # fmt: skip


class HostOnly:
    """Arrays stay where they are."""

    name = "cpu"

    def to_host(self, array):
        return array


class OneRank:
    rank, size = 0, 1

    def broadcast(self, value):
        return value

    def watched(self):
        return nullcontext()


class FakeCache:
    def __init__(self, num_rows: int, context: int) -> None:
        self.tokens = np.full((num_rows, context), -1)
        self.lengths = np.full(num_rows, 999)


def logits_after(prefix, vocab_size: int = VOCAB) -> np.ndarray:
    return np.random.default_rng([int(i) for i in prefix]).normal(size=vocab_size).astype(np.float32) * 3


class FakeRunner:
    def __init__(self, vocab_size: int = VOCAB, max_positions: int = 64) -> None:
        self.config = tiny_config(vocab_size, max_positions)
        self.device, self.collective = HostOnly(), OneRank()
        self.batches: list[Batch] = []

    def new_cache(self, num_rows: int, context: int) -> FakeCache:
        return FakeCache(num_rows, context)

    def forward(self, batch: Batch, cache: FakeCache) -> np.ndarray:
        self.batches.append(batch)
        for row, position, token in zip(batch.rows, batch.positions, batch.tokens, strict=True):
            if position == 0:
                assert cache.lengths[row] == 0, "the row was not handed over clean"
                cache.tokens[row] = -1
            cache.tokens[row, position] = token
        np.maximum.at(cache.lengths, batch.rows, batch.ends)
        out = []
        for index in batch.outputs:
            prefix = cache.tokens[batch.rows[index], : batch.ends[index]]
            assert (prefix >= 0).all(), "a position was skipped"
            out.append(logits_after(prefix, self.config.vocab_size))
        return np.stack(out)
