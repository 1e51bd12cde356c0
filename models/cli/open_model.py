"""From --model, --device and the ranks to a model that can run: what `run`, `score` and `bench` do first.

In two steps. `open_model` reads only headers: it finds the checkpoint, the device, the mesh and the tokenizer, so that a
command can refuse wrong input before anything big happens. `OpenModel.load` then reads the weights.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from l1_kernels.device import Device, cuda_problem, open_device
from l1_kernels.errors import UserError
from l1_kernels.kernel_cache import kernel_cache
from l2_dense_parallel.collectives import Collective, NoCollective
from l2_dense_parallel.gpus import choose_gpus
from l2_dense_parallel.mesh import Mesh, build_mesh, choose_shape, placement
from l2_dense_parallel.mesh_picture import draw_mesh
from l2_dense_parallel.open_collective import open_collective
from l2_dense_parallel.pipeline.open_pipe import open_pipe
from l2_dense_parallel.pipeline.pipe import Pipe
from l2_dense_parallel.pipeline.simulate import Bar
from l2_dense_parallel.pipeline.stages import Stage, make_stages
from l2_dense_parallel.world import World
from l3_moe.exchange.forms import RowExchange
from l3_moe.exchange.open_exchange import open_exchange, watch_exchange
from layers.config import ModelConfig
from layers.decode import bucket
from layers.kv_cache import KVCache
from models.build import build_runner
from models.chat import chat_end_ids
from models.cli.options import EngineOptions
from models.cli.progress import progress_bar
from models.decode_graph import Decoder
from models.encode_graph import EncodeGraphs
from models.find import find_model
from models.generate import GenerateOptions, Result, generate
from models.groups import Groups, groups_of, visits
from models.kv_home import bytes_of
from models.loading import Checkpoint, open_checkpoint
from models.pipeline import PipelinedModel, Plan, Room, generate_pipelined
from models.runner import Runner
from models.sampling import Sampling
from models.tokenizer import Tokenizer, tokenizer_of


@dataclass(slots=True)
class OpenModel:
    """One rank's view. `load` must be called before `runner` is read; load_s is how long it took."""

    name: str
    world: World
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    device: Device
    mesh: Mesh
    dtype: str
    collective: Collective
    between_groups: Collective  # of Python objects, over the ranks with the same tp rank
    verbose: bool = False
    graph: bool | None = None  # --graph, --no-graph, or neither
    int8: str = "w8a16"  # --int8
    kv: str = "gpu"  # --kv, as long as nothing else is settled (cache_home.py)
    memory: int | None = None  # --gpu-memory, bytes
    parity: int | None = None  # --offload-parity: of this rank
    stage: Stage | None = None  # of a pipeline, with its pipe and how micro-batches go through it
    pipe: Pipe | None = None
    between_stages: Collective = field(default_factory=NoCollective)
    plan: Plan = field(default_factory=Plan)
    room: Room = field(default_factory=Room)  # what a pipeline's generations keep
    exchange: RowExchange | None = None  # between ranks that own different experts
    capacity_factor: float | None = None  # --capacity-factor
    load_s: float = 0.0
    _runner: Runner | None = field(default=None)

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    @property
    def runner(self) -> Runner:
        assert self._runner is not None, "load() comes first"
        return self._runner

    @property
    def model(self) -> Runner | PipelinedModel:
        """What gives logits to all ranks: the runner, or all stages' one after the other."""
        return self.runner if self.pipe is None else PipelinedModel(self.runner, self.pipe)

    @property
    def groups(self) -> Groups:
        """This data-parallel group with the others."""
        return groups_of(self.runner, self.between_groups)

    def generate(
        self, prompts: Sequence[Sequence[int]], options: GenerateOptions, decoder: Decoder | None = None, on_text: Callable[[int, str], None] | None = None,
        indices: Sequence[int] | None = None, bars: list[Bar] | None = None,
    ) -> list[Result]:  # fmt: skip
        """`models.generate.generate`, or its like over a pipeline, whose first stage alone has results; bars: gets when this stage worked."""
        if self.pipe is None:
            return generate(self.runner, prompts, options, self.tokenizer, on_text=on_text, indices=indices, decoder=decoder, groups=self.groups)
        graphs = self._takes_graphs("stage's pass", self.runner.step_problem())
        return generate_pipelined(self.runner, self.pipe, prompts, options, self.plan, self.tokenizer, on_text, indices, bars, graphs, self.room)

    @property
    def held(self) -> str:
        """The dtype, for people."""
        return f"int8 ({self.int8})" if self.dtype == "int8" else self.dtype

    @property
    def speaks(self) -> bool:
        """Whether this is the rank that talks to the user."""
        return self.world.rank == 0

    def eos_ids(self, chat: bool = False) -> tuple[int, ...]:
        """All that end a text: by the checkpoint's settings, by a GGUF's vocabulary, and in a chat the end of a turn."""
        found = [*self.config.eos_ids]
        if self.tokenizer is not None:
            found += [*self.tokenizer.eos_ids, *(chat_end_ids(self.tokenizer) if chat else ())]
        return tuple(dict.fromkeys(found))

    def decoder(self, cache_size: tuple[int, int], sampling: Sampling | None = None) -> Decoder | None:
        """What replays decode steps as graphs over a cache of (rows, context), or None: by --graph, else on a GPU, where the
        model allows it. Says so where it was asked for and cannot be, and under --verbose. sampling: the steps', default the likeliest."""
        if self.pipe is not None:
            return None
        groups = self.groups
        rows, context = groups.agree(cache_size)  # of groups that share experts, the same for all
        with groups.equal():
            problem = self.runner.graph_problem(bucket(rows, rows)) if rows else "there are no prompts"
        if not self._takes_graphs("step", problem):
            return None
        cache = self.runner.new_cache(rows, context)
        assert isinstance(cache, KVCache)  # otherwise no graph
        return Decoder(self.runner, cache, sampling, groups)

    def say_drops(self) -> None:
        """Of a capacity limit, on standard error. All ranks call it."""
        mine = visits(self.runner)
        parts = None if mine is None else self.between_groups.gather(mine)
        if parts is not None and self.speaks:
            dropped, asked = (sum(column) for column in zip(*parts, strict=True))
            print(f"--capacity-factor {self.capacity_factor:g}: {dropped} of {asked} visits of experts were dropped", file=sys.stderr, flush=True)

    def encode_graphs(self, num_texts: int, context: int) -> EncodeGraphs | None:
        """The same for an encoder's passes of up to so many texts of so many tokens."""
        return EncodeGraphs(self.runner, num_texts, context) if self._takes_graphs("pass", self.runner.graph_problem()) else None

    def _takes_graphs(self, what: str, problem: str | None) -> bool:
        if not (self.device.name == "cuda" if self.graph is None else self.graph):
            return False
        if self.speaks and (self.verbose or (self.graph and problem)):
            line = f"each {what} is one replay of a graph" if problem is None else f"every {what} runs without a graph: {problem}"
            print(line, file=sys.stderr, flush=True)
        return problem is None

    def load(self, dtype: str | None = None) -> None:
        """Read this rank's share of the weights onto the device, in `dtype` where one is given in place of --dtype; what was loaded
        before is let go first. UserError (on all ranks) where the checkpoint is not whole."""
        start = time.perf_counter()
        self._runner, self.room = None, Room()
        together = self.world.agreement() if self.mesh.size == self.world.size else nullcontext()
        with together, progress_bar(f"loading {self.name}", self.speaks) as progress:
            self._runner = build_runner(
                self.checkpoint, self.device, dtype or self.dtype, self.mesh.shard, self.collective, progress, self.int8, self.stage, self.kv, self.parity,
                self.exchange, self.capacity_factor,
            )  # fmt: skip
            held = self._runner.held_bytes()
            if self.memory is not None and held > self.memory:
                raise UserError(f"--gpu-memory {self.memory / 2**20:.3g} MiB: the weights alone are {held / 2**20:.3g} on a rank; more ranks hold less each")
        self.device.synchronize()
        self.load_s = time.perf_counter() - start
        if self.speaks and kernels_are_cold(self.device):
            print("compiling kernels: some seconds, the first time only", file=sys.stderr, flush=True)
        if self.verbose:
            free, total = self.device.memory()
            # In one piece, so that other ranks' lines do not come between it and its end.
            sys.stderr.write(
                f"rank {self.world.rank}: {held / 2**20:.1f} MiB of weights loaded in {self.load_s:.2f} s, {free >> 20} of {total >> 20} MiB free\n"
            )
            sys.stderr.flush()


