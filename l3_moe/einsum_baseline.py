"""Routing by one-hot masks and einsums, as the first mixture-of-experts layers had it: what the tables are measured against.

    weights[t, e, c] = share of token t in expert e if it is the c-th of e's tokens, else 0
    rows[e, c, d]    = sum over t of (weights[t, e, c] != 0) * x[t, d]                     "sec,sm->ecm"
    out[t, d]        = sum over e, c of weights[t, e, c] * y[e, c, d]                      "sec,ecm->sm"

T tokens, E experts with room for C tokens each: 4 T E C D operations, of which E C / k in E C multiply zeros, and arrays of T E C numbers.
Step by step DeepSpeed-MoE's gating (softmax, argmax, one-hot, a cumulated sum for positions, a comparison with the capacity, one-hot
positions, their outer product), less what only training needs (losses, noise, random order); a choice beyond the first goes on from logits
whose best are taken out. Elementwise operations are NumPy's or CuPy's, a launch each; the gate's product and both einsums are cuBLAS's, in
`dtype`. Pairs beyond the capacity are dropped in token order, as the tables drop them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from l1_kernels import checks
from l1_kernels.device import Device
from l1_kernels.weight import Array, Weight

NUMBER = {"fp32": np.float32, "fp16": np.float16}  # what CuPy computes with


def capacity_of(num_tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """ceil(factor * k * T / E), at least 1: the room of an expert."""
    return max(1, math.ceil(factor * top_k * num_tokens / num_experts))


class EinsumRouting:
    """For E experts, k choices, and room for C tokens an expert."""

    def __init__(
        self, device: Device, num_experts: int, top_k: int, softmax_first: bool, renormalise: bool, dtype: str, capacity: int
    ) -> None:
        checks.known(dtype, "dtype", tuple(NUMBER))
        self.xp, self.kernels = device.xp, device.kernels
        self.top_k, self.capacity = top_k, capacity
        self.divide = renormalise or not softmax_first  # a softmax over the chosen is the one over all, divided by their sum
        self.number = NUMBER[dtype]
        lasting = getattr(device.kernels, "lasting", device.to_device)  # in no graph's memory, which goes when the graph does
        self.experts, self.places = lasting(np.arange(num_experts)), lasting(np.arange(capacity))
        self._gemm: Any = None
        if device.name == "cuda":
            from l3_moe.einsum_gemm import EinsumGemm

            self._gemm = EinsumGemm()

    def dispatch(self, x: Array, gate: Weight) -> tuple[Array, Array]:
        """x float32 [T, D], gate [E, D] -> weights [T, E, C] and rows [E * C, D], numbers of `dtype`; the rows of nobody are zeros."""
        weights = self._weights(self._logits(x, gate))
        mask = (weights != 0).astype(self.number)
        rows = self._gather(mask.reshape(len(x), -1), x.astype(self.number))
        return weights.astype(self.number), rows

    def combine(self, y: Array, weights: Array, residual: Array) -> Array:
        """y [E * C, D], weights [T, E, C], numbers of `dtype`; residual float32 [T, D] += the weighted sum, in place, and returned."""
        residual += self._scatter(weights.reshape(len(residual), -1), y)
        return residual

    def _logits(self, x: Array, gate: Weight) -> Array:
        if self._gemm is None:
            return self.kernels.linear(x, gate)
        logits = self.xp.empty((len(x), gate.shape[0]), np.float32)
        self._gemm(x, gate.data, "fp32", logits)
        return logits

    def _weights(self, logits: Array) -> Array:
        """float32 [T, E, C]"""
        xp = self.xp
        share = xp.exp(logits - logits.max(axis=1, keepdims=True))
        share /= share.sum(axis=1, keepdims=True)
        masks: list[Array] = []  # bool [T, E], one a choice
        for _ in range(self.top_k):
            if masks:
                logits = xp.where(masks[-1], np.float32(-np.inf), logits)
            masks.append(logits.argmax(axis=1)[:, None] == self.experts)
        chosen = masks[0]
        for mask in masks[1:]:
            chosen = chosen | mask
        if self.divide:
            share *= chosen
            share /= share.sum(axis=1, keepdims=True)
        positions = xp.cumsum(chosen, axis=0, dtype=np.int32) - np.int32(1)
        share *= positions < self.capacity
        weights = None
        for mask in masks:
            position = (positions * mask).sum(axis=1)
            part = (share * mask)[:, :, None] * (position[:, None] == self.places)[:, None, :]
            weights = part if weights is None else weights + part
        return weights

    def _gather(self, mask: Array, x: Array) -> Array:
        """mask [T, E C], x [T, D] -> [E C, D]"""
        if self._gemm is None:
            return (mask.astype(np.float32).T @ x.astype(np.float32)).astype(self.number)
        return self._gemm.product(mask, x, transpose=True)

    def _scatter(self, weights: Array, y: Array) -> Array:
        """weights [T, E C], y [E C, D] -> [T, D]"""
        if self._gemm is None:
            return (weights.astype(np.float32) @ y.astype(np.float32)).astype(self.number)
        return self._gemm.product(weights, y, transpose=False)
