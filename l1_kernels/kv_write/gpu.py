"""K[rows[t], g, positions[t]] = qkv[t, H + g],  V[rows[t], g, positions[t]] = qkv[t, H + G + g]

qkv float32 [T, H+2G, d]; caches [B, G, S, d] in their dtype's carrier; rows, positions int32 [T]; all in global memory.
Reads 8*T*G*d bytes, writes as many in fp32 and half in 16 bits: bound by bytes.

    block t -> token t; its threads walk over (g, dimension), dimensions side by side

The launcher rejects: caches of another shape or dtype, rows and positions that are not int32 [T]. Their values are the
caller's to keep inside the cache (checking them would wait for the GPU). T = 0 launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from numba import types

from l1_kernels import ptx
from l1_kernels.carrier import F32_3D, FLOATS, I32_1D, array_type, storer
from l1_kernels.cuda_api import cuda, early


@cache
def make_write_kv(dtype: str) -> Callable[..., Any]:
    """kernel(qkv, num_heads, cache_k, cache_v, rows, positions)[T, threads]."""
    store = storer(dtype)

    @early(alone="cache")
    @cuda.jit
    def write_kv(qkv, num_heads, cache_k, cache_v, rows, positions):
        ptx.take_turn()
        t = cuda.blockIdx.x
        row, position = rows[t], positions[t]
        num_kv_heads, head_dim = cache_k.shape[1], cache_k.shape[3]
        for item in range(cuda.threadIdx.x, num_kv_heads * head_dim, cuda.blockDim.x):
            g = item // head_dim
            i = item - g * head_dim
            cache_k[row, g, position, i] = store(qkv[t, num_heads + g, i])
            cache_v[row, g, position, i] = store(qkv[t, num_heads + num_kv_heads + g, i])

    return write_kv


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for dtype in FLOATS:
        cache_type = array_type(dtype, 4)
        yield f"write_kv_{dtype}", make_write_kv(dtype), (F32_3D, types.int64, cache_type, cache_type, I32_1D, I32_1D)
