"""The kernels of the GPU (each operation's gpu.py), on CuPy arrays, or on NumPy arrays in numba's simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from l1_kernels import checks
from l1_kernels.activation import gpu as activation
from l1_kernels.attention import decode as decode_attention
from l1_kernels.attention import gpu as simple_attention
from l1_kernels.attention import prompt as prompt_attention
from l1_kernels.attention.pick import pick as pick_attention
from l1_kernels.checks import FLOAT32, INT32
from l1_kernels.elementwise import gpu as elementwise
from l1_kernels.embedding import gpu as embedding
from l1_kernels.kv_write import gpu as kv_write
from l1_kernels.linear import gpu as linear
from l1_kernels.norm import gpu as norm
from l1_kernels.quantize import launch as rounding
from l1_kernels.rotary import gpu as rotate
from l1_kernels.routing import gpu as routing
from l1_kernels.sampling import gpu as sampling
from l1_kernels.sampling import gpu_draw as drawing
from l1_kernels.sampling.slots import Draw, Slots, check_draw
from l1_kernels.sampling.slots import check as check_slots
from l1_kernels.weight import CARRIER, Array, Weight

MAX_THREADS = 256  # a block
MAX_BLOCKS = 4096  # of a kernel whose threads stride over a flat array
MAX_GRID_Y = 65535


class GeMM(Protocol):
    """A library's matrix product: linear/cublas.py, which the simulator has not."""

    def usable(self) -> bool: ...

    def __call__(self, x: Array, w: Array, dtype: str, y: Array, bias: Array | None = None, add: bool = False) -> bool:
        """y = x w^T, or y += x w^T; returns whether the bias was added too (it was if there is none)."""
        ...


