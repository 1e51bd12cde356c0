"""Figs 8 and 13: a dense model over pipeline stages, a prompt of 512 tokens and 50 more; throughput and prompt latency, schedule by schedule.

    mpirun -n 2 python -m benchmarks.fig8 [--model gpt-j-6b] [--batches 8,16,24] [--tp 1] [--device cuda]

Random weights of Table I's shapes. Each batch runs by `lockstep` (as training does), `queued`, `hybrid`, and `hybrid` with as many micro-batches of prompts as of tokens,
which is Fig 13's comparison: its first tokens against hybrid's. Measured beside it is what the event simulator makes of the run's own work times: the
mean of a stage's prompt works per sequence, and of its token works; links cost it nothing. Every stage's bars are of one clock, so of one machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.random_model import random_weights, runner_of
from benchmarks.record import circumstances, write
from l1_kernels.errors import UserError
from l2_dense_parallel.faults import run
from l2_dense_parallel.pipeline.pipe import Pipe
from l2_dense_parallel.pipeline.simulate import Bar, Times, Trace, simulate
from l2_dense_parallel.world import World
from layers.config import ModelConfig
from models.generate import GenerateOptions
from models.pipeline import Plan, generate_pipelined, measured

REPEATS = 3
PLANS = {"lockstep": Plan("lockstep"), "queued": Plan("queued"), "hybrid": Plan("hybrid")}
PACKAGES = ("strata-inference", "numpy", "numba", "numba-cuda", "cupy-cuda13x", "cupy-cuda12x", "mpi4py")


def times_of(trace: Trace) -> Times:
    """What a stage's works took in this run, as the simulator wants it: the first stage's, and each stage's multiple of it."""

    def each(stage: int) -> tuple[float, float]:
        prompts = [bar for bar in trace.of(stage) if bar.work.number == 0]
        tokens = [bar.seconds for bar in trace.of(stage) if bar.work.number > 0]
        return sum(bar.seconds for bar in prompts) / sum(bar.sequences for bar in prompts), sum(tokens) / len(tokens)

    found = [each(stage) for stage in range(trace.stages)]
    prompt, token = found[0]
    slowness = tuple((p / prompt + t / token) / 2 for p, t in found)
    return Times(prompt_each=prompt, token_fixed=token, slowness=slowness)


