"""One transformer layer, in the three orders that models use. `reduce` sums over tensor-parallel ranks.

    pre-norm     x += reduce(attention(norm1 x));  x += reduce(ffn(norm2 x))
    parallel     x += reduce(attention(norm1 x) + ffn(norm2 x))                  one all-reduce a layer instead of two
    post-norm    x = norm1(x + reduce(attention x));  x = norm2(x + reduce(ffn x))
"""

from __future__ import annotations

from l1_kernels.device import Device
from l1_kernels.weight import Array
from layers.attention import Attention, Step
from layers.config import ModelConfig
from layers.kv_cache import LayerCache
from layers.norm import apply_norm
from layers.protocols import FeedForward, Reduce
from layers.weights import LayerWeights, Norm


class Block:
    """One layer on one rank, built with its `ffn` (dense, or a mixture of experts) and its `reduce`."""

    def __init__(self, config: ModelConfig, device: Device, attention: Attention, ffn: FeedForward, reduce: Reduce) -> None:
        self.config = config
        self.kernels = device.kernels
        self.attention = attention
        self.ffn = ffn
        self.reduce = reduce

    def __call__(self, x: Array, weights: LayerWeights, step: Step, cache: LayerCache) -> Array:
        """x float32 [T, D], changed in place where the order allows it; returns the layer's output."""
        if self.config.parallel_residual:
            return self._parallel(x, weights, step, cache)
        if self.config.pre_norm:
            return self._pre_norm(x, weights, step, cache)
        return self._post_norm(x, weights, step, cache)

    def _pre_norm(self, x: Array, weights: LayerWeights, step: Step, cache: LayerCache) -> Array:
        attended = self.attention(self._norm(x, weights.attn_norm), weights, step, cache)
        x = self.kernels.add(x, self.reduce(attended))
        return self.kernels.add(x, self.reduce(self.ffn(self._norm(x, weights.ffn_norm), weights)))

    def _parallel(self, x: Array, weights: LayerWeights, step: Step, cache: LayerCache) -> Array:
        normed = self._norm(x, weights.attn_norm)
        attended = self.attention(normed, weights, step, cache)
        if not self.config.shared_norm:
            normed = self._norm(x, weights.ffn_norm)
        both = self.kernels.add(attended, self.ffn(normed, weights))
        return self.kernels.add(x, self.reduce(both))

    def _post_norm(self, x: Array, weights: LayerWeights, step: Step, cache: LayerCache) -> Array:
        x = self._norm(self.kernels.add(x, self.reduce(self.attention(x, weights, step, cache))), weights.attn_norm)
        return self._norm(self.kernels.add(x, self.reduce(self.ffn(x, weights))), weights.ffn_norm)

    def _norm(self, x: Array, weights: Norm | None) -> Array:
        assert weights is not None
        return apply_norm(self.kernels, self.config, x, weights)
