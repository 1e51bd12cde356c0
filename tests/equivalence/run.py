"""Runs one setting over its cases, in this process: on this rank where there are several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from l2_dense_parallel.slicing import Shard
from l4_offload.resident import ResidentWeights, to_device
from layers.config import ModelConfig
from models.loading import open_checkpoint, stream_model
from models.runner import Runner
from tests.conformance.check import load_case
from tests.equivalence.observe import Observation, observe
from tests.equivalence.oracle import oracle_device
from tests.equivalence.settings import Setting


class OneRank:
    """The collective of a single rank."""

    rank, size = 0, 1


def run_setting(setting: Setting, cases: Path, device: Any, shard: Shard | None = None, collective: Any = None) -> Iterator[tuple[dict, Observation]]:
    """(case, what the setting gives for it) for every case, one after the other."""
    for name in setting.case_names():
        case = load_case(cases / name)
        runner = build(case["dir"], device, setting.dtype, setting.layers, shard or Shard(), collective or OneRank())
        yield case, observe(runner, case, setting.batch)


def reference(setting: Setting, case: dict[str, Any]) -> Observation:
    """The golden values, or a float64 run where there are none."""
    computed = _float64(case["dir"], setting.dtype, setting.layers)
    return {**computed, **case} if is_golden(setting) else computed


def is_golden(setting: Setting) -> bool:
    return setting.dtype == "fp32" and not setting.layers


@lru_cache(maxsize=256)
def _float64(folder: Path, dtype: str, layers: int) -> Observation:
    runner = build(folder, oracle_device(), dtype, layers, Shard(), OneRank())
    runner.kv_dtype = "fp32"
    return observe(runner, load_case(folder), "together")


def build(folder: Path, device: Any, dtype: str, layers: int, shard: Shard, collective: Any) -> Runner:
    checkpoint = open_checkpoint(folder)
    config = cut(checkpoint.config, layers) if layers else checkpoint.config
    _, ends, tensors = stream_model(checkpoint, dtype, shard, layers=range(config.num_layers))
    return Runner(config, device, shard, collective, to_device(device, ends), ResidentWeights.load(device, tensors), dtype)


def cut(config: ModelConfig, layers: int) -> ModelConfig:
    """The model of its first layers."""
    moe = config.moe and replace(config.moe, layers=tuple(i for i in config.moe.layers if i < layers))
    return replace(config, num_layers=layers, attention_scale=config.attention_scale[:layers], windows=config.windows[:layers], moe=moe)
