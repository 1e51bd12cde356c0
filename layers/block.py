"""One transformer layer, in the three orders that models use. `reduce` sums over tensor-parallel ranks.

    pre-norm     x += reduce(attention(norm1 x));  x += reduce(ffn(norm2 x))
    parallel     x += reduce(attention(norm1 x) + ffn(norm2 x))                  one all-reduce a layer instead of two
    post-norm    x = norm1(x + reduce(attention x));  x = norm2(x + reduce(ffn x))

With one rank (`reduce` None) nothing stands between a GeMM and its residual, so the GeMM adds to it itself. With more, the launch that sums a
few tokens adds to it, and may make the next norm too, this layer's second or the next layer's first (border.py). So may the last launch of a mixture
of experts.
"""

from __future__ import annotations

from collections.abc import Callable

from l1_kernels.device import Device
from l1_kernels.weight import Array
from layers.attention import Attention
from layers.border import Border, Reader
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

    def __call__(self, x: Array, weights: LayerWeights, step: Step, cache: LayerCache, border: Border | None = None) -> Array:
        """x float32 [T, D], changed in place where the order allows it; returns the layer's output. border: to the layers before and after."""
        if self.config.parallel_residual:
            return self._parallel(x, weights, step, cache, border or Border())
        if self.config.pre_norm:
            return self._pre_norm(x, weights, step, cache, border or Border())
        return self._post_norm(x, weights, step, cache)

    def first_reader(self, weights: LayerWeights) -> Reader | None:
        """The norm that this layer begins with, for the layer before to make."""
        if self.config.parallel_residual:
            if not self.config.shared_norm or weights.ffn_up is None:
                return None
            return Reader(norm_args(self.config, weights.attn_norm), (weights.qkv.weight, weights.ffn_up.weight))
        return Reader(norm_args(self.config, weights.attn_norm), (weights.qkv.weight,)) if self.config.pre_norm else None

    def _pre_norm(self, x: Array, weights: LayerWeights, step: Step, cache: LayerCache, border: Border) -> Array:
        out, up = weights.attn_out, weights.ffn_up
        start, norm = border.take(x, norm_args(self.config, weights.attn_norm))
        mixed = self.attention(start, norm, weights, step, cache)
        before = norm_args(self.config, weights.ffn_norm)
        reader = None if up is None else Reader(before, (up.weight,))  # a mixture of experts makes its norm itself
        x, border.rows = self._add(x, lambda residual: self.regions.linear_add(mixed, out.weight, out.bias, residual), reader)
        inner, norm = border.take(x, before)
        if self.reduce is None and border.following is not None:
            x, border.rows = self.ffn.add_norm(inner, norm, weights, x, border.following)
        else:
            x, border.rows = self._add(x, lambda residual: self.ffn(inner, norm, weights, residual), border.following)
        return x

    def _parallel(self, x: Array, weights: LayerWeights, step: Step, cache: LayerCache, border: Border) -> Array:
        up, down, out = weights.ffn_up, weights.ffn_down, weights.attn_out
        assert up is not None and down is not None  # ModelConfig: no mixture of experts here
        start, first = border.take(x, norm_args(self.config, weights.attn_norm))
        second = first if self.config.shared_norm else norm_args(self.config, weights.ffn_norm)
        qkv, hidden = self.regions.norm_pair(
            start, (first, second), (weights.qkv.weight, weights.qkv.bias), (up.weight, up.bias), self.config.activation, self.config.gated_ffn
        )
        mixed = self.attention.mix(qkv, weights, step, cache)
        pair = ((out.weight, out.bias), hidden, (down.weight, down.bias))
        x, border.rows = self._add(x, lambda residual: self.regions.linear_add_pair(mixed, *pair, residual), border.following)
        return x

    def _post_norm(self, x: Array, weights: LayerWeights, step: Step, cache: LayerCache) -> Array:
        out = weights.attn_out
        mixed = self.attention(x, None, weights, step, cache)
        x, _ = self._add(x, lambda residual: self.regions.linear_add(mixed, out.weight, out.bias, residual))
        x = apply_norm(self.kernels, self.config, x, weights.attn_norm)
        y, _ = self._add(x, lambda residual: self.ffn(x, None, weights, residual))
        return apply_norm(self.kernels, self.config, y, weights.ffn_norm)

    def _add(self, x: Array, part: Callable[[Array | None], Array], reader: Reader | None = None) -> tuple[Array, Array | None]:
        """x += the part of every rank; with it the norm of x that `reader` wants, in 16 bits, or None. `part(residual)` adds to the residual, or
        with None gives this rank's part."""
        if self.reduce is None:
            return part(x), None
        own = part(None)
        dtype = None if reader is None else self.regions.rows_dtype(x.shape[0], *reader.weights)
        if reader is None or dtype is None:
            return self.reduce.add(x, own), None
        return self.reduce.add_norm(x, own, reader.norm, dtype)
