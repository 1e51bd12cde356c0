"""A sparse layer of few tokens on a GPU: norm, gate and tables in one launch, and the experts' products where x lies.

    one token     pairs: its k experts, each a matrix-vector product by itself; pair (0, j) is row j
    more          active: every expert that has rows takes them together, so it is read once whoever shares it; rows are gathered, not dispatched
"""

from __future__ import annotations

import numpy as np

from l1_kernels.device import Device
from l1_kernels.regions import NormArgs
from l1_kernels.sbi_gemm.job import MAX_TOKENS
from l1_kernels.weight import Array
from l3_moe import gate
from l3_moe.combine_norm import combine_norm
from l3_moe.experts import LoopExperts
from l3_moe.sbi_experts import SbiExperts
from l3_moe.tables import RoutingTables
from layers.config import ModelConfig
from layers.weights import MoEWeights


class FewTokens:
    def __init__(self, config: ModelConfig, experts: SbiExperts) -> None:
        assert config.moe is not None
        self.moe = config.moe
        self.experts = experts
        self.kernels = experts.kernels
        # Made once: a graph reads them, and nothing writes them. Offsets are zeros: `combine` does not read them, and nothing else is given them.
        self._in_order = self.kernels.lasting(np.arange(self.moe.top_k, dtype=np.int32)).reshape(1, -1)
        self._nothing = self.kernels.lasting(np.zeros(self.moe.num_experts + 1, np.int32))

    def takes(self, num_tokens: int, weights: MoEWeights) -> bool:
        num_experts, size = weights.gate.shape
        pairs = num_tokens * self.moe.top_k
        return num_tokens <= MAX_TOKENS and weights.gate.dtype == "fp32" and gate.takes(size, num_experts, pairs) and self.experts.takes_few(num_tokens, weights)

    def __call__(self, x: Array, norm: NormArgs, weights: MoEWeights) -> tuple[Array, RoutingTables, Array]:
        """(the normed rows [T, D] as the experts read them, the tables that `combine` reads, y float32 [T * k, D])."""
        over_all = self.moe.softmax_first and not self.moe.renormalise
        dtype = self.experts.rows_dtype(weights)
        rows, experts, share, routes = gate.gate_few(self.kernels, x, norm, weights.gate, self.moe.top_k, over_all, dtype)
        if x.shape[0] == 1:
            slots, sources, y = self._in_order, self._in_order.reshape(-1), self.experts.pairs(rows, weights, experts)
        else:
            slots, sources, y = routes.slots, routes.sources, self.experts.active(rows, weights, routes)
        return rows, RoutingTables(experts, share, slots, sources, self._nothing, self._nothing[:1]), y


    def combine_norm(self, y: Array, tables: RoutingTables, residual: Array, norm: NormArgs, dtype: str) -> Array:
        """`combine` onto the residual, and the norm after it, in the 16 bits of `dtype`."""
        return combine_norm(self.kernels, y, tables.slots, tables.share, residual, norm, dtype)


def open_few_tokens(config: ModelConfig, device: Device, many: LoopExperts) -> FewTokens | None:
    """None where layers do not run as fused regions: the CPU, and the baselines."""
    from l1_kernels.fused_regions import FusedRegions

    regions = device.regions
    return FewTokens(config, SbiExperts(config, regions, many)) if isinstance(regions, FusedRegions) else None
