"""mma.sync: what a warp's tensor core does, with the fragments' layout (PTX ISA, "Matrix Fragments for mma.m16n8k16").

D[16, 8] = A[16, K] B[K, 8] + C[16, 8]. With g = lane >> 2 and t = lane & 3 a lane holds, n elements (2 of 16 bits, 4 of 8
bits) to a register, the lowest element in the lowest bits:

    A   registers 0..3: (row g, half 0), (row g+8, half 0), (row g, half 1), (row g+8, half 1)
    B   registers 0..1: (column g, half 0), (column g, half 1)       half h: n elements from K/2 * h + n * t
    C D numbers 0..3:   (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from l1_kernels.simulator.errors import DivergenceError
from l1_kernels.simulator.meeting import FULL_MASK, meet

_LANE = np.arange(32)
_G, _T = _LANE >> 2, _LANE & 3
_ROWS = np.stack([_G, _G, _G + 8, _G + 8], axis=1)  # [32, 4]: where C and D lie
_COLUMNS = np.stack([2 * _T, 2 * _T + 1, 2 * _T, 2 * _T + 1], axis=1)


def halves(registers: np.ndarray) -> np.ndarray:
    """uint32 [32, r] -> float64 [32, r, 2]: pairs of fp16."""
    return registers.view(np.float16).reshape(*registers.shape, 2).astype(np.float64)


def brain_halves(registers: np.ndarray) -> np.ndarray:
    """uint32 [32, r] -> float64 [32, r, 2]: pairs of bf16."""
    bits = registers.view(np.uint16).astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32).reshape(*registers.shape, 2).astype(np.float64)


def signed_bytes(registers: np.ndarray) -> np.ndarray:
    """uint32 [32, r] -> int64 [32, r, 4]."""
    return registers.view(np.int8).reshape(*registers.shape, 4).astype(np.int64)


def mma(kind: str, unpack: Callable[[np.ndarray], np.ndarray], a: Any, b: Any, c: Any, dtype: Any) -> Any:
    """One lane's part of D; all 32 lanes of a warp must come. dtype: float32 or int32, of C and D."""

    def compute(values: dict[int, Any]) -> dict[int, Any]:
        if len(values) != 32:
            raise DivergenceError(f"{kind}: the warp has {len(values)} lanes, not 32")
        a_parts = unpack(np.array([values[lane][0] for lane in range(32)], np.uint32))  # [32, 4, n]
        b_parts = unpack(np.array([values[lane][1] for lane in range(32)], np.uint32))  # [32, 2, n]
        c_parts = np.array([values[lane][2] for lane in range(32)], dtype)
        n = a_parts.shape[2]
        a_matrix = np.empty((16, 8 * n), a_parts.dtype)
        b_matrix = np.empty((8 * n, 8), b_parts.dtype)
        c_matrix = np.empty((16, 8), a_parts.dtype)
        for element in range(n):
            for half in range(2):
                k = 4 * n * half + n * _T + element
                a_matrix[_G, k] = a_parts[:, 2 * half, element]
                a_matrix[_G + 8, k] = a_parts[:, 2 * half + 1, element]
                b_matrix[k, _G] = b_parts[:, half, element]
        c_matrix[_ROWS, _COLUMNS] = c_parts
        d_parts = (a_matrix @ b_matrix + c_matrix)[_ROWS, _COLUMNS].astype(dtype)
        return {lane: tuple(d_parts[lane]) for lane in range(32)}

    return meet(kind, FULL_MASK, (a, b, c), compute, depth=3)
