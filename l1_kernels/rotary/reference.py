"""(a, b) <- (a cos - b sin, b cos + a sin) for each pair (a, b) of a head's first r dimensions

qkv [T, H + 2G, d], in place on its first `num_rotated` heads (queries and keys); cos, sin [P, r/2]; index [T] picks a row
of them for each token. Pairs are (2i, 2i+1) if interleaved (GPT-J), else (i, i + r/2) (GPT-NeoX, LLaMA).
Reads and writes 4*T*num_rotated*r bytes each, 3 operations a number: bound by bytes.
"""

from __future__ import annotations

import numpy as np


def rotary(qkv: np.ndarray, num_rotated: int, cos: np.ndarray, sin: np.ndarray, index: np.ndarray, interleaved: bool) -> None:
    """Turns heads 0..num_rotated of qkv in place."""
    half = cos.shape[1]
    heads = qkv[:, :num_rotated, : 2 * half]
    a, b = (heads[..., 0::2], heads[..., 1::2]) if interleaved else (heads[..., :half], heads[..., half:])
    c, s = cos[index][:, None], sin[index][:, None]  # [T, 1, r/2]
    a[...], b[...] = a * c - b * s, b * c + a * s
