"""y[t, f] = act(x[t, f]);   gate: y[t, f] = act(x[t, f]) * x[t, F + f]

float32 in global memory. `activate` reads and writes 4 bytes a number, `gate` reads 8 and writes 4; 10 to 20 operations:
bound by bytes.

    thread i -> numbers i, i + (all threads), ... of the output

The launcher rejects: x that is not float32 [T, F] (gate: [T, 2F]), an unknown kind. Size 0 launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels.carrier import F32_1D, F32_2D
from l1_kernels.cuda_api import cuda, math

KINDS = ("gelu", "gelu_new", "relu", "silu")
ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)
SQRT_HALF = np.float32(math.sqrt(0.5))
MINUS_2_SQRT_2_OVER_PI = np.float32(-2 * math.sqrt(2 / math.pi))
CUBIC = np.float32(0.044715)


@cuda.jit(device=True)
def gelu(x):
    return HALF * x * (ONE + math.erf(x * SQRT_HALF))


@cuda.jit(device=True)
def gelu_new(x):
    # (1 + tanh(z)) / 2 = 1 / (1 + e^-2z): one exponential where tanh takes a branch or two. It overflows to 0, and a NaN stays one.
    return x / (ONE + math.exp(MINUS_2_SQRT_2_OVER_PI * (x + CUBIC * x * x * x)))


@cuda.jit(device=True)
def relu(x):
    return ZERO if x < ZERO else x  # this way round a NaN stays one


@cuda.jit(device=True)
def silu(x):
    e = math.exp(-abs(x))  # at most 1: never overflows
    return x / (ONE + e) if x >= ZERO else x * e / (ONE + e)


FUNCTIONS = {"gelu": gelu, "gelu_new": gelu_new, "relu": relu, "silu": silu}


@cache
def make_activate(kind: str) -> Callable[..., Any]:
    """kernel(x, y), flat."""
    function = FUNCTIONS[kind]

    @cuda.jit
    def activate(x, y):
        for i in range(cuda.grid(1), x.shape[0], cuda.gridsize(1)):
            y[i] = function(x[i])

    return activate


@cache
def make_gate(kind: str) -> Callable[..., Any]:
    """kernel(x [T, 2F], y [T, F])."""
    function = FUNCTIONS[kind]

    @cuda.jit
    def gate(x, y):
        width = y.shape[1]
        for i in range(cuda.grid(1), y.shape[0] * width, cuda.gridsize(1)):
            t = i // width
            f = i - t * width
            y[t, f] = function(x[t, f]) * x[t, width + f]

    return gate


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for kind in KINDS:
        yield f"activate_{kind}", make_activate(kind), (F32_1D, F32_1D)
        yield f"gate_{kind}", make_gate(kind), (F32_2D, F32_2D)
