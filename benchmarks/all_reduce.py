"""Sums of small messages over GPUs: NCCL's all-reduce beside the one launch over peer memory (l1_kernels/peer_reduce), alone, with a residual, and with
the norm after it.

    mpirun -n 2 python -m benchmarks.all_reduce [--sizes 1024,4096,...]

Each time is of a CUDA graph of 50 calls that follow each other: the median of 7 replays, of the slowest rank. "add": what a layer does after it,
residual += sum; by NCCL that is a launch more. "norm": the norm of the residual besides, in fp16, of tokens of up to 4096 numbers; by NCCL two more.
The last line is what `--all-reduce auto` makes of the same sizes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.record import Others, circumstances, write
from l1_kernels.errors import UserError
from l2_dense_parallel.faults import run
from l2_dense_parallel.peer_trial import CALLS, ROUNDS, SIZES, Timing, crossover
from l2_dense_parallel.world import World

COLUMNS = ("nccl_us", "one_shot_us", "nccl_add_us", "one_shot_add_us", "nccl_norm_us", "one_shot_norm_us")
HEADS = ("NCCL", "one-shot", "NCCL, add", "one-shot add", "NCCL, norm", "one-shot norm")
WIDTH = 4096  # numbers of a token, where there are so many
PACKAGES = ("strata-inference", "numpy", "numba", "numba-cuda", "cupy-cuda13x", "cupy-cuda12x", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "mpi4py")


def ways(collective: Any, device: Any, size: int) -> dict[str, Callable[[], Any]]:
    """The calls to time, by column, of `size` bytes."""
    from l1_kernels.regions import NormArgs
    from l1_kernels.sbi_gemm.launch import norm_rows
    from l2_dense_parallel.nccl_collective import NCCLCollective

    x, residual = (device.zeros(shape_of(size)) for _ in range(2))
    norm = NormArgs("rmsnorm", device.zeros(x.shape[1]), None, 1e-5)
    by_nccl = partial(NCCLCollective.all_reduce, collective, x)

    def add() -> Any:
        return device.kernels.add(residual, by_nccl())

    calls: tuple[Callable[[], Any], ...] = (
        by_nccl, partial(collective.all_reduce, x), add, partial(collective.reduce_add, x, residual),
        lambda: norm_rows(device.kernels, add(), norm.kind, norm.weight, norm.bias, norm.eps, "fp16"),
        partial(collective.reduce_add_norm, x, residual, norm, "fp16"),
    )  # fmt: skip
    return dict(zip(COLUMNS, calls, strict=True))


def shape_of(size: int) -> tuple[int, int]:
    """Tokens and their width, of `size` bytes of float32."""
    width = min(WIDTH, size // 4)
    return size // 4 // width, width


def main(world: World) -> int:
    options = arguments()
    from l1_kernels.device import open_device, prepare
    from l1_kernels.peer_reduce.launch import MAX_BYTES
    from l2_dense_parallel.gpus import choose_gpus
    from l2_dense_parallel.mesh import MeshShape, build_mesh
    from l2_dense_parallel.open_collective import open_collective

    if any(size % (32 if size <= 4 * WIDTH else 4 * WIDTH) or not 0 < size <= MAX_BYTES for size in options.sizes):
        raise UserError(f"--sizes: multiples of 32, beyond {4 * WIDTH} of that, up to {MAX_BYTES}, the most that goes in one launch")
    prepare("cuda")
    world.start()
    if world.size < 2:
        raise UserError("all_reduce: one rank sums nothing; start two or more (mpirun -n 2)")
    index, _, _ = choose_gpus(world, asked=True, share_gpu=False)
    mesh = build_mesh(world, MeshShape(tp=world.size))
    assert mesh is not None
    device = open_device("cuda", index)
    collective: Any = open_collective(world, mesh, "tp", "cuda", kernels=device.kernels, all_reduce="one-shot")
    document = circumstances(PACKAGES)
    document["machine"]["gpu"], document["ranks"], document["calls"], document["rounds"] = device.description, world.size, CALLS, ROUNDS
    rows: list[dict[str, Any]] = []
    with Others() as others:
        for size in options.sizes:
            here = {name: collective.time_us(call) for name, call in ways(collective, device, size).items()}
            everywhere = world.exchange(here)
            rows.append({"bytes": size, **{name: round(max(rank[name] for rank in everywhere), 3) for name in COLUMNS}})
    if world.rank == 0:
        print(table(rows, device.description, world.size), flush=True)
        document["rows"], document["one_shot_bytes"] = rows, chosen(rows)
        print(f"auto: one launch up to {document['one_shot_bytes']} bytes")
        print(write(options.out, document, [others.cores]))
    return 0


def chosen(rows: list[dict[str, Any]]) -> int:
    return crossover([Timing(row["bytes"], row["nccl_us"], row["one_shot_us"]) for row in rows])


def table(rows: list[dict[str, Any]], gpu: str, ranks: int) -> str:
    lines = [f"{ranks} x {gpu}, us a call", f"{'bytes':>8}" + "".join(f" {head:>13}" for head in HEADS)]
    lines += [f"{row['bytes']:8}" + "".join(f" {row[name]:13.2f}" for name in COLUMNS) for row in rows]
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], prog="python -m benchmarks.all_reduce")
    parser.add_argument("--sizes", type=lambda text: [int(n) for n in text.split(",")], default=list(SIZES), help="bytes, with commas between")
    parser.add_argument("--out", default="all_reduce", help="name of the result file in benchmarks/results")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
