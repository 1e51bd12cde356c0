"""x[t, k] ~ scale[t] * (low[t, k] + 128 * high[t, k]): a token's numbers in int8, its few outliers in twice as many bits.

x [T, K] -> low, high int8 [T, K], scale [T]. `high` is 0 except at outliers, so what is multiplied in int8 is `low`, and `high`
adds a sparse correction: both products are sums of int8 * int8, and share the scale.

Which scheme, and why: a hundred channels of a thousand may be 60 times larger than the rest (OPT), or a few numbers of a token
hundreds of times (what a gated feed-forward gives its down-projection). With one scale a token, max|x| / 127, the rest then
becomes noise. No calibration data is at hand when a checkpoint is loaded, so outliers are found in each token by itself:

    m       the mean of |x|; twice again the mean of those |x| <= 4 m, which the outliers are then not part of
    outlier |x| > 8 m. Normally distributed numbers have none (8 m is 6.4 of their standard deviations)
    scale   max|x| of the others / 127, but at least max|x| / (127 * 128), which `high` reaches
    high    rint(x / (128 scale)) at outliers; low what is left, rint(x / scale - 128 high), |low| <= 127

So an outlier has 15 bits and all else 8; one number's rounding does not depend on other tokens. LLM.int8 (arXiv 2208.07339) keeps
the columns of outliers in 16 bits; here they stay in int8, and nothing has to be gathered. 5 sweeps over a row, some 12 operations
a number: bound by bytes, 4 K read and 2 K written a token.
Under tensor parallelism a rank rounds its own slice of a row-parallel matrix's input, by a scale of its own.

`fine` gives every number 15 bits of max|x|: high rint(x / (128 scale)) everywhere, scale max|x| / (127 * 128 + 63). That is for W8A16 where a
library multiplies int8 and nothing mixed: x loses less than fp16 would take from a token's larger numbers, and two products cost what one in 16 bits does.

A token that is not finite has a NaN for its scale, so all its outputs are NaN.
"""

from __future__ import annotations

import numpy as np

TRIM = 4  # times the mean: numbers beyond it are left out of the next mean
OUTLIER = 8  # times the trimmed mean
ROUNDS = 2
STEP = 128  # of `high`, in steps of `low`
LARGEST = 127
FINE_LARGEST = LARGEST * STEP + STEP // 2 - 1  # in steps of `low`, of a fine plane: high <= 127, |low| <= 64


def quantize_rows(x: np.ndarray, fine: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [T, K] of any float dtype -> low, high int8 [T, K], scale [T] in x's precision."""
    size = np.abs(x)
    with np.errstate(invalid="ignore"):
        mean = size.mean(axis=1, keepdims=True)
        for _ in range(ROUNDS):
            inside = size <= TRIM * mean
            mean = np.where(inside, size, 0).sum(axis=1, keepdims=True) / np.maximum(inside.sum(axis=1, keepdims=True), 1)
        outlier = (size > OUTLIER * mean) | fine
        reach = FINE_LARGEST if fine else LARGEST * STEP
        scale = np.maximum(np.where(outlier, 0, size).max(axis=1, keepdims=True) / LARGEST, size.max(axis=1, keepdims=True) / reach)
        scale = np.where(scale > 0, scale, 1)
        finite = np.isfinite(size).all(axis=1, keepdims=True)
        parts = np.where(finite, x, 0) / np.where(finite, scale, 1)
        high = np.where(outlier & finite, np.rint(parts / STEP), 0)
        low = np.rint(parts - STEP * high)
    scale = np.where(finite, scale, np.nan).astype(x.dtype)
    return low.astype(np.int8), high.astype(np.int8), scale[:, 0]


def rounded(x: np.ndarray, fine: bool = False) -> np.ndarray:
    """The numbers that `quantize_rows` leaves of x [T, K], in x's precision."""
    low, high, scale = quantize_rows(x, fine)
    return scale[:, None] * (low.astype(x.dtype) + STEP * high.astype(x.dtype))
