"""A mixture of experts in its plainest form: for each expert, gather its tokens, run it, add the weighted result.

The baseline that the table-routed version is measured against, and its oracle. Costs a trip to the host a layer, to
learn which experts have tokens. Sliced over tensor-parallel ranks like a dense feed-forward (every rank holds a part of
every expert), so the block's all-reduce completes it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from l1_kernels.device import Device
from l1_kernels.regions import NormArgs, apply_norm_args
from l1_kernels.weight import Array
from layers.config import ModelConfig
from layers.feed_forward import feed_forward
from layers.weights import LayerWeights, Linear, MoEWeights


class ReferenceMoE:
    """A `layers.protocols.FeedForward` for sparse layers."""

    def __init__(self, config: ModelConfig, device: Device, watched: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """watched: around what waits for the device (`Collective.watched`)."""
        assert config.moe is not None
        self.config = config
        self.moe = config.moe
        self.device = device
        self.watched = watched

    def __call__(self, x: Array, norm: NormArgs | None, weights: LayerWeights, residual: Array | None) -> Array:
        assert weights.moe is not None
        kernels = self.device.kernels
        part = self._experts(apply_norm_args(kernels, x, norm), weights.moe)
        return part if residual is None else kernels.add(residual, part)

    def _experts(self, x: Array, weights: MoEWeights) -> Array:
        """x [T, D] -> this rank's part of the sum over the chosen experts [T, D]."""
        kernels = self.device.kernels
        logits = kernels.linear(x, weights.gate)
        chosen, share = kernels.route(logits, self.moe.top_k, self.moe.softmax_first, self.moe.renormalise)
        out = self._shared_expert(x, weights)
        with self.watched():
            chosen_host = self.device.to_host(chosen)
        for expert in np.unique(chosen_host):
            tokens, slot = np.nonzero(chosen_host == expert)
            tokens, slot = self.device.to_device(tokens), self.device.to_device(slot)
            part = self._expert(x[tokens], weights, int(expert))
            out[tokens] += part * share[tokens, slot][:, None]
        return out

    def _expert(self, x: Array, weights: MoEWeights, expert: int) -> Array:
        return feed_forward(self.device.kernels, self.config, x, _one(weights.up, expert), _one(weights.down, expert))

    def _shared_expert(self, x: Array, weights: MoEWeights) -> Array:
        """The expert that every token visits, or zeros where the model has none."""
        xp, kernels = self.device.xp, self.device.kernels
        if weights.shared_up is None or weights.shared_down is None:
            return xp.zeros_like(x)
        out = feed_forward(kernels, self.config, x, weights.shared_up, weights.shared_down)
        if weights.shared_gate is None:
            return out
        return out / (1.0 + xp.exp(-kernels.linear(x, weights.shared_gate)))  # times the sigmoid of one logit a token


def _one(stack: Linear, expert: int) -> Linear:
    return Linear(stack.weight[expert], None if stack.bias is None else stack.bias[expert])
