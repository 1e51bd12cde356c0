"""What one launch of a production kernel computes, and the arguments that it takes.

    y = epilogue(prologue(x) @ w^T)             x [T, K], w [N, K], T <= 16

    prologue    none; or a norm of x's rows, made again by every block (its statistics need whole rows, a block needs all of x)
    epilogue    * scale (int8), + bias, activation, gate * up, added to y (a residual)
    pair        "rows"    two matrices side by side on one x: blocks below `blocks_a` take w with norm a, the rest wb with norm b
                "inner"   one output from two products: x @ w^T + xb @ wb^T
    experts     w is a stack [E * N, K], the grid has a second axis, and `routes` says who reads which matrix of the stack (layer 3)
                "pairs"   block row p: y[p] = x[p // share] @ w[routes[p]]^T: each (token, expert) pair by itself
                "rows"    block row e: y[r] = x[r] @ w[e]^T for the rows routes[e] .. routes[e + 1] of expert e
                "active"  block row a of A: the same for the a-th expert that has rows, routes[a] (-1: none), and its rows routes[A + a] .. routes[A + a + 1];
                          `gathers`: y[r] = x[routes[2 A + 1 + r] // share] @ ..., so that x needs not be dispatched

A job is a closure constant of its kernel: what it has not costs nothing. Both kernels (wide.py, tensor.py) take the arguments
of `signature`, in that order; what a job has not is an array of one number that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import ptx
from l1_kernels.activation.gpu import FUNCTIONS
from l1_kernels.carrier import F32_1D, F32_2D, I32_1D, array_type, storer
from l1_kernels.cuda_api import cuda

MAX_TOKENS = 16
PER_LOAD = {"fp32": 4, "fp16": 8, "bf16": 8, "int8": 16}  # numbers in 16 bytes
CARRIED = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "int8": "fp16"}  # weights' dtype -> what x is rounded to
LINE = 128  # bytes of a cache line


@dataclass(frozen=True, slots=True)
class Job:
    """dtype      of the weights
    norm          None | "layernorm" | "rmsnorm": the prologue, of float32 x
    carried       x comes in CARRIED[dtype]; otherwise float32
    activation    None | a kind of activation/gpu.py; with pair "rows" of the second matrix alone
    gated         w is [2F, K], gate rows then up rows, and y [T, F]
    add           y += instead of y =
    carries       y (with pair "rows": yb) is CARRIED[dtype]; otherwise float32
    pair          None | "rows" | "inner"
    experts       None | "pairs" | "rows" | "active"; x carried, without norm, pair and add
    gathers       with "active": x lies token by token
    settled       `routes` was written before the launch before this one, so it may be read before one's turn
    """

    dtype: str
    norm: str | None = None
    carried: bool = False
    activation: str | None = None
    gated: bool = False
    add: bool = False
    carries: bool = False
    pair: str | None = None
    experts: str | None = None
    gathers: bool = False
    settled: bool = False


def signature(job: Job) -> tuple[types.Type, ...]:
    """(x, xb, gain, shift, has_shift, gain_b, shift_b, has_shift_b, eps, eps_b, w, scale, bias, has_bias, y,
    wb, scale_b, bias_b, has_bias_b, yb, blocks_a, ahead, ahead_width, routes, share)

    ahead        [N', K'] in w's carrier: the weights that the next launch reads, whose rows' first `ahead_width` numbers
                 are fetched into L2 when a block has no more weights of its own to ask for
    routes       int32, as `experts` says; read where the job has experts
    share        choices a token
    """
    x = array_type(CARRIED[job.dtype], 2) if job.carried else F32_2D
    w, y = array_type(job.dtype, 2), array_type(CARRIED[job.dtype], 2) if job.carries and job.pair != "rows" else F32_2D
    yb = array_type(CARRIED[job.dtype], 2) if job.carries and job.pair == "rows" else F32_2D
    norm = (F32_1D, F32_1D, types.boolean)
    vectors = (F32_1D, F32_1D, types.boolean)
    return (x, x, *norm, *norm, types.float32, types.float32, w, *vectors, y, w, *vectors, yb, types.int64, w, types.int64, I32_1D, types.int64)


@cache
def make_row_of(gated: bool, half: int) -> Callable[..., Any]:
    """Which row of w a tile's slot is. Gated: `half` gate rows and their up rows alternate, so that one block has both."""
    if gated and half == 1:  # wide: slots 2j, 2j + 1 are a gate row and its up row

        @cuda.jit(device=True, forceinline=True)
        def row_of(slot, num_rows):
            return (slot >> 1) + (slot & 1) * (num_rows >> 1)

    elif gated:  # tensor: slots 16j..16j+7 are gate rows, 16j+8..16j+15 their up rows

        @cuda.jit(device=True, forceinline=True)
        def row_of(slot, num_rows):
            return ((slot >> 4) << 3) + (slot & 7) + ((slot >> 3) & 1) * (num_rows >> 1)

    else:

        @cuda.jit(device=True, forceinline=True)
        def row_of(slot, num_rows):
            return slot

    return row_of


@cache
def make_write(job: Job, second: bool) -> Callable[..., Any]:
    """write(y, t, n, value, up): the end of the epilogue; `up` is read by a gated job alone. `second`: of pair "rows"."""
    plain = job.pair == "rows" and not second
    function = FUNCTIONS[job.activation] if job.activation is not None and not plain else None
    gated, add = job.gated and not plain, job.add
    store = storer(CARRIED[job.dtype] if job.carries and not plain else "fp32")

    @cuda.jit(device=True, forceinline=True)
    def write(y, t, n, value, up):
        if function is not None:
            value = function(value)
        if gated:
            value = value * up
        if add:
            y[t, n] += value
        else:
            y[t, n] = store(value)

    return write


@cache
def make_fetch_ahead(dtype: str) -> Callable[..., Any]:
    """fetch_ahead(w, width): the whole grid asks for the first `width` numbers of every row of w, a cache line a thread."""
    line = LINE // np.dtype(str(array_type(dtype, 2).dtype)).itemsize

    @cuda.jit(device=True)
    def fetch_ahead(w, width):
        if width > 0:
            lines = (width + line - 1) // line
            size = w.shape[1]
            for i in range(cuda.grid(1), w.shape[0] * lines, cuda.gridsize(1)):
                row = i // lines
                ptx.prefetch_l2(w, row * size + min((i - row * lines) * line, size - 1))

    return fetch_ahead
