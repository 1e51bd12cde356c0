"""Fig 10b: throughput as layer 2's ideas are added one after the other, on prompts of 512 tokens and 50 more.

    mpirun -n 4 python -m benchmarks.fig10b --tp 2 [--model gpt-j-6b] [--budget 8] [--most 32] [--check]
    mpirun -n 2 python -m benchmarks.fig10b                 without --tp there is no all-reduce, and the step is left out

    baseline        lockstep, keys and values on the GPU, NCCL's all-reduce, a launch an operation; as many sequences as the budget holds
    schedule        + hybrid
    memory          + keys and values in host memory: as many sequences as the budget holds then, --most at most
    communication   + sums over peer memory, and with keys in host memory odd ranks move odd layers
    kernels         + fused regions and SBI-GeMM

`--budget` is GiB of a GPU for its weights, keys and values, and stands for a model that fills its GPUs (the paper's has 530 billion parameters): a GPU with room for all needs no host
memory. A step that does not gain is reported and left out of the later ones. Token passes are graphs where they can be (not with keys in host memory). Bar (--check): the schedule
and the kernels each gain.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks.pipeline_run import PACKAGES, Stand, common_arguments, show, timed
from benchmarks.record import circumstances, write
from l1_kernels.errors import UserError
from l2_dense_parallel.faults import run
from l2_dense_parallel.kv_offload import OffloadedKV
from l2_dense_parallel.world import World
from layers.kv_cache import KVCache
from layers.weights import held_bytes
from models.pipeline import Plan
from models.runner import Runner

GIB = 1 << 30


def most_sequences(stand: Stand, runner: Runner, schedule: str, budget: float, most: int) -> int:
    """How many sequences side by side a budget of bytes holds beside the weights, on every rank."""
    context, config = stand.options.prompt + stand.options.new, stand.config
    free = budget - runner.held_bytes()
    fitting = 0
    for batch in range(1, most + 1):
        cut = Plan(schedule).of(stand.pipe.size, batch)
        at_once = max(len(part) for part in (*cut.prompt_parts, *cut.token_parts))
        sizes = runner.heads.kv_count, context, config.head_dim, runner.kv_dtype
        layers = len(runner.blocks)
        if runner.kv == "cpu" and runner.offload_parity is None:
            needed = OffloadedKV.bytes_needed(at_once, *sizes)
        elif runner.kv == "cpu":  # every second layer stays, and the buffers have room for all sequences
            needed = OffloadedKV.bytes_needed(batch, *sizes) + KVCache.bytes_needed((layers + 1) // 2, batch, *sizes)
        else:
            needed = KVCache.bytes_needed(layers, batch, *sizes)
        if needed <= free:
            fitting = batch
    return min(stand.world.exchange(fitting))


def main(world: World) -> int:
    options = arguments()
    stand = Stand(world, options)
    document = circumstances(PACKAGES)
    document["machine"]["gpu"], document["model"], document["mesh"] = stand.device.description, options.model, stand.mesh.describe()
    unfused = stand.open_device(fused=False) if options.device == "cuda" else stand.device
    rows: list[dict[str, Any]] = []
    kept: dict[str, Any] = {"schedule": "lockstep", "kv": "gpu", "parity": False, "all_reduce": "nccl", "fused": False}
    steps: list[tuple[str, dict[str, Any]]] = [("baseline", {}), ("schedule", {"schedule": "hybrid"}), ("memory", {"kv": "cpu"})]
    if options.tp > 1:
        steps.append(("communication", {"all_reduce": "auto", "parity": True}))
    if options.device == "cuda":
        steps.append(("kernels", {"fused": True}))
    best = 0.0
    for name, change in steps:
        tried = kept | change
        tried["parity"] = tried["parity"] and tried["kv"] == "cpu"
        device = stand.device if tried["fused"] else unfused
        runner = stand.runner(device, tried["kv"], tried["parity"], tried["all_reduce"])
        batch = most_sequences(stand, runner, tried["schedule"], options.budget * GIB, options.most)
        if not batch:
            raise UserError(f"--budget {options.budget:g}: {held_bytes(runner.embedding.weights) / GIB:.1f} GiB and the layers' weights leave room for no sequence")
        row = timed(stand, runner, name, Plan(tried["schedule"]), batch, options.prompt, options.new, options.repeats)
        rate = max(world.exchange(row["tokens_per_s"] if row is not None else 0.0))
        gains = rate > best
        if row is not None:
            rows.append(row | {"over_step_before": rate / best if best else 1.0, "kept": gains, "settings": tried})
            print(show(row) + f"  {rows[-1]['over_step_before']:.2f} x{'' if gains else ', left out from here on'}", flush=True)
        if gains:
            best, kept = rate, tried
    if world.rank:
        return world.exchange(0)[0] if options.check else 0
    missed = [f"{row['plan']}: {row['over_step_before']:.2f} x" for row in rows if row["plan"] in ("schedule", "kernels") and not row["kept"]]
    for line in missed:
        print(f"missed: {line}", file=sys.stderr, flush=True)
    document["rows"], document["bars_missed"], document["budget_gib"] = rows, missed, options.budget
    print(write(options.out, document, []))
    return world.exchange(int(bool(missed)))[0] if options.check else 0


def arguments() -> argparse.Namespace:
    parser = common_arguments("fig10b", (__doc__ or "").split("\n")[0], "fig10b")
    parser.add_argument("--budget", type=float, default=8.0, metavar="GIB", help="a GPU's memory for weights, keys and values (default 8)")
    parser.add_argument("--most", type=int, default=32, help="sequences side by side (default 32)")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
