"""Keys and values of every token seen so far, one row a sequence, with explicit lengths.

k, v  [B, G, S, d] a layer, in the carrier of `dtype` (l1_kernels/weight.py); rows are given out and taken back by the
generation loop, which also keeps `lengths` on the host: nothing on the device depends on padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from l1_kernels.device import Device
from l1_kernels.weight import BYTES, CARRIER, Array


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's part: k, v [B, G, S, d]."""

    k: Array
    v: Array
    dtype: str


class KVCache:
    """`num_rows` sequences of up to `context` tokens."""

    def __init__(self, layers: list[LayerCache], num_rows: int, context: int) -> None:
        self.layers = layers
        self.num_rows = num_rows
        self.context = context
        self.lengths = np.zeros(num_rows, np.int32)

    @classmethod
    def allocate(
        cls, device: Device, num_layers: int, num_rows: int, num_kv_heads: int, context: int, head_dim: int, dtype: str, shared: bool = False
    ) -> KVCache:
        """shared: every layer writes over the same arrays (an encoder needs a layer's keys only while it runs)."""
        shape = (num_rows, num_kv_heads, context, head_dim)

        def one() -> LayerCache:
            return LayerCache(device.zeros(shape, CARRIER[dtype]), device.zeros(shape, CARRIER[dtype]), dtype)

        layers = [one()] * num_layers if shared else [one() for _ in range(num_layers)]
        return cls(layers, num_rows, context)

    def begin_pass(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """rows int32 [T] of a pass's tokens -> the rows as kernels see them. The cache is all here: the same."""
        return rows

    def open_layer(self, index: int) -> LayerCache:
        """Layer `index`, for the time until it is closed."""
        return self.layers[index]

    def close_layer(self, index: int) -> None:
        """The layer's work is launched."""

    @staticmethod
    def bytes_needed(num_layers: int, num_rows: int, num_kv_heads: int, context: int, head_dim: int, dtype: str) -> int:
        """What `allocate` takes from the device."""
        return 2 * num_layers * num_rows * num_kv_heads * context * head_dim * BYTES[dtype]
