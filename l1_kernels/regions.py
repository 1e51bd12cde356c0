"""Deep-Fusion (paper, Section III-B, Fig 1c): the regions that a transformer layer falls into, each meant to be one launch.

    1  norm_linear          norm + QKV GeMM + bias
    2  attend               rotary + cache write + attention: heads are independent, so nothing leaves a block
    3  linear_add           output GeMM + bias + residual
    4  norm_feed_forward    norm + GeMM + bias + activation
    5  linear_add           GeMM + bias + residual

and for layers whose attention and feed-forward run side by side (GPT-J, NeoX) the pairs: 1 with 4, 3 with 5, so three.
The tile-to-tile condition: two operations may share a region if each tile of the second needs only the tile of the first
that the same block made. A norm needs a whole row, so every block of a GeMM makes it again (the row is small, and lies in
the cache); a GeMM needs all of its input, so two GeMMs never share a region.

`UnfusedRegions` is the baseline, a launch for every operation, and what the CPU and the simulator run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from l1_kernels.kernels import Kernels
from l1_kernels.weight import Array, Weight


@dataclass(frozen=True, slots=True)
class NormArgs:
    """kind "layernorm" | "rmsnorm"; weight float32 [D]; bias float32 [D] or None."""

    kind: str
    weight: Array
    bias: Array | None
    eps: float


@dataclass(frozen=True, slots=True)
class RotaryArgs:
    """Tables float32 [P, r/2] and each token's row in them, int32 [T] (`Kernels.rotary`)."""

    cos: Array
    sin: Array
    index: Array
    interleaved: bool


@dataclass(frozen=True, slots=True)
class CacheArgs:
    """Where the keys and values of a step's tokens lie: caches [B, G, S, d] in the carrier of `dtype`, rows, positions and
    ends int32 [T] (`Kernels.write_kv`, `Kernels.attention`). `distinct`: no two tokens share a row (and each is its
    row's last: ends = positions + 1), so none reads what another one of the step writes. It is the caller's word: checking
    it would wait for the GPU. `mixed` may come in the carrier of `dtype`, which is what the output GeMM rounds its input to."""

    k: Array
    v: Array
    dtype: str
    rows: Array
    positions: Array
    ends: Array
    distinct: bool = False


class Regions(Protocol):
    """x is float32 [T, D]. What a region gives the next one (`hidden`, `mixed`) is its own affair: float32, or the carrier
    of the weights' dtype, [T, K]. `norm` None: x goes in as it is (post-norm models)."""

    def norm_linear(self, x: Array, norm: NormArgs | None, weight: Weight, bias: Array | None) -> Array:
        """norm(x) @ weight^T + bias -> float32 [T, N]."""
        ...

    def attend(
        self, qkv: Array, num_heads: int, rotary: RotaryArgs | None, cache: CacheArgs, window: int, scale: float, slopes: Array | None
    ) -> Array:
        """Turns queries and keys of qkv [T, H+2G, d], writes keys and values to the cache, attends -> mixed [T, H * d]."""
        ...

    def norm_feed_forward(self, x: Array, norm: NormArgs | None, weight: Weight, bias: Array | None, kind: str, gated: bool) -> Array:
        """activation(norm(x) @ weight^T + bias) -> hidden [T, F]; gated: weight is [2F, D], gate rows then up rows."""
        ...

    def linear_add(self, x: Array, weight: Weight, bias: Array | None, residual: Array | None) -> Array:
        """residual += x @ weight^T + bias, in place, and returned; residual None: the sum alone, float32 [T, N]."""
        ...

    def norm_pair(
        self, x: Array, norms: tuple[NormArgs | None, NormArgs | None], qkv: tuple[Weight, Array | None],
        up: tuple[Weight, Array | None], kind: str, gated: bool,
    ) -> tuple[Array, Array]:
        """norm_linear by norms[0] and norm_feed_forward by norms[1] of the same x -> (float32 [T, N], hidden [T, F])."""
        ...

    def linear_add_pair(
        self, mixed: Array, out: tuple[Weight, Array | None], hidden: Array, down: tuple[Weight, Array | None], residual: Array | None
    ) -> Array:
        """Both linear_adds into one residual."""
        ...

    def rows_dtype(self, num_tokens: int, *weights: Weight) -> str | None:
        """The 16-bit dtype in which norm_linear, norm_feed_forward or norm_pair by these weights take rows that are normed already, as x with
        norm None; None where they do not."""
        ...


class UnfusedRegions:
    """Every operation by itself."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def norm_linear(self, x: Array, norm: NormArgs | None, weight: Weight, bias: Array | None) -> Array:
        return self.kernels.linear(apply_norm_args(self.kernels, x, norm), weight, bias)

    def attend(
        self, qkv: Array, num_heads: int, rotary: RotaryArgs | None, cache: CacheArgs, window: int, scale: float, slopes: Array | None
    ) -> Array:
        kernels = self.kernels
        if rotary is not None:
            num_kv_heads = (qkv.shape[1] - num_heads) // 2
            kernels.rotary(qkv, num_heads + num_kv_heads, rotary.cos, rotary.sin, rotary.index, rotary.interleaved)
        kernels.write_kv(qkv, num_heads, cache.k, cache.v, cache.dtype, cache.rows, cache.positions)
        return kernels.attention(qkv, num_heads, cache.k, cache.v, cache.dtype, cache.rows, cache.ends, window, scale, slopes)

    def norm_feed_forward(self, x: Array, norm: NormArgs | None, weight: Weight, bias: Array | None, kind: str, gated: bool) -> Array:
        hidden = self.norm_linear(x, norm, weight, bias)
        return self.kernels.gate(hidden, kind) if gated else self.kernels.activate(hidden, kind)

    def linear_add(self, x: Array, weight: Weight, bias: Array | None, residual: Array | None) -> Array:
        y = self.kernels.linear(x, weight, bias)
        return y if residual is None else self.kernels.add(residual, y)

    def norm_pair(
        self, x: Array, norms: tuple[NormArgs | None, NormArgs | None], qkv: tuple[Weight, Array | None],
        up: tuple[Weight, Array | None], kind: str, gated: bool,
    ) -> tuple[Array, Array]:  # fmt: skip
        normed = apply_norm_args(self.kernels, x, norms[0])
        other = normed if norms[1] is norms[0] else apply_norm_args(self.kernels, x, norms[1])
        return self.kernels.linear(normed, *qkv), self.norm_feed_forward(other, None, *up, kind, gated)

    def linear_add_pair(
        self, mixed: Array, out: tuple[Weight, Array | None], hidden: Array, down: tuple[Weight, Array | None], residual: Array | None
    ) -> Array:
        total = self.linear_add(mixed, *out, residual)
        return self.linear_add(hidden, *down, total)

    def rows_dtype(self, num_tokens: int, *weights: Weight) -> str | None:
        return None


def apply_norm_args(kernels: Kernels, x: Array, norm: NormArgs | None) -> Array:
    """The norm by itself: x [T, D] -> [T, D]; None: x."""
    if norm is None:
        return x
    if norm.kind == "rmsnorm":
        return kernels.rms_norm(x, norm.weight, norm.eps)
    return kernels.layer_norm(x, norm.weight, norm.bias, norm.eps)
