"""What ranks of a group do together, as the layers see it: one protocol, and the implementation for a group of one.

The rest: `mpi_collective.py` (host memory), `nccl_collective.py` (GPUs), `peer_collective.py` (GPUs that reach each other's memory).
`open_collective.py` picks.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from l1_kernels.regions import NormArgs
from l1_kernels.weight import Array


@dataclass(slots=True)
class Counters:
    """Calls, and bytes that this rank put into them, by operation."""

    messages: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def add(self, operation: str, size: int) -> None:
        self.messages[operation] += 1
        self.bytes[operation] += size

    def clear(self) -> None:
        self.messages.clear()
        self.bytes.clear()


class Collective(Protocol):
    """A group of ranks. Every call must be made by all of them, in the same order."""

    rank: int
    size: int
    counters: Counters
    capturable: bool  # whether a CUDA graph can hold all_reduce and all_gather
    note: str  # how sums are made, a line for people; "" where there is nothing to say

    def all_reduce(self, x: Array) -> Array:
        """The sum over the group, in place in x (float32, any shape, C-contiguous), the same bits on every rank; returns x."""
        ...

    def reduce_add(self, x: Array, residual: Array) -> Array | None:
        """residual += the sum of x over the group, in place in residual, and returned, where that is one launch for an x of this size; else
        None, and nothing is done. The same bits as all_reduce and an addition."""
        ...

    def reduce_add_norm(self, x: Array, residual: Array, norm: NormArgs, dtype: str) -> Array | None:
        """reduce_add of x [T, D], with the norm of the new residual in the same launch: it is returned, [T, D] in the carrier of `dtype`
        ("fp16", "bf16"). None, and nothing is done, where there is no such launch."""
        ...

    def all_gather(self, x: Array) -> Array:
        """x [n, m] (float32, the same shape on every rank) -> [n, size * m]: rank r's columns are [r * m, (r + 1) * m)."""
        ...

    def broadcast(self, obj: Any) -> Any:
        """Rank 0's Python object, on every rank."""
        ...

    def gather(self, obj: Any) -> list[Any] | None:
        """Every rank's Python object, in rank order, on rank 0; None on the others."""
        ...

    def barrier(self) -> None:
        """Return once all have called it."""
        ...

    def watched(self) -> AbstractContextManager[None]:
        """`with collective.watched():` the host waits for its device, and so perhaps for another rank: one that never comes is noticed. On the host nothing."""
        ...

    def mark(self, part: float) -> None:
        """Tells the watchdog, when the device comes to it, which part (above 0, below 1) is done of what is waited for next. On the host nothing."""
        ...


class NoCollective:
    """A group of one."""

    rank = 0
    size = 1
    capturable = True
    note = ""

    def __init__(self) -> None:
        self.counters = Counters()

    def all_reduce(self, x: Array) -> Array:
        return x

    def reduce_add(self, x: Array, residual: Array) -> Array | None:
        return None

    def reduce_add_norm(self, x: Array, residual: Array, norm: NormArgs, dtype: str) -> Array | None:
        return None

    def all_gather(self, x: Array) -> Array:
        return x

    def broadcast(self, obj: Any) -> Any:
        return obj

    def gather(self, obj: Any) -> list[Any] | None:
        return [obj]

    def barrier(self) -> None:
        return

    def watched(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self, part: float) -> None:
        return


def check_float32(x: Array, operation: str, dimensions: int | None = None) -> None:
    """ValueError unless x is a C-contiguous float32 array (of so many dimensions)."""
    if x.dtype != np.float32 or not x.flags.c_contiguous:
        raise ValueError(f"{operation}: x must be C-contiguous float32, got {x.dtype}")
    if dimensions is not None and x.ndim != dimensions:
        raise ValueError(f"{operation}: x must have {dimensions} dimensions, got shape {x.shape}")
