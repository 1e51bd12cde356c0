"""Passes that prompts begin in, as graphs: all layers are one launch from Python, where a layer of a short prompt is done by the GPU
before Python has launched the next one's kernels.

    fields int32 [4, T] on the device     tokens | rows | positions | ends       of a packed pass, layers/batch.py
                                          [the n tokens of the pass | the last one again, T - n times]

A graph for each bucket of T (encode_graph.py), recorded when a pass falls into it for the second time: a command with one prompt
has no use for it. The head is outside, for passes want logits of different numbers of tokens. Long passes are the GPU's time
whatever launches them, and go without.

A token given again computes what the token does, and writes the same numbers to the same place of the cache.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from layers.batch import Batch
from layers.step import Step
from models.encode_graph import bucket
from models.recording import capture, record_together

if TYPE_CHECKING:
    from layers.kv_cache import KVCache
    from models.runner import Runner

TOKENS, ROWS, POSITIONS, ENDS = range(4)
MOST_TOKENS = 512


class PromptGraph:
    """The layers of one bucket's passes over one cache."""

    def __init__(self, runner: Runner, cache: KVCache, size: int) -> None:
        self._runner, self._cache, self.size = runner, cache, size
        self._fields = runner.device.zeros((4, size), np.int32)
        self._graph: Any = None

    def fill(self, batch: Batch) -> None:
        """The next replay is of these tokens."""
        fields = np.stack([batch.tokens, batch.rows, batch.positions, batch.ends])
        fields = np.pad(fields, ((0, 0), (0, self.size - fields.shape[1])), mode="edge")
        self._fields[...] = self._runner.device.to_device(np.ascontiguousarray(fields, np.int32))

    def record(self) -> None:
        """After a `fill`: the pass runs at this."""
        self._graph = capture(self._runner.device, self._runner.collective, self._pass)

    def _pass(self) -> Any:
        fields, rotary = self._fields, self._runner.rotary
        turned = None if rotary is None else rotary.at(fields[POSITIONS])
        return self._runner.layers(Step(fields[TOKENS], fields[ROWS], fields[POSITIONS], fields[ENDS], turned), self._cache)

    def replay(self) -> Any:
        """float32 [T, D], overwritten by the next replay."""
        return self._graph.replay()


class PromptGraphs:
    """All passes over one cache. `recording_s`: seconds that went into recording."""

    def __init__(self, runner: Runner, cache: KVCache) -> None:
        """Ask runner.graph_problem() first."""
        self.runner, self.cache = runner, cache
        self.recording_s = 0.0
        self.failure: str | None = None  # why recording failed; then passes run without a graph
        self._graphs: dict[int, PromptGraph | None] = {}  # None: one pass so far

    def forward(self, batch: Batch) -> Any:
        """As `Runner.forward`: logits float32 [len(batch.outputs), V]."""
        self.runner.check(batch, self.cache)
        graph = self._graph_of(batch)
        if graph is None:
            return self.runner.forward(batch, self.cache)
        x = graph.replay()
        np.maximum.at(self.cache.lengths, batch.rows, batch.ends)
        return self.runner.head(x[self.runner.device.to_device(batch.outputs)])

    def _graph_of(self, batch: Batch) -> PromptGraph | None:
        """The graph of the batch's bucket, filled with it, or None."""
        size = bucket(len(batch.tokens))
        if self.failure is not None or size > MOST_TOKENS or self.runner.graph_problem(size) is not None:
            return None
        if size not in self._graphs:
            self._graphs[size] = None
            return None
        graph = self._graphs[size]
        if graph is not None:
            graph.fill(batch)
            return graph
        start = time.perf_counter()
        graph = PromptGraph(self.runner, self.cache, size)
        graph.fill(batch)
        self.failure = record_together(self.runner.collective, graph.record)
        if self.failure is not None:
            return None
        self._graphs[size] = graph
        self.recording_s += time.perf_counter() - start
        return graph
