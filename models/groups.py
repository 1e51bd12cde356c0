"""Data-parallel groups whose passes go together, because their tokens visit experts on each other's ranks.

    group 0    agree  pass  agree  pass  agree  pass  agree
    group 1    agree  pass  agree  idle  agree  idle  agree      its prompts have ended, and its experts still serve

Before each pass the groups say whether they have one; while any has, the others serve it (`ExpertParallelMoE.idle`). Groups with different numbers of
tokens, prompts beside single tokens, exchange as they are: counts go with the rows. Replays of a graph have no counts, so there all groups take as many
slots as the one with most sequences: inside `equal`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import numpy as np

from l2_dense_parallel.collectives import Collective
from l3_moe.capacity import CappedMoE
from l3_moe.expert_parallel import ExpertParallelMoE
from layers.protocols import FeedForward

if TYPE_CHECKING:
    from models.runner import Runner


class Groups(Protocol):
    shared: bool  # whether there are others

    def agree(self, mine: Sequence[int]) -> list[int]:
        """The largest of every group's, number by number. All groups call it together, between passes. On the host; the device goes on meanwhile."""
        ...

    def idle(self) -> None:
        """A pass of the others."""
        ...

    def equal(self) -> AbstractContextManager[None]:
        """Inside, all groups' passes are of the same number of tokens."""
        ...


class OneGroup:
    """No group but this, or none that it shares experts with."""

    shared = False

    def agree(self, mine: Sequence[int]) -> list[int]:
        return list(mine)

    def idle(self) -> None:
        raise AssertionError("the only group is idle, and there is a pass")

    def equal(self) -> AbstractContextManager[None]:
        return nullcontext()


class SharingGroups:
    shared = True

    def __init__(self, runner: Runner, moe: ExpertParallelMoE, between: Collective) -> None:
        """between: over host memory, the ranks with this one's tp rank, one of each group."""
        self._runner, self._moe, self._between = runner, moe, between

    def agree(self, mine: Sequence[int]) -> list[int]:
        everyones = self._between.all_gather(np.array([mine], np.float32))
        return everyones.reshape(-1, len(mine)).max(0).astype(int).tolist()

    def idle(self) -> None:
        for index, block in enumerate(self._runner.blocks):
            if block.ffn is self._moe:
                self._moe.idle(self._runner.weights.layer(index))

    def equal(self) -> AbstractContextManager[None]:
        return self._moe.equal_tokens()


def serve(groups: Groups) -> None:
    """This group has no more passes; its experts take part in the others'. Each of theirs begins with `agree([1])`."""
    while groups.agree([0])[0]:
        groups.idle()


def sparse_through(runner: Runner, moe: FeedForward) -> None:
    """The runner's sparse layers go through `moe`."""
    config, layers = runner.config, runner.stage.layers
    for layer, block in zip(layers, runner.blocks, strict=True):
        if config.is_moe(layer):
            block.ffn = moe


def visits(runner: Runner) -> tuple[int, int] | None:
    """(visits of experts that a capacity limit dropped, visits that were asked for) on this rank, or None without one."""
    for block in runner.blocks:
        table = block.ffn.table if isinstance(block.ffn, ExpertParallelMoE) else block.ffn
        if isinstance(table, CappedMoE):
            return table.counts()
    return None


def groups_of(runner: Runner, between: Collective) -> Groups:
    """How this rank's group goes together with the others. between: as SharingGroups'."""
    found = [block.ffn for block in runner.blocks if isinstance(block.ffn, ExpertParallelMoE)]
    return SharingGroups(runner, found[0], between) if found and between.size > 1 else OneGroup()