def open_model(world: World, engine: EngineOptions, quiet: bool, seen: dict[str, Any], encoder: bool = False) -> OpenModel | None:
    """All ranks call it together.

    quiet    standard output is for a document: the line about the device goes to standard error
    seen     what else the ranks must agree on: option groups and inputs by name
    encoder  which kind of model the command is for; the other is refused
    Returns None on a rank that stands aside because there are more ranks than GPUs.
    """
    world.start()
    world.check_same_arguments(**flags_of(engine), **{k: v for name, value in seen.items() for k, v in (flags_of(value) or {name: value}).items()})
    with world.agreement():
        path = find_model(engine.model)
        checkpoint = open_checkpoint(path)
        family = checkpoint.config.family
        if not checkpoint.config.causal and not encoder:
            raise UserError(f"--model {engine.model}: {family} is an encoder and generates no text; see python -m models.bert")
        if checkpoint.config.causal and encoder:
            raise UserError(f"--model {engine.model}: {family} generates text and is no encoder; see python -m models.gpt")
        if encoder and engine.kv == "cpu":
            raise UserError("--kv cpu: an encoder keeps no keys and values; leave it out")
        tokenizer = tokenizer_of(path)
    device_name, index, taking_part, line = choose_device(world, engine)
    config = checkpoint.config
    num_experts = 0 if config.moe is None else config.moe.num_experts
    shape = choose_shape(len(taking_part), config.num_heads, config.num_kv_heads, num_experts, engine.tp, engine.pp, engine.ep)
    mesh = build_mesh(world, shape, taking_part)
    if mesh is None:
        return None
    if engine.fusion and device_name == "cpu":
        raise UserError("--fusion: fused kernels are a GPU's (and the simulator's); leave it out, or use --device cuda or sim")
    if engine.overlap and device_name != "cuda":
        raise UserError("--overlap: launches overlap on a GPU alone; leave it out, or use --device cuda")
    if engine.share_gpu and device_name != "cuda":
        raise UserError(f"--share-gpu: this run takes no GPU (--device {device_name}); leave it out")
    check_all_reduce(engine, device_name, mesh.tp)
    check_experts(engine, mesh, num_experts)
    with world.agreement():
        stages = make_stages(config, mesh.pp)
    device = open_device(device_name, index, fused=engine.fusion, overlap=engine.overlap is not False)
    if engine.overlap and not getattr(device, "overlaps", False):
        raise UserError("--overlap: this GPU is older than compute capability 9.0; leave it out")
    dtype = engine.dtype or (config.dtype if device.name == "cuda" else "fp32")
    opened = OpenModel(
        engine.model, world, checkpoint, tokenizer, device, mesh, dtype,
        collective=open_collective(world, mesh, "tp", device.name, engine.share_gpu, device.kernels, engine.all_reduce),
        between_groups=open_collective(world, mesh, "dp"),
        verbose=engine.verbose, graph=engine.graph, int8=engine.int8 or "w8a16", kv="cpu" if engine.kv == "cpu" else "gpu", parity=mesh.rank % 2 if engine.offload_parity else None,
        stage=stages[mesh.pp_rank] if mesh.pp > 1 else None, pipe=open_pipe(world, mesh, device, engine.share_gpu),
        between_stages=open_collective(world, mesh, "pp"),
        memory=None if engine.gpu_memory is None else bytes_of("--gpu-memory", engine.gpu_memory),
        exchange=open_exchange(world, mesh, device, num_experts, engine.all_to_all or "pcc", engine.share_gpu) if num_experts else None,
        capacity_factor=engine.capacity_factor,
        plan=Plan(engine.schedule or "hybrid", engine.prompt_micro_batches, engine.token_micro_batches),
    )  # fmt: skip
    if opened.exchange is not None:
        opened.collective = watch_exchange(world, mesh, device, opened.collective)
    if opened.speaks:
        say_where(opened, line, sys.stderr if quiet else sys.stdout)
        if opened.verbose and mesh.size > 1:
            print(draw_mesh(mesh.shape, placement(world.hosts, taking_part), world.hosts, [stage.layers for stage in stages]), file=sys.stderr, flush=True)
            if opened.collective.note:
                print(opened.collective.note, file=sys.stderr, flush=True)
    return opened


