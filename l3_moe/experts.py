"""The experts of a sparse layer over rows that were dispatched to them: y[r] = expert(rows[r]), where expert e has the rows offsets[e] .. offsets[e + 1].

`LoopExperts` takes them one after the other by the device's own products: on the CPU, and on a GPU for experts of many tokens each, where a product is
bound by the tensor cores, which a library feeds well. It must know the counts on the host: one trip a layer. An expert without tokens costs nothing, and its
weights are not touched. sbi_experts.py has neither loop nor trip, for few tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np

from l1_kernels.device import Device
from l1_kernels.weight import Array
from layers.config import ModelConfig
from layers.weights import Linear, MoEWeights


class Experts(Protocol):
    def rows_dtype(self, weights: MoEWeights) -> str:
        """How the rows must be held: "fp32", "fp16" or "bf16"."""
        ...

    def __call__(self, rows: Array, weights: MoEWeights, offsets: Array) -> Array:
        """rows [P, D] in the carrier of rows_dtype, offsets int32 [E + 1] -> float32 [P, D]; rows past offsets[E] are nobody's, and what is given for them
        means nothing."""
        ...

    def on_device(self, num_pairs: int, weights: MoEWeights) -> bool:
        """Whether that many rows are computed without a trip to the host, so that a graph can hold it."""
        ...


class LoopExperts:
    """rows are float32, or in 16 bits where the device's regions take such."""

    def __init__(self, config: ModelConfig, device: Device, watched: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """watched: around what waits for the device (`Collective.watched`)."""
        self.config = config
        self.device = device
        self.regions = device.regions
        self.watched = watched

    def rows_dtype(self, weights: MoEWeights) -> str:
        return "fp32"

    def on_device(self, num_pairs: int, weights: MoEWeights) -> bool:
        return False

    def __call__(self, rows: Array, weights: MoEWeights, offsets: Array) -> Array:
        with self.watched():
            ends = self.device.to_host(offsets)
        y = self.device.zeros((rows.shape[0], weights.down.weight.shape[1]), np.float32)
        for expert in np.flatnonzero(np.diff(ends)):
            first, end = int(ends[expert]), int(ends[expert + 1])
            up, down = matrix_of(weights.up, int(expert)), matrix_of(weights.down, int(expert))
            hidden = self.regions.norm_feed_forward(rows[first:end], None, up.weight, up.bias, self.config.activation, self.config.gated_ffn)
            self.regions.linear_add(hidden, down.weight, down.bias, y[first:end])
        return y


def matrix_of(stack: Linear, expert: int) -> Linear:
    """One expert's matrix of a stack [E, N, K]."""
    return Linear(stack.weight[expert], None if stack.bias is None else stack.bias[expert])
