"""A checkpoint becomes a runner on a device: read slice by slice in this rank's share, moved to the device layer by layer."""

from __future__ import annotations

from l1_kernels.device import Device
from l2_dense_parallel.collectives import Collective
from l2_dense_parallel.pipeline.stages import Stage
from l2_dense_parallel.slicing import Shard, check_tp
from l3_moe.capacity import CappedMoE
from l3_moe.exchange.forms import RowExchange
from l3_moe.expert_parallel import ExpertParallelMoE
from l4_offload.resident import ResidentWeights, to_device
from models.groups import sparse_through
from models.loading import Checkpoint, Progress, rounding_activations, stream_model
from models.runner import Runner


def build_runner(
    checkpoint: Checkpoint, device: Device, dtype: str, shard: Shard, collective: Collective, progress: Progress | None = None,
    int8: str = "w8a16", stage: Stage | None = None, kv: str = "gpu",
    offload_parity: int | None = None, exchange: RowExchange | None = None,
    capacity_factor: float | None = None,
) -> Runner:
    """dtype "fp32" | "fp16" | "bf16" | "int8": how weights and KV cache are held; int8 "w8a16" | "w8a8" (--int8); stage: of a pipeline; kv: --kv; offload_parity: Runner's;
    exchange: between ranks that own different experts, as the shard says; capacity_factor: --capacity-factor.
    UserError where the heads do not divide over the shard's ranks, or the checkpoint is not whole."""
    check_tp(checkpoint.config, shard.size)
    config, ends, layers = stream_model(checkpoint, dtype, shard, progress, stage=stage)
    if int8 == "w8a8":
        layers = rounding_activations(layers)
    runner = Runner(config, device, shard, collective, to_device(device, ends), ResidentWeights.load(device, layers), dtype, stage, kv, offload_parity)
    if exchange is not None:
        sparse_through(runner, ExpertParallelMoE(config, device, exchange, collective.watched, capacity_factor))
    elif capacity_factor is not None:
        sparse_through(runner, CappedMoE(config, device, capacity_factor, collective.watched))
    return runner
