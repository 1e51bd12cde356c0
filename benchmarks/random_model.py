"""A model of given shape with random weights, made on the device itself: what latency needs, and no checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np

from l1_kernels.device import Device
from l1_kernels.weight import Array, Weight
from l2_dense_parallel.collectives import Collective, NoCollective
from l2_dense_parallel.pipeline.stages import Stage, whole
from l2_dense_parallel.slicing import Shard, TensorSlice, global_tensors, layer_tensors
from l4_offload.resident import ResidentWeights
from layers.config import ModelConfig
from layers.protocols import FeedForward
from layers.weights import LayerWeights
from models.loading import held_dtype
from models.runner import Runner

SPREAD = 0.02  # standard deviation of the matrices: hidden states stay in fp16's range


def random_runner(
    config: ModelConfig, device: Device, dtype: str, shard: Shard | None = None, collective: Collective | None = None, seed: int = 0
) -> Runner:
    """A model that owns its weights."""
    shard = shard or Shard()
    return runner_of(config, device, dtype, random_weights(config, device, dtype, shard, seed), shard, collective)


def random_weights(
    config: ModelConfig, device: Device, dtype: str, shard: Shard | None = None, seed: int = 0, stage: Stage | None = None
) -> tuple[dict[str, Weight | Array], list[LayerWeights]]:
    """Every tensor that a checkpoint of this config would have, random: zeros would run faster than real numbers do. (Those outside
    the layers, the layers'; of a pipeline's `stage`, its own.) They are there when this returns, on whatever stream they are read."""
    shard = shard or Shard()
    rng = device.xp.random.default_rng(seed)
    stage = stage or whole(config)
    ends = _tensors(device, rng, dtype, config, {n: part for n, part in global_tensors(config, shard).items() if stage.holds(n, config)})
    layers = [LayerWeights.from_tensors(_tensors(device, rng, dtype, config, layer_tensors(config, i, shard))) for i in stage.layers]
    device.synchronize()
    return ends, layers


def runner_of(
    config: ModelConfig, device: Device, dtype: str, weights: tuple[dict[str, Weight | Array], list[LayerWeights]],
    shard: Shard | None = None, collective: Collective | None = None, stage: Stage | None = None, sparse: FeedForward | None = None,
) -> Runner:  # fmt: skip
    """A model over `random_weights`, which several may share: one for each way to run on a GPU (open_device's fused and gemm)."""
    ends, layers = weights
    return Runner(config, device, shard or Shard(), collective or NoCollective(), ends, ResidentWeights(layers), dtype, stage, sparse=sparse)


def _tensors(device: Device, rng: Any, dtype: str, config: ModelConfig, slices: dict[str, TensorSlice]) -> dict[str, Weight | Array]:
    return {name: _tensor(device, rng, name, held_dtype(name, config, dtype), part) for name, part in slices.items() if part.held}


def _tensor(device: Device, rng: Any, name: str, dtype: str, part: TensorSlice) -> Weight | Array:
    xp = device.xp
    if not part.width:
        numbers = rng.standard_normal(part.shape, dtype=np.float32) * np.float32(SPREAD)
        return numbers + np.float32(1) if "norm.weight" in name else numbers
    held = dtype if part.matrix else "fp32"
    if held == "int8":
        data = rng.integers(-127, 128, part.shape).astype(np.int8)
        return Weight(data, held, xp.full(part.shape[:-1], SPREAD / 73, np.float32))  # 73: the spread of those integers
    numbers = rng.standard_normal(part.shape, dtype=np.float32) * np.float32(SPREAD)
    if held == "fp16":
        return Weight(numbers.astype(np.float16).view(np.uint16), held)
    if held == "bf16":  # cut, not rounded: random all the same
        return Weight((numbers.view(np.uint32) >> np.uint32(16)).astype(np.uint16), held)
    return Weight(numbers, held)