class GpuKernels:
    """`kernels.Kernels` over numba.cuda.

    empty   makes an uninitialised array of the device: empty(shape, dtype)
    stream  gives the stream to launch on, as numba names it (None: numba's default one)
    gemm    cuBLAS for many tokens, where it is usable (None: a kernel of ours)
    quick   quick_launch.QuickLaunch, in numba's launch's place (None: numba's, which the simulator needs)
    lasting host array -> the same on the device, in memory that no graph's end takes away (None: `empty`'s)
    """

    def __init__(
        self,
        empty: Callable[..., Array],
        stream: Callable[[], Any] | None = None,
        gemm: GeMM | None = None,
        quick: Callable[..., None] | None = None,
        lasting: Callable[[np.ndarray], Array] | None = None,
    ) -> None:
        self._empty = empty
        self._stream = stream or (lambda: 0)
        self._gemm = gemm
        self._quick = quick
        self.lasting = lasting or self._copied
        self._absent: Array | None = None
        self._counts: dict[Any, Array] = {}  # by stream
        self.launches = 0  # from Python, so far

    def embed(self, table: Weight, ids: Array, first: int = 0) -> Array:
        checks.matrix(table, "table")
        checks.ranked(ids, "ids", INT32, 1)
        width = table.data.shape[1]
        out = self._empty((ids.shape[0], width), np.float32)
        kernel = embedding.make_embed(table.dtype)
        self._launch(kernel, ids.shape[0], threads(width), table.data, self._or_absent(table.scale), ids, first, out)
        return out

    def layer_norm(self, x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
        checks.ranked(x, "x", FLOAT32, 2)
        checks.array(weight, "weight", FLOAT32, x.shape[1:])
        if bias is not None:
            checks.array(bias, "bias", FLOAT32, x.shape[1:])
        y = self._empty(x.shape, np.float32)
        self._launch(
            norm.make_layer_norm(), x.shape[0], threads(x.shape[1]),
            x, weight, self._or_absent(bias), bias is not None, np.float32(eps), y,
        )  # fmt: skip
        return y

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        checks.ranked(x, "x", FLOAT32, 2)
        checks.array(weight, "weight", FLOAT32, x.shape[1:])
        y = self._empty(x.shape, np.float32)
        self._launch(norm.make_rms_norm(), x.shape[0], threads(x.shape[1]), x, weight, np.float32(eps), y)
        return y

    def linear(self, x: Array, weight: Weight, bias: Array | None = None) -> Array:
        checks.matrix(weight, "weight")
        checks.ranked(x, "x", FLOAT32, 2)
        num_tokens, (num_out, size) = x.shape[0], weight.data.shape
        if x.shape[1] != size:
            checks.reject("x", f"[T, {size}] (weight's K)", checks.describe(x))
        if bias is not None:
            checks.array(bias, "bias", FLOAT32, (num_out,))
        if weight.act is not None:  # W8A8: what int8 leaves of x
            x = rounding.rounded(self, x)
        y = self._empty((num_tokens, num_out), np.float32)
        if num_tokens > linear.SKINNY_TOKENS and self._cublas_takes(weight) and y.size and size:
            self._linear_cublas(x, weight, bias, y)
            return y
        if num_tokens <= linear.SKINNY_TOKENS:
            tokens = 1 if num_tokens == 1 else 4
            kernel = linear.make_skinny(weight.dtype, tokens)
            grid, block = (ceil_div(num_out, linear.WARPS), ceil_div(num_tokens, tokens)), (linear.WARPS * 32, 1)
        else:
            kernel = linear.make_tiled(weight.dtype)
            grid, block = (ceil_div(num_out, linear.TILE), ceil_div(num_tokens, linear.TILE)), (linear.TILE, linear.TILE)
        if grid[1] > MAX_GRID_Y:
            checks.reject("x", f"of at most {MAX_GRID_Y * linear.TILE} tokens", checks.describe(x))
        self._launch(kernel, grid, block, x, weight.data, self._or_absent(weight.scale), self._or_absent(bias), bias is not None, y)
        return y

    def _cublas_takes(self, weight: Weight) -> bool:
        return self._gemm is not None and self._gemm.usable()

    def _linear_cublas(self, x: Array, weight: Weight, bias: Array | None, y: Array) -> None:
        """int8 weights go through a copy in fp16, which holds them exactly, and get their scale afterwards: 5 bytes moved a
        weight instead of 1, still far below a tiled kernel's time."""
        dtype, data = weight.dtype, weight.data
        if dtype == "int8":
            dtype, data = "fp16", self._empty(data.shape, CARRIER["fp16"])
            self._launch_flat(elementwise.make_int8_to_fp16(), data.size, weight.data.reshape(-1), data.reshape(-1))
        if dtype != "fp32":
            rounded = self._empty(x.shape, CARRIER[dtype])
            self._launch_flat(elementwise.make_round(dtype), x.size, x.reshape(-1), rounded.reshape(-1))
            x = rounded
        assert self._gemm is not None
        if weight.scale is not None:
            self._gemm(x, data, dtype, y)
            self._launch_flat(elementwise.make_scale_add_bias(), y.size, y, weight.scale, self._or_absent(bias), bias is not None)
        elif not self._gemm(x, data, dtype, y, bias):
            self._launch_flat(elementwise.make_add_bias(), y.size, y, bias)

    def activate(self, x: Array, kind: str) -> Array:
        checks.ranked(x, "x", FLOAT32, 2)
        checks.known(kind, "kind", activation.KINDS)
        y = self._empty(x.shape, np.float32)
        self._launch_flat(activation.make_activate(kind), y.size, x.reshape(-1), y.reshape(-1))
        return y

    def gate(self, x: Array, kind: str) -> Array:
        checks.ranked(x, "x", FLOAT32, 2)
        checks.known(kind, "kind", activation.KINDS)
        if x.shape[1] % 2:
            checks.reject("x", "[T, 2F]", checks.describe(x))
        y = self._empty((x.shape[0], x.shape[1] // 2), np.float32)
        self._launch_flat(activation.make_gate(kind), y.size, x, y)
        return y

    def add(self, x: Array, y: Array) -> Array:
        checks.array(y, "y", FLOAT32, x.shape)
        checks.array(x, "x", FLOAT32, y.shape)
        self._launch_flat(elementwise.make_add(), x.size, x.reshape(-1), y.reshape(-1))
        return x

    def rotary(self, qkv: Array, num_rotated: int, cos: Array, sin: Array, index: Array, interleaved: bool) -> None:
        checks.heads(qkv, 0, num_rotated, "num_rotated")
        checks.ranked(cos, "cos", FLOAT32, 2)
        checks.array(sin, "sin", FLOAT32, cos.shape)
        checks.array(index, "index", INT32, (qkv.shape[0],))
        if 2 * cos.shape[1] > qkv.shape[2]:
            checks.reject("cos", f"[P, r/2] with r <= {qkv.shape[2]} (qkv's d)", checks.describe(cos))
        block = threads(num_rotated * cos.shape[1])
        self._launch(rotate.make_rotary(bool(interleaved)), qkv.shape[0], block, qkv, num_rotated, cos, sin, index)

    def head_norm(self, qkv: Array, first: int, count: int, weight: Array, eps: float) -> None:
        checks.heads(qkv, first, count)
        checks.array(weight, "weight", FLOAT32, qkv.shape[2:])
        self._launch(norm.make_head_norm(), (qkv.shape[0], count), 32, qkv, first, weight, np.float32(eps))

    def sum_squares(self, qkv: Array, first: int, count: int) -> Array:
        checks.heads(qkv, first, count)
        total = self._empty((qkv.shape[0],), np.float32)
        self._launch(norm.make_sum_squares(), qkv.shape[0], threads(count * qkv.shape[2]), qkv, first, count, total)
        return total

    def span_norm(self, qkv: Array, first: int, count: int, total: Array, size: int, weight: Array, eps: float) -> None:
        checks.heads(qkv, first, count)
        checks.array(total, "total", FLOAT32, (qkv.shape[0],))
        checks.array(weight, "weight", FLOAT32, (count * qkv.shape[2],))
        if size <= 0:
            checks.reject("size", "positive", size)
        block = threads(weight.shape[0])
        self._launch(norm.make_span_norm(), qkv.shape[0], block, qkv, first, total, size, weight, np.float32(eps))

    def write_kv(
        self, qkv: Array, num_heads: int, cache_k: Array, cache_v: Array, dtype: str, rows: Array, positions: Array
    ) -> None:
        checks.cache(qkv, num_heads, cache_k, cache_v, dtype)
        checks.array(rows, "rows", INT32, (qkv.shape[0],))
        checks.array(positions, "positions", INT32, (qkv.shape[0],))
        block = threads(cache_k.shape[1] * cache_k.shape[3])
        self._launch(kv_write.make_write_kv(dtype), qkv.shape[0], block, qkv, num_heads, cache_k, cache_v, rows, positions)

    def attention(
        self, qkv: Array, num_heads: int, cache_k: Array, cache_v: Array, dtype: str, rows: Array, ends: Array,
        window: int, scale: float, slopes: Array | None,
    ) -> Array:  # fmt: skip
        checks.cache(qkv, num_heads, cache_k, cache_v, dtype)
        num_tokens, _, head_dim = qkv.shape
        checks.array(rows, "rows", INT32, (num_tokens,))
        checks.array(ends, "ends", INT32, (num_tokens,))
        if slopes is not None:
            checks.array(slopes, "slopes", FLOAT32, (num_heads,))
        if window < 0:
            checks.reject("window", "0 (the whole context) or positive", window)
        if head_dim > simple_attention.MAX_HEAD_DIM:
            checks.reject("qkv", f"of a head dimension up to {simple_attention.MAX_HEAD_DIM}", checks.describe(qkv))
        out = self._empty((num_tokens, num_heads * head_dim), np.float32)
        aligned = all(checks.is_aligned(array) for array in (qkv, cache_k, cache_v))
        kind = pick_attention(dtype, num_tokens, cache_k.shape[0], head_dim, aligned)
        self.attend(kind, qkv, num_heads, cache_k, cache_v, dtype, rows, ends, window, scale, slopes, out)
        return out

    def attend(
        self, kind: str, qkv: Array, num_heads: int, cache_k: Array, cache_v: Array, dtype: str, rows: Array, ends: Array,
        window: int, scale: float, slopes: Array | None, out: Array,
    ) -> None:  # fmt: skip
        """attention, unchecked, by the kernel that `kind` names: "simple", "decode" or "prompt" (attention/{gpu,decode,prompt}.py);
        "prompt" writes the cache's carrier too, if `out` has it."""
        num_tokens, _, head_dim = qkv.shape
        num_kv_heads, places = cache_k.shape[1:3]
        group = num_heads // num_kv_heads
        alibi = self._or_absent(slopes), slopes is not None
        if kind == "simple":
            kernel = simple_attention.make_attention(dtype, simple_attention.lanes_share(head_dim))
            self._launch(
                kernel, (num_tokens, num_heads), simple_attention.WARPS * 32,
                qkv, num_heads, cache_k, cache_v, rows, ends, window, np.float32(scale), *alibi, out,
            )  # fmt: skip
        elif kind == "prompt":
            warps = prompt_attention.warps_a_block(num_tokens, num_heads, head_dim)
            self._launch(
                prompt_attention.make_prompt(dtype, head_dim, warps, out.dtype != FLOAT32),
                (ceil_div(num_tokens, 16 * warps), num_heads), prompt_attention.threads_a_block(warps),
                qkv, group, cache_k, cache_v, rows, ends, window, np.float32(scale), *alibi, out,
            )  # fmt: skip
        else:
            lanes, heads = decode_attention.lanes_a_key(head_dim), decode_attention.heads_a_block(group)
            blocks = num_kv_heads * ceil_div(group, heads)  # a token
            bits = decode_attention.split_bits(num_tokens * blocks, places, decode_attention.keys_a_step(dtype, lanes, heads))
            work = self._empty((decode_attention.work_size(num_tokens * blocks, bits, heads, head_dim),), np.float32)
            self._launch(
                decode_attention.make_decode(dtype, lanes, heads), (num_tokens, blocks, 1 << bits), 32 * decode_attention.warps_a_block(heads),
                qkv, group, cache_k, cache_v, rows, ends, window, np.float32(scale), *alibi, bits, work, self.zero_counts(), out,
            )  # fmt: skip

    def zero_counts(self) -> Array:
        """int32 zeros for kernels that count their blocks and set the counts back: one array a stream, whose launches follow
        each other. A graph's were made on a stream of its own, so it has its own."""
        stream = self._stream()
        if stream not in self._counts:
            # Two graphs' streams may come to the same address one after the other, so the counts outlive the first.
            self._counts[stream] = self.lasting(np.zeros(decode_attention.BLOCKS, np.int32))
        return self._counts[stream]

    def _copied(self, host: np.ndarray) -> Array:
        array = self._empty(host.shape, host.dtype)
        array[...] = host
        return array

    def route(self, logits: Array, top_k: int, softmax_first: bool, renormalise: bool) -> tuple[Array, Array]:
        checks.ranked(logits, "logits", FLOAT32, 2)
        if not 1 <= top_k <= logits.shape[1]:
            checks.reject("top_k", f"in 1..{logits.shape[1]} (logits' E)", top_k)
        shape = (logits.shape[0], top_k)
        experts, weights = self._empty(shape, np.int32), self._empty(shape, np.float32)
        over_all = bool(softmax_first and not renormalise)
        self._launch(routing.make_route(), logits.shape[0], 32, logits, over_all, experts, weights)
        return experts, weights

    def greedy(self, logits: Array, slots: Slots) -> None:
        check_slots(logits, slots)
        block = min(sampling.MAX_THREADS, ceil_div(logits.shape[1], 32) * 32)
        self._launch(
            sampling.make_greedy(), logits.shape[0], block,
            logits, slots.tokens, slots.positions, slots.ends, slots.last, slots.turns, slots.ring,
        )  # fmt: skip

    def sample(self, logits: Array, slots: Slots, draw: Draw) -> None:
        check_slots(logits, slots)
        check_draw(logits, draw)
        block = min(drawing.MAX_THREADS, ceil_div(logits.shape[1], 32) * 32)
        self._launch(
            drawing.make_sample(), logits.shape[0], block, logits, logits.view(np.int32),
            float(draw.temperature), int(draw.top_k), float(draw.top_p), float(draw.penalty), np.uint64(draw.seed).astype(np.int64),
            draw.prompts, draw.steps, draw.seen,
            slots.tokens, slots.positions, slots.ends, slots.last, slots.turns, slots.ring,
        )  # fmt: skip

    def widen(self, x: Array, dtype: str) -> Array:
        """x in the carrier of `dtype` ("fp16", "bf16") -> float32."""
        y = self._empty(x.shape, np.float32)
        self._launch_flat(elementwise.make_widen(dtype), x.size, x.reshape(-1), y.reshape(-1))
        return y

    def new(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An uninitialised array of the device."""
        return self._empty(shape, dtype)

    def or_absent(self, array: Array | None) -> Array:
        """For a fixed argument list: an array, or one number that nobody reads."""
        return self._or_absent(array)

    def launch(self, kernel: Any, grid: int | tuple[int, ...], block: int | tuple[int, ...], shared_bytes: int, *arguments: Any) -> None:
        """With `shared_bytes` of dynamic shared memory, on the current stream; an empty grid, which CUDA refuses, has nothing
        to do."""
        if grid == 0 or (isinstance(grid, tuple) and 0 in grid):
            return
        self.launches += 1
        if self._quick is not None:
            self._quick(kernel, grid, block, arguments, shared_bytes)
        else:
            kernel[grid, block, self._stream(), shared_bytes](*arguments)

    def _launch(self, kernel: Any, grid: int | tuple[int, ...], block: int | tuple[int, ...], *arguments: Any) -> None:
        self.launch(kernel, grid, block, 0, *arguments)

    def _launch_flat(self, kernel: Any, size: int, *arguments: Any) -> None:
        """A thread a number of `size`, as far as MAX_BLOCKS go."""
        block = threads(size)
        self._launch(kernel, min(ceil_div(size, block), MAX_BLOCKS), block, *arguments)

    def _or_absent(self, array: Array | None) -> Array:
        """A kernel's argument list is fixed: what is absent becomes one number that nobody reads."""
        if array is not None:
            return array
        if self._absent is None:
            self._absent = self._empty((1,), np.float32)
        return self._absent


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def threads(items: int) -> int:
    """Threads of a block over `items`: whole warps, at most MAX_THREADS."""
    return min(MAX_THREADS, max(1, ceil_div(items, 32)) * 32)
