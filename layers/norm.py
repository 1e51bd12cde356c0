"""LayerNorm or RMSNorm, as the model's config says: by itself, or handed to the region that begins with it."""

from __future__ import annotations

from l1_kernels.kernels import Kernels
from l1_kernels.regions import NormArgs, apply_norm_args
from l1_kernels.weight import Array
from layers.config import ModelConfig
from layers.weights import Norm


def norm_args(config: ModelConfig, weights: Norm | None) -> NormArgs:
    """For a region of l1_kernels/regions.py."""
    assert weights is not None
    return NormArgs(config.norm, weights.weight, weights.bias, config.norm_eps)


def apply_norm(kernels: Kernels, config: ModelConfig, x: Array, weights: Norm | None) -> Array:
    """x [T, D] -> [T, D], float32 sums."""
    return apply_norm_args(kernels, x, norm_args(config, weights))
