"""Keys and values in host memory, a layer at a time on the GPU (`--kv cpu`; paper, Section IV-C).

    host        every layer's cache of all rows, page-locked
    device      two buffers of one layer, for the rows of one pass

    compute     | layer 0 | layer 1 | layer 2 | ...
    copies      | load 1  | store 0, load 2 | store 1, load 3 | ...        a stream of its own

A row's keys so far come in before its layer, and only what the pass made of new ones goes out after it. A layer waits for its load; a
load waits for the layer that used its buffer. Bytes a pass, of rows with n keys, m of them new, s bytes a number: 2 G (n - m) d s a layer
in and 2 G m d s out. For a token of a long sequence that is all of its cache, so the link bounds it: it pays where there is other work to do
meanwhile (micro-batches that wait their turn, prompts), or where there is no memory for the cache otherwise.

On the host devices everything happens in this order, at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from l1_kernels.device import Device
from l1_kernels.weight import BYTES, CARRIER
from layers.kv_cache import LayerCache

BUFFERS = 2


class OffloadedKV:
    """What `layers.kv_cache.KVCache` is, with host memory behind it. `rows_at_once`: the most rows of a pass."""

    def __init__(
        self, device: Device, num_layers: int, num_rows: int, num_kv_heads: int, context: int, head_dim: int, dtype: str, rows_at_once: int | None = None
    ) -> None:
        self.device, self.num_rows, self.context, self.dtype = device, num_rows, context, dtype
        self.lengths = np.zeros(num_rows, np.int32)
        rows = min(num_rows, rows_at_once or num_rows)
        shape = (num_kv_heads, context, head_dim)
        whole, part = (num_rows, *shape), (rows, *shape)
        self.layers = [LayerCache(_zeros(device, whole, dtype), _zeros(device, whole, dtype), dtype) for _ in range(num_layers)]
        self.buffers = [
            LayerCache(device.zeros(part, CARRIER[dtype]), device.zeros(part, CARRIER[dtype]), dtype) for _ in range(min(BUFFERS, num_layers))
        ]
        self.copies = device.stream()
        self.loaded = [device.event() for _ in self.buffers]
        self.computed = [device.event() for _ in self.buffers]
        self.bytes_in = self.bytes_out = 0
        self._rows = np.zeros(0, np.int32)  # of the pass, in the order of their slots
        self._before = self._after = np.zeros(0, np.int64)  # keys of each

    @staticmethod
    def bytes_needed(num_rows_at_once: int, num_kv_heads: int, context: int, head_dim: int, dtype: str) -> int:
        """Of the device's memory."""
        return 2 * BUFFERS * num_rows_at_once * num_kv_heads * context * head_dim * BYTES[dtype]

    def begin_pass(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """rows, positions int32 [T] of the pass's tokens -> the rows as kernels see them, in the buffers. ValueError for more rows than there is room for."""
        self._rows, slots = np.unique(rows, return_inverse=True)
        if len(self._rows) > len(self.buffers[0].k):
            raise ValueError(f"a pass over {len(self._rows)} rows, and buffers of {len(self.buffers[0].k)}")
        first = np.full(len(self._rows), self.context, np.int64)
        last = np.zeros(len(self._rows), np.int64)
        np.minimum.at(first, slots, positions)
        np.maximum.at(last, slots, positions)
        self._before, self._after = first, last + 1
        for index in range(len(self.buffers)):
            self._load(index)
        return slots.astype(np.int32)

    def open_layer(self, index: int) -> LayerCache:
        """Layer `index` for the rows of the pass, once it is there. Layers are opened and closed in order, one at a time."""
        buffer = index % len(self.buffers)
        self.device.current_stream().wait_event(self.loaded[buffer])
        return self.buffers[buffer]

    def close_layer(self, index: int) -> None:
        """The layer's work is launched: its new keys go out, and the buffer takes the next layer but one."""
        buffer = index % len(self.buffers)
        self.device.current_stream().record(self.computed[buffer])
        self.copies.wait_event(self.computed[buffer])
        for slot, row, before, after in self._each():
            for here, there in self._pairs(index, slot, row):
                self.device.copy(there[:, before:after], here[:, before:after], self.copies)
                self.bytes_out += here[:, before:after].nbytes
        if index + len(self.buffers) < len(self.layers):
            self._load(index + len(self.buffers))

    def _load(self, index: int) -> None:
        for slot, row, before, _ in self._each():
            for here, there in self._pairs(index, slot, row):
                if before:
                    self.device.copy(here[:, :before], there[:, :before], self.copies)
                    self.bytes_in += here[:, :before].nbytes
        self.copies.record(self.loaded[index % len(self.buffers)])

    def _each(self) -> Any:
        return zip(range(len(self._rows)), self._rows.tolist(), self._before.tolist(), self._after.tolist(), strict=True)

    def _pairs(self, index: int, slot: int, row: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """(on the device, on the host) [G, S, d]: keys, values."""
        buffer, layer = self.buffers[index % len(self.buffers)], self.layers[index]
        return (buffer.k[slot], layer.k[row]), (buffer.v[slot], layer.v[row])


def _zeros(device: Device, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    memory = device.pinned(shape, CARRIER[dtype])
    memory[...] = 0
    return memory
