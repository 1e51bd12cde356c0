"""Passes by replays against passes launched one by one, on any device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from l1_kernels.device import Device
from l1_kernels.weight import encode
from l2_dense_parallel.collectives import NoCollective
from l2_dense_parallel.slicing import Shard
from layers.batch import Batch
from models.build import build_runner
from models.encode_graph import EncodeGraphs
from models.loading import open_checkpoint

CASES = Path(__file__).parents[1] / "conformance"


def build(device: Device, case: str, dtype: str = "fp32") -> Any:
    return build_runner(open_checkpoint(CASES / case), device, dtype, Shard(), NoCollective())


def some_texts(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng()
    return [rng.integers(3, 100, n).tolist() for n in lengths]


def poisoned(graphs: EncodeGraphs) -> EncodeGraphs:
    for layer in graphs.cache.layers:
        poison = encode(np.full(1, np.nan, np.float32), layer.dtype)[0]
        layer.k[...] = poison
        layer.v[...] = poison
    return graphs


def check_passes(runner: Any, passes: list[tuple[int, ...]], bar: float) -> EncodeGraphs:
    """Texts of these lengths, a pass after a pass through the same graphs: hidden states and logits of some places."""
    context = max(max(lengths) for lengths in passes)
    graphs = poisoned(EncodeGraphs(runner, max(map(len, passes)), context))
    host = runner.device.to_host
    for lengths in passes:
        batch = Batch.encode(some_texts(lengths), [[i % 2 if runner.config.token_types else 0] * n for i, n in enumerate(lengths)])
        want = np.array(host(runner.hidden(batch, runner.new_cache(len(lengths), context))))
        got = np.array(host(graphs.hidden(batch)))
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, atol=bar * np.abs(want).max())
        few = Batch(batch.tokens, batch.rows, batch.positions, batch.ends, batch.outputs[::3], batch.types)
        want = np.array(host(runner.forward(few, runner.new_cache(len(lengths), context))))
        np.testing.assert_allclose(np.array(host(graphs.forward(few))), want, atol=bar * np.abs(want).max())
    assert graphs.failure is None
    return graphs
