"""A pipeline stage's token passes as graphs: one for each number of sequences, recorded when it first comes.

What comes in differs from pass to pass, so it is written into arrays that stay, in the order of the stream, and the pass is one launch. The host
waits for nothing but a recording. On the host a replay is a call, and what this file does can be tested there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from l1_kernels.device import Graph
from l1_kernels.weight import Array
from layers.batch import Batch
from layers.protocols import Cache
from layers.step import Step
from models.runner import Runner

TOKENS, ROWS, POSITIONS, ENDS = range(4)


@dataclass(slots=True)
class _Pass:
    """numbers int32 [4, n]: the tokens, rows, positions and ends; x float32 [n, D], None on the first stage."""

    numbers: Array
    x: Array | None
    graph: Graph[Array] | None = None


class StageGraphs:
    """Over one cache. The runner must have no `step_problem`. watched: around what waits for the device (Pipe.watched)."""

    def __init__(self, runner: Runner, cache: Cache, watched: Callable[[], AbstractContextManager] = nullcontext) -> None:
        self.runner, self.cache, self.watched = runner, cache, watched
        self._passes: dict[int, _Pass] = {}

    def __call__(self, batch: Batch, receive: Callable[[Array | None], None]) -> Array:
        """Of a batch of one token a sequence: what the stage's last block gives, or on the last stage the logits; overwritten by the next call with
        as many sequences. receive: called when all else is there; fills an array float32 [n, D] from the stage before (None: there is none)."""
        runner = self.runner
        runner.check(batch, self.cache)
        size = len(batch.tokens)
        if size not in self._passes:
            device = runner.device
            held = None if runner.stage.is_first else device.zeros((size, runner.config.hidden_size), np.float32)
            self._passes[size] = _Pass(device.zeros((4, size), np.int32), held)
        one = self._passes[size]
        numbers = np.stack([batch.tokens, batch.rows, batch.positions, batch.ends])
        one.numbers[...] = runner.device.to_device(numbers)
        receive(one.x)
        if one.graph is None:
            self._record(one)
        np.maximum.at(self.cache.lengths, batch.rows, batch.ends)
        return one.graph.replay()  # type: ignore[union-attr]

    def _record(self, one: _Pass) -> None:
        """The pass is tried out while it is recorded, and changes x; keys it writes are written again."""
        device = self.runner.device
        held = None if one.x is None else device.empty(one.x.shape, np.float32)
        if held is not None:
            held[...] = one.x
        arrived = device.event()
        arrived.record()
        with self.watched():  # what may be long in coming; the recording itself is this rank's own work (it compiles), which others wait for
            arrived.synchronize()
        one.graph = device.capture(lambda: self._step(one))
        if one.x is not None:
            one.x[...] = held

    def _step(self, one: _Pass) -> Any:
        runner, numbers = self.runner, one.numbers
        rotary = None if runner.rotary is None else runner.rotary.at(numbers[POSITIONS])
        step = Step(numbers[TOKENS], numbers[ROWS], numbers[POSITIONS], numbers[ENDS], rotary, distinct=True)
        y = runner.layers(step, self.cache, one.x)
        return runner.head(y) if runner.stage.is_last else y
