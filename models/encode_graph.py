"""An encoder's passes as graphs: the host fills ids, replays, reads hidden states; one launch from Python a pass.

    fields int32 [5, T] on the device     tokens | rows | positions | ends | types      of a packed pass, layers/batch.py
                                          [the n tokens of the texts | T - n idle ones]

A graph has a fixed number of tokens T, so there is one for each bucket of T, recorded when first needed, and a pass takes the
smallest that holds it. Texts of any lengths share a bucket: whose a token is and what it sees is in the fields.

An idle token must harm nobody. All of them are token 0 at place 0 of a cache row that no text has, and see that place alone: they
write the same numbers there, and nobody else reads them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from layers.batch import Batch
from layers.step import Step
from models.recording import capture, record_together

if TYPE_CHECKING:
    from models.runner import Runner

TOKENS, ROWS, POSITIONS, ENDS, TYPES = range(5)
LEAST = 16  # tokens of the smallest bucket


def bucket(num_tokens: int) -> int:
    """T for a pass of so many tokens: a power of two or three quarters of one, so at most half as much again from 16 on."""
    power = max(LEAST, 1 << (num_tokens - 1).bit_length())
    return power * 3 // 4 if power > LEAST and num_tokens <= power * 3 // 4 else power


class EncodeGraph:
    """The pass of one bucket."""

    def __init__(self, runner: Runner, cache: Any, size: int) -> None:
        self._runner, self._cache, self.size = runner, cache, size
        self._fields = runner.device.zeros((5, size), np.int32)
        self._graph: Any = None

    def fill(self, batch: Batch) -> None:
        """The next replay is of these texts."""
        count = len(batch.tokens)
        fields = np.zeros((5, self.size), np.int32)
        fields[ROWS] = self._cache.num_rows - 1
        fields[ENDS] = 1
        for field, values in ((TOKENS, batch.tokens), (ROWS, batch.rows), (POSITIONS, batch.positions), (ENDS, batch.ends)):
            fields[field, :count] = values
        if batch.types is not None:
            fields[TYPES, :count] = batch.types
        self._fields[...] = self._runner.device.to_device(fields)

    def record(self) -> None:
        """After a `fill`: the pass runs at this."""
        self._graph = capture(self._runner.device, self._runner.collective, self._pass)

    def _pass(self) -> tuple[Any, Any]:
        fields, rotary = self._fields, self._runner.rotary
        turned = None if rotary is None else rotary.at(fields[POSITIONS])
        return self._runner.encode(Step(fields[TOKENS], fields[ROWS], fields[POSITIONS], fields[ENDS], turned, fields[TYPES]), self._cache)

    def replay(self) -> tuple[Any, Any]:
        """What `Runner.encode` gives, [T, D] each, overwritten by the next replay."""
        return self._graph.replay()


class EncodeGraphs:
    """All passes of up to `num_texts` texts of up to `context` tokens each. `recording_s`: seconds that went into recording."""

    def __init__(self, runner: Runner, num_texts: int, context: int) -> None:
        """Ask runner.graph_problem() first."""
        self.runner = runner
        self.cache = runner.new_cache(num_texts + 1, context)  # the last row is the idle tokens'
        self.num_texts = num_texts
        self.recording_s = 0.0
        self.failure: str | None = None  # why recording failed; then passes run without a graph
        self._graphs: dict[int, EncodeGraph] = {}

    def hidden(self, batch: Batch) -> Any:
        """As `Runner.hidden`: last hidden states float32 [n, D] on the device; valid until the next pass."""
        graph = self.graph_of(batch)
        return self.runner.hidden(batch, self.cache) if graph is None else graph.replay()[1][: len(batch.tokens)]

    def forward(self, batch: Batch) -> Any:
        """As `Runner.forward`: logits float32 [len(batch.outputs), V]. The head is outside of the graph: masks differ in number."""
        graph = self.graph_of(batch)
        if graph is None:
            return self.runner.forward(batch, self.cache)
        return self.runner.head(graph.replay()[0][self.runner.device.to_device(batch.outputs)])

    def graph_of(self, batch: Batch) -> EncodeGraph | None:
        """The graph of the batch's bucket, filled with it; None where it cannot be recorded."""
        self.runner.check(batch, self.cache)
        if int(batch.rows.max()) >= self.num_texts:
            raise ValueError(f"batch: text {int(batch.rows.max())} of a pass of {self.num_texts}")
        size = bucket(len(batch.tokens))
        if self.failure is None and size not in self._graphs:
            self._record(size, batch)
        if self.failure is not None:
            return None
        graph = self._graphs[size]
        graph.fill(batch)
        return graph

    def _record(self, size: int, batch: Batch) -> None:
        start = time.perf_counter()
        graph = EncodeGraph(self.runner, self.cache, size)
        graph.fill(batch)
        self.failure = record_together(self.runner.collective, graph.record)
        if self.failure is None:
            self._graphs[size] = graph
            self.recording_s += time.perf_counter() - start
