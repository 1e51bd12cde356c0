"""A token and a prompt over tensor-parallel GPUs beside one GPU, in one run: what slicing gains, and what its sums cost.

    mpirun -n 2 python -m benchmarks.tensor_parallel [--models gpt-j-6b,gpt-87b] [--batches 1] [--all-reduce auto|nccl|one-shot]

Random weights (benchmarks/random_model.py), timed as fig6 does: prompt 128, the mean of the last 32 of 48 tokens. First every rank times the whole model
on its own GPU, where it fits; then all of them their slices of it. The bound is a rank's bytes over the read bandwidth measured in the run.
"""

from __future__ import annotations

import argparse
from math import prod
from typing import Any

from benchmarks.fig6 import PROMPT, STEADY, WARM, measure
from benchmarks.random_model import random_runner
from benchmarks.record import circumstances, write
from l1_kernels.errors import UserError
from l2_dense_parallel.faults import run
from l2_dense_parallel.slicing import Shard, global_tensors, layer_tensors
from l2_dense_parallel.world import World

PACKAGES = ("strata-inference", "numpy", "numba", "numba-cuda", "cupy-cuda13x", "cupy-cuda12x", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "mpi4py")
SPARE = 0.9  # of a GPU's memory for weights
TIMES = ("total_ms", "first_ms", "token_ms")


def whole_bytes(config: Any) -> int:
    """Of the model in 16 bits."""
    parts = [*global_tensors(config, Shard()).values()]
    parts += [part for i in range(config.num_layers) for part in layer_tensors(config, i, Shard()).values()]
    return sum(2 * prod(part.shape) for part in parts)


def timed(device: Any, runner: Any, batch: int, bandwidth: float) -> dict[str, Any]:
    from models.speeds import bytes_read

    config, kv = runner.config, runner.config.num_kv_heads / runner.collective.size
    cached = 2 * config.num_layers * kv * config.head_dim * (PROMPT + WARM + STEADY // 2) * 2 * batch
    found = measure(device, runner, batch)
    return found | {"batch": batch, "bound_ms": (bytes_read(runner, batch) + cached) / bandwidth * 1e3}


def slowest(world: World, found: dict[str, Any]) -> dict[str, Any]:
    """A rank's times, each the largest over ranks."""
    everywhere = world.exchange(found)
    return found | {name: max(other[name] for other in everywhere) for name in TIMES}


def main(world: World) -> int:
    options = arguments()
    from l1_kernels.device import open_device, prepare
    from l2_dense_parallel.gpus import choose_gpus
    from l2_dense_parallel.mesh import MeshShape, build_mesh
    from l2_dense_parallel.open_collective import open_collective
    from models.presets import preset
    from models.speeds import read_bandwidth

    prepare("cuda")
    world.start()
    if world.size < 2:
        raise UserError("tensor_parallel: one rank slices nothing; start two or more (mpirun -n 2)")
    index, _, _ = choose_gpus(world, asked=True, share_gpu=False)
    mesh = build_mesh(world, MeshShape(tp=world.size))
    assert mesh is not None
    device: Any = open_device("cuda", index)
    bandwidth = min(world.exchange(read_bandwidth(device)))
    collective: Any = open_collective(world, mesh, "tp", "cuda", kernels=device.kernels, all_reduce=options.all_reduce)
    shard = Shard(world.rank, world.size)
    document = circumstances(PACKAGES)
    document["machine"]["gpu"], document["read_gb_s"], document["ranks"] = device.description, bandwidth / 1e9, world.size
    document["all_reduce"] = options.all_reduce
    rows: list[dict[str, Any]] = []
    for name in options.models:
        config = preset(name)
        alone: dict[int, float] = {}
        if not options.sliced_only and whole_bytes(config) < SPARE * device.memory()[1]:
            whole = random_runner(config, device, options.dtype)
            for batch in options.batches:
                row = slowest(world, timed(device, whole, batch, bandwidth)) | {"model": name, "gpus": 1}
                alone[batch] = row["token_ms"]
                rows.append(row)
            del whole
            device.xp.get_default_memory_pool().free_all_blocks()
        sliced = random_runner(config, device, options.dtype, shard, collective)
        for batch in options.batches:
            row = slowest(world, timed(device, sliced, batch, bandwidth)) | {"model": name, "gpus": world.size}
            row["of_one"] = row["token_ms"] / alone[batch] if batch in alone else None
            rows.append(row)
        del sliced
        device.xp.get_default_memory_pool().free_all_blocks()
        if world.rank == 0:
            print("\n".join(line(row) for row in rows if row["model"] == name), flush=True)
    if world.rank == 0:
        document["rows"] = rows
        print(write(options.out, document, []))
    return 0


def line(row: dict[str, Any]) -> str:
    ratio = f"{row['of_one']:.3f} of one GPU's" if row.get("of_one") else ""
    return (
        f"{row['model']:12} {row['gpus']} GPU batch {row['batch']:3} {row['token_ms']:8.3f} ms/token (bound {row['bound_ms']:.2f}), first {row['first_ms']:7.2f} ms, "
        f"128 + 8: {row['total_ms']:7.1f} ms  {ratio}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], prog="python -m benchmarks.tensor_parallel")

    def names(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--models", type=names, default=["gpt-j-6b", "gpt-87b"])
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1])
    parser.add_argument("--all-reduce", default="auto", choices=("auto", "nccl", "one-shot"))
    parser.add_argument("--sliced-only", action="store_true", help="not the whole model on one GPU")
    parser.add_argument("--out", default="tensor_parallel", help="name of the result file in benchmarks/results")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
