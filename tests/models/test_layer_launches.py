"""Launches of a layer in a decode step (paper, Fig 1c), counted: five regions one after the other, or three side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from l1_kernels.device import Device, open_device
from l1_kernels.fused_regions import FusedRegions
from l2_dense_parallel.collectives import NoCollective
from l2_dense_parallel.slicing import Shard
from layers.batch import Batch
from models.build import build_runner
from models.loading import open_checkpoint

pytestmark = pytest.mark.sim
CASES = Path(__file__).parents[1] / "conformance"


def first_layer(device: Device, case: str, num_tokens: int) -> tuple[np.ndarray, int]:
    """Output and launches of layer 0 for the second token of `num_tokens` sequences; the cache holds zeros for their first."""
    runner = build_runner(open_checkpoint(CASES / case), device, "fp16", Shard(), NoCollective())
    cache, rows = runner.new_cache(num_tokens + 1, 8), np.arange(num_tokens, dtype=np.int32)[::-1] + 1
    for array in (cache.layers[0].k, cache.layers[0].v):
        array[...] = 0
    step = runner._upload(Batch.step(rows, rows, np.ones(num_tokens, np.int32)), cache)
    x = np.random.default_rng(3).standard_normal((num_tokens, runner.config.hidden_size)).astype(np.float32)
    before = device.launches()
    y = runner.blocks[0](device.to_device(x), runner.weights.layer(0), step, cache.layers[0])
    return device.to_host(y), device.launches() - before


@pytest.mark.parametrize(
    ("case", "num_tokens", "launches"),
    [("gpt2", 2, 7), ("gptj", 2, 4), pytest.param("gpt2", 1, 5, marks=pytest.mark.slow), pytest.param("gptj", 1, 3, marks=pytest.mark.slow)],
)
def test_launches(case: str, num_tokens: int, launches: int) -> None:
    """Beyond one token a norm is a launch of its own. The numbers are the CPU's, within the rounding of 16 bits."""
    device: Any = open_device("sim", fused=True)
    device.regions = FusedRegions(device.kernels, 2)
    y, found = first_layer(device, case, num_tokens)
    want, _ = first_layer(open_device("cpu"), case, num_tokens)
    assert found == launches
    assert np.abs(y - want).max() <= 5e-3 * np.abs(want).max()
