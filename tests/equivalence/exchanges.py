"""Ranks that own different experts: the exchange that a case's runner goes through, and data-parallel groups that do not all have tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from l2_dense_parallel.mesh import Mesh
from l2_dense_parallel.open_collective import open_collective
from l2_dense_parallel.world import World
from l3_moe.exchange.open_exchange import open_exchange, watch_exchange
from l3_moe.expert_parallel import ExpertParallelMoE
from models.groups import groups_of, sparse_through
from models.runner import Runner


class Exchanges:
    """One for each number of experts, made when a case first needs it, by all ranks together."""

    def __init__(self, world: World, mesh: Mesh, device: Any, form: str, graph: bool) -> None:
        self.world, self.mesh, self.device, self.form, self.graph = world, mesh, device, form, graph
        self._between = open_collective(world, mesh, "dp")
        self._made: dict[int, Any] = {}

    def join(self, runner: Runner) -> Any:
        moe = runner.config.moe
        if moe is None or self.mesh.ep * self.mesh.es == 1:
            return runner
        if moe.num_experts not in self._made:
            self._made[moe.num_experts] = open_exchange(self.world, self.mesh, self.device, moe.num_experts, self.form)
        exchange = self._made[moe.num_experts]
        if exchange is None:
            return runner
        sparse_through(runner, ExpertParallelMoE(runner.config, self.device, exchange, runner.collective.watched))
        return runner if self.mesh.dp_rank == 0 or self.graph else EverySecond(runner)

    def watch(self, collective: Any) -> Any:
        return watch_exchange(self.world, self.mesh, self.device, collective)

    def groups(self, runner: Any) -> Any:
        """How the groups' steps go together where they are replays: all take the same tokens then."""
        return groups_of(runner, self._between)


class EverySecond:
    """A runner of another group: it has tokens in every second pass, the last sequence's alone, and serves in all. What it gives means nothing."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._turn = 0
        self._groups: Any = groups_of(runner, AnyOther())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def forward(self, batch: Any, cache: Any) -> np.ndarray:
        self._turn += 1
        if self._turn % 2:
            self._groups.idle()
        else:
            from layers.batch import Batch

            last = batch.rows == batch.rows[-1]
            self.runner.forward(Batch(batch.tokens[last], batch.rows[last], batch.positions[last], batch.ends[last], np.arange(1, dtype=np.int32)), cache)
        return np.zeros((len(batch.outputs), self.runner.config.vocab_size), np.float32)


class AnyOther:
    """A group of two, as far as `groups_of` asks."""

    size = 2
