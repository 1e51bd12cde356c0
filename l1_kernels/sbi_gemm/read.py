"""out[i] = xor of the words that thread i reads: what memory gives to a kernel that does nothing else.

words uint32 [n], n a multiple of 16 * threads * blocks, in global memory; reads 4n bytes: the bound that GeMMs are held against.

    thread i -> 16 bytes at i, i + (all threads), ..., four of them in flight
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import ptx
from l1_kernels.cuda_api import cuda

ZERO = np.uint32(0)


@cache
def make_read() -> Callable[..., Any]:
    """kernel(words, out[blocks * threads])"""

    @cuda.jit
    def read(words, out):
        thread, threads = cuda.grid(1), cuda.gridsize(1)
        total = ZERO
        last = words.shape[0] - 4
        for i in range(thread * 4, words.shape[0], threads * 16):
            a = ptx.load16_stream(words, i)
            b = ptx.load16_stream(words, min(i + threads * 4, last))
            c = ptx.load16_stream(words, min(i + threads * 8, last))
            d = ptx.load16_stream(words, min(i + threads * 12, last))
            total ^= a[0] ^ a[1] ^ a[2] ^ a[3] ^ b[0] ^ b[1] ^ b[2] ^ b[3]
            total ^= c[0] ^ c[1] ^ c[2] ^ c[3] ^ d[0] ^ d[1] ^ d[2] ^ d[3]
        out[thread] = total

    return read


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    words = types.Array(types.uint32, 1, "C")
    yield "read", make_read(), (words, words)
