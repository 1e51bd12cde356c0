"""K[rows[t], g, positions[t]] = qkv[t, H + g],  V[rows[t], g, positions[t]] = qkv[t, H + G + g]

qkv [T, H + 2G, d]; caches [B, G, S, d] in the carrier of their dtype. Reads 8*T*G*d bytes, writes as many in fp32 and half
in 16 bits: bound by bytes.
"""

from __future__ import annotations

import numpy as np

from l1_kernels.weight import encode


def write_kv(
    qkv: np.ndarray, num_heads: int, cache_k: np.ndarray, cache_v: np.ndarray, dtype: str, rows: np.ndarray, positions: np.ndarray
) -> None:
    """Keys and values of qkv into the caches, rounded to `dtype` ("fp32", "fp16", "bf16")."""
    num_kv_heads = cache_k.shape[1]
    keys, values = qkv[:, num_heads : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :]
    cache_k[rows, :, positions] = encode(keys, dtype)
    cache_v[rows, :, positions] = encode(values, dtype)
