"""Attention of one layer: regions 1 and 2 of l1_kernels/regions.py, with the norms of queries and keys between them.

Shapes on a rank (docs/notation.md): H and G are its share of the heads.

    x [T, D] -> qkv [T, H + 2G, d] -> (q/k norm) -> rotary, cache [B, G, S, d], attention -> mixed [T, H d]

The block applies the out-projection, since the residual is added in the same region.
"""

from __future__ import annotations

from dataclasses import dataclass

from l1_kernels.device import Device
from l1_kernels.regions import CacheArgs, NormArgs
from l1_kernels.weight import Array
from layers.config import ModelConfig
from layers.kv_cache import LayerCache
from layers.protocols import Reduce
from layers.step import Step
from layers.weights import LayerWeights


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The heads that a tensor-parallel rank holds.

    first, count        query heads [first, first + count)
    kv_count            KV heads held
    kv_copies           on how many ranks each KV head lies (more than 1 where there are fewer KV heads than ranks)
    """

    first: int
    count: int
    kv_count: int
    kv_copies: int = 1


class Attention:
    """One layer's attention on one rank. Holds no weights and no state of a sequence."""

    def __init__(self, config: ModelConfig, layer: int, device: Device, heads: HeadShare, slopes: Array | None, reduce: Reduce) -> None:
        self.config = config
        self.device = device
        self.heads = heads
        self.slopes = slopes  # ALiBi, of this rank's heads
        self.reduce = reduce  # used only by a q/k norm that spans all ranks' heads
        self.window = config.window(layer)
        self.scale = config.scale(layer)

    def __call__(self, x: Array, norm: NormArgs | None, weights: LayerWeights, step: Step, cache: LayerCache) -> Array:
        """x [T, D] -> mixed [T, H * d], before the out-projection."""
        return self.mix(self.device.regions.norm_linear(x, norm, weights.qkv.weight, weights.qkv.bias), weights, step, cache)

    def mix(self, qkv: Array, weights: LayerWeights, step: Step, cache: LayerCache) -> Array:
        """The same from the fused projection, float32 [T, (H + 2G) d]."""
        heads = self.heads
        qkv = qkv.reshape(qkv.shape[0], heads.count + 2 * heads.kv_count, self.config.head_dim)
        self._norm_queries_and_keys(qkv, weights)
        place = CacheArgs(cache.k, cache.v, cache.dtype, step.rows, step.positions, step.ends, step.distinct)
        return self.device.regions.attend(qkv, heads.count, step.rotary, place, self.window, self.scale, self.slopes)

    def _norm_queries_and_keys(self, qkv: Array, weights: LayerWeights) -> None:
        kernels, heads, eps = self.device.kernels, self.heads, self.config.norm_eps
        if self.config.qk_norm == "head":
            kernels.head_norm(qkv, 0, heads.count, weights.q_norm, eps)
            kernels.head_norm(qkv, heads.count, heads.kv_count, weights.k_norm, eps)
        elif self.config.qk_norm == "span":
            # The norm runs over the heads of all ranks: one small all-reduce for both sums, [2, T].
            sums = self.device.xp.stack(
                [kernels.sum_squares(qkv, 0, heads.count), kernels.sum_squares(qkv, heads.count, heads.kv_count)]
            )
            sums = self.reduce(sums)
            width = self.config.head_dim
            # A KV head that lies on several ranks was summed that many times.
            total_kv = self.config.num_kv_heads * heads.kv_copies * width
            kernels.span_norm(qkv, 0, heads.count, sums[0], self.config.num_heads * width, weights.q_norm, eps)
            kernels.span_norm(qkv, heads.count, heads.kv_count, sums[1], total_kv, weights.k_norm, eps)
