"""A sparse layer of few tokens on a GPU: norm, gate and top k in one launch, and each (token, expert) pair's products where its x lies.

No row is moved: pair (t, j) is row t * k + j, and the tables that `combine` reads say just that.
"""

from __future__ import annotations

import numpy as np

from l1_kernels.device import Device
from l1_kernels.regions import NormArgs
from l1_kernels.weight import Array
from l3_moe.experts import LoopExperts
from l3_moe.gate import gate_few, takes
from l3_moe.sbi_experts import SbiExperts
from l3_moe.tables import RoutingTables
from layers.config import ModelConfig
from layers.weights import MoEWeights

MOST_PAIRS = 256  # of any model: experts // 2 or PAIRS of them are taken (sbi_experts.py)


class FewTokens:
    def __init__(self, config: ModelConfig, experts: SbiExperts) -> None:
        assert config.moe is not None
        self.moe = config.moe
        self.experts = experts
        self.kernels = experts.kernels
        # Made once: a graph reads them, and nothing writes them.
        self._in_place = self.kernels.lasting(np.arange(MOST_PAIRS, dtype=np.int32))
        self._nobody = self.kernels.lasting(np.zeros(self.moe.num_experts + 1, np.int32))

    def takes(self, x: Array, norm: NormArgs | None, weights: MoEWeights) -> bool:
        num_pairs = x.shape[0] * self.moe.top_k
        gate = weights.gate
        return (
            norm is not None and gate.dtype == "fp32" and takes(gate.shape[1], gate.shape[0])
            and num_pairs <= MOST_PAIRS and self.experts.takes_pairs(num_pairs, weights)
        )  # fmt: skip

    def __call__(self, x: Array, norm: NormArgs | None, weights: MoEWeights) -> tuple[Array, RoutingTables, Array]:
        """(the normed rows [T, D] as the experts read them, the tables, y float32 [T * k, D])."""
        assert norm is not None
        over_all = self.moe.softmax_first and not self.moe.renormalise
        rows, experts, share = gate_few(self.kernels, x, norm, weights.gate, self.moe.top_k, over_all, self.experts.rows_dtype(weights))
        in_place = self._in_place[: experts.size]
        tables = RoutingTables(experts, share, in_place.reshape(experts.shape), in_place, self._nobody, self._nobody[:1])
        return rows, tables, self.experts.pairs(rows, weights, experts)


def open_few_tokens(config: ModelConfig, device: Device, many: LoopExperts) -> FewTokens | None:
    """None where layers do not run as fused regions: the CPU, and the baselines."""
    from l1_kernels.fused_regions import FusedRegions

    regions = device.regions
    return FewTokens(config, SbiExperts(config, regions, many)) if isinstance(regions, FusedRegions) else None
