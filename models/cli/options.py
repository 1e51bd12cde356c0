"""The flags of every command that opens a model, and the refusal of those whose machinery is not built yet.

A flag is never ignored: what it asks for is done, or one line says that it cannot be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from typer import Option

from l1_kernels.errors import UserError
from l2_dense_parallel.open_collective import ALL_REDUCES
from l2_dense_parallel.pipeline.schedule import NAMES as SCHEDULES
from models.kv_home import HOMES, bytes_of

DTYPES = ("fp32", "fp16", "bf16", "int8")
DEVICES = ("auto", "cpu", "cuda", "sim")
MODEL, RANKS, MEMORY, SPEED, OUTPUT = "Model", "Ranks", "Memory", "Speed", "Output"


def flag(*names: str, panel: str, text: str, metavar: str | None = None, show_default: bool = True) -> Any:
    return Option(*names, help=text, metavar=metavar, rich_help_panel=panel, show_default=show_default)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Which model, where it runs, and how its weights, cache and ranks are laid out."""

    model: Annotated[
        str, flag("--model", "-m", panel=MODEL, metavar="NAME|DIR|FILE", text="a bundled name, a Hugging Face folder or a GGUF file")
    ] = "shakespeare"
    dtype: Annotated[
        str | None, flag("--dtype", panel=MODEL, metavar="|".join(DTYPES), text="how weights and KV cache are held (default: fp32 on cpu, else the checkpoint's)")
    ] = None
    device: Annotated[str, flag("--device", panel=MODEL, metavar="|".join(DEVICES), text="auto: a GPU where one is usable, else the CPU")] = "auto"

    tp: Annotated[int | None, flag("--tp", panel=RANKS, metavar="T", text="tensor-parallel ranks (default: as many as divide the heads)")] = None
    pp: Annotated[int | None, flag("--pp", panel=RANKS, metavar="P", text="pipeline stages")] = None
    ep: Annotated[int | None, flag("--ep", panel=RANKS, metavar="E", text="owners of experts")] = None
    share_gpu: Annotated[bool, flag("--share-gpu", panel=RANKS, text="let several ranks use one GPU (for tests)")] = False
    all_reduce: Annotated[
        str, flag("--all-reduce", panel=RANKS, metavar="|".join(ALL_REDUCES), text="how GPUs sum small messages; auto: whichever is faster at the start")
    ] = "auto"
    schedule: Annotated[
        str | None, flag("--schedule", panel=RANKS, metavar="hybrid|queued|lockstep", text="of the pipeline's micro-batches (default: hybrid)")
    ] = None
    prompt_micro_batches: Annotated[int | None, flag("--prompt-micro-batches", panel=RANKS, metavar="N", text="of prompts (default: as stages; hybrid: twice as many)")] = None
    token_micro_batches: Annotated[int | None, flag("--token-micro-batches", panel=RANKS, metavar="N", text="of tokens (default: as stages)")] = None
    all_to_all: Annotated[str | None, flag("--all-to-all", panel=RANKS, metavar="pcc|flat|hierarchical", text="exchange of tokens and experts")] = None
    capacity_factor: Annotated[float | None, flag("--capacity-factor", panel=RANKS, metavar="F", text="the most tokens an expert takes")] = None

    kv: Annotated[
        str,
        flag("--kv", panel=MEMORY, metavar="|".join(HOMES), text="where keys and values live: cpu brings them a layer at a time; auto: on the GPU, unless they do not fit and host memory is faster than fewer side by side"),
    ] = "auto"
    offload_parity: Annotated[
        bool | None, flag("--offload-parity/--no-offload-parity", panel=MEMORY, text="with --kv cpu: odd ranks move odd layers' caches, even ranks even ones' (default: each moves all)", show_default=False)
    ] = None
    weights: Annotated[str, flag("--weights", panel=MEMORY, metavar="gpu|cpu|nvme", text="where the weights live")] = "gpu"
    store: Annotated[str | None, flag("--store", panel=MEMORY, metavar="DIR", text="where --weights nvme keeps its store")] = None
    prefetch: Annotated[int | None, flag("--prefetch", panel=MEMORY, metavar="K", text="layers to stream ahead")] = None
    resident_layers: Annotated[int | None, flag("--resident-layers", panel=MEMORY, metavar="N", text="layers that are not streamed")] = None
    gpu_memory: Annotated[str | None, flag("--gpu-memory", panel=MEMORY, metavar="8GiB", text="the most of the device's memory for weights, keys and values, and work")] = None
    verify: Annotated[bool, flag("--verify", panel=MEMORY, text="check the store's sums while streaming")] = False

    int8: Annotated[
        str | None, flag("--int8", panel=SPEED, metavar="w8a16|w8a8", text="what --dtype int8 rounds: weights (w8a16, default), or activations too")
    ] = None
    graph: Annotated[bool | None, flag("--graph/--no-graph", panel=SPEED, text="replay each step as one CUDA graph (default: on a GPU)", show_default=False)] = None
    fusion: Annotated[
        bool | None, flag("--fusion/--no-fusion", panel=SPEED, text="fuse each layer's operations into a few kernels (default: on a GPU)", show_default=False)
    ] = None
    overlap: Annotated[
        bool | None,
        flag("--overlap/--no-overlap", panel=SPEED, text="let a kernel begin while the one before it ends (default: on a GPU from 9.0 on)", show_default=False),
    ] = None

    check_nan: Annotated[bool, flag("--check-nan", panel=OUTPUT, text="stop at the first logits that are not all finite")] = False
    verbose: Annotated[bool, flag("--verbose", panel=OUTPUT, text="say more about model, ranks and memory (on standard error)")] = False

    def __post_init__(self) -> None:
        one_of("--dtype", self.dtype, DTYPES)
        one_of("--device", self.device, DEVICES)
        one_of("--all-reduce", self.all_reduce, ALL_REDUCES)
        one_of("--kv", self.kv, HOMES)
        one_of("--weights", self.weights, ("gpu", "cpu", "nvme"))
        one_of("--int8", self.int8, ("w8a16", "w8a8"))
        if self.offload_parity and self.kv != "cpu":
            raise UserError("--offload-parity: says which layers' keys and values move; add --kv cpu, or leave it out")
        if self.int8 is not None and self.dtype != "int8":
            raise UserError(f"--int8 {self.int8}: says how --dtype int8 rounds; add --dtype int8, or leave it out")
        one_of("--schedule", self.schedule, SCHEDULES)
        one_of("--all-to-all", self.all_to_all, ("pcc", "flat", "hierarchical"))
        for name in ("tp", "pp", "ep", "prompt_micro_batches", "token_micro_batches", "prefetch"):
            at_least_one("--" + name.replace("_", "-"), getattr(self, name))
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise UserError(f"--capacity-factor must be above 0, got {self.capacity_factor:g}")
        if self.gpu_memory is not None:
            bytes_of("--gpu-memory", self.gpu_memory)
        refuse_what_is_not_built(self)
        check_schedule(self)


