"""The dense feed-forward: up, activation (gated or not), down. [T, D] -> [T, F] -> [T, D]."""

from __future__ import annotations

from l1_kernels.device import Device
from l1_kernels.regions import NormArgs
from l1_kernels.weight import Array
from layers.border import Reader
from layers.config import ModelConfig
from layers.weights import LayerWeights


class DenseFeedForward:
    """A `layers.protocols.FeedForward`."""

    def __init__(self, config: ModelConfig, device: Device) -> None:
        self.config = config
        self.regions = device.regions

    def __call__(self, x: Array, norm: NormArgs | None, weights: LayerWeights, residual: Array | None) -> Array:
        up, down = weights.ffn_up, weights.ffn_down
        assert up is not None and down is not None
        hidden = self.regions.norm_feed_forward(x, norm, up.weight, up.bias, self.config.activation, self.config.gated_ffn)
        return self.regions.linear_add(hidden, down.weight, down.bias, residual)

    def add_norm(self, x: Array, norm: NormArgs | None, weights: LayerWeights, residual: Array, reader: Reader) -> tuple[Array, Array | None]:
        return self(x, norm, weights, residual), None

    def graph_problem(self, num_tokens: int, weights: LayerWeights) -> str | None:
        return None
