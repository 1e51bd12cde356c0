"""Keys and values in host memory beside the GPU's: what a token takes, how near the link's bound that is, how many sequences each has room for, and where one overtakes the other.

    python -m benchmarks.kv_offload [--model gpt-j-6b] [--prompt 512] [--new 50] [--batches 1,4,16] [--device cuda|cpu]

Random weights. A step's bound from host memory is the larger of b * row / link and (weights + b * row) / bandwidth (models/kv_home.py), link and bandwidth measured in the
run. "side by side": what is left of the GPU's memory after the weights holds so many sequences with their caches there, and so many with two layers' there.
The last lines give --kv auto's choice for little room, and the rates of the two ways that it weighs, measured: as many sequences as fit, and --batches' most from host memory.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

import numpy as np

from benchmarks.pipeline_run import cut
from benchmarks.random_model import random_runner
from benchmarks.record import circumstances, write
from l1_kernels.device import open_device, prepare

PACKAGES = ("strata-inference", "numpy", "numba", "numba-cuda", "cupy-cuda13x", "cupy-cuda12x")
WARM = 8  # tokens that do not count


def step_ms(runner: Any, kv: str, batch: int, prompt: int, new: int, repeats: int = 3) -> tuple[float, float]:
    """(ms of a step, ms to the first token), the median over `repeats`; a graph where one may be."""
    from models.decode_graph import Decoder
    from models.generate import GenerateOptions, cache_size, generate

    runner.kv = kv
    prompts = np.random.default_rng(0).integers(0, runner.config.vocab_size, (batch, prompt)).tolist()
    options = GenerateOptions(new, batch_size=batch)
    decoder = None
    if runner.device.name == "cuda" and not runner.graph_problem():
        decoder = Decoder(runner, runner.new_cache(*cache_size(prompts, options)))
    steps, firsts = [], []
    for repeat in range(repeats + 1):
        times = generate(runner, prompts, options, decoder=decoder)[0].token_times
        if repeat:  # the first one compiles and records
            steps.append((times[-1] - times[WARM - 1]) / (len(times) - WARM))
            firsts.append(times[0])
    return 1e3 * median(steps), 1e3 * median(firsts)


def main() -> None:
    options = arguments()
    if options.device == "cuda":
        prepare("cuda")
    device = open_device(options.device)
    from models.kv_home import Need, Speed, in_host_memory, on_device, row_bytes, weigh
    from models.presets import preset
    from models.speeds import bytes_read, link_speed, read_bandwidth

    config = cut(preset(options.model), options.layers)
    runner = random_runner(config, device, options.dtype)
    speed = Speed(read_bandwidth(device), link_speed(device))
    context = options.prompt + options.new - 1
    row, in_buffers = row_bytes(config, config.num_layers, config.num_kv_heads, context, runner.kv_dtype)
    free = device.memory()[0]
    document = circumstances(PACKAGES)
    document["machine"]["gpu"], document["model"], document["row_bytes"] = device.description, options.model, row
    document["link_gb_s"], document["read_gb_s"] = speed.link / 1e9, speed.bandwidth / 1e9
    document["side_by_side"] = {"gpu": free // row, "cpu": free // in_buffers}
    print(f"{device.description}: link {speed.link / 1e9:.1f} GB/s, reads {speed.bandwidth / 1e9:.0f} GB/s; {config.num_layers} layers, a sequence of {context} tokens {row / 1e6:.1f} MB")
    print(f"side by side: {free // row} with caches on the device, {free // in_buffers} from host memory", flush=True)
    rows: list[dict[str, Any]] = []
    for batch in options.batches:
        need = Need(free, row, in_buffers, bytes_read(runner, batch))
        for kv in ("gpu", "cpu"):
            token, first = step_ms(runner, kv, batch, options.prompt, options.new)
            bound = 1e3 * batch / (on_device(batch, need, speed) if kv == "gpu" else in_host_memory(batch, need, speed))
            rows.append({"kv": kv, "batch": batch, "token_ms": token, "first_ms": first, "bound_ms": bound, "tokens_per_s": 1e3 * batch / token})
            print(f"--kv {kv} batch {batch:3}: {token:8.3f} ms a step, bound {bound:8.3f} ({100 * bound / token:3.0f} %), {1e3 * batch / token:8.1f} tokens/s, first {first:7.1f} ms", flush=True)
    document["rows"] = rows
    weights = bytes_read(runner, 1)
    document["crossover_bytes"] = weights * speed.link / max(1.0, speed.bandwidth - speed.link)
    most = max((one for one in rows if one["kv"] == "cpu"), key=lambda one: one["tokens_per_s"])
    print(f"host memory pays while the room for caches is below {document['crossover_bytes'] / 1e6:.0f} MB, {document['crossover_bytes'] / row:.2f} sequences of this length")
    for one in (one for one in rows if one["kv"] == "gpu"):
        chosen = weigh(10**6, Need(one["batch"] * row, row, in_buffers, weights), speed)
        ahead = "cpu" if most["tokens_per_s"] > one["tokens_per_s"] else "gpu"
        one["auto"], one["measured_best"] = chosen.kv, ahead
        print(f"room for {one['batch']:3}: auto takes {chosen.kv}; measured {one['tokens_per_s']:.1f} tokens/s there, {most['tokens_per_s']:.1f} from host memory at batch {most['batch']}")
    print(write(options.out, document, []))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], prog="python -m benchmarks.kv_offload")
    parser.add_argument("--model", default="gpt-j-6b")
    parser.add_argument("--layers", type=int, help="the model's first N layers (default all)")
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=50)
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4, 16])
    parser.add_argument("--out", default="kv_offload", help="name of the result file in benchmarks/results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
