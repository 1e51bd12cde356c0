"""The oracle's mixture of experts: for each expert its tokens, in float64, with no table in sight."""

from __future__ import annotations

import numpy as np

from l1_kernels.device import Device
from l1_kernels.regions import NormArgs, apply_norm_args
from l1_kernels.weight import Array
from layers.border import Reader
from layers.config import ModelConfig
from layers.weights import LayerWeights, Linear


class PlainMoE:
    """A `layers.protocols.FeedForward`."""

    def __init__(self, config: ModelConfig, device: Device) -> None:
        assert config.moe is not None
        self.config, self.moe, self.kernels = config, config.moe, device.kernels

    def __call__(self, x: Array, norm: NormArgs | None, weights: LayerWeights, residual: Array | None) -> Array:
        moe = weights.moe
        assert moe is not None
        x = apply_norm_args(self.kernels, x, norm)
        chosen, share = self.kernels.route(self.kernels.linear(x, moe.gate), self.moe.top_k, self.moe.softmax_first, self.moe.renormalise)
        out = np.zeros_like(x) if residual is None else residual
        for expert in range(self.moe.num_experts):
            tokens, choice = np.nonzero(chosen == expert)
            if len(tokens):
                out[tokens] += share[tokens, choice][:, None] * self._expert(x[tokens], _one(moe.up, expert), _one(moe.down, expert))
        if moe.shared_up is not None and moe.shared_down is not None:
            part = self._expert(x, moe.shared_up, moe.shared_down)
            out += part if moe.shared_gate is None else part / (1 + np.exp(-self.kernels.linear(x, moe.shared_gate)))
        return out

    def add_norm(self, x: Array, norm: NormArgs | None, weights: LayerWeights, residual: Array, reader: Reader) -> tuple[Array, Array | None]:
        return self(x, norm, weights, residual), None

    def _expert(self, x: Array, up: Linear, down: Linear) -> Array:
        hidden = self.kernels.linear(x, up.weight, up.bias)
        hidden = self.kernels.gate(hidden, self.config.activation) if self.config.gated_ffn else self.kernels.activate(hidden, self.config.activation)
        return self.kernels.linear(hidden, down.weight, down.bias)

    def graph_problem(self, num_tokens: int, weights: LayerWeights) -> str | None:
        return "it is an oracle"


def _one(stack: Linear, expert: int) -> Linear:
    return Linear(stack.weight[expert], None if stack.bias is None else stack.bias[expert])
