"""Weights that fit: every layer stays in the device's memory (`--weights gpu`, the default; paper, Section VI, the
case that streaming is compared with)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from l1_kernels.device import Device
from l1_kernels.weight import Array, Weight
from layers.weights import LayerWeights, Tensors


class ResidentWeights:
    """A `layers.protocols.WeightSource` over layers that were moved to the device once."""

    def __init__(self, layers: list[LayerWeights]) -> None:
        self.layers = layers
        self.num_layers = len(layers)

    @classmethod
    def load(cls, device: Device, layers: Iterable[Tensors]) -> ResidentWeights:
        """Moves one layer after the other, so that the host never holds more than the layer that is being read."""
        return cls([LayerWeights.from_tensors(to_device(device, tensors)) for tensors in layers])

    def layer(self, index: int) -> LayerWeights:
        return self.layers[index]


def to_device(device: Device, tensors: Tensors) -> dict[str, Weight | Array]:
    """Host tensors -> the same names in the device's memory."""

    def move(tensor: Weight | np.ndarray) -> Weight | Array:
        if isinstance(tensor, Weight):
            scale = None if tensor.scale is None else device.to_device(tensor.scale)
            return Weight(device.to_device(tensor.data), tensor.dtype, scale, tensor.act)
        return device.to_device(np.ascontiguousarray(tensor, np.float32))

    return {name: move(tensor) for name, tensor in tensors.items()}
