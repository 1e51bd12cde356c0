"""A sparse feed-forward layer by routing tables (paper, Section V-C): gate, tables, dispatch, experts, combine.

    x -- norm -- gate -- tables -- dispatch -- experts -- combine -- + residual        O(S k D) beside the experts' own products
     \\___ few tokens on a GPU: norm and gate in one launch, experts read x where it is ___/    4 launches: gate, up, down, combine

Over tensor-parallel ranks every rank holds a slice of each expert (of F), and gives its part of the sum, which the block's all-reduce completes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from l1_kernels.device import Device
from l1_kernels.regions import NormArgs, apply_norm_args
from l1_kernels.weight import Array
from l3_moe.experts import Experts, LoopExperts
from l3_moe.kernels import open_moe_kernels
from l3_moe.shared_expert import add_shared_expert
from l3_moe.tables import RoutingTables
from layers.border import Reader
from layers.config import ModelConfig
from layers.weights import LayerWeights, MoEWeights

if TYPE_CHECKING:
    from l3_moe.few_tokens import FewTokens


class TableMoE:
    """A `layers.protocols.FeedForward` for sparse layers."""

    def __init__(
        self, config: ModelConfig, device: Device, watched: Callable[[], AbstractContextManager[None]] = nullcontext,
        capacity_factor: float | None = None,
    ) -> None:  # fmt: skip
        """watched: around what waits for the device (`Collective.watched`). capacity_factor F: of S tokens an expert takes at most ceil(F k S / E); None: all."""
        assert config.moe is not None
        self.config, self.moe, self.device = config, config.moe, device
        self.kernels = device.kernels
        self.routing = open_moe_kernels(device)
        self.capacity_factor = capacity_factor
        loop = LoopExperts(config, device, watched)
        self.few: FewTokens | None = None
        self.experts: Experts = loop
        if device.name != "cpu":
            from l3_moe.few_tokens import open_few_tokens

            self.few = open_few_tokens(config, device, loop)
            self.experts = loop if self.few is None else self.few.experts

    def __call__(self, x: Array, norm: NormArgs | None, weights: LayerWeights, residual: Array | None) -> Array:
        moe = weights.moe
        assert moe is not None
        if norm is not None and self._takes_few(x.shape[0], moe):
            assert self.few is not None
            rows, tables, y = self.few(x, norm, moe)
        else:
            rows = apply_norm_args(self.kernels, x, norm)
            tables, dispatched = self.route(rows, moe)
            y = self.experts(dispatched, moe, tables.offsets)
        if moe.shared_up is not None:
            residual = add_shared_expert(self.config, self.device, x, norm, rows, moe, residual)
        return self.routing.combine(y, tables, residual)

    def add_norm(self, x: Array, norm: NormArgs | None, weights: LayerWeights, residual: Array, reader: Reader) -> tuple[Array, Array | None]:
        moe = weights.moe
        assert moe is not None
        dtype = self.device.regions.rows_dtype(x.shape[0], *reader.weights)
        if norm is None or dtype is None or not self._takes_few(x.shape[0], moe):
            return self(x, norm, weights, residual), None
        assert self.few is not None
        rows, tables, y = self.few(x, norm, moe)
        if moe.shared_up is not None:
            add_shared_expert(self.config, self.device, x, norm, rows, moe, residual)
        return residual, self.few.combine_norm(y, tables, residual, reader.norm, dtype)

    def tables(self, normed: Array, moe: MoEWeights) -> RoutingTables:
        """normed float32 [T, D] -> who goes where."""
        logits = self.kernels.linear(normed, moe.gate)
        return self.routing.tables(logits, self.moe.top_k, self.moe.softmax_first, self.moe.renormalise, self._capacity(normed.shape[0]))

    def route(self, normed: Array, moe: MoEWeights) -> tuple[RoutingTables, Array]:
        """`tables`, and normed dispatched by them, as the experts read it."""
        routed, dtype = self.moe, self.experts.rows_dtype(moe)
        return self.routing.route_rows(normed, moe.gate, routed.top_k, routed.softmax_first, routed.renormalise, dtype, self._capacity(normed.shape[0]))

    def _capacity(self, num_tokens: int) -> int | None:
        if self.capacity_factor is None:
            return None
        return max(1, math.ceil(self.capacity_factor * self.moe.top_k * num_tokens / self.moe.num_experts))

    def graph_problem(self, num_tokens: int, weights: LayerWeights) -> str | None:
        moe = weights.moe
        assert moe is not None
        few = self._takes_few(num_tokens, moe)
        return None if few or self.experts.on_device(num_tokens * self.moe.top_k, moe) else "the experts' rows are counted on the host"

    def _takes_few(self, num_tokens: int, moe: MoEWeights) -> bool:
        return self.few is not None and self.capacity_factor is None and self.few.takes(num_tokens, moe)


