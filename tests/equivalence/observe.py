"""What one setting gives for one case: the arrays that golden.npz holds, computed by a runner.

Tokens are teacher-forced: each step is fed the reference's token, so that one near-tie does not end the comparison.
The caches are filled with NaN first: reading a slot that nothing wrote shows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from l1_kernels.weight import encode
from layers.batch import Batch
from layers.kv_cache import KVCache
from models.decode_graph import Decoder
from models.encode_graph import EncodeGraphs
from models.groups import OneGroup

Observation = dict[str, np.ndarray]


def observe(runner: Any, case: dict[str, Any], batch: str, graph: bool = False, groups: Any = None) -> Observation:
    """runner: models.runner.Runner (or the oracle). case: tests/conformance/check.py's dict. groups: models.groups.Groups, of a graph's steps."""
    if not runner.config.causal:
        return _encoder(runner, case, batch, graph)
    pads = [row[mask == 1] for row, mask in zip(case["pad_input_ids"], case["pad_attention_mask"], strict=True)]
    return {
        "logits": np.stack(_passes(runner, list(case["input_ids"]), batch)),
        "greedy_logits": _decode(runner, [case["input_ids"][0]], [case["greedy_tokens"]], batch, graph, groups)[0],
        "pad_logits": np.stack(_decode(runner, pads, list(case["pad_tokens"]), batch, graph, groups)),
        "ppl_nll": _nll(_passes(runner, [case["ppl_input_ids"]], batch)[0], case["ppl_input_ids"]),
    }


def _encoder(runner: Any, case: dict[str, Any], batch: str, graph: bool) -> Observation:
    """Padding goes in nowhere: each row's real tokens, laid back at the places that the goldens have them."""
    masks = case["attention_mask"] == 1
    texts = [row[mask] for row, mask in zip(case["input_ids"], masks, strict=True)]
    types = None
    if "token_type_ids" in case:
        types = [row[mask] for row, mask in zip(case["token_type_ids"], masks, strict=True)]
    groups = [[i] for i in range(len(texts))] if batch == "alone" else [list(range(len(texts)))]
    hidden, logits = np.zeros(case["last_hidden_state"].shape), np.zeros(case["mlm_logits"].shape)
    for group in groups:
        packed = Batch.encode([texts[i] for i in group], None if types is None else [types[i] for i in group])
        longest = max(len(texts[i]) for i in group)
        if graph:
            assert runner.graph_problem() is None
            graphs = EncodeGraphs(runner, len(group), longest)
            _poison(graphs.cache)
            h, y = _host(runner, graphs.hidden(packed)), _host(runner, graphs.forward(packed))
            assert graphs.failure is None
        else:
            h = _host(runner, runner.hidden(packed, _poisoned_cache(runner, len(group), longest)))
            y = _host(runner, runner.forward(packed, _poisoned_cache(runner, len(group), longest)))
        for row, i in enumerate(group):
            hidden[i, masks[i]] = h[packed.rows == row]
            logits[i, masks[i]] = y[packed.rows == row]
    return {"last_hidden_state": hidden, "mlm_logits": logits}


def _passes(runner: Any, sequences: list[np.ndarray], batch: str) -> list[np.ndarray]:
    """Logits [n, V] at every position of every sequence, in one pass or one pass each."""
    if batch == "alone":
        return [_passes(runner, [s], "together")[0] for s in sequences]
    rows = list(range(len(sequences)))[:: -1 if batch == "staggered" else 1]
    packed = Batch.prompts(sequences, rows, all_logits=True)
    cache = _poisoned_cache(runner, len(sequences), max(map(len, sequences)))
    logits = _host(runner, runner.forward(packed, cache))
    return np.split(logits, np.cumsum([len(s) for s in sequences])[:-1])


def _decode(runner: Any, prompts: list[np.ndarray], forced: list[np.ndarray], batch: str, graph: bool, groups: Any = None) -> list[np.ndarray]:
    """Logits [steps, V] that each of the forced tokens is chosen from, for every prompt."""
    if batch == "alone":
        return [_decode(runner, [p], [f], "together", graph, groups)[0] for p, f in zip(prompts, forced, strict=True)]
    delays = [i if batch == "staggered" else 0 for i in range(len(prompts))]  # prompt i joins in pass delays[i]
    rows = [len(prompts) - 1 - i if batch == "staggered" else i for i in range(len(prompts))]
    cache = _poisoned_cache(runner, len(prompts), max(len(p) + len(f) for p, f in zip(prompts, forced, strict=True)))
    found: list[list[np.ndarray]] = [[] for _ in prompts]
    replays = Replays(runner, cache, groups or OneGroup()) if graph else None
    while any(len(done) < len(f) for done, f in zip(found, forced, strict=True)):
        parts, owners = [], []
        for i, prompt in enumerate(prompts):
            if delays[i] > 0:
                delays[i] -= 1
            elif not found[i]:
                parts.append(Batch.prompts([prompt], [rows[i]]))
                owners.append(i)
            elif len(found[i]) < len(forced[i]):
                step = len(found[i]) - 1
                parts.append(Batch.step([forced[i][step]], [rows[i]], [len(prompt) + step]))
                owners.append(i)
        if replays is not None and all(found[owner] for owner in owners):
            logits = replays.logits(Batch.join(parts))
        else:
            logits = _host(runner, runner.forward(Batch.join(parts), cache))
        for owner, row in zip(owners, logits, strict=True):
            found[owner].append(row)
    return [np.stack(steps) for steps in found]


class Replays:
    """Steps of a graph, told where its sequences stand only when they are others than before: it must know itself."""

    def __init__(self, runner: Any, cache: KVCache, groups: Any) -> None:
        with groups.equal():
            assert runner.graph_problem() is None
        self._decoder = Decoder(runner, cache, groups=groups)
        self._next: tuple[list[int], list[int]] | None = None  # rows and positions

    def logits(self, batch: Batch) -> np.ndarray:
        tokens, rows, positions = (part.tolist() for part in (batch.tokens, batch.rows, batch.positions))
        if (rows, positions) == self._next:
            self._decoder.force(tokens)
        else:
            assert self._decoder.begin(tokens, rows, positions)
        turn = self._decoder.launch()
        logits = np.array(self._decoder.logits())
        assert self._decoder.read(turn) == logits.argmax(-1).tolist(), "the step chose other tokens than the largest"
        self._next = rows, (batch.positions + 1).tolist()
        return logits


def _nll(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    peak = logits.max(-1, keepdims=True)
    log_sum = (peak + np.log(np.exp(logits - peak).sum(-1, keepdims=True)))[:-1, 0]
    return np.array(np.mean(log_sum - logits[np.arange(len(ids) - 1), ids[1:]]))


def _poisoned_cache(runner: Any, rows: int, context: int) -> KVCache:
    cache = runner.new_cache(rows, context)
    _poison(cache)
    return cache


def _poison(cache: KVCache) -> None:
    for layer in [*cache.layers, *getattr(cache, "buffers", ())]:
        poison = encode(np.full(1, np.nan, np.float32), layer.dtype)[0]
        layer.k[...] = poison
        layer.v[...] = poison


def _host(runner: Any, array: Any) -> np.ndarray:
    return np.array(runner.device.to_host(array))
