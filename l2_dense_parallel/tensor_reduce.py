"""A layer's sums over tensor-parallel ranks (`layers.protocols.Reduce`): by the collective, and with it what the layer does next."""

from __future__ import annotations

from l1_kernels.kernels import Kernels
from l1_kernels.regions import NormArgs
from l1_kernels.weight import Array
from l2_dense_parallel.collectives import Collective


class TensorReduce:
    def __init__(self, collective: Collective, kernels: Kernels) -> None:
        self.collective = collective
        self.kernels = kernels

    def __call__(self, x: Array) -> Array:
        if self.collective.size > 1:
            self.collective.all_reduce(x)
        return x

    def add(self, residual: Array, part: Array) -> Array:
        fused = self.collective.reduce_add(part, residual)
        return self.kernels.add(residual, self(part)) if fused is None else fused

    def add_norm(self, residual: Array, part: Array, norm: NormArgs, dtype: str) -> tuple[Array, Array | None]:
        rows = self.collective.reduce_add_norm(part, residual, norm, dtype)
        return (self.add(residual, part), None) if rows is None else (residual, rows)
