"""LayerNorm: y = (x - mean) / sqrt(var + eps) * w + b.  RMSNorm: y = x / sqrt(mean(x^2) + eps) * w.

x [T, D], w and b [D]. Reads 4(T*D + 2D) bytes, writes 4*T*D, about 6 operations a number: bound by bytes.
The head norms work in place on a run of heads of qkv [T, H + 2G, d]: each head by itself, or all of them together
("span": first the sums of squares, which ranks add up, then the scaling).
"""

from __future__ import annotations

import numpy as np


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, eps: float) -> np.ndarray:
    """x [T, D] -> [T, D]. The variance is the mean of squared distances (divisor D), as in the LayerNorm paper."""
    centred = x - x.mean(axis=-1, keepdims=True)
    y = centred / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + eps) * weight
    return y if bias is None else y + bias


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x [T, D] -> [T, D]."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def head_norm(qkv: np.ndarray, first: int, count: int, weight: np.ndarray, eps: float) -> None:
    """In place: each of the heads first..first+count of qkv [T, H+2G, d] by its own RMS, times weight [d]."""
    heads = qkv[:, first : first + count]
    heads[...] = rms_norm(heads, weight, eps)


def sum_squares(qkv: np.ndarray, first: int, count: int) -> np.ndarray:
    """Sum of squares over heads first..first+count together -> [T]."""
    heads = qkv[:, first : first + count]
    return (heads * heads).sum(axis=(1, 2))


def span_norm(qkv: np.ndarray, first: int, count: int, total: np.ndarray, size: int, weight: np.ndarray, eps: float) -> None:
    """In place: heads first..first+count *= weight [count * d] / sqrt(total[t] / size + eps). `size` is the whole span's
    width, of which this rank may hold a part."""
    heads = qkv[:, first : first + count]
    heads[...] = heads / np.sqrt(total / size + eps)[:, None, None] * weight.reshape(heads.shape[1:])
