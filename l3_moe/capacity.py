"""A sparse layer whose experts take at most ceil(F k S / E) of S tokens (`--capacity-factor F`), and how many visits were dropped.

No token is dropped by default: a model answers as it was trained to, whoever else is in the batch. A limit bounds the work of the fullest expert, and so of the
slowest rank. What is dropped adds nothing: the token goes on with what its other experts and the residual give it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from l1_kernels.device import Device
from l1_kernels.weight import Array
from l3_moe.table_moe import TableMoE
from l3_moe.tables import RoutingTables
from layers.config import ModelConfig
from layers.weights import MoEWeights


class CappedMoE(TableMoE):
    """Counts on the device, in a graph too; a graph's idle slots are tokens to it."""

    def __init__(
        self, config: ModelConfig, device: Device, capacity_factor: float, watched: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        super().__init__(config, device, watched, capacity_factor)
        self.watched = watched
        self._counts = device.zeros(2, np.int32)

    def tables(self, normed: Array, moe: MoEWeights) -> RoutingTables:
        return self._counted(super().tables(normed, moe))

    def route(self, normed: Array, moe: MoEWeights) -> tuple[RoutingTables, Array]:
        tables, dispatched = super().route(normed, moe)
        return self._counted(tables), dispatched

    def _counted(self, tables: RoutingTables) -> RoutingTables:
        self._counts[:1] += tables.dropped
        self._counts[1:] += np.int32(tables.experts.size)
        return tables

    def counts(self) -> tuple[int, int]:
        """(visits of experts that were dropped, visits that were asked for), of all layers and passes so far. Waits for the device."""
        with self.watched():
            dropped, asked = self.device.to_host(self._counts).tolist()
        return dropped, asked
