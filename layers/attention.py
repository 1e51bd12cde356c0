"""Attention of one layer: fused QKV, norms and rotation of queries and keys, cache write, attention, out-projection.

Shapes on a rank (docs/notation.md): H and G are its share of the heads.

    x [T, D] -> qkv [T, H + 2G, d] -> (q/k norm) -> (rotary) -> cache [B, G, S, d] -> [T, H d] -> out [T, D], a part to be summed
"""

from __future__ import annotations

from dataclasses import dataclass

from l1_kernels.device import Device
from l1_kernels.weight import Array
from layers.config import ModelConfig
from layers.kv_cache import LayerCache
from layers.protocols import Reduce
from layers.rotary import RotaryStep
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


@dataclass(frozen=True, slots=True)
class Step:
    """A `Batch` on the device, the same for every layer of a pass. int32 [T] each."""

    rows: Array
    positions: Array
    ends: Array
    rotary: RotaryStep | None


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

    def __call__(self, x: Array, weights: LayerWeights, step: Step, cache: LayerCache) -> Array:
        kernels, heads = self.device.kernels, self.heads
        qkv = kernels.linear(x, weights.qkv.weight, weights.qkv.bias)
        qkv = qkv.reshape(x.shape[0], heads.count + 2 * heads.kv_count, self.config.head_dim)
        self._norm_queries_and_keys(qkv, weights)
        if step.rotary is not None and self.config.rope is not None:
            rope = step.rotary
            kernels.rotary(qkv, heads.count + heads.kv_count, rope.cos, rope.sin, rope.index, self.config.rope.interleaved)
        kernels.write_kv(qkv, heads.count, cache.k, cache.v, cache.dtype, step.rows, step.positions)
        mixed = kernels.attention(
            qkv, heads.count, cache.k, cache.v, cache.dtype, step.rows, step.ends, self.window, self.scale, self.slopes
        )
        return kernels.linear(mixed, weights.attn_out.weight, weights.attn_out.bias)

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
