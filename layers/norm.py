"""LayerNorm or RMSNorm, as the model's config says."""

from __future__ import annotations

from l1_kernels.kernels import Kernels
from l1_kernels.weight import Array
from layers.config import ModelConfig
from layers.weights import Norm


def apply_norm(kernels: Kernels, config: ModelConfig, x: Array, weights: Norm) -> Array:
    """x [T, D] -> [T, D], float32 sums."""
    if config.norm == "rmsnorm":
        return kernels.rms_norm(x, weights.weight, config.norm_eps)
    return kernels.layer_norm(x, weights.weight, weights.bias, config.norm_eps)
