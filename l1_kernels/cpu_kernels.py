"""The kernels of the CPU: NumPy where it is fast enough, numba twins (each operation's cpu.py) where it is not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from l1_kernels import checks, waiting  # noqa: F401 (waiting: before numba's first parallel loop)
from l1_kernels.activation import cpu as activation
from l1_kernels.attention import cpu as attend
from l1_kernels.blas_threads import BlasThreads
from l1_kernels.bounds import within
from l1_kernels.checks import FLOAT32, INT32
from l1_kernels.elementwise import reference as elementwise
from l1_kernels.embedding import reference as embedding
from l1_kernels.kv_write import cpu as kv_write
from l1_kernels.linear import cpu as linear
from l1_kernels.norm import cpu as norm
from l1_kernels.norm import reference as span
from l1_kernels.rotary import cpu as rotate
from l1_kernels.routing import cpu as routing
from l1_kernels.sampling import reference as sampling
from l1_kernels.sampling.slots import Draw, Slots, check_draw
from l1_kernels.sampling.slots import check as check_slots
from l1_kernels.weight import Array, Weight


class CpuKernels:
    """`kernels.Kernels` on NumPy arrays. Arguments are checked and outputs allocated here; the kernels below trust them."""

    _empty: Callable[..., np.ndarray] = staticmethod(np.empty)  # tests put one in its place that fills with NaN

    def __init__(self) -> None:
        self._blas = BlasThreads()

    def embed(self, table: Weight, ids: Array, first: int = 0) -> Array:
        checks.matrix(table, "table")
        checks.ranked(ids, "ids", INT32, 1)
        return embedding.embed(table, ids, first)

    def layer_norm(self, x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
        checks.ranked(x, "x", FLOAT32, 2)
        checks.array(weight, "weight", FLOAT32, x.shape[1:])
        if bias is not None:
            checks.array(bias, "bias", FLOAT32, x.shape[1:])
        y = self._empty(x.shape, FLOAT32)
        norm.layer_norm(x, weight, bias, eps, y)
        return y

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        checks.ranked(x, "x", FLOAT32, 2)
        checks.array(weight, "weight", FLOAT32, x.shape[1:])
        y = self._empty(x.shape, FLOAT32)
        norm.rms_norm(x, weight, eps, y)
        return y

    def linear(self, x: Array, weight: Weight, bias: Array | None = None) -> Array:
        checks.matrix(weight, "weight")
        checks.ranked(x, "x", FLOAT32, 2)
        num_out, num_in = weight.data.shape
        if x.shape[1] != num_in:
            checks.reject("x", f"[T, {num_in}] (weight's K)", checks.describe(x))
        if bias is not None:
            checks.array(bias, "bias", FLOAT32, (num_out,))
        y = self._empty((x.shape[0], num_out), FLOAT32)
        self._blas.serve(linear.product_operations(x.shape[0], weight))
        linear.linear(x, weight, bias, y)
        return y

    def activate(self, x: Array, kind: str) -> Array:
        checks.ranked(x, "x", FLOAT32, 2)
        checks.known(kind, "kind", activation.KINDS)
        y = self._empty(x.shape, FLOAT32)
        activation.activate(x, kind, y)
        return y

    def gate(self, x: Array, kind: str) -> Array:
        checks.ranked(x, "x", FLOAT32, 2)
        checks.known(kind, "kind", activation.KINDS)
        if x.shape[1] % 2:
            checks.reject("x", "[T, 2F]", checks.describe(x))
        y = self._empty((x.shape[0], x.shape[1] // 2), FLOAT32)
        activation.activate(x, kind, y)
        return y

    def add(self, x: Array, y: Array) -> Array:
        checks.array(y, "y", FLOAT32, x.shape)
        checks.array(x, "x", FLOAT32, y.shape)
        return elementwise.add(x, y)

    def rotary(self, qkv: Array, num_rotated: int, cos: Array, sin: Array, index: Array, interleaved: bool) -> None:
        checks.heads(qkv, 0, num_rotated, "num_rotated")
        checks.ranked(cos, "cos", FLOAT32, 2)
        checks.array(sin, "sin", FLOAT32, cos.shape)
        checks.array(index, "index", INT32, (qkv.shape[0],))
        if 2 * cos.shape[1] > qkv.shape[2]:
            checks.reject("cos", f"[P, r/2] with r <= {qkv.shape[2]} (qkv's d)", checks.describe(cos))
        within(index, "index", 0, cos.shape[0] - 1)
        rotate.rotary(qkv, num_rotated, cos, sin, index, interleaved)

    def head_norm(self, qkv: Array, first: int, count: int, weight: Array, eps: float) -> None:
        checks.heads(qkv, first, count)
        checks.array(weight, "weight", FLOAT32, qkv.shape[2:])
        norm.head_norm(qkv, first, count, weight, eps)

    def sum_squares(self, qkv: Array, first: int, count: int) -> Array:
        checks.heads(qkv, first, count)
        return span.sum_squares(qkv, first, count)

    def span_norm(self, qkv: Array, first: int, count: int, total: Array, size: int, weight: Array, eps: float) -> None:
        checks.heads(qkv, first, count)
        checks.array(total, "total", FLOAT32, qkv.shape[:1])
        checks.array(weight, "weight", FLOAT32, (count * qkv.shape[2],))
        if size <= 0:
            checks.reject("size", "positive", size)
        span.span_norm(qkv, first, count, total, size, weight, eps)

    def write_kv(self, qkv: Array, num_heads: int, cache_k: Array, cache_v: Array, dtype: str, rows: Array, positions: Array) -> None:
        checks.cache(qkv, num_heads, cache_k, cache_v, dtype)
        checks.array(rows, "rows", INT32, qkv.shape[:1])
        checks.array(positions, "positions", INT32, qkv.shape[:1])
        within(rows, "rows", 0, cache_k.shape[0] - 1)
        within(positions, "positions", 0, cache_k.shape[2] - 1)
        kv_write.write_kv(qkv, num_heads, cache_k, cache_v, dtype, rows, positions)

    def attention(
        self,
        qkv: Array,
        num_heads: int,
        cache_k: Array,
        cache_v: Array,
        dtype: str,
        rows: Array,
        ends: Array,
        window: int,
        scale: float,
        slopes: Array | None,
    ) -> Array:
        checks.cache(qkv, num_heads, cache_k, cache_v, dtype)
        checks.array(rows, "rows", INT32, qkv.shape[:1])
        checks.array(ends, "ends", INT32, qkv.shape[:1])
        if window < 0:
            checks.reject("window", "0 (whole context) or positive", window)
        if slopes is not None:
            checks.array(slopes, "slopes", FLOAT32, (num_heads,))
        within(rows, "rows", 0, cache_k.shape[0] - 1)
        within(ends, "ends", 0, cache_k.shape[2])
        out = self._empty((qkv.shape[0], num_heads, qkv.shape[2]), FLOAT32)
        self._blas.serve(0)
        attend.attention(qkv, cache_k, cache_v, dtype, rows, ends, window, scale, slopes, out)
        return out.reshape(qkv.shape[0], num_heads * qkv.shape[2])

    def route(self, logits: Array, top_k: int, softmax_first: bool, renormalise: bool) -> tuple[Array, Array]:
        checks.ranked(logits, "logits", FLOAT32, 2)
        if not 0 < top_k <= logits.shape[1]:
            checks.reject("top_k", f"1..{logits.shape[1]} (logits' E)", top_k)
        experts, weights = self._empty((logits.shape[0], top_k), INT32), self._empty((logits.shape[0], top_k), FLOAT32)
        routing.route(logits, softmax_first, renormalise, experts, weights)
        return experts, weights

    def greedy(self, logits: Array, slots: Slots) -> None:
        check_slots(logits, slots)
        sampling.greedy(logits, slots)

    def sample(self, logits: Array, slots: Slots, draw: Draw) -> None:
        check_slots(logits, slots)
        check_draw(logits, draw)
        sampling.sample(logits, slots, draw)
