"""`bench`: how long a token takes, and how far that is from what the memory allows.

At small batches a step reads every weight once and does little else, so its bound is bytes of weights / bandwidth. Both
are measured in this run: the bandwidth as a read-only sum over more than 1 GB, on all ranks at the same time.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from l1_kernels.errors import UserError
from l2_dense_parallel.world import World
from models.cli.options import OUTPUT, EngineOptions, at_least_one, flag

if TYPE_CHECKING:
    from l2_dense_parallel.pipeline.simulate import Bar, Trace
    from models.cli.open_model import OpenModel
    from models.generate import Result

SIZE = "Size"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """How much to generate."""

    prompt_length: Annotated[int, flag("--prompt-length", panel=SIZE, metavar="N", text="tokens of each prompt")] = 128
    new_tokens: Annotated[int, flag("--new-tokens", panel=SIZE, metavar="N", text="tokens to generate")] = 32
    batch: Annotated[int, flag("--batch", panel=SIZE, metavar="N", text="prompts side by side in a data-parallel group")] = 1
    json: Annotated[bool, flag("--json", panel=OUTPUT, text="one JSON document and nothing else")] = False

    def __post_init__(self) -> None:
        at_least_one("--prompt-length", self.prompt_length)
        if self.new_tokens < 2:
            raise UserError(f"--new-tokens must be at least 2, got {self.new_tokens}: what a token takes is measured after the first one")
        at_least_one("--batch", self.batch)


def bench(world: World, engine: EngineOptions, options: BenchOptions) -> None:
    """Time to first token, ms/token, tokens/s, GB/s of weights and % of the memory's bound."""
    import numpy as np

    from l1_kernels.regions import UnfusedRegions
    from l2_dense_parallel.pipeline.draw import ascii_chart
    from models.cli.cache_home import settle
    from models.cli.open_model import open_model
    from models.generate import GenerateOptions, cache_size, check_prompts
    from models.pipeline import measured
    from models.speeds import read_bandwidth

    opened = open_model(world, engine, quiet=options.json, seen={"bench": options})
    if opened is None:
        return
    generator = np.random.default_rng(0)
    prompts = generator.integers(0, opened.config.vocab_size, (options.batch, options.prompt_length)).tolist()
    names = ["--prompt-length"] * options.batch
    check_prompts(opened.config, prompts, options.new_tokens, names)
    opened.load()

    settled = settle(opened, prompts, GenerateOptions(options.new_tokens, batch_size=options.batch, check_nan=engine.check_nan), engine.kv)
    options = replace(options, batch=min(options.batch, settled.batch_size))  # what fits side by side is what is timed
    prompts = prompts[: options.batch]
    decoder = opened.decoder(cache_size(prompts, settled))

    def once(new_tokens: int, bars: list[Bar] | None = None) -> tuple[list[Result], int]:
        """What was generated, and how many launches from Python it took."""
        before = opened.device.launches()
        results = opened.generate(prompts, replace(settled, max_new_tokens=new_tokens), decoder=decoder, bars=bars)
        return results, opened.device.launches() - before

    once(2)  # compiles, records the graph, and touches every weight
    opened.collective.barrier()
    _, of_prompts = once(1)
    bars: list[Bar] = []
    results, launches = once(options.new_tokens, bars)
    opened.collective.barrier()
    opened.say_drops()
    stages = opened.between_stages.gather(bars)
    gigabytes_s = read_bandwidth(opened.device) / 1e9
    if opened.speaks:
        found = figures(opened, options, results, gigabytes_s)
        graph = decoder is not None and decoder.failure is None
        found["fused"] = not isinstance(opened.device.regions, UnfusedRegions)
        found["graph"] = graph
        found["graph_recording_s"] = round(decoder.recording_s, 4) if decoder is not None and graph else None
        found["launches_per_token"] = round((launches - of_prompts) / (options.new_tokens - 1), 2)
        if opened.pipe is not None and stages is not None:
            trace = measured(stages)
            found["pipeline"] = pipeline_figures(opened, options.batch, trace)
            if opened.verbose:
                sys.stderr.write(ascii_chart(trace) + "\n")
        report(found, options.json)


def pipeline_figures(opened: OpenModel, batch: int, trace: Trace) -> dict[str, Any]:
    """idle: each stage's share of the run in which it waited."""
    assert opened.pipe is not None
    schedule = opened.plan.of(opened.pipe.size, batch)
    return {
        "schedule": schedule.name,
        "prompt_micro_batches": len(schedule.prompt_parts),
        "token_micro_batches": len(schedule.token_parts),
        "idle": [round(trace.idle_of_run(stage) / trace.total, 4) for stage in range(trace.stages)],
    }


def figures(opened: OpenModel, options: BenchOptions, results: list[Result], bandwidth: float) -> dict[str, Any]:
    """bandwidth and gb_s are one rank's, in 1e9 bytes a second; tokens_per_s is of all data-parallel groups together."""
    from models.speeds import bytes_read

    times = results[0].token_times
    step = (times[-1] - times[0]) / (len(times) - 1)
    weights = bytes_read(opened.runner, options.batch)
    if opened.pipe is not None:  # each micro-batch reads them
        weights *= len(opened.plan.of(opened.pipe.size, options.batch).token_parts)
    gb_s = weights / step / 1e9
    return {
        "model": opened.name,
        "device": opened.device.name,
        "hardware": opened.device.description,
        "dtype": opened.dtype,
        "mesh": opened.mesh.describe(),
        "prompt_length": options.prompt_length,
        "new_tokens": options.new_tokens,
        "batch": options.batch,
        "load_s": round(opened.load_s, 3),
        "first_token_ms": round(1e3 * times[0], 3),
        "token_ms": round(1e3 * step, 4),
        "tokens_per_s": round(options.batch * opened.mesh.dp / step, 2),
        "weight_bytes": weights,
        "gb_s": round(gb_s, 3),
        "bandwidth_gb_s": round(bandwidth, 2),
        "bound_ms": round(weights / bandwidth / 1e6, 4),
        "percent_of_bound": round(100 * gb_s / bandwidth, 1),
    }


def report(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    sys.stdout.write(
        f"prompt {found['prompt_length']}, {found['new_tokens']} new tokens, batch {found['batch']}\n"
        f"first token  {found['first_token_ms']:.1f} ms\n"
        f"each more    {found['token_ms']:.3f} ms/token, {found['tokens_per_s']:.1f} tokens/s\n"
        f"weights      {found['weight_bytes'] / 1e6:.1f} MB a step and rank: {found['gb_s']:.2f} GB/s of {found['bandwidth_gb_s']:.1f} GB/s, "
        f"{found['percent_of_bound']:.0f} % of the bound of {found['bound_ms']:.3f} ms\n"
    )
    if "pipeline" in found:
        pipeline = found["pipeline"]
        idle = ", ".join(f"{100 * share:.0f}" for share in pipeline["idle"])
        sys.stdout.write(
            f"pipeline     {pipeline['schedule']}, {pipeline['prompt_micro_batches']} micro-batches of prompts and {pipeline['token_micro_batches']} of tokens; "
            f"stages waited {idle} % of the run\n"
        )
    if found["device"] != "cpu":
        graph = f"; the graph was recorded in {found['graph_recording_s']:.2f} s" if found["graph"] else ", no graph"
        graph += "" if found["fused"] else "; layers are not fused"
        sys.stdout.write(f"launches     {found['launches_per_token']:.0f} from Python a token{graph}\n")
