"""What floor 2 asks of the floors above it. A block is handed these; it imports none of them."""

from __future__ import annotations

from typing import Protocol

from l1_kernels.regions import NormArgs
from l1_kernels.weight import Array
from layers.weights import LayerWeights


class Reduce(Protocol):
    """Sums float32 x over the tensor-parallel ranks, in place, and returns it. With one rank: the identity."""

    def __call__(self, x: Array) -> Array: ...


class FeedForward(Protocol):
    """residual += ffn(norm(x)), in place, and returned; residual None: this rank's part of ffn(norm(x)) [T, D], which the
    block sums over the ranks. norm None: x goes in as it is."""

    def __call__(self, x: Array, norm: NormArgs | None, weights: LayerWeights, residual: Array | None) -> Array: ...


class WeightSource(Protocol):
    """Where layer i's weights come from: resident in the device's memory, or streamed into it (paper, Section VI)."""

    num_layers: int

    def layer(self, index: int) -> LayerWeights:
        """Layer `index`, in the device's memory, valid until the next call."""
        ...
