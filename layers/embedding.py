"""Both ends of the model: ids to hidden states, hidden states to logits.

The vocabulary may be sliced over tensor-parallel ranks: each looks its own rows up and `reduce` adds the ranks' zeros
away; at the head each computes its own columns and `gather` lays them side by side (a padded column is cut off, so it
can never be sampled).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from l1_kernels.device import Device
from l1_kernels.weight import Array, Weight
from layers.config import ModelConfig
from layers.norm import apply_norm, norm_args
from layers.protocols import Reduce
from layers.step import Step
from layers.weights import Linear, Norm, Tensors, norm, optional_linear


@dataclass(frozen=True, slots=True)
class EmbeddingWeights:
    """The tensors outside the layers, by role. `tokens` holds rows first_row.. of the vocabulary."""

    tokens: Weight | None  # None on a pipeline stage that has neither end, or only a head of its own
    first_row: int
    positions: Weight | None
    types: Weight | None
    norm: Norm | None
    project_in: Linear | None
    project_out: Linear | None
    final_norm: Norm | None
    head: Linear | None  # [V of this rank, D_e]; tied: the token table itself
    mlm_dense: Linear | None
    mlm_norm: Norm | None

    @classmethod
    def from_tensors(cls, tensors: Tensors, first_row: int) -> EmbeddingWeights:
        def table(name: str) -> Weight | None:
            found = tensors.get(name)
            assert found is None or isinstance(found, Weight)
            return found

        tokens = table("embed.tokens")
        head = optional_linear(tensors, "head")
        if head is None and tokens is not None:
            head = Linear(tokens, tensors.get("head.bias"))
        return cls(
            tokens=tokens,
            first_row=first_row,
            positions=table("embed.positions"),
            types=table("embed.types"),
            norm=norm(tensors, "embed.norm"),
            project_in=optional_linear(tensors, "embed.project_in"),
            project_out=optional_linear(tensors, "embed.project_out"),
            final_norm=norm(tensors, "final_norm"),
            head=head,
            mlm_dense=optional_linear(tensors, "mlm.dense"),
            mlm_norm=norm(tensors, "mlm.norm"),
        )


class Embedding:
    """ids -> [T, D]."""

    def __init__(self, config: ModelConfig, device: Device, weights: EmbeddingWeights, reduce: Reduce) -> None:
        self.config = config
        self.device = device
        self.weights = weights
        self.reduce = reduce

    def __call__(self, step: Step) -> Array:
        kernels, weights = self.device.kernels, self.weights
        assert weights.tokens is not None, "the embedding is the first stage's"
        x = self.reduce(kernels.embed(weights.tokens, step.tokens, weights.first_row))
        if weights.project_in is not None:
            x = kernels.linear(x, weights.project_in.weight, weights.project_in.bias)
        if weights.positions is not None:
            # Position p is row p + offset (OPT's and RoBERTa's tables begin with rows that no token has).
            x = kernels.add(x, kernels.embed(weights.positions, step.positions, -self.config.position_offset))
        if weights.types is not None:
            types = self.device.zeros(step.tokens.shape, np.int32) if step.types is None else step.types
            x = kernels.add(x, kernels.embed(weights.types, types))
        if weights.norm is not None:
            x = apply_norm(kernels, self.config, x, weights.norm)
        return x


class Head:
    """[T, D] -> logits float32 [n, V], the same on every tensor-parallel rank."""

    def __init__(self, config: ModelConfig, device: Device, weights: EmbeddingWeights, gather: Callable[[Array], Array]) -> None:
        self.config = config
        self.kernels = device.kernels
        self.regions = device.regions
        self.weights = weights
        self.gather = gather

    def final_norm(self, x: Array) -> Array:
        """What an encoder calls its last hidden state."""
        norm_weights = self.weights.final_norm
        return x if norm_weights is None else apply_norm(self.kernels, self.config, x, norm_weights)

    def __call__(self, x: Array) -> Array:
        weights, regions = self.weights, self.regions
        assert weights.head is not None, "the head is the last stage's"
        before = None if weights.final_norm is None else norm_args(self.config, weights.final_norm)
        if weights.project_out is not None:
            x, before = regions.norm_linear(x, before, weights.project_out.weight, weights.project_out.bias), None
        if weights.mlm_dense is not None and weights.mlm_norm is not None:
            x = regions.norm_linear(x, before, weights.mlm_dense.weight, weights.mlm_dense.bias)
            x, before = self.kernels.activate(x, self.config.mlm_head), norm_args(self.config, weights.mlm_norm)
        return self.gather(regions.norm_linear(x, before, weights.head.weight, weights.head.bias))
