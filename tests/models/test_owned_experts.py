"""What a rank reads of the experts: its own, whole or a slice of each; and a checkpoint without one of them is refused, whoever owns it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from l1_kernels.errors import UserError
from l2_dense_parallel.slicing import ExpertShard, Shard
from models.loading import load_layers, open_checkpoint

CASES = Path(__file__).parents[1] / "conformance"


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "olmoe"])
@pytest.mark.parametrize(("ep", "es"), [(1, 2), (2, 1), (4, 2), (8, 1)])
def test_owners_and_slices_together_are_the_whole(name: str, ep: int, es: int) -> None:
    checkpoint = open_checkpoint(CASES / name)
    whole = next(load_layers(checkpoint, "fp32"))
    up = {}
    for owner in range(ep):
        parts = [next(load_layers(checkpoint, "fp32", Shard(0, 1, ExpertShard(owner, ep, rank, es)))) for rank in range(es)]
        down = np.concatenate([part["moe.down.weight"].data for part in parts], axis=2)
        own = slice(owner * 8 // ep, (owner + 1) * 8 // ep)
        assert np.array_equal(down, whole["moe.down.weight"].data[own])
        halves = [part["moe.up.weight"].data.reshape(8 // ep, 2, -1, down.shape[1]) for part in parts]  # gate's rows, then up's
        up[owner] = np.concatenate(halves, axis=2).reshape(8 // ep, -1, down.shape[1])
        assert all(np.array_equal(part["moe.gate.weight"].data, whole["moe.gate.weight"].data) for part in parts)
    assert np.array_equal(np.concatenate(list(up.values())), whole["moe.up.weight"].data)


@pytest.mark.parametrize("owner", [0, 1])
def test_a_missing_expert_is_named(tmp_path: Path, owner: int) -> None:
    folder = tmp_path / "mixtral"
    shutil.copytree(CASES / "mixtral", folder, ignore=shutil.ignore_patterns("golden*"))
    tensors = load_file(folder / "model.safetensors")
    missing = "model.layers.1.block_sparse_moe.experts.5.w2.weight"
    del tensors[missing]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"tensor {missing.removeprefix('model.')} is missing") as refused:
        open_checkpoint(folder).plan(Shard(0, 1, ExpertShard(owner, 2)))
    assert "\n" not in str(refused.value)
