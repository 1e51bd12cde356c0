"""y[t, n] = sum_k x[t, k] * w[n, k] + b[n]

x [T, K], w [N, K] in any dtype, b [N] -> y [T, N]. 2*T*N*K operations; reads N*K weights of 4, 2 or 1 bytes, once.
At T = 1 that is half an operation a byte in fp32: bound by the weights' bytes. From T of some tens on by operations.
A weight with act "int8" (W8A8) is multiplied with x rounded to int8, a scale a token: l1_kernels/quantize.
"""

from __future__ import annotations

import numpy as np

from l1_kernels.quantize.reference import rounded
from l1_kernels.weight import Weight, decode


def linear(x: np.ndarray, weight: Weight, bias: np.ndarray | None = None) -> np.ndarray:
    """x [T, K] @ weight [N, K]^T + bias [N] -> [T, N], in x's precision."""
    w = weight.data if weight.dtype == "int8" else decode(weight.data, weight.dtype)
    if weight.act is not None:
        x = rounded(x)
    y = x @ w.astype(x.dtype).T
    if weight.scale is not None:
        y = y * weight.scale  # one scale an output: it comes out of the sum
    return y if bias is None else y + bias
