"""What floor 2 asks of the floors above it. A block is handed these; it imports none of them."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from l1_kernels.regions import NormArgs
from l1_kernels.weight import Array
from layers.border import Reader
from layers.kv_cache import LayerCache
from layers.weights import LayerWeights


class Reduce(Protocol):
    """Sums float32 x over the tensor-parallel ranks, in place, and returns it. With one rank: the identity."""

    def __call__(self, x: Array) -> Array: ...

    def add(self, residual: Array, part: Array) -> Array:
        """residual += the sum of every rank's part, in place, and returned; part is used up."""
        ...

    def add_norm(self, residual: Array, part: Array, norm: NormArgs, dtype: str) -> tuple[Array, Array | None]:
        """`add`, and the norm of the new residual [T, D], in the 16 bits of `dtype`, where the same launch makes it; else None in its place."""
        ...


class FeedForward(Protocol):
    """residual += ffn(norm(x)), in place, and returned; residual None: this rank's part of ffn(norm(x)) [T, D], which the
    block sums over the ranks. norm None: x goes in as it is."""

    def __call__(self, x: Array, norm: NormArgs | None, weights: LayerWeights, residual: Array | None) -> Array: ...

    def add_norm(self, x: Array, norm: NormArgs | None, weights: LayerWeights, residual: Array, reader: Reader) -> tuple[Array, Array | None]:
        """The same onto a residual, and with it the rows that `reader` wants, where the last launch makes them too; else None in their place."""
        ...

    def graph_problem(self, num_tokens: int, weights: LayerWeights) -> str | None:
        """Why a graph cannot hold a pass of so many tokens through it, in a few words, or None."""
        ...


class WeightSource(Protocol):
    """Where layer i's weights come from: resident in the device's memory, or streamed into it (paper, Section VI)."""

    num_layers: int

    def layer(self, index: int) -> LayerWeights:
        """Layer `index`, in the device's memory, valid until the next call."""
        ...


class Cache(Protocol):
    """Keys and values of `num_rows` sequences of up to `context` tokens, wherever they live (layers/kv_cache.py: on the device)."""

    num_rows: int
    context: int
    lengths: np.ndarray  # int32 [num_rows]

    def begin_pass(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """rows, positions int32 [T] of a pass's tokens -> the rows as kernels see them."""
        ...

    def open_layer(self, index: int) -> LayerCache:
        """Layer `index`, on the device, until it is closed. In order, one at a time."""
        ...

    def close_layer(self, index: int) -> None:
        """The layer's work is launched."""
        ...
