"""Runs one setting over its cases, in this process: on this rank where there are several."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from l2_dense_parallel.collectives import NoCollective
from l2_dense_parallel.pipeline.stages import make_stages
from l2_dense_parallel.slicing import Shard
from l4_offload.resident import ResidentWeights, to_device
from layers.config import ModelConfig
from models.loading import open_checkpoint, rounding_activations, stream_model
from models.pipeline import PipelinedModel
from models.runner import Runner
from tests.conformance.check import load_case
from tests.equivalence.judge import Verdict, judge
from tests.equivalence.observe import Observation, observe
from tests.equivalence.oracle import as_held, oracle_device, slices
from tests.equivalence.oracle_moe import PlainMoE
from tests.equivalence.settings import Setting

CASES = Path(__file__).parents[1] / "conformance"


def check_setting(setting: Setting, device: Any, shard: Shard | None = None, collective: Any = None, judging: bool = True, pipe: Any = None, exchanges: Any = None) -> Verdict:
    """Every case of the setting. `judging` is False on the ranks that only take part; pipe: of a pipeline, this rank's stage; exchanges: of ranks that
    own different experts (exchanges.py)."""
    verdict = Verdict()
    for name in setting.case_names():
        case = shortened(load_case(CASES / name)) if setting.short else load_case(CASES / name)
        runner: Any = build(case["dir"], device, setting.dtype, setting.layers, shard or Shard(), collective or NoCollective(), setting.int8, pipe, setting.kv, setting.parity)
        if exchanges is not None:
            runner = exchanges.join(runner)
        if pipe is not None:
            runner = PipelinedModel(runner, pipe)
        groups = exchanges.groups(runner) if exchanges is not None and setting.graph else None
        got = observe(runner, case, setting.batch, setting.graph, groups)
        if judging:
            judge(verdict, setting, case, got, reference(setting, case))
    verdict.close()
    return verdict


def reference(setting: Setting, case: dict[str, Any]) -> Observation:
    """The golden values, or a float64 run where there are none."""
    held_by = setting.slices if setting.numbers == "int8" else (1, 1)
    computed = _float64(case["name"], setting.dtype, setting.layers, setting.short, setting.int8, held_by)
    is_golden = setting.dtype == "fp32" and not setting.layers and not setting.short
    return {**computed, **case} if is_golden else computed


@lru_cache(maxsize=256)
def _float64(name: str, dtype: str, layers: int, short: bool, int8: str, held_by: tuple[int, int]) -> Observation:
    case = shortened(load_case(CASES / name)) if short else load_case(CASES / name)
    runner = build(case["dir"], oracle_device(), dtype, layers, Shard(), NoCollective(), int8, held_by=held_by)
    runner.kv_dtype = "fp32"
    return observe(runner, case, "together")


def build(
    folder: Path, device: Any, dtype: str, layers: int, shard: Shard, collective: Any, int8: str = "w8a16", pipe: Any = None, kv: str = "gpu",
    parity: bool = False, held_by: tuple[int, int] = (1, 1),
) -> Runner:  # fmt: skip
    """The runner of one rank. held_by: for the oracle, which stands for all of them, `Setting.slices`."""
    checkpoint = open_checkpoint(folder)
    config = cut(checkpoint.config, layers) if layers else checkpoint.config
    stage = make_stages(config, pipe.size)[pipe.stage] if pipe is not None else None
    _, ends, tensors = stream_model(checkpoint, dtype, shard, layers=range(config.num_layers), stage=stage)
    if int8 == "w8a8":
        tensors = rounding_activations(tensors)
    if held_by != (1, 1):
        held = [stream_model(checkpoint, dtype, part, layers=range(config.num_layers))[2] for part in slices(*held_by)]
        tensors = (as_held(layer, parts) for layer, *parts in zip(tensors, *held, strict=True))
    moved = shard.rank % 2 if parity else None
    sparse = PlainMoE(config, device) if device.name == "float64" and config.moe is not None else None
    return Runner(config, device, shard, collective, to_device(device, ends), ResidentWeights.load(device, tensors), dtype, stage, kv, moved, sparse)


def cut(config: ModelConfig, layers: int) -> ModelConfig:
    """The model of its first layers."""
    moe = config.moe and replace(config.moe, layers=tuple(i for i in config.moe.layers if i < layers))
    return replace(config, num_layers=layers, attention_scale=config.attention_scale[:layers], windows=config.windows[:layers], moe=moe)


def shortened(case: dict[str, Any]) -> dict[str, Any]:
    """A few tokens of each input: what the simulator can do in seconds. A decoder's case only."""
    keep = {"input_ids": 3, "greedy_tokens": 2, "pad_tokens": 2, "ppl_input_ids": 3}
    cut_inputs = {name: case[name][..., :count] for name, count in keep.items()}
    pads = {name: case[name][:, -6:] for name in ("pad_input_ids", "pad_attention_mask")}  # 5 and 6 real tokens
    return {**case, **cut_inputs, **pads}
