"""The expert that every token visits (Qwen2-MoE has one, its output times the sigmoid of one logit a token)."""

from __future__ import annotations

from l1_kernels.device import Device
from l1_kernels.regions import NormArgs
from l1_kernels.weight import Array
from layers.config import ModelConfig
from layers.weights import MoEWeights


def add_shared_expert(
    config: ModelConfig, device: Device, x: Array, norm: NormArgs | None, rows: Array, weights: MoEWeights, residual: Array | None
) -> Array:
    """residual += the shared expert of norm(x), in place, and returned; None: onto zeros. x float32 [T, D]; rows [T, D]: norm(x), float32 or in the 16
    bits that the products round it to."""
    up, down, gate = weights.shared_up, weights.shared_down, weights.shared_gate
    assert up is not None and down is not None
    hidden = device.regions.norm_feed_forward(rows, None, up.weight, up.bias, config.activation, config.gated_ffn)
    if gate is None:
        return device.regions.linear_add(hidden, down.weight, down.bias, residual)
    part = device.regions.linear_add(hidden, down.weight, down.bias, None)
    part /= 1.0 + device.xp.exp(-device.regions.norm_linear(x, norm, gate, None))
    return part if residual is None else device.kernels.add(residual, part)
