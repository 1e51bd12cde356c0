"""What one forward pass computes: packed tokens of any number of sequences, and where each of them stands.

No padding anywhere: a prompt of 5 tokens beside one of 12 is 17 tokens, and a step of prompts and single tokens
together is a `Batch.join`. So a sequence in a batch is the same arithmetic as the sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Ids = Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True)
class Batch:
    """Host arrays, int32.

    tokens     [T]  ids
    rows       [T]  the cache row of each token's sequence; a sequence's tokens lie together, in order
    positions  [T]  place in the sequence, from 0
    ends       [T]  keys [.., ends) are visible: position + 1 if causal, the length in an encoder
    outputs    [n]  indices into T whose logits are wanted
    types      [T]  token types (encoders), or None
    """

    tokens: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    ends: np.ndarray
    outputs: np.ndarray
    types: np.ndarray | None = None

    @classmethod
    def prompts(cls, prompts: Sequence[Ids], rows: Sequence[int], all_logits: bool = False) -> Batch:
        """Whole causal prompts from position 0, one a row. Logits of each one's last token, or of every token."""
        lengths = [len(p) for p in prompts]
        if not lengths or min(lengths) == 0:
            raise ValueError("Batch.prompts: prompts must be given and none may be empty")
        positions = np.concatenate([np.arange(n) for n in lengths])
        last = np.cumsum(lengths) - 1
        return cls(
            tokens=_int32(np.concatenate([np.asarray(p) for p in prompts])),
            rows=_int32(np.repeat(np.asarray(rows), lengths)),
            positions=_int32(positions),
            ends=_int32(positions + 1),
            outputs=_int32(np.arange(sum(lengths)) if all_logits else last),
        )

    @classmethod
    def step(cls, tokens: Ids, rows: Ids, positions: Ids) -> Batch:
        """One more token of each row."""
        positions = _int32(positions)
        return cls(_int32(tokens), _int32(rows), positions, positions + 1, np.arange(len(positions), dtype=np.int32))

    @classmethod
    def encode(cls, texts: Sequence[Ids], types: Sequence[Ids] | None = None) -> Batch:
        """Whole texts for an encoder: each token sees all of its text. Logits of every token."""
        whole = cls.prompts(texts, range(len(texts)), all_logits=True)
        lengths = [len(t) for t in texts]
        kinds = None if types is None else _int32(np.concatenate([np.asarray(t) for t in types]))
        return cls(whole.tokens, whole.rows, whole.positions, _int32(np.repeat(lengths, lengths)), whole.outputs, kinds)

    @classmethod
    def join(cls, batches: Sequence[Batch]) -> Batch:
        """Several batches as one pass; their rows must differ. Outputs keep the order of the batches."""
        starts = np.cumsum([0, *(len(b.tokens) for b in batches[:-1])])
        tokens, rows, positions, ends = (
            np.concatenate([getattr(b, name) for b in batches]) for name in ("tokens", "rows", "positions", "ends")
        )
        outputs = _int32(np.concatenate([b.outputs + s for b, s in zip(batches, starts, strict=True)]))
        return cls(tokens, rows, positions, ends, outputs)

    def pass_lengths(self) -> np.ndarray:
        """[T] the length that each token's sequence has after this pass (dynamic rotary scaling reads it)."""
        longest = np.zeros(int(self.rows.max()) + 1, np.int32)
        np.maximum.at(longest, self.rows, self.ends)
        return longest[self.rows]


def _int32(x: Ids) -> np.ndarray:
    return np.ascontiguousarray(x, np.int32)
