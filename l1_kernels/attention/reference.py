"""o[t, h] = sum_j p_j v_j,  p = softmax_j(scale * q[t, h] . k_j + slope[h] * (j - (ends[t] - 1))),  j in [start, ends[t])

qkv [T, H + 2G, d] holds the queries; keys and values come from row rows[t] of the caches [B, G, S, d], head h // (H/G);
start = max(0, ends[t] - window), or 0 where window is 0. Output [T, H * d]. With L keys a token: 4*T*H*L*d operations,
reads 2*G*L*d numbers of cache a token (a decode step) or once a sequence (a prompt): the first is bound by bytes, the
second by operations. A token without keys (ends 0) gives zeros.
"""

from __future__ import annotations

import numpy as np

from l1_kernels.weight import decode


def attention(
    qkv: np.ndarray,
    num_heads: int,
    cache_k: np.ndarray,
    cache_v: np.ndarray,
    dtype: str,
    rows: np.ndarray,
    ends: np.ndarray,
    window: int,
    scale: float,
    slopes: np.ndarray | None,
) -> np.ndarray:
    """One token after the other, all its keys at once. In qkv's precision."""
    num_tokens, _, head_dim = qkv.shape
    num_kv_heads = cache_k.shape[1]
    out = np.zeros((num_tokens, num_heads, head_dim), qkv.dtype)
    for t in range(num_tokens):
        end = int(ends[t])
        start = max(0, end - window) if window > 0 else 0
        if end == start:
            continue
        keys = decode(cache_k[rows[t], :, start:end], dtype).astype(qkv.dtype)  # [G, L, d]
        values = decode(cache_v[rows[t], :, start:end], dtype).astype(qkv.dtype)
        queries = qkv[t, :num_heads].reshape(num_kv_heads, -1, head_dim)  # [G, H/G, d]
        scores = scale * (queries @ keys.transpose(0, 2, 1))  # [G, H/G, L]
        if slopes is not None:
            distance = np.arange(start, end) - (end - 1)
            scores = scores + slopes.reshape(num_kv_heads, -1, 1).astype(qkv.dtype) * distance.astype(qkv.dtype)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[t] = ((p / p.sum(axis=-1, keepdims=True)) @ values).reshape(num_heads, head_dim)
    return out.reshape(num_tokens, num_heads * head_dim)
