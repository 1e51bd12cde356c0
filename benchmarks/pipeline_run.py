"""What Figs 8, 10b and 13 share: a stage of a model with random weights on each rank, and a generation that is timed work by work.

Weights are made on the device, so no checkpoint is read. Bars are by the devices' clocks, laid on one machine's host clock: all stages on one machine.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.random_model import random_weights
from l1_kernels.errors import UserError
from l2_dense_parallel.pipeline.pipe import Pipe
from l2_dense_parallel.pipeline.simulate import Bar, Times, Trace, simulate
from l2_dense_parallel.world import World
from layers.config import ModelConfig
from models.generate import GenerateOptions
from models.pipeline import Plan, Room, generate_pipelined, measured
from models.runner import Runner

PACKAGES = ("strata-inference", "numpy", "numba", "numba-cuda", "cupy-cuda13x", "cupy-cuda12x", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "mpi4py")


def cut(config: ModelConfig, layers: int | None) -> ModelConfig:
    """The model of its first layers; None: all."""
    if layers is None:
        return config
    return replace(config, num_layers=layers, attention_scale=config.attention_scale[:layers], windows=config.windows[:layers])


@dataclass(slots=True)
class Stand:
    """One rank: where it is in the mesh, its weights, and the ways to run them. All ranks make it together."""

    world: World
    options: argparse.Namespace  # model, layers, tp, dtype, device, host_pipe
    config: ModelConfig = field(init=False)
    mesh: Any = field(init=False)
    device: Any = field(init=False)
    pipe: Pipe = field(init=False)
    stage: Any = field(init=False)
    shard: Any = field(init=False)
    weights: Any = field(init=False)

    def __post_init__(self) -> None:
        from l1_kernels.device import prepare
        from l2_dense_parallel.mesh import MeshShape, build_mesh
        from l2_dense_parallel.pipeline.open_pipe import open_pipe
        from l2_dense_parallel.pipeline.stages import make_stages
        from l2_dense_parallel.slicing import Shard, check_tp
        from models.presets import preset

        world, options = self.world, self.options
        prepare(options.device)
        world.start()
        if world.size < 2 * options.tp or world.size % options.tp:
            raise UserError(f"{world.size} ranks with --tp {options.tp}: start two stages or more (mpirun -n {2 * options.tp})")
        self.mesh = mesh = build_mesh(world, MeshShape(tp=options.tp, pp=world.size // options.tp))
        self.config = cut(preset(options.model), options.layers)
        check_tp(self.config, mesh.tp)
        self.stage = make_stages(self.config, mesh.pp)[mesh.pp_rank]
        self.device = self.open_device()
        self.shard = Shard(mesh.tp_rank, mesh.tp)
        pipe = open_pipe(world, mesh, self.device, share_gpu=options.host_pipe)
        assert pipe is not None
        self.pipe = pipe
        # Ranks that are to hold slices of one tensor hold other numbers each: a time does not mind.
        self.weights = random_weights(self.config, self.device, options.dtype, self.shard, stage=self.stage)

    def open_device(self, **how: Any) -> Any:
        from l1_kernels.device import open_device

        return open_device(self.options.device, self.world.launch.local_rank if self.options.device == "cuda" else 0, **how)

    def runner(self, device: Any, kv: str = "gpu", parity: bool = False, all_reduce: str = "auto") -> Runner:
        """A way to run the weights: on a device that was opened for it, with a collective of its own."""
        from l2_dense_parallel.open_collective import open_collective
        from l4_offload.resident import ResidentWeights

        kernels = device.kernels if self.options.device == "cuda" else None
        collective = open_collective(self.world, self.mesh, "tp", self.options.device, kernels=kernels, all_reduce=all_reduce)
        ends, layers = self.weights
        moved = self.mesh.rank % 2 if parity else None
        return Runner(self.config, device, self.shard, collective, ends, ResidentWeights(layers), self.options.dtype, self.stage, kv, moved)


def times_of(trace: Trace) -> Times:
    """What a stage's works took in this run, as the simulator wants it: the first stage's, and each stage's multiple of it."""

    def each(stage: int) -> tuple[float, float]:
        prompts = [bar for bar in trace.of(stage) if bar.work.number == 0]
        tokens = [bar.seconds for bar in trace.of(stage) if bar.work.number > 0]
        return sum(bar.seconds for bar in prompts) / sum(bar.sequences for bar in prompts), sum(tokens) / max(1, len(tokens))

    found = [each(stage) for stage in range(trace.stages)]
    prompt, token = found[0]
    # One number a stage for both kinds of works, weighed by the time that goes into each.
    prompts, tokens = (sum(bar.seconds for bar in trace.of(0) if (bar.work.number > 0) == later) for later in (False, True))
    slowness = tuple((prompts * p / prompt + tokens * (t / token if token else 0.0)) / (prompts + tokens) for p, t in found)
    return Times(prompt_each=prompt, token_fixed=token, slowness=slowness)


