"""A pipeline stage's token passes as graphs: one for each number of sequences, recorded when it first comes.

A stage waits on the host for what comes in, so a graph holds one pass of one stage: inputs are written into arrays that stay, and the pass is one
launch. On the host a replay is a call, and what this file does can be tested there.
"""

from __future__ import annotations

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
    """Over one cache. The runner must have no `step_problem`."""

    def __init__(self, runner: Runner, cache: Cache) -> None:
        self.runner, self.cache = runner, cache
        self._passes: dict[int, _Pass] = {}

    def __call__(self, batch: Batch, x: np.ndarray | None) -> Array:
        """Of a batch of one token a sequence: what the stage's last block gives, or on the last stage the logits; overwritten by the next call with
        as many sequences. x: from the stage before, on the host."""
        runner = self.runner
        runner.check(batch, self.cache)
        size = len(batch.tokens)
        if size not in self._passes:
            device = runner.device
            held = None if runner.stage.is_first else device.zeros((size, runner.config.hidden_size), np.float32)
            self._passes[size] = _Pass(device.zeros((4, size), np.int32), held)
        one = self._passes[size]
        self._fill(one, batch, x)
        if one.graph is None:
            one.graph = runner.device.capture(lambda: self._step(one))
            self._fill(one, batch, x)  # what was tried out while recording went over it
        np.maximum.at(self.cache.lengths, batch.rows, batch.ends)
        return one.graph.replay()

    def _fill(self, one: _Pass, batch: Batch, x: np.ndarray | None) -> None:
        upload: Any = self.runner.device.to_device
        one.numbers[...] = upload(np.stack([batch.tokens, batch.rows, batch.positions, batch.ends]))
        if one.x is not None:
            one.x[...] = upload(x)

    def _step(self, one: _Pass) -> Array:
        runner, numbers = self.runner, one.numbers
        rotary = None if runner.rotary is None else runner.rotary.at(numbers[POSITIONS])
        step = Step(numbers[TOKENS], numbers[ROWS], numbers[POSITIONS], numbers[ENDS], rotary, distinct=True)
        y = runner.layers(step, self.cache, one.x)
        return runner.head(y) if runner.stage.is_last else y