def check_all_reduce(engine: EngineOptions, device_name: str, tp: int) -> None:
    """UserError where there is nothing to choose for --all-reduce."""
    if engine.all_reduce == "auto":
        return
    if device_name != "cuda" or engine.share_gpu:
        raise UserError(f"--all-reduce {engine.all_reduce}: is for ranks with a GPU each; leave it out")
    if tp == 1:
        raise UserError(f"--all-reduce {engine.all_reduce}: nothing is summed without --tp 2 or more; leave it out")


def check_experts(engine: EngineOptions, mesh: Mesh, num_experts: int) -> None:
    """UserError for flags of experts where there are none, or nothing goes between ranks; and for what only one data-parallel group can do."""
    if engine.all_to_all is not None and not num_experts:
        raise UserError(f"--all-to-all {engine.all_to_all}: this model has no experts; leave it out")
    if engine.capacity_factor is not None and not num_experts:
        raise UserError(f"--capacity-factor {engine.capacity_factor:g}: this model has no experts; leave it out")
    if engine.all_to_all is not None and mesh.dp == 1 and mesh.ep == 1:
        raise UserError(f"--all-to-all {engine.all_to_all}: nothing is exchanged where no rank owns whole experts; add --ep E, or leave it out")
    if num_experts and mesh.dp > 1 and mesh.pp > 1:
        raise UserError(f"--pp {mesh.pp}: a pipeline of a model with experts has one data-parallel group as yet; use --tp {mesh.tp * mesh.dp}, or {mesh.tp * mesh.pp} ranks")


