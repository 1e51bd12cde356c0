"""`MoEKernels` on NumPy arrays: arguments are checked and outputs made here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from l1_kernels.kernels import Kernels
from l1_kernels.weight import CARRIER, Array, Weight, encode
from l3_moe.routing import check, cpu
from l3_moe.tables import RoutingTables

NO_LIMIT = (1 << 31) - 1


class CpuMoEKernels:
    _empty: Callable[..., np.ndarray] = staticmethod(np.empty)  # tests put one in its place that fills with NaN

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def tables(self, logits: Array, top_k: int, softmax_first: bool, renormalise: bool, capacity: int | None = None) -> RoutingTables:
        check.gate(logits, top_k, capacity)
        shape = (logits.shape[0], top_k)
        experts, share = self._empty(shape, np.int32), self._empty(shape, np.float32)
        cpu.choose(logits, softmax_first and not renormalise, experts, share)
        return self._sorted(experts, share, logits.shape[1], capacity)

    def tables_of(self, experts: Array, share: Array, num_experts: int, capacity: int | None = None) -> RoutingTables:
        check.choice(experts, share, num_experts, capacity)
        return self._sorted(experts, share, num_experts, capacity)

    def dispatch(self, x: Array, tables: RoutingTables, dtype: str) -> Array:
        check.dispatch(x, tables, dtype)
        rows = self._empty((tables.num_tokens * tables.top_k, x.shape[1]), CARRIER[dtype])
        cpu.gather(encode(x, dtype), tables.sources, tables.top_k, int(tables.offsets[-1]), rows)
        return rows

    def route_rows(
        self, x: Array, gate: Weight, top_k: int, softmax_first: bool, renormalise: bool, dtype: str, capacity: int | None = None
    ) -> tuple[RoutingTables, Array]:
        check.gated(x, gate, top_k, dtype, capacity)
        tables = self.tables(self.kernels.linear(x, gate), top_k, softmax_first, renormalise, capacity)
        return tables, self.dispatch(x, tables, dtype)

    def combine(self, y: Array, tables: RoutingTables, residual: Array | None) -> Array:
        check.combine(y, tables, residual)
        if residual is None:
            residual = self._empty((tables.num_tokens, y.shape[1]), np.float32)
            residual[...] = 0
        cpu.combine(y, tables.slots, tables.share, residual)
        return residual

    def _sorted(self, experts: Array, share: Array, num_experts: int, capacity: int | None) -> RoutingTables:
        slots, sources = self._empty(experts.shape, np.int32), self._empty((experts.size,), np.int32)
        offsets, dropped = self._empty((num_experts + 1,), np.int32), self._empty((1,), np.int32)
        limit = NO_LIMIT if capacity is None else min(capacity, NO_LIMIT)
        cpu.sort(experts.reshape(-1), limit, slots.reshape(-1), sources, offsets, dropped)
        return RoutingTables(experts, share, slots, sources, offsets, dropped)
