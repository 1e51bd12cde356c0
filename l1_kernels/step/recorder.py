"""`Regions` that can note a sequence of operations down and run it as one launch of the step kernel.

    with regions.sequence():
        x = block(x) ...; logits = head(x)          # regions append to a program; leaving runs it

Outside of a sequence, and for what the step kernel does not do, everything goes to the regions behind. Whoever launches
anything else meanwhile gets what was noted so far launched first (`GpuKernels.pending`), so the order of work is the order of calls.

Noted arrays may go back to the pool before the kernel runs: whoever gets their memory writes to it later in the same
stream, and operations of a program run in order, so nothing is overwritten early.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from l1_kernels.attention import decode
from l1_kernels.checks import FLOAT32
from l1_kernels.cuda_api import allow_shared
from l1_kernels.fused_regions import FusedRegions
from l1_kernels.gpu_kernels import GpuKernels, ceil_div
from l1_kernels.regions import CacheArgs, NormArgs, RotaryArgs
from l1_kernels.sbi_gemm.job import CARRIED, MAX_TOKENS, PER_LOAD
from l1_kernels.step import program as columns
from l1_kernels.step.activations import PADDED, longest_norm, pitch_of
from l1_kernels.step.attend import LEAST, scratch_words
from l1_kernels.step.gemm import MAX_KEPT, MAX_STAGES, stage_bytes
from l1_kernels.step.kernel import BARS, SIGNATURE, Kind, make_step
from l1_kernels.step.program import ATTEND, GEMM, Group, Program, address, float_bits, set_group, set_source
from l1_kernels.weight import CARRIER, Array, Weight

SHARED = 200 * 1024  # bytes of dynamic shared memory: what a block of compute capability 9.0 may have, less the kernel's own arrays
FEWEST_STAGES = 4
MOST_HEADS = 2  # query heads of a block


@dataclass
class Kept:
    """What all programs of one recorder share on the device, and what a graph may still launch."""

    counter: Array
    arrivals: Array
    tables: list[Any]


class StepRegions:
    """`regions.Regions` over FusedRegions.

    blocks   the kernel's, all of which must be on the GPU at a time
    upload   host array -> device array, at once, even while a stream is captured
    warps    that work, of a block
    """

    def __init__(
        self, kernels: GpuKernels, fused: FusedRegions, blocks: int, upload: Callable[[np.ndarray], Array], warps: int = 15, shared: int = SHARED
    ) -> None:
        self.kernels, self.fused, self.blocks, self.upload, self.warps, self.shared = kernels, fused, blocks, upload, warps, shared
        self.multiprocessors = blocks
        self.launched = 0  # programs so far
        self._kept: Kept | None = None
        self._recording = False
        self._forget()

    def _forget(self) -> None:
        self._program = Program(self.blocks)
        self._kind: dict[str, Any] = {}
        self._num_tokens = 0
        self._numbers = 0  # of x that the longest operation would have in shared memory
        self._whole = 0  # that one needs
        self._scratch = 0
        self._work = 1

    @contextlib.contextmanager
    def sequence(self) -> Iterator[None]:
        """What is called within goes into one program. Not to be nested."""
        self._recording, self.kernels.pending = True, self._flush
        try:
            yield
            self._flush()
        finally:
            self._recording, self.kernels.pending = False, None
            self._forget()

    def norm_linear(self, x: Array, norm: NormArgs | None, weight: Weight, bias: Array | None) -> Array:
        if not self._takes(x, norm, weight):
            return self.fused.norm_linear(x, norm, weight, bias)
        self.fused._check(x, norm, weight, bias)
        y = self.kernels.new((x.shape[0], weight.data.shape[0]), np.float32)
        self._gemm(x, norm, Group(weight, bias, y))
        return y

    def norm_feed_forward(self, x: Array, norm: NormArgs | None, weight: Weight, bias: Array | None, kind: str, gated: bool) -> Array:
        width = weight.data.shape[0] // (2 if gated else 1)
        if width % PER_LOAD["int8"] or not self._takes(x, norm, weight, activation=kind):
            return self.fused.norm_feed_forward(x, norm, weight, bias, kind, gated)
        self.fused._check(x, norm, weight, bias, gated)
        hidden = self._carried((x.shape[0], width), weight)
        self._gemm(x, norm, Group(weight, bias, hidden, activate=True, gated=gated, carry=True))
        return hidden

    def linear_add(self, x: Array, weight: Weight, bias: Array | None, residual: Array | None) -> Array:
        if not self._takes(x, None, weight):
            return self.fused.linear_add(x, weight, bias, residual)
        self.fused._check(x, None, weight, bias)
        y = self.fused._sum(x.shape[0], weight, residual)
        self._gemm(x, None, Group(weight, bias, y, add=residual is not None))
        return y

    def norm_pair(
        self, x: Array, norms: tuple[NormArgs | None, NormArgs | None], qkv: tuple[Weight, Array | None],
        up: tuple[Weight, Array | None], kind: str, gated: bool,
    ) -> tuple[Array, Array]:  # fmt: skip
        width = up[0].data.shape[0] // (2 if gated else 1)
        takes = width % PER_LOAD["int8"] == 0 and qkv[0].dtype == up[0].dtype and self._takes(x, norms[0], qkv[0], up[0], activation=kind)
        if not (takes and self._takes(x, norms[1], up[0], activation=kind)):
            return self.fused.norm_pair(x, norms, qkv, up, kind, gated)
        self.fused._check(x, norms[0], *qkv)
        self.fused._check(x, norms[1], *up, gated)
        y, hidden = self.kernels.new((x.shape[0], qkv[0].data.shape[0]), np.float32), self._carried((x.shape[0], width), up[0])
        first, second = Group(*qkv, y), Group(*up, hidden, activate=True, gated=gated, carry=True)
        if norms[0] is norms[1]:
            self._gemm(x, norms[0], first, second)
        else:
            self._gemm(x, norms[0], first)
            self._gemm(x, norms[1], second, waits=False)
        return y, hidden

    def linear_add_pair(
        self, mixed: Array, out: tuple[Weight, Array | None], hidden: Array, down: tuple[Weight, Array | None], residual: Array | None
    ) -> Array:
        if not (self._takes(mixed, None, out[0]) and self._takes(hidden, None, down[0]) and out[0].dtype == down[0].dtype):
            return self.fused.linear_add_pair(mixed, out, hidden, down, residual)
        self.fused._check(mixed, None, *out)
        self.fused._check(hidden, None, *down)
        y = self.fused._sum(mixed.shape[0], out[0], residual)
        biases = [bias for bias in (out[1], down[1]) if bias is not None]
        if len(biases) == 2 or ceil_div(out[0].data.shape[0], columns.TILE * self.blocks) > MAX_KEPT:
            self._gemm(mixed, None, Group(*out, y, add=residual is not None))
            self._gemm(hidden, None, Group(*down, y, add=True))
            return y
        row = self._gemm(mixed, None, Group(out[0], biases[0] if biases else None, y, add=residual is not None))
        set_source(row, 1, hidden, down[0], hidden.shape[1])
        self._hold(hidden, down[0])
        self._longest(mixed.shape[1], hidden.shape[1])
        return y

    def attend(
        self, qkv: Array, num_heads: int, rotary: RotaryArgs | None, cache: CacheArgs, window: int, scale: float, slopes: Array | None
    ) -> Array:
        if not self._attends(qkv, num_heads, rotary, cache):
            return self.fused.attend(qkv, num_heads, rotary, cache, window, scale, slopes)
        num_tokens, _, head_dim = qkv.shape
        num_kv_heads, places = cache.k.shape[1:3]
        heads = self._kind["heads"]
        pairs = num_tokens * num_kv_heads * ceil_div(num_heads // num_kv_heads, heads)
        splits = max(1, min(self.blocks // pairs, ceil_div(places, LEAST)))
        dtype = self._kind["dtype"]
        out = self.kernels.new((num_tokens, num_heads * head_dim), CARRIER[CARRIED[dtype]])
        row = self._program.row(ATTEND, pairs * splits, True)
        row[columns.QKV], row[columns.HEADS], row[columns.KV_HEADS], row[columns.HEAD_DIM] = address(qkv), num_heads, num_kv_heads, head_dim
        row[columns.CACHE_K], row[columns.CACHE_V], row[columns.PLACES] = address(cache.k), address(cache.v), places
        row[columns.CACHE_ROWS], row[columns.POSITIONS], row[columns.ENDS] = address(cache.rows), address(cache.positions), address(cache.ends)
        if rotary is not None:
            row[columns.COS], row[columns.SIN], row[columns.ROTARY_ROW] = address(rotary.cos), address(rotary.sin), address(rotary.index)
            row[columns.HALF], row[columns.INTERLEAVED] = rotary.cos.shape[1], rotary.interleaved
        row[columns.WINDOW], row[columns.SOFTMAX_SCALE], row[columns.SLOPES] = window, float_bits(scale), address(slopes)
        row[columns.OUT], row[columns.SPLITS] = address(out), splits
        self._hold(qkv, cache, rotary, slopes, out)
        self._work = max(self._work, pairs * splits * heads * (head_dim + 2))
        self._scratch = max(self._scratch, 4 * scratch_words(self._kind["lanes"], heads, self.warps))
        return out

    # What a program takes

    def _takes(self, x: Array, norm: NormArgs | None, *weights: Weight, activation: str | None = None) -> bool:
        """Whether the operation can be noted; it may end the program that is under way, for one of its own."""
        if not self._recording or getattr(x, "ndim", 0) != 2 or not 1 <= x.shape[0] <= min(MAX_TOKENS, self.warps * 4):
            return False
        dtype, size = weights[0].dtype, x.shape[1]
        carried = x.dtype != FLOAT32
        if dtype not in ("fp16", "bf16", "int8") or carried == (norm is not None) or getattr(weights[0], "act", None):
            return False
        if size % PER_LOAD[dtype] or size % 8 or any(address(array) % 16 for array in (x, *(weight.data for weight in weights))):
            return False
        if norm is not None and x.shape[0] == 1 and size > longest_norm(self.warps):
            return False
        if size > self._most(x.shape[0], dtype):  # x comes in segments, and the tiles' sums are kept meanwhile
            tiles = sum(ceil_div(weight.data.shape[0], columns.TILE) for weight in weights)
            if norm is not None or ceil_div(tiles, self.blocks) > MAX_KEPT:
                return False
        asked = {"dtype": dtype}
        if norm is not None:
            asked["norm"] = norm.kind
        if activation is not None:
            asked["activation"] = activation
        return self._join(x.shape[0], asked)

    def _attends(self, qkv: Array, num_heads: int, rotary: RotaryArgs | None, cache: CacheArgs) -> bool:
        if not self._recording or not self._program.rows or not cache.distinct or cache.dtype not in ("fp16", "bf16"):
            return False
        num_tokens, _, head_dim = qkv.shape
        if num_tokens != self._num_tokens or not decode.takes(head_dim) or any(address(a) % 16 for a in (qkv, cache.k, cache.v)):
            return False
        group = num_heads // cache.k.shape[1]
        heads = min(group, MOST_HEADS)
        dtype = self._kind["dtype"]
        return self._join(num_tokens, {"dtype": dtype, "cache_dtype": cache.dtype, "lanes": decode.lanes_a_key(head_dim), "heads": heads})

    def _join(self, num_tokens: int, asked: dict[str, Any]) -> bool:
        """One kernel serves a program: an operation that needs another one begins another program."""
        if self._program.rows and (num_tokens != self._num_tokens or any(self._kind.get(key, value) != value for key, value in asked.items())):
            self._flush()
        self._num_tokens = num_tokens
        self._kind |= asked
        return True

    def _most(self, num_tokens: int, dtype: str) -> int:
        """Numbers of x a token that there is room for beside a ring of FEWEST_STAGES."""
        room = self.shared - BARS - 128 - FEWEST_STAGES * stage_bytes(dtype, self.warps)
        return (room // num_tokens - 64) // 2 // PADDED * PADDED

    def _longest(self, *sizes: int) -> None:
        self._numbers = max(self._numbers, sum(ceil_div(size, PADDED) * PADDED for size in sizes) + (PADDED if len(sizes) > 1 else 0))

    def _gemm(self, x: Array, norm: NormArgs | None, first: Group, second: Group | None = None, waits: bool = True) -> np.ndarray:
        row = self._program.row(GEMM, first.tiles + (second.tiles if second else 0), waits)
        set_source(row, 0, x, first.weight, x.shape[1])
        set_group(row, 0, first)
        if second is not None:
            set_source(row, 1, x, second.weight, x.shape[1])
            set_group(row, 1, second)
        if norm is not None:
            row[columns.NORM], row[columns.GAIN], row[columns.SHIFT] = 1, address(norm.weight), address(norm.bias)
            row[columns.EPS] = float_bits(norm.eps)
            self._whole = max(self._whole, ceil_div(x.shape[1], PADDED) * PADDED)
        self._longest(x.shape[1])
        self._hold(x, norm, first, second)
        return row

    def _hold(self, *things: Any) -> None:
        self._program.held += things

    def _carried(self, shape: tuple[int, ...], weight: Weight) -> Array:
        return self.kernels.new(shape, CARRIER[CARRIED[weight.dtype]])

    # Running it

    def _flush(self) -> None:
        """Launches what was noted."""
        if not self._program.rows:
            return
        program, kind, num_tokens = self._program, self._kind, self._num_tokens
        numbers, stages = self._share(num_tokens, kind["dtype"])
        ring = ceil_div(BARS + max(num_tokens * pitch_of(numbers), self._scratch), 128) * 128
        shared_bytes = ring + stages * stage_bytes(kind["dtype"], self.warps)
        work_size = self._work
        self._forget()
        table = self.upload(program.table())
        kept = self._shared_arrays()
        kept.tables.append(table)  # a graph reads it at each replay
        kernel = make_step(
            Kind(
                kind["dtype"], kind.get("cache_dtype", "fp16"), kind.get("norm", "layernorm"), kind.get("activation"),
                1 if num_tokens <= 8 else 2, kind.get("lanes", 8), kind.get("heads", 1), self.warps,
            )
        )  # fmt: skip
        allow_shared(kernel, SIGNATURE, shared_bytes)
        work = self.kernels.new((work_size,), np.float32)
        kept.tables.append(work)
        pending, self.kernels.pending = self.kernels.pending, None
        try:
            self.kernels.launch(
                kernel, self.blocks, 32 * (self.warps + 1), shared_bytes,
                table, np.int32(num_tokens), np.int32(numbers), np.int32(ring), np.int32(stages), kept.counter, work, kept.arrivals,
            )  # fmt: skip
        finally:
            self.kernels.pending = pending
        self.launched += 1

    def _share(self, num_tokens: int, dtype: str) -> tuple[int, int]:
        """(numbers of x a token, stages of the ring) that shared memory is divided into: x whole if it leaves FEWEST_STAGES,
        else in segments."""
        stage = stage_bytes(dtype, self.warps)
        numbers = max(PADDED, min(self._numbers, self._most(num_tokens, dtype)))
        assert numbers >= self._whole
        stages = (self.shared - BARS - 128 - max(num_tokens * pitch_of(numbers), self._scratch)) // stage
        return numbers, min(MAX_STAGES, stages)

    def _shared_arrays(self) -> Kept:
        if self._kept is None:
            # of attention: a (token, key head, chunk) in several stretches leaves room for no more than there are blocks
            zeros = self.kernels.lasting(np.zeros(self.blocks, np.int32))
            self._kept = Kept(self.kernels.lasting(np.zeros(1, np.int32)), zeros, [])
        return self._kept