def measure(
    world: World, runner: Any, pipe: Pipe, config: ModelConfig, batch: int, prompt: int, new: int, graphs: bool
) -> list[dict[str, Any]]:
    """A row for each plan, on rank 0; [] on the others."""
    prompts = np.random.default_rng(0).integers(0, config.vocab_size, (batch, prompt)).tolist()
    options = GenerateOptions(new, batch_size=batch)
    plans = PLANS | {"equal": Plan("hybrid", min(batch, pipe.size), min(batch, pipe.size))}
    rows = []
    for name, plan in plans.items():
        traces = []
        for repeat in range(REPEATS + 1):
            bars: list[Bar] = []
            world.exchange(None)  # all begin together
            generate_pipelined(runner, pipe, prompts, options, plan, bars=bars, graphs=graphs)
            everyone = world.exchange([(b.stage, b.work, b.sequences, b.start, b.end) for b in bars] if runner.collective.rank == 0 else [])
            if repeat:  # the first one compiles
                traces.append(measured([[Bar(*bar) for bar in some] for some in everyone if some]))
        trace = sorted(traces, key=lambda one: one.total)[len(traces) // 2]
        schedule = plan.of(pipe.size, batch)
        said = simulate(schedule, new, times_of(trace))
        rows.append(
            {
                "plan": name, "batch": batch, "prompt": prompt, "new_tokens": new, "total_ms": trace.total, "first_tokens_ms": trace.first_token,
                "tokens_per_s": 1e3 * batch * new / trace.total, "simulated_ms": said.total, "simulated_first_tokens_ms": said.first_token,
                "idle": [trace.idle_of_run(stage) / trace.total for stage in range(trace.stages)], "totals_ms": [one.total for one in traces],
                "prompt_micro_batches": len(schedule.prompt_parts), "token_micro_batches": len(schedule.token_parts),
            }
        )  # fmt: skip
    return rows if world.rank == 0 else []


def gains(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At equal batch, over lockstep, measured and simulated; and hybrid's first tokens against equal micro-batches'."""
    found = []
    for batch in dict.fromkeys(row["batch"] for row in rows):
        by = {row["plan"]: row for row in rows if row["batch"] == batch}
        for name in ("queued", "hybrid"):
            gain, said = (by["lockstep"][key] / by[name][key] for key in ("total_ms", "simulated_ms"))
            found.append({"batch": batch, "plan": name, "gain": gain, "simulated": said, "of_simulated": gain / said})
        found.append({"batch": batch, "plan": "hybrid, first tokens", "gain": by["equal"]["first_tokens_ms"] / by["hybrid"]["first_tokens_ms"]})
    return found


def show(row: dict[str, Any]) -> str:
    idle = ", ".join(f"{100 * share:.0f}" for share in row["idle"])
    return (
        f"batch {row['batch']:3} {row['plan']:9} {row['total_ms']:9.1f} ms (simulated {row['simulated_ms']:9.1f})  first tokens {row['first_tokens_ms']:8.1f} ms  "
        f"{row['tokens_per_s']:8.1f} tokens/s  idle {idle} %"
    )


def main(world: World) -> int:
    options = arguments()
    from l1_kernels.device import open_device, prepare
    from l2_dense_parallel.mesh import MeshShape, build_mesh
    from l2_dense_parallel.open_collective import open_collective
    from l2_dense_parallel.pipeline.pipe import open_pipe
    from l2_dense_parallel.pipeline.stages import make_stages
    from l2_dense_parallel.slicing import Shard, check_tp
    from models.presets import preset

    prepare(options.device)
    world.start()
    if world.size < 2 or world.size % options.tp:
        raise UserError(f"fig8: {world.size} ranks with --tp {options.tp}: start two stages or more (mpirun -n {2 * options.tp})")
    mesh = build_mesh(world, MeshShape(tp=options.tp, pp=world.size // options.tp))
    assert mesh is not None
    config = preset(options.model)
    check_tp(config, mesh.tp)
    stage = make_stages(config, mesh.pp)[mesh.pp_rank]
    device = open_device(options.device, world.launch.local_rank if options.device == "cuda" else 0)
    shard, collective, pipe = Shard(mesh.tp_rank, mesh.tp), open_collective(world, mesh, "tp", options.device, kernels=device.kernels), open_pipe(world, mesh)
    assert pipe is not None
    weights = random_weights(config, device, options.dtype, shard, stage=stage)
    runner = runner_of(config, device, options.dtype, weights, shard, collective, stage)
    document = circumstances(PACKAGES)
    document["machine"]["gpu"], document["model"], document["mesh"] = device.description, options.model, mesh.describe()
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    for batch in options.batches:
        some = measure(world, runner, pipe, config, batch, options.prompt, options.new, options.device == "cuda" and runner.step_problem() is None)
        rows += some
        for row in some:
            print(show(row), flush=True)
    if world.rank == 0:
        document["rows"], document["gains"] = rows, gains(rows)
        for gain in document["gains"]:
            beside = f", simulated {gain['simulated']:.3f} ({gain['of_simulated']:.2f} of it)" if "simulated" in gain else " over equal micro-batches"
            print(f"batch {gain['batch']:3} {gain['plan']:20} {gain['gain']:.3f} x{beside}")
        best = {name: max(row["tokens_per_s"] for row in rows if row["plan"] == name) for name in PLANS}
        print("best tokens/s: " + ", ".join(f"{name} {rate:.0f}" for name, rate in best.items()) + f"; median of {REPEATS} runs, {time.perf_counter() - start:.0f} s")
        document["best_tokens_per_s"] = best
        print(write(options.out, document, []))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], prog="python -m benchmarks.fig8")
    parser.add_argument("--model", default="gpt-j-6b")
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[8, 16, 24])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=50)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", default="fig8", help="name of the result file in benchmarks/results")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
