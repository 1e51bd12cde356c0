"""The dense feed-forward: up, activation (gated or not), down. [T, D] -> [T, F] -> [T, D], a part to be summed."""

from __future__ import annotations

from l1_kernels.kernels import Kernels
from l1_kernels.weight import Array
from layers.config import ModelConfig
from layers.weights import LayerWeights, Linear


class DenseFeedForward:
    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        self.config = config
        self.kernels = kernels

    def __call__(self, x: Array, weights: LayerWeights) -> Array:
        assert weights.ffn_up is not None and weights.ffn_down is not None
        return feed_forward(self.kernels, self.config, x, weights.ffn_up, weights.ffn_down)


def feed_forward(kernels: Kernels, config: ModelConfig, x: Array, up: Linear, down: Linear) -> Array:
    """Also one expert's arithmetic (l3_moe)."""
    hidden = kernels.linear(x, up.weight, up.bias)
    hidden = kernels.gate(hidden, config.activation) if config.gated_ffn else kernels.activate(hidden, config.activation)
    return kernels.linear(hidden, down.weight, down.bias)
