"""What floor 2 asks of the floors above it. A block is handed these; it imports none of them."""

from __future__ import annotations

from typing import Protocol

from l1_kernels.weight import Array
from layers.weights import LayerWeights


class Reduce(Protocol):
    """Sums float32 x over the tensor-parallel ranks, in place, and returns it. With one rank: the identity."""

    def __call__(self, x: Array) -> Array: ...


class FeedForward(Protocol):
    """x [T, D] -> this rank's part of the feed-forward's output [T, D]; the block sums the parts."""

    def __call__(self, x: Array, weights: LayerWeights) -> Array: ...


class WeightSource(Protocol):
    """Where layer i's weights come from: resident in the device's memory, or streamed into it (paper, Section VI)."""

    num_layers: int

    def layer(self, index: int) -> LayerWeights:
        """Layer `index`, in the device's memory, valid until the next call."""
        ...
