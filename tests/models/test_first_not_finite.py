"""--check-nan names the layer: a weight of one layer is made infinite, and that layer is found."""

import numpy as np
import pytest

from l1_kernels.device import open_device
from l2_dense_parallel.collectives import NoCollective
from l2_dense_parallel.slicing import Shard
from layers.batch import Batch
from models.build import build_runner
from models.find import find_model
from models.loading import open_checkpoint


@pytest.mark.parametrize("broken", [0, 2, 3])
def test_the_layer_is_named(broken: int) -> None:
    runner = build_runner(open_checkpoint(find_model("shakespeare")), open_device("cpu"), "fp32", Shard(), NoCollective())
    batch, cache = Batch.prompts([[1, 2, 3]], [0]), runner.new_cache(1, 8)
    assert np.isfinite(runner.forward(batch, cache)).all()
    down = runner.weights.layer(broken).ffn_down
    assert down is not None
    down.weight.data[5, 7] = np.inf
    assert runner.first_not_finite(batch, cache) == f"layer {broken}"


def test_a_broken_head_is_told_from_the_layers() -> None:
    runner = build_runner(open_checkpoint(find_model("shakespeare")), open_device("cpu"), "fp32", Shard(), NoCollective())
    batch, cache = Batch.prompts([[1, 2, 3]], [0]), runner.new_cache(1, 8)
    runner.head.weights.head.weight.data[9, 0] = np.nan
    assert not np.isfinite(runner.forward(batch, cache)).all()
    assert runner.first_not_finite(batch, cache) == "the head"
