"""The figures' programs at tiny sizes: they run, their rows are whole, and their counts of bytes and operations are right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks import fig7, fig10a, fig12
from benchmarks.random_model import random_runner, random_weights, runner_of
from l1_kernels.device import Device, open_device
from l1_kernels.weight import host_weight
from l3_moe.einsum_moe import EinsumMoE
from layers.config import MoEConfig
from models.presets import preset
from models.speeds import bytes_read

LIMITS = {"read_gb_s": 10.0, "copy_gb_s": 10.0, "fp16_tflop_s": 0.1}


def tiny(name: str) -> Any:
    config = preset(name)
    rope = None if config.rope is None else replace(config.rope, dim=8)
    return replace(
        config, num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=2, head_dim=16, ffn_size=64, vocab_size=37, max_positions=160, rope=rope
    )


class Pool:
    """timing.WeightPool's place."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def matrices(self, outputs: int, inner: int) -> list[Any]:
        rng = np.random.default_rng(0)
        return [self.device.weight(host_weight(rng.standard_normal((outputs, inner)).astype(np.float32), "fp16")) for _ in range(2)]


@pytest.mark.parametrize("name", fig10a.MODELS)
def test_fig10a_steps(name: str) -> None:
    devices = {stage: open_device("cpu") for stage in fig10a.STAGES}
    rows = list(fig10a.measure_steps(devices, name, tiny(name), [1, 3], 10.0))
    assert [(row["batch"], row["stage"]) for row in rows] == [(batch, stage) for batch in (1, 3) for stage in fig10a.STAGES]
    assert all(row["launched_ms"] > 0 and row["graph_ms"] > 0 and row["bound_ms"] > 0 for row in rows)
    assert name in fig10a.show_step(rows[0])


def check_regions(devices: dict[str, Device], name: str) -> None:
    rows = list(fig10a.measure_regions(devices, name, tiny(name), 2, Pool(devices["sbi"]), 10.0))
    assert [row["region"] for row in rows] == list(fig10a.PAPER_GAINS)
    for row in rows:
        assert row["gain"] == pytest.approx(row["unfused_us"] / row["overlap_us"]) and "paper" in fig10a.show_region(row)
    by_name = {row["region"]: row["bytes"] for row in rows}
    assert by_name == {"norm + qkv": 2 * 96 * 32, "attend": 2 * 2 * 32 * 137 * 2, "norm + ff1 + act": 2 * 64 * 32, "ff2 + residual": 2 * 64 * 32}


@pytest.mark.parametrize("name", fig10a.MODELS)
def test_fig10a_regions(name: str) -> None:
    check_regions({stage: open_device("cpu") for stage in fig10a.STAGES}, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", fig10a.MODELS)
def test_fig10a_on_a_gpu(name: str) -> None:
    devices = {stage: open_device("cuda", **how) for stage, how in fig10a.STAGES.items()}
    check_regions(devices, name)
    assert len(list(fig10a.measure_steps(devices, name, tiny(name), [2], 10.0))) == len(devices)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", fig12.PAPER)
def test_fig12(name: str, device: str) -> None:
    config = tiny(name)
    row = fig12.measure(open_device(device), name, config, "fp16", 37, LIMITS)
    runner = random_runner(config, open_device(device), "fp16")
    head = runner.head.weights.head.weight.nbytes
    assert row["weight_bytes"] == bytes_read(runner, 1) - head  # the head is no part of a pass
    assert row["gflop"] * 1e9 == 37 * row["weight_bytes"] + 4 * 32 * 37**2  # 2 bytes a weight, 2 operations
    assert row["replay_ms"] > 0 and row["text_ms"] > 0 and name in fig12.line(row)


def test_runners_share_random_weights() -> None:
    device, config = open_device("cpu"), tiny("gpt2-xl")
    weights = random_weights(config, device, "fp16")
    a, b = (runner_of(config, device, "fp16", weights) for _ in range(2))
    assert a.weights.layer(0).qkv.weight.data is b.weights.layer(0).qkv.weight.data
    assert a.head.weights.head.weight.data is b.head.weights.head.weight.data


@pytest.mark.parametrize("way", ["tables", "einsum"])
@pytest.mark.parametrize(("device", "dtype"), [("cpu", "fp32"), pytest.param("cuda", "fp16", marks=pytest.mark.gpu)])
def test_fig7(way: str, device: str, dtype: str) -> None:
    """On a GPU both ways are replays of graphs."""
    config = replace(tiny("mixtral-5.8b"), num_layers=2, moe=MoEConfig((0, 1), 4, 2, 48, renormalise=True))
    opened = open_device(device)
    runner = runner_of(config, opened, dtype, random_weights(config, opened, dtype), sparse=EinsumMoE(config, opened) if way == "einsum" else None)
    for batch in (1, 3):
        found = fig7.measure(runner, batch, 4)
        assert found["graph"] == (device == "cuda") and 0 < found["token_ms"] and found["first_ms"] < found["total_ms"]
