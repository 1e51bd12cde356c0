"""The operations of a transformer layer, as every device offers them.

Activations are float32, C-contiguous, in the device's memory; weights are `Weight`s. Tokens are packed: T tokens of
any number of sequences lie one after the other, without padding (docs/notation.md has the letters).
`qkv` is one buffer [T, H + 2G, d]: H query heads, then G key heads, then G value heads.
A sequence owns a row of the cache; `rows[t]` is token t's, `positions[t]` its place there, and it reads the keys
[max(0, ends[t] - window), ends[t]) of that row (window 0: from 0). A causal token has ends = position + 1, an
encoder's token has ends = length: one kernel serves both.

Three implementations: `cpu_kernels.CpuKernels` (NumPy and numba), `gpu_kernels.GpuKernels` (numba.cuda, on a GPU and on
the simulator), and the references in each operation's `reference.py`, which are float64-clean NumPy.
"""

from __future__ import annotations

from typing import Protocol

from l1_kernels.sampling.slots import Draw, Slots
from l1_kernels.weight import Array, Weight


class Kernels(Protocol):
    """Every operation checks its arguments and raises ValueError naming the bad one before anything runs."""

    def embed(self, table: Weight, ids: Array, first: int = 0) -> Array:
        """Rows of table [N, K] for ids int32 [T] -> float32 [T, K]. The table holds rows first..first+N of the whole
        one (a rank's slice of the vocabulary); an id outside gives zeros."""
        ...

    def layer_norm(self, x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
        """x [T, D] -> (x - mean) / sqrt(var + eps) * weight + bias."""
        ...

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """x [T, D] -> x / sqrt(mean(x^2) + eps) * weight."""
        ...

    def linear(self, x: Array, weight: Weight, bias: Array | None = None) -> Array:
        """x [T, K] @ weight [N, K]^T + bias [N] -> [T, N], summed in float32. On a GPU x is rounded to the weight's
        16-bit dtype first (it multiplies in it); on the CPU it is not. Where weight.act is "int8" x is rounded to int8 before,
        a scale a token (l1_kernels/quantize)."""
        ...

    def activate(self, x: Array, kind: str) -> Array:
        """Elementwise on [T, F]: "gelu" (erf), "gelu_new" (tanh), "relu", "silu"."""
        ...

    def gate(self, x: Array, kind: str) -> Array:
        """[T, 2F] -> [T, F]: activate(x[:, :F], kind) * x[:, F:] (gate first, then up)."""
        ...

    def add(self, x: Array, y: Array) -> Array:
        """x += y, in place, any equal shapes; returns x."""
        ...

    def rotary(self, qkv: Array, num_rotated: int, cos: Array, sin: Array, index: Array, interleaved: bool) -> None:
        """In place, heads 0..num_rotated of qkv [T, H+2G, d]. Token t takes row index[t] of the tables cos, sin
        float32 [P, r/2]; the first r <= d dimensions turn: pairs (2i, 2i+1) if interleaved, else (i, i + r/2)."""
        ...

    def head_norm(self, qkv: Array, first: int, count: int, weight: Array, eps: float) -> None:
        """In place RMS norm of each of the heads first..first+count, over its own d, times weight [d]."""
        ...

    def sum_squares(self, qkv: Array, first: int, count: int) -> Array:
        """Sum of squares over heads first..first+count together -> float32 [T] (a norm that spans heads and ranks)."""
        ...

    def span_norm(self, qkv: Array, first: int, count: int, total: Array, size: int, weight: Array, eps: float) -> None:
        """In place: heads first..first+count *= weight [count * d] / sqrt(total[t] / size + eps)."""
        ...

    def write_kv(self, qkv: Array, num_heads: int, cache_k: Array, cache_v: Array, dtype: str, rows: Array, positions: Array) -> None:
        """Keys and values of qkv [T, H+2G, d] -> caches [B, G, S, d] (carrier of dtype) at (rows[t], :, positions[t])."""
        ...

    def attention(
        self, qkv: Array, num_heads: int, cache_k: Array, cache_v: Array, dtype: str, rows: Array, ends: Array,
        window: int, scale: float, slopes: Array | None,
    ) -> Array:
        """softmax(scale * q k^T + slope * (key - (end - 1))) v over each token's keys -> [T, H * d]. Query head h reads
        key head h // (H / G). slopes float32 [H] is ALiBi, or None."""
        ...

    def route(self, logits: Array, top_k: int, softmax_first: bool, renormalise: bool) -> tuple[Array, Array]:
        """Gate: logits [T, E] -> experts int32 [T, k], weights float32 [T, k], best first; ties to the lowest expert.
        softmax_first: probabilities over all E, then top k, then divided by their sum if renormalise.
        Otherwise: top k of the logits, softmax over those k."""
        ...

    def greedy(self, logits: Array, slots: Slots) -> None:
        """The largest of logits [B, V], of equals the lowest id, becomes each slot's token; the slots move on
        (l1_kernels/sampling/slots.py)."""
        ...

    def sample(self, logits: Array, slots: Slots, draw: Draw) -> None:
        """As greedy, but drawn as `draw` says, and the draw's steps and seen tokens move on too. The penalty may change logits
        in place."""
        ...