def flags_of(options: object) -> dict[str, Any]:
    """An option group as {"--flag": value}; {} for anything else."""
    if not dataclasses.is_dataclass(options):
        return {}
    return {"--" + f.name.replace("_", "-"): getattr(options, f.name) for f in dataclasses.fields(options)}


def choose_device(world: World, engine: EngineOptions) -> tuple[str, int, list[int], str]:
    """-> (device, GPU index, world ranks that take part, a line for the user or ""). The same device on all ranks."""
    everyone = list(world.everyone)
    if engine.device in ("cpu", "sim"):
        return engine.device, 0, everyone, ""
    problems = world.exchange(cuda_problem())
    if engine.device == "auto" and any(problems):
        return "cpu", 0, everyone, ""
    world.agree(UserError(f"--device cuda: {problems[world.rank]}; use --device cpu") if problems[world.rank] else None)
    asked = any(degree is not None for degree in (engine.tp, engine.pp, engine.ep))
    return "cuda", *choose_gpus(world, asked, engine.share_gpu)


def say_where(opened: OpenModel, line: str, stream: Any) -> None:
    """The first line: which device was taken, and how the ranks are laid out."""
    mesh = opened.mesh
    ranks = f", {mesh.size} ranks (tp {mesh.tp}, {f'pp {mesh.pp}, ' if mesh.pp > 1 else ''}dp {mesh.dp}{f', ep {mesh.ep}, es {mesh.es}' if mesh.ep * mesh.es > 1 else ''})" if mesh.size > 1 else ""
    print(f"{opened.name} on {opened.device.name} ({opened.device.description}), {opened.held}{ranks}", file=stream, flush=True)
    if line:
        print(line, file=stream, flush=True)
    if opened.verbose:
        print(opened.config, file=sys.stderr, flush=True)


def kernels_are_cold(device: Device) -> bool:
    """Whether the first step will compile: on a CPU, no compiled kernel lies in numba's cache; on a GPU, always."""
    if device.name != "cpu":
        return device.name == "cuda"
    folder = kernel_cache()
    return folder is None or next(folder.rglob("*.nbi"), None) is None
