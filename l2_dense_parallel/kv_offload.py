"""Keys and values in host memory, a layer at a time on the GPU (`--kv cpu`; paper, Section IV-C).

    host        every layer's cache of all rows, page-locked
    device      two buffers of one layer, for the rows of one pass

    compute     | layer 0 | layer 1 | layer 2 | ...
    copies      | load 1  | store 0, load 2 | store 1, load 3 | ...        a stream of its own

A row's keys so far come in before its layer, and only what the pass made of new ones goes out after it. A layer waits for its load; a
load waits for the layer that used its buffer. Bytes a pass, of rows with n keys, m of them new, s bytes a number: 2 G (n - m) d s a layer
in and 2 G m d s out. For a token of a long sequence that is all of its cache, so the link bounds it: it pays where there is other work to do
meanwhile (micro-batches that wait their turn, prompts), or where there is no memory for the cache otherwise.

With a `parity` (`--offload-parity`) only every second layer moves, on odd ranks the odd ones, and the others' caches stay on the device: of two ranks that share a
link and go through the layers together, one moves at a time. Half of the memory is saved then, and a pass has room for all rows.

On the host devices everything happens in this order, at once.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from l1_kernels.device import Device
from l1_kernels.weight import BYTES, CARRIER
from layers.kv_cache import LayerCache

BUFFERS = 2


class OffloadedKV:
    """What `layers.kv_cache.KVCache` is, with host memory behind it. `rows_at_once`: the most rows of a pass."""

    def __init__(
        self, device: Device, num_layers: int, num_rows: int, num_kv_heads: int, context: int, head_dim: int, dtype: str, rows_at_once: int | None = None,
        parity: int | None = None,
    ) -> None:  # fmt: skip
        self.device, self.num_rows, self.context, self.dtype = device, num_rows, context, dtype
        self.lengths = np.zeros(num_rows, np.int32)
        self.parity = parity
        # Layers that stay take rows by their numbers, and all layers of a pass are told the same ones.
        rows = num_rows if parity is not None else min(num_rows, rows_at_once or num_rows)
        self.moved = [index for index in range(num_layers) if parity is None or index % 2 == parity]
        self._place = {index: place for place, index in enumerate(self.moved)}
        shape = (num_kv_heads, context, head_dim)
        whole, part = (num_rows, *shape), (rows, *shape)

        def here(shape: tuple[int, ...]) -> LayerCache:
            return LayerCache(device.zeros(shape, CARRIER[dtype]), device.zeros(shape, CARRIER[dtype]), dtype)

        def there() -> LayerCache:
            return LayerCache(_zeros(device, whole, dtype), _zeros(device, whole, dtype), dtype)

        self.layers = [there() if index in self.moved else here(whole) for index in range(num_layers)]
        self.buffers = [here(part) for _ in range(min(BUFFERS, len(self.moved)))]
        self.copies = device.stream()
        self.loaded = [device.event() for _ in self.buffers]
        self.computed = [device.event() for _ in self.buffers]
        # The buffers' memory may be what work under way still uses, and is zeroed in that work's stream.
        made = device.event()
        device.current_stream().record(made)
        self.copies.wait_event(made)
        self.bytes_in = self.bytes_out = 0
        self._rows = np.zeros(0, np.int32)  # of the pass, in the order of their slots
        self._slots: np.ndarray = np.zeros(0, np.int64)
        self._before = self._after = np.zeros(0, np.int64)  # of each: its row in the buffers, its keys before and after the pass

    def __del__(self) -> None:
        """Both memories go back to pools that know nothing of the copies' stream: what it still writes would be another's."""
        if not sys.is_finalizing() and hasattr(self, "copies"):
            self.copies.synchronize()

    @staticmethod
    def bytes_needed(num_rows_at_once: int, num_kv_heads: int, context: int, head_dim: int, dtype: str) -> int:
        """Of the device's memory."""
        return 2 * BUFFERS * num_rows_at_once * num_kv_heads * context * head_dim * BYTES[dtype]

    def begin_pass(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """rows, positions int32 [T] of the pass's tokens -> the rows as kernels see them, in the buffers. ValueError for more rows than there is room for."""
        self._rows, slots = np.unique(rows, return_inverse=True)
        self._slots = np.arange(len(self._rows)) if self.parity is None else self._rows.astype(np.int64)
        if self.parity is None and self.buffers and len(self._rows) > len(self.buffers[0].k):
            raise ValueError(f"a pass over {len(self._rows)} rows, and buffers of {len(self.buffers[0].k)}")
        first = np.full(len(self._rows), self.context, np.int64)
        last = np.zeros(len(self._rows), np.int64)
        np.minimum.at(first, slots, positions)
        np.maximum.at(last, slots, positions)
        self._before, self._after = first, last + 1
        for place in range(len(self.buffers)):
            self._load(place)
        return slots.astype(np.int32) if self.parity is None else rows

    def open_layer(self, index: int) -> LayerCache:
        """Layer `index` for the rows of the pass, once it is there. Layers are opened and closed in order, one at a time."""
        place = self._place.get(index)
        if place is None:
            return self.layers[index]
        buffer = place % len(self.buffers)
        self.device.current_stream().wait_event(self.loaded[buffer])
        return self.buffers[buffer]

    def close_layer(self, index: int) -> None:
        """The layer's work is launched: its new keys go out, and the buffer takes the next layer but one of those that move."""
        place = self._place.get(index)
        if place is None:
            return
        buffer = place % len(self.buffers)
        self.device.current_stream().record(self.computed[buffer])
        self.copies.wait_event(self.computed[buffer])
        for slot, row, before, after in self._each():
            for here, there in self._pairs(place, slot, row):
                self.device.copy(there[:, before:after], here[:, before:after], self.copies)
                self.bytes_out += here[:, before:after].nbytes
        if place + len(self.buffers) < len(self.moved):
            self._load(place + len(self.buffers))

    def _load(self, place: int) -> None:
        for slot, row, before, _ in self._each():
            for here, there in self._pairs(place, slot, row):
                if before:
                    self.device.copy(here[:, :before], there[:, :before], self.copies)
                    self.bytes_in += here[:, :before].nbytes
        self.copies.record(self.loaded[place % len(self.buffers)])

    def _each(self) -> Any:
        return zip(self._slots.tolist(), self._rows.tolist(), self._before.tolist(), self._after.tolist(), strict=True)

    def _pairs(self, place: int, slot: int, row: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """(on the device, on the host) [G, S, d]: keys, values. place: among the layers that move."""
        buffer, layer = self.buffers[place % len(self.buffers)], self.layers[self.moved[place]]
        return (buffer.k[slot], layer.k[row]), (buffer.v[slot], layer.v[row])


def _zeros(device: Device, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    memory = device.pinned(shape, CARRIER[dtype])
    memory[...] = 0
    return memory