def timed(
    stand: Stand, runner: Runner, name: str, plan: Plan, batch: int, prompt: int, new: int, repeats: int, graphs: bool | None = None
) -> dict[str, Any] | None:
    """`repeats` runs, of which the median counts (one before them compiles and records): a row on rank 0, None on the others. graphs None: on a GPU, where they can be."""
    world, pipe = stand.world, stand.pipe
    prompts = np.random.default_rng(0).integers(0, stand.config.vocab_size, (batch, prompt)).tolist()
    graphs = stand.options.device == "cuda" and runner.step_problem() is None if graphs is None else graphs
    room, traces = Room(), []
    for repeat in range(repeats + 1):
        bars: list[Bar] = []
        world.exchange(None)  # all begin together
        generate_pipelined(runner, pipe, prompts, GenerateOptions(new, batch_size=batch), plan, bars=bars, graphs=graphs, room=room)
        everyone = world.exchange([(b.stage, b.work, b.sequences, b.start, b.end) for b in bars] if runner.collective.rank == 0 else [])
        if repeat:
            traces.append(measured([[Bar(*bar) for bar in some] for some in everyone if some]))
    if world.rank:
        return None
    trace = sorted(traces, key=lambda one: one.total)[len(traces) // 2]
    schedule = plan.of(pipe.size, batch)
    times = times_of(trace)
    said = simulate(schedule, new, times)
    stages = range(trace.stages)
    return {
        "plan": name, "batch": batch, "prompt": prompt, "new_tokens": new, "total_ms": trace.total, "first_tokens_ms": trace.first_token,
        "tokens_per_s": 1e3 * batch * new / trace.total, "simulated_ms": said.total, "simulated_first_tokens_ms": said.first_token,
        "idle": [trace.idle_of_run(stage) / trace.total for stage in stages],
        "simulated_idle": [said.idle_of_run(stage) / said.total for stage in stages],
        "prompt_ms": times.prompt_each, "token_ms": times.token_fixed, "slowness": list(times.slowness), "totals_ms": [one.total for one in traces],
        "prompt_micro_batches": len(schedule.prompt_parts), "token_micro_batches": len(schedule.token_parts), "graphs": graphs,
    }  # fmt: skip


def show(row: dict[str, Any]) -> str:
    idle, said = (", ".join(f"{100 * share:.0f}" for share in row[key]) for key in ("idle", "simulated_idle"))
    return (
        f"batch {row['batch']:3} {row['plan']:9} {row['total_ms']:9.1f} ms (simulated {row['simulated_ms']:9.1f})  first tokens {row['first_tokens_ms']:8.1f} ms  "
        f"{row['tokens_per_s']:8.1f} tokens/s  idle {idle} % (simulated {said})"
    )


def common_arguments(prog: str, text: str, out: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{prog}", description=text)
    parser.add_argument("--model", default="gpt-j-6b")
    parser.add_argument("--layers", type=int, help="the model's first N layers (default all)")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=50)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--host-pipe", action="store_true", help="hidden states by way of host memory, by MPI")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="exit status 1 where a bar does not hold")
    parser.add_argument("--out", default=out, help="name of the result file in benchmarks/results")
    return parser


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