def one_of(name: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise UserError(f"{name} {value}: have {', '.join(known)}")


def at_least_one(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise UserError(f"{name} must be at least 1, got {value}")


def check_schedule(options: EngineOptions) -> None:
    """The flags of a pipeline want one, and two numbers of micro-batches want the schedule that has two."""
    prompts, tokens = options.prompt_micro_batches, options.token_micro_batches
    if options.pp in (None, 1):
        for name, value in (("--schedule", options.schedule), ("--prompt-micro-batches", prompts), ("--token-micro-batches", tokens)):
            if value is not None:
                raise UserError(f"{name} {value}: is a pipeline's; add --pp P, or leave it out")
    if options.schedule in ("queued", "lockstep") and None not in (prompts, tokens) and prompts != tokens:
        raise UserError(f"--schedule {options.schedule}: has the same micro-batches for prompts and tokens, not {prompts} and {tokens}; hybrid has two numbers")


def refuse_what_is_not_built(options: EngineOptions) -> None:
    """Each line: the flag as given (None: it asks for nothing special), and what it would need."""
    streaming = "streaming is"

    def given(name: str, value: object) -> str | None:
        return None if value is None else f"{name} {value}"

    needs = [
        (given("--weights", options.weights) if options.weights != "gpu" else None, streaming),
        (given("--store", options.store), streaming),
        (given("--prefetch", options.prefetch), streaming),
        (given("--resident-layers", options.resident_layers), streaming),
        ("--verify" if options.verify else None, streaming),
    ]
    for flag_given, what in needs:
        if flag_given is not None:
            raise UserError(f"{flag_given}: {what} not there yet")
