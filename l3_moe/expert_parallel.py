"""A sparse feed-forward layer whose experts lie on several ranks (paper, Section V; `--ep`): TableMoE with an exchange between gate and experts.

    x -- norm -- gate --+-- dispatch ~~> experts of this rank ~~> collect --+-- this rank's part; the block adds up the tensor-parallel ranks'
                        +------------- shared expert, cut over tp ----------+

Three ways through, by what the ranks know:

    no exchange    PCC over one tensor-parallel group (dp = 1): every rank has every token, so each takes those of its own experts     a graph can hold it
    slots          every rank has T tokens, a step of a graph: slots.py                                                                a graph can hold it
    rows           any numbers of tokens: exactly the rows that are wanted go, their counts first                                      the gate's choice goes to the host
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np

from l1_kernels.device import Device
from l1_kernels.regions import NormArgs, apply_norm_args
from l1_kernels.weight import Array
from l3_moe.capacity import CappedMoE
from l3_moe.exchange.forms import RowExchange
from l3_moe.exchange.pcc import PCC
from l3_moe.exchange.slots import SlotExchange
from l3_moe.experts import LoopExperts
from l3_moe.shared_expert import add_shared_expert
from l3_moe.table_moe import TableMoE
from l3_moe.tables import RoutingTables
from layers.border import Reader
from layers.config import ModelConfig
from layers.weights import LayerWeights, MoEWeights


class ExpertParallelMoE:
    """A `layers.protocols.FeedForward` for sparse layers. weights.moe holds this rank's experts, and the whole gate."""

    def __init__(
        self, config: ModelConfig, device: Device, exchange: RowExchange, watched: Callable[[], AbstractContextManager[None]] = nullcontext,
        capacity_factor: float | None = None,
    ) -> None:  # fmt: skip
        """watched: around what waits for the device; capacity_factor: as TableMoE's, of the tokens of a data-parallel group."""
        self.config, self.device, self.exchange = config, device, exchange
        self.placement = exchange.placement
        self.watched = watched
        self.table = TableMoE(config, device, watched) if capacity_factor is None else CappedMoE(config, device, capacity_factor, watched)
        self.loop = LoopExperts(config, device, watched)
        self.slots = SlotExchange(exchange.hops["across"].peers, device) if isinstance(exchange, PCC) else None
        self._equal = False

    def __call__(self, x: Array, norm: NormArgs | None, weights: LayerWeights, residual: Array | None) -> Array:
        moe = weights.moe
        assert moe is not None
        rows = apply_norm_args(self.device.kernels, x, norm)
        tables = self.table.tables(rows, moe)
        if moe.shared_up is not None:
            residual = add_shared_expert(self.config, self.device, x, norm, rows, moe, residual)
        if self.slots is not None and (self._equal or self.slots.peers.size == 1):
            return self._by_slots(self.slots, rows, tables, moe, residual)
        with self.watched():
            experts = self.device.to_host(self._kept(tables))
        part = self._by_rows(rows, experts, tables.share, moe)
        return part if residual is None else self.device.kernels.add(residual, part)

    def add_norm(self, x: Array, norm: NormArgs | None, weights: LayerWeights, residual: Array, reader: Reader) -> tuple[Array, Array | None]:
        return self(x, norm, weights, residual), None

    def idle(self, weights: LayerWeights) -> None:
        """A pass of the others, in which this rank has no tokens: it serves theirs."""
        assert weights.moe is not None and self.config.moe is not None
        nothing = self.device.zeros((0, self.config.hidden_size), np.float32)
        share = self.device.zeros((0, self.config.moe.top_k), np.float32)
        self._by_rows(nothing, np.zeros((0, self.config.moe.top_k), np.int32), share, weights.moe)

    @contextmanager
    def equal_tokens(self) -> Iterator[None]:
        """Inside, every rank has as many tokens as every other: a graph's steps."""
        self._equal = True
        try:
            yield
        finally:
            self._equal = False

    def graph_problem(self, num_tokens: int, weights: LayerWeights) -> str | None:
        """Why a graph cannot hold a pass of so many tokens on every rank through this layer, or None."""
        if self.slots is None:
            return "--all-to-all flat and hierarchical count rows on the host"
        if self.slots.peers.size > 1 and not self._equal:
            return "data-parallel groups have different numbers of tokens"
        assert weights.moe is not None and self.config.moe is not None
        pairs = num_tokens * self.slots.peers.size * self.config.moe.top_k  # as many, though most are for other ranks
        return None if self.table.experts.on_device(pairs, weights.moe) else "the experts' rows are counted on the host"

    def _by_slots(self, slots: SlotExchange, rows: Array, tables: RoutingTables, moe: MoEWeights, residual: Array | None) -> Array:
        """rows [T, D], the same T on all ranks of the exchange."""
        arrived = slots.dispatch(rows, self._kept(tables), tables.share)
        routing, experts = self.table.routing, self.table.experts
        local = routing.tables_of(arrived.experts - np.int32(self.placement.first_expert), arrived.share, self.placement.owned)
        y = experts(routing.dispatch(arrived.x, local, experts.rows_dtype(moe)), moe, local.offsets)
        if slots.peers.size == 1:
            return routing.combine(y, local, residual)
        part = slots.collect(routing.combine(y, local, None))
        return part if residual is None else self.device.kernels.add(residual, part)

    def _by_rows(self, rows: Array, experts: np.ndarray, share: Array, moe: MoEWeights) -> Array:
        trip = self.exchange.dispatch(rows, experts)
        y = self.loop(trip.rows, moe, self.device.to_device(trip.offsets.astype(np.int32)))
        return self.exchange.collect(trip, y, share)

    def _kept(self, tables: RoutingTables) -> Array:
        """The gate's choice, -1 where the capacity dropped it."""
        if self.table.capacity_factor is None:
            return tables.experts
        return self.device.xp.where(tables.slots >= 0, tables.experts, np.int32(-1))
