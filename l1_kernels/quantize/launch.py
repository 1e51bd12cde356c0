"""Launching quantize/gpu.py: its arguments, and the shared memory that a row takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from l1_kernels import checks
from l1_kernels.checks import FLOAT32
from l1_kernels.cuda_api import allow_shared
from l1_kernels.quantize.gpu import make_quantize, signature
from l1_kernels.weight import Array

if TYPE_CHECKING:
    from l1_kernels.gpu_kernels import GpuKernels
    from l1_kernels.regions import NormArgs

STATIC_LIMIT = 48 * 1024  # bytes that a block gets without asking
MOST_NUMBERS = 50_000  # of a row, in the shared memory of compute capability 9.0


@dataclass(frozen=True, slots=True)
class Planes:
    """both int8 [2T, K], the low planes of all tokens and then the high ones; scale float32 [T]."""

    both: Array
    scale: Array

    @property
    def low(self) -> Array:
        """int8 [T, K]"""
        return self.both[: len(self.scale)]

    @property
    def high(self) -> Array:
        """int8 [T, K]"""
        return self.both[len(self.scale) :]


def quantized(kernels: GpuKernels, x: Array, norm: NormArgs | None, dtype: str, fine: bool = False) -> Planes:
    """x [T, K] in the carrier of `dtype` ("fp32"; "fp16", "bf16" without a norm), with its norm first. fine: reference.py."""
    num_tokens, size = x.shape
    planes = Planes(kernels.new((2 * num_tokens, size), np.int8), kernels.new((num_tokens,), np.float32))
    _run(kernels, x, norm, dtype, planes, None, fine)
    return planes


def rounded(kernels: GpuKernels, x: Array) -> Array:
    """float32 x [T, K] -> the numbers that int8 leaves of it, float32."""
    y = kernels.new(x.shape, np.float32)
    _run(kernels, x, None, "fp32", None, y)
    return y


def _run(kernels: GpuKernels, x: Array, norm: NormArgs | None, dtype: str, planes: Planes | None, y: Array | None, fine: bool = False) -> None:
    size = x.shape[1]
    if size > MOST_NUMBERS:
        checks.reject("x", f"of at most {MOST_NUMBERS} numbers a token, to be rounded to int8", checks.describe(x))
    kernel = make_quantize(dtype, None if norm is None else norm.kind, y is not None, fine)
    if 4 * size > STATIC_LIMIT:
        allow_shared(kernel, signature(dtype), 4 * size)
    absent = kernels.or_absent(None)
    if planes is None:
        none = kernels.new((1, 1), np.int8)
        low, high, scale = none, none, absent
    else:
        low, high, scale = planes.low, planes.high, planes.scale
    gain, shift = (absent, absent) if norm is None else (norm.weight, kernels.or_absent(norm.bias))
    if norm is not None:
        checks.array(gain, "norm.weight", FLOAT32, (size,))
        if norm.bias is not None:
            checks.array(shift, "norm.bias", FLOAT32, (size,))
    block = min(1024, max(1, -(-size // 128)) * 32)
    kernels.launch(
        kernel, x.shape[0], block, 4 * size,
        x, gain, shift, norm is not None and norm.bias is not None, np.float32(0 if norm is None else norm.eps), low, high, scale,
        absent.reshape(1, 1) if y is None else y,
    )  # fmt: skip
