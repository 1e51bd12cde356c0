"""A group of ranks that swap rows. Each call sends every other member its part and receives theirs; all members call in the same order.

Messages are counted where they are sent, by what they carry: "counts", "rows there", "rows back", "gather". A part without rows is not sent: both
sides know from the counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from l1_kernels.weight import Array
from l2_dense_parallel.collectives import Counters


class Peers(Protocol):
    """`rank` of `size`."""

    rank: int
    size: int
    counters: Counters

    def swap_counts(self, table: np.ndarray) -> np.ndarray:
        """table int32 [size, ...] on the host, the same shape on every rank: part j goes to rank j -> [size, ...], part i came from rank i."""
        ...

    def swap(self, rows: Array, sent: Sequence[int], received: Sequence[int], what: str) -> Array:
        """rows float32 [sum of sent, D] of the device, rank j's part after rank j - 1's -> [sum of received, D], rank i's after rank i - 1's.
        what: the name under which messages are counted."""
        ...

    def gather(self, rows: Array, counts: Sequence[int]) -> Array:
        """rows [counts[rank], D] of this rank -> everybody's, rank i's after rank i - 1's, on every rank. Messages "gather"."""
        ...


class NoPeers:
    """A group of one."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.counters = Counters()

    def swap_counts(self, table: np.ndarray) -> np.ndarray:
        return table

    def swap(self, rows: Array, sent: Sequence[int], received: Sequence[int], what: str) -> Array:
        return rows

    def gather(self, rows: Array, counts: Sequence[int]) -> Array:
        return rows


def parted(rows: Array, counts: Sequence[int]) -> list[Array]:
    """Views of so many rows each, one after the other."""
    starts = np.cumsum([0, *counts]).tolist()
    return [rows[first:last] for first, last in zip(starts, starts[1:], strict=False)]
