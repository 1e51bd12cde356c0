"""Checks of kernel arguments, cheap enough for every call: a bad one raises ValueError that names it.

They read only what NumPy and CuPy arrays both have (dtype, shape, flags), never the numbers.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from l1_kernels.weight import BYTES, CARRIER, Array, Weight

FLOAT32 = np.dtype(np.float32)
INT32 = np.dtype(np.int32)
_CARRIER = {name: np.dtype(carrier) for name, carrier in CARRIER.items()}


def reject(name: str, need: str, got: object) -> NoReturn:
    raise ValueError(f"argument {name} must be {need}, got {got}")


def describe(x: object) -> str:
    """What an argument is, for the message: float32 [3, 5], not contiguous."""
    if not hasattr(x, "dtype"):
        return repr(x)
    layout = "" if x.flags.c_contiguous else ", not contiguous"  # type: ignore[attr-defined]
    return f"{x.dtype} {list(x.shape)}{layout}"  # type: ignore[attr-defined]


def array(x: Array, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """x must be C-contiguous, of this dtype and shape."""
    try:
        good = x.shape == shape and x.dtype == dtype and x.flags.c_contiguous
    except AttributeError:
        good = False
    if not good:
        reject(name, f"{dtype} {list(shape)}, contiguous", describe(x))


def ranked(x: Array, name: str, dtype: np.dtype, ndim: int) -> None:
    """x must be C-contiguous, of this dtype, with `ndim` axes of any size."""
    try:
        good = x.ndim == ndim and x.dtype == dtype and x.flags.c_contiguous
    except AttributeError:
        good = False
    if not good:
        reject(name, f"{dtype} with {ndim} axes, contiguous", describe(x))


def matrix(w: Weight, name: str) -> None:
    """w must be a Weight [N, K] whose data has its dtype's carrier, with scales [N] exactly where it is int8."""
    if not isinstance(w, Weight):
        reject(name, "a Weight", describe(w))
    if w.dtype not in BYTES:
        reject(f"{name}.dtype", "one of " + ", ".join(BYTES), repr(w.dtype))
    ranked(w.data, f"{name}.data", _CARRIER[w.dtype], 2)
    if w.dtype == "int8":
        array(w.scale, f"{name}.scale", FLOAT32, (w.data.shape[0],))
    elif w.scale is not None:
        reject(f"{name}.scale", f"None for {w.dtype}", describe(w.scale))
    if w.act is not None and (w.act, w.dtype) != ("int8", "int8"):
        reject(f"{name}.act", 'None, or "int8" with an int8 matrix', repr(w.act))


def heads(qkv: Array, first: int, count: int, name: str = "first, count") -> None:
    """qkv must be [T, H+2G, d] and hold the heads first..first+count."""
    ranked(qkv, "qkv", FLOAT32, 3)
    if not (0 <= first and 0 < count and first + count <= qkv.shape[1]):
        reject(name, f"heads of the {qkv.shape[1]} in qkv", (first, count))


def cache(qkv: Array, num_heads: int, cache_k: Array, cache_v: Array, dtype: str) -> None:
    """Caches [B, G, S, d] in the carrier of `dtype` that fit qkv [T, H+2G, d]."""
    ranked(qkv, "qkv", FLOAT32, 3)
    if dtype not in ("fp32", "fp16", "bf16"):
        reject("dtype", "one of fp32, fp16, bf16", repr(dtype))
    ranked(cache_k, "cache_k", _CARRIER[dtype], 4)
    num_kv_heads, head_dim = cache_k.shape[1], cache_k.shape[3]
    array(cache_v, "cache_v", _CARRIER[dtype], cache_k.shape)
    if qkv.shape[1] != num_heads + 2 * num_kv_heads or qkv.shape[2] != head_dim:
        reject("qkv", f"[T, {num_heads} + 2 * {num_kv_heads}, {head_dim}] (num_heads, caches)", describe(qkv))
    if num_heads <= 0 or num_heads % num_kv_heads:
        reject("num_heads", f"a multiple of the {num_kv_heads} key heads of cache_k", num_heads)


def known(value: str, name: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        reject(name, "one of " + ", ".join(choices), repr(value))


def is_aligned(x: Array, size: int = 16) -> bool:
    """Does a device array lie at a multiple of `size` bytes?"""
    pointer = x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr
    return pointer % size == 0
