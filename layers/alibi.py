"""ALiBi: a head-specific slope times the distance to a key, in place of position embeddings."""

from __future__ import annotations

import numpy as np


def alibi_slopes(num_heads: int) -> np.ndarray:
    """float32 [H]. For a power of two: 2^(-8 (h+1) / H). Any other count takes the slopes of the power of two below
    it, then every second slope of the one above."""
    below = 1 << (num_heads.bit_length() - 1)
    slopes = geometric(below)
    if below < num_heads:
        slopes = np.concatenate([slopes, geometric(2 * below)[::2][: num_heads - below]])
    return slopes.astype(np.float32)


def geometric(count: int) -> np.ndarray:
    return 2.0 ** (-8.0 * np.arange(1, count + 1) / count)
