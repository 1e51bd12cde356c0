"""Norms that are made by the launch of the sum before them: where, how often, and the same bits as without."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from l1_kernels.device import Device, open_device
from l1_kernels.fused_regions import FusedRegions
from l1_kernels.sbi_gemm.launch import norm_rows
from l2_dense_parallel.collectives import NoCollective
from l2_dense_parallel.slicing import Shard
from layers.batch import Batch
from layers.border import Border
from tests.equivalence.run import build

pytestmark = pytest.mark.sim
CASES = Path(__file__).parents[1] / "conformance"


class Claims(NoCollective):
    """Says that it is two ranks, of which the other's parts are zeros. makes_norms: what peer_collective.py does, by launches one by one."""

    size = 2

    def __init__(self, device: Any, makes_norms: bool) -> None:
        super().__init__()
        self.device, self.makes_norms = device, makes_norms

    def all_reduce(self, x: Any) -> Any:
        self.counters.add("all_reduce", x.nbytes)
        return x

    def reduce_add_norm(self, x: Any, residual: Any, norm: Any, dtype: str) -> Any:
        if not self.makes_norms:
            return None
        self.counters.add("reduce_add_norm", x.nbytes)
        self.device.kernels.add(residual, x)
        return norm_rows(self.device.kernels, residual, norm.kind, norm.weight, norm.bias, norm.eps, dtype)


def fused_device() -> Any:
    device: Any = open_device("sim", fused=True)
    device.regions = FusedRegions(device.kernels, 2, norm_tokens=0)
    return device


def last_hidden(device: Device, case: str, dtype: str, makes_norms: bool) -> tuple[np.ndarray, Claims]:
    """What two layers give for the second tokens of two sequences whose first have keys and values of zeros."""
    collective = Claims(device, makes_norms)
    runner = build(CASES / case, device, dtype, 2, Shard(), collective)
    cache: Any = runner.new_cache(2, 8)
    for layer in cache.layers:
        layer.k[...] = 0
        layer.v[...] = 0
    rows = np.arange(2, dtype=np.int32)
    step = runner._upload(Batch.step(rows + 5, rows, np.ones(2, np.int32)), cache)
    return device.to_host(runner.layers(step, cache)), collective


@pytest.mark.parametrize(
    ("case", "dtype", "norms"),
    [
        ("gpt2", "fp16", 3),  # pre-norm: two norms a layer, of which the first layer's first follows no sum
        ("gptj", "int8", 1),  # parallel, one norm for both
    ],
)
def test_the_same_bits(case: str, dtype: str, norms: int) -> None:
    device = fused_device()
    without, _ = last_hidden(device, case, dtype, False)
    made, collective = last_hidden(device, case, dtype, True)
    assert collective.counters.messages["reduce_add_norm"] == norms
    np.testing.assert_array_equal(made, without)


@pytest.mark.parametrize(
    ("case", "dtype", "int8", "num_tokens", "found"),
    [
        ("gpt2", "fp16", "w8a16", 16, "fp16"),
        ("gpt2", "bf16", "w8a16", 1, "bf16"),
        ("gptj", "int8", "w8a16", 1, "fp16"),
        ("gpt2", "fp16", "w8a16", 17, None),  # too many tokens for SBI-GeMM
        ("gpt2", "fp32", "w8a16", 1, None),  # no rows in 16 bits
        ("gpt2", "int8", "w8a8", 1, None),  # rounds x itself
        ("gpt_neox_parallel", "fp16", "w8a16", 1, None),  # two norms of the same x, which one launch does not make
    ],
)
def test_which_layers_take_rows(case: str, dtype: str, int8: str, num_tokens: int, found: str | None) -> None:
    device = fused_device()
    runner = build(CASES / case, device, dtype, 2, Shard(), NoCollective(), int8)
    reader = runner.blocks[1].first_reader(runner.weights.layer(1))
    assert (None if reader is None else device.regions.rows_dtype(num_tokens, *reader.weights)) == found


def test_experts_take_x_itself() -> None:
    """So the sum before them makes no norm; the one after them may make the next layer's first."""
    runner = build(CASES / "mixtral", fused_device(), "fp16", 2, Shard(), NoCollective())
    block, weights, asked = runner.blocks[0], runner.weights.layer(0), []

    def add(residual: Any, part: Any) -> Any:
        asked.append("add")
        return residual

    def add_norm(residual: Any, part: Any, norm: Any, dtype: str) -> Any:
        asked.append(dtype)
        return residual, "rows"

    block.reduce = SimpleNamespace(add=add, add_norm=add_norm)
    block.attention = block.ffn = lambda x, norm, *more: x
    block.regions.linear_add = lambda x, *more: x
    border = Border(following=runner.blocks[1].first_reader(runner.weights.layer(1)))
    block(np.zeros((1, runner.config.hidden_size), np.float32), weights, None, None, border)
    assert asked == ["add", "fp16"] and border.rows == "rows"


def test_unfused_regions_take_none() -> None:
    device = open_device("sim")
    runner = build(CASES / "gpt2", device, "fp16", 2, Shard(), NoCollective())
    assert device.regions.rows_dtype(1, runner.weights.layer(1).qkv.weight) is None
