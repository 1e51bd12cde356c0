"""kv_write/reference.py: one pass copies keys and values; 16-bit caches get bits that NumPy rounded before."""

from __future__ import annotations

import numpy as np
from numba import njit

from l1_kernels.weight import encode


def write_kv(
    qkv: np.ndarray, num_heads: int, cache_k: np.ndarray, cache_v: np.ndarray, dtype: str, rows: np.ndarray, positions: np.ndarray
) -> None:
    """As the reference. Arguments are checked by the caller, the ranges of rows and positions too."""
    if dtype == "fp32":
        _scatter(qkv, num_heads, cache_k, cache_v, rows, positions)
    else:
        _scatter(encode(qkv[:, num_heads:], dtype), 0, cache_k, cache_v, rows, positions)


@njit(cache=True)
def _scatter(kv, first, cache_k, cache_v, rows, positions):
    num_kv_heads, head_dim = cache_k.shape[1], cache_k.shape[3]
    for t in range(kv.shape[0]):
        b, s = rows[t], positions[t]
        for g in range(num_kv_heads):
            for i in range(head_dim):
                cache_k[b, g, s, i] = kv[t, first + g, i]
            for i in range(head_dim):
                cache_v[b, g, s, i] = kv[t, first + num_kv_heads + g, i]
