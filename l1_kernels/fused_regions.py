"""Deep-Fusion's regions as launches of the SBI-GeMM kernels (l1_kernels/sbi_gemm), for up to 16 tokens.

    region                launches here   unfused
    norm_linear                 1             2
    attend                      1             3         of tokens that share no row (attention/decode_region.py)
    norm_feed_forward           1             3
    linear_add                  1             2
    norm_pair                   1             4
    linear_add_pair             1             4         and one more for a norm beyond `norm_tokens` tokens

Bytes that no longer travel, of 4 a number, T tokens: norm_linear 2TD, norm_feed_forward 2TD + 2TF (gated 2TD + 4TF), linear_add
2TD, attend 2T(H+G)r of r dimensions that turn; `hidden` and `mixed` are handed on in 16 bits (linear_add_pair takes them alike).
At T = 1 they are nothing beside the weights: the gain is in launches, a dependent step costs about 4 us however small it is.

With `ahead_bytes` each launch is told which weights the next one will read, and a block without work left fetches its share
of them into L2. The order in which a model comes by its weights is the same in every pass; it is learnt in the first one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from l1_kernels import checks
from l1_kernels.activation import gpu as activation
from l1_kernels.attention import region_launch
from l1_kernels.checks import FLOAT32
from l1_kernels.gpu_kernels import GeMM, GpuKernels
from l1_kernels.int8_regions import Int8Regions
from l1_kernels.regions import CacheArgs, NormArgs, RotaryArgs, apply_norm_args
from l1_kernels.sbi_gemm import launch, plans
from l1_kernels.sbi_gemm.job import CARRIED, MAX_TOKENS, Job
from l1_kernels.sbi_gemm.launch import Operand
from l1_kernels.sbi_gemm.plans import Plan
from l1_kernels.sbi_gemm.tensor import pitch_of
from l1_kernels.weight import CARRIER, Array, Weight

LINE = 128  # bytes
NORM_TOKENS = 1  # on an H200 from 8 tokens on a norm in every block costs 6 us and more, a launch of its own about 3
NORM_BYTES = 200 * 1024  # of shared memory for a normalised x


class FusedRegions:
    """`regions.Regions` on a GPU or the simulator. More than 16 tokens, a K that is no multiple of 16 bytes, misaligned
    weights: library_regions.py, by `gemm` (a library's product; None: the unfused regions).

    multiprocessors   of the GPU
    table             the tuner's (sbi_gemm/plans.py)
    ahead_bytes       of the next weights to fetch into L2 at the end of a launch; 0: none (measured: no gain, no loss)
    norm_tokens       up to so many tokens every block makes the norm itself; beyond, the norm is a launch of its own
    most_tokens       up to so many tokens SBI-GeMM multiplies; 0: never, for the ablation of Fig 10a
    """

    def __init__(
        self, kernels: GpuKernels, multiprocessors: int, table: list[dict[str, Any]] | None = None,
        ahead_bytes: int = 0, norm_tokens: int = NORM_TOKENS, gemm: GeMM | None = None, most_tokens: int = MAX_TOKENS,
    ) -> None:  # fmt: skip
        self.kernels = kernels
        self.unfused = Int8Regions(kernels, gemm)
        self.multiprocessors = multiprocessors
        self.table = table or []
        self.ahead_bytes = ahead_bytes
        self.norm_tokens = norm_tokens
        self.most_tokens = min(most_tokens, MAX_TOKENS)
        self._order = WeightOrder()
        self._plans: dict[Any, Plan] = {}

    def norm_linear(self, x: Array, norm: NormArgs | None, weight: Weight, bias: Array | None) -> Array:
        job = Job(weight.dtype, norm=_kind(norm), carried=norm is None and x.dtype != FLOAT32)
        if not self._takes(job, x, weight):
            return self.unfused.norm_linear(x, norm, weight, bias)
        self._check(x, norm, weight, bias)
        if norm is not None and not self._fits(x):
            return self.norm_linear(self._normed(x, norm, weight), None, weight, bias)
        y = self.kernels.new((x.shape[0], weight.data.shape[0]), np.float32)
        self._run(job, _operand(x, norm, weight, bias, y))
        return y

    def norm_feed_forward(self, x: Array, norm: NormArgs | None, weight: Weight, bias: Array | None, kind: str, gated: bool) -> Array:
        checks.known(kind, "kind", activation.KINDS)
        carried = norm is None and x.dtype != FLOAT32
        carries = self._carries(weight, gated)
        job = Job(weight.dtype, norm=_kind(norm), carried=carried, activation=kind, gated=gated, carries=carries)
        if not self._takes(job, x, weight):
            return self.unfused.norm_feed_forward(x, norm, weight, bias, kind, gated)
        self._check(x, norm, weight, bias, gated)
        if norm is not None and not self._fits(x):
            return self.norm_feed_forward(self._normed(x, norm, weight), None, weight, bias, kind, gated)
        hidden = self._hidden(job, x.shape[0], weight)
        self._run(job, _operand(x, norm, weight, bias, hidden))
        return hidden

    def linear_add(self, x: Array, weight: Weight, bias: Array | None, residual: Array | None) -> Array:
        job = Job(weight.dtype, carried=x.dtype != FLOAT32, add=residual is not None)
        if not self._takes(job, x, weight):
            return self.unfused.linear_add(x, weight, bias, residual)
        self._check(x, None, weight, bias)
        y = self._sum(x.shape[0], weight, residual)
        self._run(job, _operand(x, None, weight, bias, y))
        return y

    def norm_pair(
        self, x: Array, norms: tuple[NormArgs | None, NormArgs | None], qkv: tuple[Weight, Array | None],
        up: tuple[Weight, Array | None], kind: str, gated: bool,
    ) -> tuple[Array, Array]:  # fmt: skip
        checks.known(kind, "kind", activation.KINDS)
        if x.shape[0] > self.most_tokens or qkv[0].act is not None:
            return self.unfused.norm_pair(x, norms, qkv, up, kind, gated)
        carried, carries = norms[0] is None and x.dtype != FLOAT32, self._carries(up[0], gated)
        job = Job(qkv[0].dtype, _kind(norms[0]), carried, activation=kind, gated=gated, carries=carries, pair="rows")
        alike = qkv[0].dtype == up[0].dtype and _kind(norms[0]) == _kind(norms[1])
        if not (alike and self._takes(job, x, qkv[0], up[0])):
            return self.norm_linear(x, norms[0], *qkv), self.norm_feed_forward(x, norms[1], *up, kind, gated)
        self._check(x, norms[0], *qkv)
        self._check(x, norms[1], *up, gated)
        if norms[0] is not None and not self._fits(x):
            if norms[0] is not norms[1]:
                return self.norm_linear(x, norms[0], *qkv), self.norm_feed_forward(x, norms[1], *up, kind, gated)
            return self.norm_pair(self._normed(x, norms[0], qkv[0]), (None, None), qkv, up, kind, gated)
        y, hidden = self.kernels.new((x.shape[0], qkv[0].data.shape[0]), np.float32), self._hidden(job, x.shape[0], up[0])
        self._run(job, _operand(x, norms[0], *qkv, y), _operand(x, norms[1], *up, hidden))
        return y, hidden

    def linear_add_pair(
        self, mixed: Array, out: tuple[Weight, Array | None], hidden: Array, down: tuple[Weight, Array | None], residual: Array | None
    ) -> Array:
        carried = mixed.dtype != FLOAT32
        job = Job(out[0].dtype, carried=carried, add=residual is not None, pair="inner")
        alike = out[0].dtype == down[0].dtype and mixed.dtype == hidden.dtype
        if not (alike and self._takes(job, mixed, out[0]) and self._takes(job, hidden, down[0])):
            return self.linear_add(hidden, *down, self.linear_add(mixed, *out, residual))
        self._check(mixed, None, *out)
        self._check(hidden, None, *down)
        y = self._sum(mixed.shape[0], out[0], residual)
        self._run(job, _operand(mixed, None, *out, y), _operand(hidden, None, *down, y))
        return y

    def attend(
        self, qkv: Array, num_heads: int, rotary: RotaryArgs | None, cache: CacheArgs, window: int, scale: float, slopes: Array | None
    ) -> Array:
        if not region_launch.takes_step(cache):
            return self.unfused.attend(qkv, num_heads, rotary, cache, window, scale, slopes)
        return region_launch.attend_step(self.kernels, self.multiprocessors, qkv, num_heads, rotary, cache, window, scale, slopes)

    def rows_dtype(self, num_tokens: int, *weights: Weight) -> str | None:
        dtype = weights[0].dtype
        good = (
            dtype != "fp32"
            and num_tokens <= self.most_tokens
            and all(weight.dtype == dtype and weight.act is None and address(weight.data) % 16 == 0 for weight in weights)
            and plans.takes(Job(dtype, carried=True), num_tokens, *(weight.data.shape[-1] for weight in weights))
        )
        return CARRIED[dtype] if good else None

    def _takes(self, job: Job, x: Array, *weights: Weight) -> bool:
        return (
            getattr(x, "ndim", 0) == 2
            and x.shape[0] <= self.most_tokens
            and all(weight.act is None for weight in weights)  # W8A8 is int8_regions.py's
            and plans.takes(job, x.shape[0], *(weight.data.shape[-1] for weight in weights))
            and all(address(weight.data) % 16 == 0 for weight in weights)
        )

    def _fits(self, x: Array) -> bool:
        """Whether a block has room, and the GPU time, for the normalised x."""
        return x.shape[0] <= self.norm_tokens and x.shape[0] * 4 * pitch_of(x.shape[1]) <= NORM_BYTES

    def _normed(self, x: Array, norm: NormArgs, weight: Weight) -> Array:
        """The norm by itself, in the 16 bits that a GeMM with `weight` reads."""
        if weight.dtype == "fp32":
            return apply_norm_args(self.kernels, x, norm)
        return launch.norm_rows(self.kernels, x, norm.kind, norm.weight, norm.bias, norm.eps, CARRIED[weight.dtype])

    def _check(self, x: Array, norm: NormArgs | None, weight: Weight, bias: Array | None, gated: bool = False) -> None:
        checks.matrix(weight, "weight")
        num_out, size = weight.data.shape
        carried = x.dtype != FLOAT32 and norm is None
        checks.ranked(x, "x", np.dtype(CARRIER[CARRIED[weight.dtype]]) if carried else FLOAT32, 2)
        if x.shape[1] != size:
            checks.reject("x", f"[T, {size}] (weight's K)", checks.describe(x))
        if bias is not None:
            checks.array(bias, "bias", FLOAT32, (num_out,))
        if norm is not None:
            checks.array(norm.weight, "norm.weight", FLOAT32, (size,))
            if norm.bias is not None:
                checks.array(norm.bias, "norm.bias", FLOAT32, (size,))
        if gated and num_out % 2:
            checks.reject("weight", "[2F, D]", checks.describe(weight.data))

    def _run(self, job: Job, a: Operand, b: Operand | None = None) -> None:
        num_tokens = a.x.shape[0]
        outputs, inner = a.weight.data.shape
        if b is not None:
            outputs += b.weight.data.shape[0] if job.pair == "rows" else 0
            inner += b.weight.data.shape[1] if job.pair == "inner" else 0
        key = (job, plans.bucket(num_tokens), outputs, inner)
        if key not in self._plans:
            self._plans[key] = plans.choose(self.table, job, num_tokens, outputs, inner)
        ahead, width = None, 0
        if self.ahead_bytes:
            ahead = self._order.after(*[operand.weight.data for operand in (a, b) if operand is not None])
            if ahead is not None:
                width = ahead_width(ahead, self.ahead_bytes)
        launch.run(self.kernels, job, self._plans[key], self.multiprocessors, a, b, ahead, width)

    def _carries(self, weight: Weight, gated: bool) -> bool:
        """Hidden goes on in 16 bits where the next GeMM can read it 16 bytes at a time."""
        width = weight.data.shape[0] // (2 if gated else 1)
        return weight.dtype != "fp32" and width % 16 == 0

    def _hidden(self, job: Job, num_tokens: int, weight: Weight) -> Array:
        width = weight.data.shape[0] // (2 if job.gated else 1)
        return self.kernels.new((num_tokens, width), CARRIER[CARRIED[job.dtype]] if job.carries else np.float32)

    def _sum(self, num_tokens: int, weight: Weight, residual: Array | None) -> Array:
        shape = (num_tokens, weight.data.shape[0])
        if residual is None:
            return self.kernels.new(shape, np.float32)
        checks.array(residual, "residual", FLOAT32, shape)
        return residual


class WeightOrder:
    """Which weights came after which, as weak references: nothing is kept alive, and a weight that is gone is not fetched."""

    def __init__(self) -> None:
        self._next: dict[int, Callable[[], Array | None]] = {}
        self._last: int | None = None

    def after(self, *weights: Array) -> Array | None:
        """Notes that a launch reads `weights`, and gives the largest that the launch after it read the last time."""
        here = address(weights[0])
        if self._last is not None and self._last != here:
            self._next[self._last] = weakref.ref(max(weights, key=lambda weight: weight.size))
        self._last = here
        known = self._next.get(here)
        return None if known is None else known()


def ahead_width(weight: Array, most_bytes: int) -> int:
    """How many numbers at the start of each row make up about `most_bytes`, in whole cache lines."""
    line = LINE // weight.dtype.itemsize
    return min(weight.shape[1], most_bytes // LINE // weight.shape[0] * line)


def address(array: Array) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def _kind(norm: NormArgs | None) -> str | None:
    return None if norm is None else norm.kind


def _operand(x: Array, norm: NormArgs | None, weight: Weight, bias: Array | None, y: Array) -> Operand:
    if norm is None:
        return Operand(x, weight, bias, y)
    return Operand(x, weight, bias, y, norm.weight, norm.bias, norm.eps)
