"""A sparse layer by one-hot einsums and experts at their capacity: the baseline that the paper's tables are compared with (benchmarks/fig7.py).

Every expert computes all the rows that it has room for, those of nobody too, and so every expert's weights are read in every pass. Routing is
einsum_baseline.py's; the experts' products are the same kernels that dense layers have, one expert after the other.
"""

from __future__ import annotations

import numpy as np

from l1_kernels.device import Device
from l1_kernels.regions import NormArgs, apply_norm_args
from l1_kernels.weight import Array
from l3_moe.einsum_baseline import EinsumRouting, capacity_of
from l3_moe.experts import matrix_of
from layers.border import Reader
from layers.config import ModelConfig
from layers.weights import LayerWeights

FACTOR = 1.25  # of the room for an even spread


class EinsumMoE:
    """A `layers.protocols.FeedForward`: fp16 weights on a GPU, fp32 on the CPU; no shared expert. What is beyond an expert's room is dropped."""

    def __init__(self, config: ModelConfig, device: Device, factor: float = FACTOR) -> None:
        assert config.moe is not None
        self.config, self.moe, self.device, self.factor = config, config.moe, device, factor
        self._routings: dict[int, EinsumRouting] = {}  # by the number of tokens

    def __call__(self, x: Array, norm: NormArgs | None, weights: LayerWeights, residual: Array | None) -> Array:
        moe, config, regions = weights.moe, self.config, self.device.regions
        assert moe is not None and moe.shared_up is None
        normed = apply_norm_args(self.device.kernels, x, norm)
        routing = self._routing(x.shape[0], moe.up.weight.dtype)
        shares, rows = routing.dispatch(normed, moe.gate)
        y = self.device.empty(rows.shape, rows.dtype)
        room = routing.capacity
        for expert in range(self.moe.num_experts):
            up, down = matrix_of(moe.up, expert), matrix_of(moe.down, expert)
            here = slice(expert * room, (expert + 1) * room)
            mine = rows[here] if rows.dtype == np.float32 else rows[here].view(np.uint16)
            hidden = regions.norm_feed_forward(mine, None, up.weight, up.bias, config.activation, config.gated_ffn)
            y[here] = regions.linear_add(hidden, down.weight, down.bias, None)
        return routing.combine(y, shares, self.device.zeros(x.shape, np.float32) if residual is None else residual)

    def add_norm(self, x: Array, norm: NormArgs | None, weights: LayerWeights, residual: Array, reader: Reader) -> tuple[Array, Array | None]:
        return self(x, norm, weights, residual), None

    def graph_problem(self, num_tokens: int, weights: LayerWeights) -> str | None:
        return None

    def _routing(self, num_tokens: int, dtype: str) -> EinsumRouting:
        if num_tokens not in self._routings:
            moe = self.moe
            room = capacity_of(num_tokens, moe.top_k, moe.num_experts, self.factor)
            self._routings[num_tokens] = EinsumRouting(self.device, moe.num_experts, moe.top_k, moe.softmax_first, moe.renormalise, dtype, room)
        return self._routings[num_tokens]
