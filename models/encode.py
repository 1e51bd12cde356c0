"""What an encoder is asked for: sentence embeddings, and the likeliest tokens at a text's masks.

    texts of ids -> packed passes -> hidden states [T, D] -> pooled over each text, L2-normalised -> [N, D]
                                  -> logits [masks, V]    -> the k likeliest tokens of each mask

A pass holds `batch_size` whole texts side by side without padding, so a text's result does not depend on its company.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from l1_kernels.errors import UserError
from layers.batch import Batch, Ids
from layers.config import ModelConfig

if TYPE_CHECKING:
    from models.tokenizer import Tokenizer

POOLINGS = ("mean", "cls")
TINY = 1e-12  # a hidden state of nothing but zeros stays one


class Encoder(Protocol):
    """What is asked of `models.runner.Runner`."""

    config: ModelConfig
    device: Any
    collective: Any

    def new_cache(self, num_rows: int, context: int) -> Any: ...

    def forward(self, batch: Batch, cache: Any) -> Any: ...

    def hidden(self, batch: Batch, cache: Any) -> Any: ...


class Passes(Protocol):
    """What is asked of `models.encode_graph.EncodeGraphs`: the runner's passes, over a cache of its own."""

    def forward(self, batch: Batch) -> Any: ...

    def hidden(self, batch: Batch) -> Any: ...


class PlainPasses:
    """Passes launched operation by operation; one cache for all: each writes a text's keys before it reads them."""

    def __init__(self, runner: Encoder, num_texts: int, context: int) -> None:
        self.runner, self.cache = runner, runner.new_cache(num_texts, context)

    def forward(self, batch: Batch) -> Any:
        return self.runner.forward(batch, self.cache)

    def hidden(self, batch: Batch) -> Any:
        return self.runner.hidden(batch, self.cache)


@dataclass(frozen=True, slots=True)
class SentenceSettings:
    """How the makers of a sentence encoder use it: tokens of a text that are read (None: all positions), and the pooling."""

    max_tokens: int | None = None
    pooling: str = "mean"


def sentence_settings(folder: Path) -> SentenceSettings:
    """From the files that sentence-transformers puts beside a checkpoint; the defaults where there are none. A pooling that
    is none of POOLINGS is given by its name in the file, for the caller to refuse."""
    limit = _read_json(folder / "sentence_bert_config.json").get("max_seq_length")
    pooling = _read_json(folder / "1_Pooling" / "config.json")
    chosen = [name for name, on in pooling.items() if name.startswith("pooling_mode_") and on is True]
    names = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    shown = "+".join(names.get(name, name) for name in chosen) or "mean"
    return SentenceSettings(limit if isinstance(limit, int) and limit > 0 else None, shown)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return {}
    except ValueError as error:
        raise UserError(f"{path}: not readable JSON ({error})") from None
    return found if isinstance(found, dict) else {}


def text_ids(tokenizer: Tokenizer, text: str, limit: int) -> tuple[list[int], bool]:
    """Ids with the special tokens around them, and whether the text had to be cut. A text of too many tokens loses its end,
    never its last special token."""
    ids = tokenizer.encode(text, special_tokens=True)
    if len(ids) <= limit:
        return ids, False
    tokenizer.backend.enable_truncation(limit)
    try:
        return tokenizer.encode(text, special_tokens=True), True
    finally:
        tokenizer.backend.no_truncation()


def embed(
    runner: Encoder, texts: Sequence[Ids], batch_size: int, pooling: str = "mean",
    on_batch: Callable[[int], None] | None = None, passes: Passes | None = None,
) -> np.ndarray:  # fmt: skip
    """Ids of each text (none may be empty) -> float32 [N, D] of length 1.

    pooling   "mean" over all of a text's tokens, special ones too; "cls": its first token's hidden state
    on_batch  called with the number of texts that are done
    passes    how passes of `pass_size(texts, batch_size)` run (default: `PlainPasses`)
    """
    found = np.empty((len(texts), runner.config.hidden_size), np.float32)
    passes = passes or PlainPasses(runner, *pass_size(texts, batch_size))
    for start in range(0, len(texts), batch_size):
        batch = Batch.encode(texts[start : start + batch_size])
        on_device = passes.hidden(batch)
        with runner.collective.watched():
            hidden = runner.device.to_host(on_device)
        found[start : start + batch_size] = pool(hidden, batch.rows, pooling)
        if on_batch is not None:
            on_batch(min(start + batch_size, len(texts)))
    return found


def pool(hidden: np.ndarray, rows: np.ndarray, pooling: str) -> np.ndarray:
    """hidden float32 [T, D] of texts that lie one after the other, rows [T] whose -> float32 [N, D] of length 1."""
    starts = np.flatnonzero(np.diff(rows, prepend=rows[0] - 1))
    if pooling == "cls":
        pooled = hidden[starts].astype(np.float64)
    elif pooling == "mean":
        pooled = np.add.reduceat(hidden, starts, axis=0, dtype=np.float64)  # the length goes out in the next line
    else:
        raise ValueError(f"pool: pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
    return (pooled / np.maximum(np.linalg.norm(pooled, axis=1, keepdims=True), TINY)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Mask:
    """One masked place of a text, and its likeliest tokens, best first: (id, probability)."""

    position: int
    tokens: list[tuple[int, float]]


def fill_masks(
    runner: Encoder, texts: Sequence[Ids], mask_id: int, top_k: int, batch_size: int, passes: Passes | None = None
) -> list[list[Mask]]:
    """The `top_k` likeliest tokens at every `mask_id` of every text. The model must have a masked-LM head. passes: as `embed`'s."""
    found: list[list[Mask]] = []
    passes = passes or PlainPasses(runner, *pass_size(texts, batch_size))
    for start in range(0, len(texts), batch_size):
        whole = Batch.encode(texts[start : start + batch_size])
        batch = replace(whole, outputs=np.flatnonzero(whole.tokens == mask_id).astype(np.int32))
        of_texts: list[list[Mask]] = [[] for _ in texts[start : start + batch_size]]
        if len(batch.outputs):
            on_device = passes.forward(batch)
            with runner.collective.watched():
                logits = np.asarray(runner.device.to_host(on_device))
            for index, row in zip(batch.outputs, logits, strict=True):
                of_texts[batch.rows[index]].append(Mask(int(batch.positions[index]), likeliest(row, top_k)))
        found += of_texts
    return found


def likeliest(logits: np.ndarray, top_k: int) -> list[tuple[int, float]]:
    """logits [V] -> the top_k (id, probability), best first; the lower id first where two are equal."""
    order = np.argsort(-logits, kind="stable")[:top_k]
    shifted = np.exp(logits.astype(np.float64) - logits.max())
    return [(int(i), float(shifted[i] / shifted.sum())) for i in order]


def pass_size(texts: Sequence[Ids], batch_size: int) -> tuple[int, int]:
    """(texts of the largest pass, tokens of the longest text)."""
    return min(batch_size, max(1, len(texts))), max(map(len, texts), default=1)
