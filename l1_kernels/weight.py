"""A weight matrix as a device holds it, and the four dtypes it can be held in (docs/notation.md: N rows out, K in).

16-bit floats travel as their bits in uint16 arrays on every device: numba has no half arithmetic, NumPy has no
bfloat16, and one carrier keeps the kernels' signatures few. `decode` gives the numbers back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any  # np.ndarray on cpu and sim, cupy.ndarray on cuda

CARRIER = {"fp32": np.float32, "fp16": np.uint16, "bf16": np.uint16, "int8": np.int8}
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [N, K] (or a stack [E, N, K]), row-major, one output a row.

    data   float32, uint16 (the bits of fp16 or bf16), or int8
    dtype  "fp32" | "fp16" | "bf16" | "int8"
    scale  float32 [N] (or [E, N]) for int8: the number is data * scale; otherwise None
    act    "int8": what is multiplied with an int8 matrix is rounded to int8 too, a token at a time (l1_kernels/quantize),
           which is W8A8; None: it is not, W8A16
    """

    data: Array
    dtype: str
    scale: Array | None = None
    act: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes) + (0 if self.scale is None else int(self.scale.nbytes))

    def __getitem__(self, index: int) -> Weight:
        """One matrix of a stack [E, N, K]."""
        return Weight(self.data[index], self.dtype, None if self.scale is None else self.scale[index], self.act)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """The bits of float32 `x` rounded to bfloat16, nearest even (NaN stays NaN)."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FC0), rounded).astype(np.uint16)


def encode(x: np.ndarray, dtype: str) -> np.ndarray:
    """Host float32 numbers -> the carrier array of `dtype` (not int8: see `quantize`)."""
    if dtype == "fp32":
        return np.ascontiguousarray(x, np.float32)
    if dtype == "fp16":
        return np.ascontiguousarray(x, np.float32).astype(np.float16).view(np.uint16)
    if dtype == "bf16":
        return bf16_bits(x)
    raise ValueError(f"encode: dtype {dtype!r} is not one of fp32, fp16, bf16")


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric int8, one scale a row (an output channel): x ~ q * scale[..., None], scale = max|row| / 127."""
    x = np.ascontiguousarray(x, np.float32)
    peak = np.abs(x).max(axis=-1)
    scale = (np.where(peak > 0, peak, 1.0) / 127.0).astype(np.float32)
    q = np.clip(np.rint(x / scale[..., None]), -127, 127).astype(np.int8)
    return q, scale


def decode(data: np.ndarray, dtype: str, scale: np.ndarray | None = None) -> np.ndarray:
    """Carrier array on the host -> float32 numbers. Exact for every dtype."""
    if dtype == "fp32":
        return data
    if dtype == "fp16":
        return data.view(np.float16).astype(np.float32)
    if dtype == "bf16":
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "int8":
        assert scale is not None
        return data.astype(np.float32) * scale[..., None]
    raise ValueError(f"decode: unknown dtype {dtype!r}")


def host_weight(x: np.ndarray, dtype: str) -> Weight:
    """Host float32 matrix [N, K] or stack [E, N, K] -> Weight in host memory."""
    if dtype == "int8":
        data, scale = quantize(x)
        return Weight(data, "int8", scale)
    return Weight(encode(x, dtype), dtype)
