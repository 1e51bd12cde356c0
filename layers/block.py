"""One transformer layer, in the three orders that models use. `reduce` sums over tensor-parallel ranks.

    pre-norm     x += reduce(attention(norm1 x));  x += reduce(ffn(norm2 x))
    parallel     x += reduce(attention(norm1 x) + ffn(norm2 x))                  one all-reduce a layer instead of two
    post-norm    x = norm1(x + reduce(attention x));  x = norm2(x + reduce(ffn x))

With one rank (`reduce` None) nothing stands between a GeMM and its residual, so the GeMM adds to it itself.
"""

from __future__ import annotations

from collections.abc import Callable

from l1_kernels.device import Device
from l1_kernels.weight import Array
from layers.attention import Attention
from layers.config import ModelConfig
from layers.kv_cache import LayerCache
from layers.norm import apply_norm, norm_args
from layers.protocols import FeedForward, Reduce
from layers.step import Step
from layers.weights import LayerWeights


class Block:
    """One layer on one rank, built with its `ffn` (dense, or a mixture of experts) and its `reduce`."""

    def __init__(self, config: ModelConfig, device: Device, attention: Attention, ffn: FeedForward, reduce: Reduce | None) -> None:
        self.config = config
        self.kernels = device.kernels
        self.regions = device.regions
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
        out = weights.attn_out
        mixed = self.attention(x, norm_args(self.config, weights.attn_norm), weights, step, cache)
        x = self._add(x, lambda residual: self.regions.linear_add(mixed, out.weight, out.bias, residual))
        before = norm_args(self.config, weights.ffn_norm)
        return self._add(x, lambda residual: self.ffn(x, before, weights, residual))

    def _parallel(self, x: Array, weights: LayerWeights, step: Step, cache: LayerCache) -> Array:
        up, down, out = weights.ffn_up, weights.ffn_down, weights.attn_out
        assert up is not None and down is not None  # ModelConfig: no mixture of experts here
        first = norm_args(self.config, weights.attn_norm)
        second = first if self.config.shared_norm else norm_args(self.config, weights.ffn_norm)
        qkv, hidden = self.regions.norm_pair(
            x, (first, second), (weights.qkv.weight, weights.qkv.bias), (up.weight, up.bias), self.config.activation, self.config.gated_ffn
        )
        mixed = self.attention.mix(qkv, weights, step, cache)
        pair = ((out.weight, out.bias), hidden, (down.weight, down.bias))
        return self._add(x, lambda residual: self.regions.linear_add_pair(mixed, *pair, residual))

    def _post_norm(self, x: Array, weights: LayerWeights, step: Step, cache: LayerCache) -> Array:
        out = weights.attn_out
        mixed = self.attention(x, None, weights, step, cache)
        x = self._add(x, lambda residual: self.regions.linear_add(mixed, out.weight, out.bias, residual))
        x = apply_norm(self.kernels, self.config, x, weights.attn_norm)
        y = self._add(x, lambda residual: self.ffn(x, None, weights, residual))
        return apply_norm(self.kernels, self.config, y, weights.ffn_norm)

    def _add(self, x: Array, part: Callable[[Array | None], Array]) -> Array:
        """x += the part of every rank. `part(residual)` adds to the residual, or with None gives this rank's part."""
        return part(x) if self.reduce is None else self.reduce.add(x, part(None))
