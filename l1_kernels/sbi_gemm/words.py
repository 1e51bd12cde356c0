"""The four 32-bit words of a 16-byte load as numbers: float32 for the cores, pairs of 16-bit floats for the tensor cores."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from l1_kernels import ptx
from l1_kernels.cuda_api import cuda

ZERO = np.float32(0)
ZEROS4, ZEROS8 = (ZERO,) * 4, (ZERO,) * 8
ZERO_WORDS = (np.uint32(0),) * 4


@cache
def make_unpack(dtype: str) -> Callable[..., Any]:
    """unpack(words) -> eight float32 of four words of 16-bit floats."""
    pair = ptx.f16x2_to_f32x2 if dtype == "fp16" else ptx.bf16x2_to_f32x2

    @cuda.jit(device=True, forceinline=True)
    def unpack(words):
        a, b = pair(words[0])
        c, d = pair(words[1])
        e, f = pair(words[2])
        g, h = pair(words[3])
        return a, b, c, d, e, f, g, h

    return unpack


@cache
def make_pack(dtype: str) -> Callable[..., Any]:
    """pack(a, b) -> one word: two float32 rounded to `dtype` ("fp16", where it stays finite: beyond 65504 is 65504; "bf16")."""
    if dtype == "bf16":
        return ptx.f32x2_to_bf16x2
    largest = np.float32(65504)

    @cuda.jit(device=True, forceinline=True)
    def pack(a, b):
        # A NaN stays one: both comparisons are false.
        a = largest if a > largest else (-largest if a < -largest else a)
        b = largest if b > largest else (-largest if b < -largest else b)
        return ptx.f32x2_to_f16x2(a, b)

    return pack


@cache
def make_load_x(count: int, carried: bool) -> Callable[..., Any]:
    """load_x(x, index, inside) -> `count` words of x from global memory, 4 of 16-bit pairs (`carried`), 4 or 8 float32;
    zeros where not `inside`. As they come: a conversion would wait for them."""
    if carried:

        @cuda.jit(device=True, forceinline=True)
        def load_x(x, index, inside):
            return ptx.load16(x, index) if inside else ZERO_WORDS

    elif count == 4:

        @cuda.jit(device=True, forceinline=True)
        def load_x(x, index, inside):
            return ptx.load16_floats(x, index) if inside else ZEROS4

    else:

        @cuda.jit(device=True, forceinline=True)
        def load_x(x, index, inside):
            if inside:
                a, b, c, d = ptx.load16_floats(x, index)
                e, f, g, h = ptx.load16_floats(x, index + 4)
                return a, b, c, d, e, f, g, h
            return ZEROS8

    return load_x


@cache
def make_numbers_of(dtype: str, count: int, carried: bool) -> Callable[..., Any]:
    """numbers_of(held, at) -> the float32 of `count` held words: 4 for fp32 weights, 8 otherwise."""
    if carried:
        unpack = make_unpack(dtype)

        @cuda.jit(device=True, forceinline=True)
        def numbers_of(held, at):
            return unpack((held[at], held[at + 1], held[at + 2], held[at + 3]))

    elif count == 4:

        @cuda.jit(device=True, forceinline=True)
        def numbers_of(held, at):
            return held[at], held[at + 1], held[at + 2], held[at + 3]

    else:

        @cuda.jit(device=True, forceinline=True)
        def numbers_of(held, at):
            return held[at], held[at + 1], held[at + 2], held[at + 3], held[at + 4], held[at + 5], held[at + 6], held[at + 7]

    return numbers_of


@cache
def make_load_x_pairs(dtype: str, carried: bool) -> Callable[..., Any]:
    """load_x_pairs(x, index, inside) -> four words, eight numbers of x in 16 bits, from global memory; zeros where not `inside`."""
    pack = make_pack(dtype)
    if carried:

        @cuda.jit(device=True, forceinline=True)
        def load_x_pairs(x, index, inside):
            return ptx.load16(x, index) if inside else ZERO_WORDS

    else:

        @cuda.jit(device=True, forceinline=True)
        def load_x_pairs(x, index, inside):
            if inside:
                a, b, c, d = ptx.load16_floats(x, index)
                e, f, g, h = ptx.load16_floats(x, index + 4)
                return pack(a, b), pack(c, d), pack(e, f), pack(g, h)
            return ZERO_WORDS

    return load_x_pairs
