"""gelu(x) = x/2 (1 + erf(x/sqrt 2));  gelu_new(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)));  silu(x) = x / (1 + e^-x)

x [T, F] -> y [T, F]; the gated form takes [T, 2F] (gate columns, then up columns) -> act(gate) * up [T, F].
Reads and writes 4 bytes a number, some tens of operations each: bound by bytes on a GPU, by `exp` on a CPU.
"""

from __future__ import annotations

import math

import numpy as np

_erf = np.vectorize(math.erf, otypes=[np.float64])  # NumPy has none


def activate(x: np.ndarray, kind: str) -> np.ndarray:
    """Elementwise, in x's precision: "gelu" (erf), "gelu_new" (tanh), "relu", "silu"."""
    if kind == "gelu":
        return 0.5 * x * (1 + _erf(x / math.sqrt(2)).astype(x.dtype))
    if kind == "gelu_new":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))))
    if kind == "relu":
        return np.maximum(x, 0)
    if kind == "silu":
        return x / (1 + np.exp(-np.maximum(x, -80)))  # below -80 the result is under 1e-33, and exp must not overflow
    raise ValueError(f"activate: kind {kind!r} is not one of gelu, gelu_new, relu, silu")


def gate(x: np.ndarray, kind: str) -> np.ndarray:
    """[T, 2F] -> [T, F]: activate(x[:, :F]) * x[:, F:]."""
    size = x.shape[1] // 2
    return activate(x[:, :size], kind) * x[:, size:]
