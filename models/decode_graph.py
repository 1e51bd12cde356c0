"""Decode steps as graphs: the whole step, choice of the token included, is one launch from Python.

    host      fill . launch 0 . launch 1 . read 0 . launch 2 . read 1 ...      a step behind, so that the GPU never waits
    device           [embed .. layers .. head . choose] [embed .. layers .. head . choose] ...

A graph is bound to the addresses that it was recorded with: the cache's, and those of a bucket's slots (layers/decode.py).
So a `Decoder` belongs to one cache and holds one graph for each bucket of batch sizes, recorded when first needed.
On the host a "graph" calls the step again (l1_kernels/device.py): the same loop, where it can be tested.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from l1_kernels.sampling.slots import Draw
from layers.decode import RING, DecodeState, bucket
from models.groups import Groups, OneGroup
from models.prompt_graph import PromptGraphs
from models.recording import capture, record_together
from models.sampling import Sampling

if TYPE_CHECKING:
    from layers.kv_cache import KVCache
    from models.runner import Runner


class DecodeGraph:
    """The step of one bucket: from its slots to logits [B, V] and the slots' next tokens, chosen by `sampling`."""

    def __init__(self, runner: Runner, cache: KVCache, size: int, sampling: Sampling, groups: Groups) -> None:
        self._runner, self._cache, self._groups = runner, cache, groups
        self.state = state = DecodeState(
            runner.device, size, cache.num_rows, runner.limit(cache), 0 if sampling.repetition_penalty == 1.0 else runner.config.vocab_size
        )
        self._draw: Draw | None = None
        if not sampling.greedy:
            numbers = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty, sampling.seed)
            self._draw = Draw(*numbers, state.prompts, state.steps, state.seen)
        self._events = [runner.device.event() for _ in range(RING)]
        self._graph: Any = None
        self._logits: Any = None

    def record(self) -> None:
        """Records the step. It runs once or more at this: so the slots must be filled, to write what the first replay writes
        again, and be filled anew afterwards."""
        self._graph = capture(self._runner.device, self._runner.collective, self._step)

    def _step(self) -> Any:
        with self._groups.equal():
            logits = self._runner.decode(self.state.slots, self._cache)
        kernels = self._runner.device.kernels
        if self._draw is None:
            kernels.greedy(logits, self.state.slots)
        else:
            kernels.sample(logits, self.state.slots, self._draw)
        return logits

    def replay(self, turn: int) -> None:
        with self._runner.collective.watched():
            self._logits = self._graph.replay()
            self._events[turn % RING].record()

    def tokens(self, turn: int) -> np.ndarray:
        """int32 [B]: what step `turn` chose. Waits for it, not for later ones."""
        with self._runner.collective.watched():
            self._events[turn % RING].synchronize()
        return self.state.chosen(turn)

    def logits(self) -> np.ndarray:
        """float32 [B, V] of the last step, on the host. Waits for it."""
        with self._runner.collective.watched():
            return self._runner.device.to_host(self._logits)


class Decoder:
    """The decode steps of one cache; `prompts`: the passes that prompts begin in, over the same cache."""

    def __init__(self, runner: Runner, cache: KVCache, sampling: Sampling | None = None, groups: Groups | None = None) -> None:
        """Ask runner.graph_problem() first. sampling: how a step chooses tokens (default: the likeliest). groups: those that this one shares experts
        with; they call `begin` and `launch` together, over caches of as many rows."""
        self.runner, self.cache = runner, cache
        self.groups = groups or OneGroup()
        self.sampling = sampling or Sampling()
        self.prompts = PromptGraphs(runner, cache)
        self._recording_s = 0.0
        self.failure: str | None = None  # why recording failed; then steps must run without a graph
        self._graphs: dict[int, DecodeGraph] = {}
        self._graph: DecodeGraph | None = None
        self._rows = np.zeros(0, np.int32)
        self._lengths = np.zeros(0, np.int32)
        self._turn = 0

    def begin(
        self, tokens: Sequence[int], rows: Sequence[int], positions: Sequence[int],
        prompts: Sequence[int] = (), steps: Sequence[int] = (), seen: Sequence[Sequence[int]] = (), most: int = 1,
    ) -> bool:  # fmt: skip
        """Steps of these sequences follow, the first of which reads these tokens at these places (`DecodeState.fill`). False, with a warning on
        rank 0's standard error, where the step cannot be recorded. most: as many as any group has; a group that has none takes part with a slot."""
        if not rows:
            tokens, rows, positions = [0], [0], [0]
        if self.failure is None:
            self._graph = self._recorded(tokens, rows, positions, max(most, len(rows)))
        if self.failure is not None or self._graph is None:
            return False
        self._graph.state.fill(tokens, rows, positions, prompts, steps, seen)
        self._rows, self._lengths, self._turn = np.asarray(rows), np.asarray(positions), 0
        return True

    @property
    def recording_s(self) -> float:
        """Seconds that went into recording graphs."""
        return self._recording_s + self.prompts.recording_s

    def _recorded(self, tokens: Sequence[int], rows: Sequence[int], positions: Sequence[int], most: int) -> DecodeGraph | None:
        size = bucket(most, self.cache.num_rows)
        if size in self._graphs:
            return self._graphs[size]
        start = time.perf_counter()
        graph = DecodeGraph(self.runner, self.cache, size, self.sampling, self.groups)
        graph.state.fill(tokens, rows, positions)
        self.failure = record_together(self.runner.collective, graph.record)
        if self.groups.agree([self.failure is not None])[0]:
            self.failure = self.failure or "another data-parallel group cannot"
        if self.failure is not None:
            self.prompts.failure = self.failure  # no second try, and no second warning
            return None
        self._graphs[size] = graph
        self._recording_s += time.perf_counter() - start
        return graph

    def launch(self) -> int:
        """The next step, which reads the tokens that the last one chose (or `force`); does not wait. Returns its number."""
        assert self._graph is not None, "begin() comes first"
        turn = self._turn
        self._graph.replay(turn)
        self._turn += 1
        return turn

    def read(self, turn: int) -> list[int]:
        """The n tokens that step `turn` chose, -1 where its logits are no numbers. At most RING - 1 steps may be ahead of it."""
        assert self._graph is not None and turn < self._turn < turn + RING
        tokens = self._graph.tokens(turn)[: len(self._rows)].tolist()
        self.cache.lengths[self._rows] = np.minimum(self._lengths + turn + 1, self.cache.context)
        return tokens

    def logits(self) -> np.ndarray:
        """float32 [n, V] of the last step launched, on the host (with the penalty in them, where sampling has one)."""
        assert self._graph is not None
        return self._graph.logits()[: len(self._rows)]

    def force(self, tokens: Sequence[int]) -> None:
        """The next step reads these n tokens."""
        assert self._graph is not None
        self._graph.state.force(tokens)
