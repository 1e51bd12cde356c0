"""Fig 7: latency of sparse models on one GPU: a prompt of 128 tokens and 100 more, beside the einsum baseline.

    python -m benchmarks.fig7 [--models mixtral-5.8b,moe-1.3b-128] [--batches 1,8] [--ways tables,einsum] [--dtype fp16] [--check]

Random weights (benchmarks/random_model.py). tables: routing tables and experts that read what was chosen (l3_moe/table_moe.py), a step is one replay of a graph.
einsum: one-hot masks and every expert at its capacity (l3_moe/einsum_moe.py), what the paper calls the sparse-einsum baseline; everything else the same, in a graph too. A step's bound is the bytes of
weights that it must read, of the experts those that so many tokens choose if their choices are spread evenly, and its keys and values, over the read bandwidth
measured in the same run. The steady step is the mean of the last 64 of 100 tokens. --check: exit status 1 where a bar below is missed.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from typing import Any

import numpy as np

from benchmarks.random_model import random_weights, runner_of
from benchmarks.record import circumstances, write
from l1_kernels.device import Device, open_device, prepare
from l3_moe.einsum_moe import EinsumMoE

PROMPT, NEW, STEADY = 128, 100, 64
MODELS = ("mixtral-5.8b", "moe-1.3b-128")
BARS = {("mixtral-5.8b", 1): 1.25, ("moe-1.3b-128", 8): 2.8}  # ms a token on one H200, fp16


def main() -> int:
    options = arguments()
    prepare(options.device)
    device = open_device(options.device)
    from models.speeds import read_bandwidth

    document = circumstances(("strata-inference", "numpy", "numba", "numba-cuda", "cupy-cuda13x", "cupy-cuda12x"))
    document["machine"]["gpu"] = device.description
    bandwidth = read_bandwidth(device)
    document["read_gb_s"] = bandwidth / 1e9
    print(f"{device.description}: read-only sum {bandwidth / 1e9:.0f} GB/s", flush=True)
    rows: list[dict[str, Any]] = []
    for name in options.models:
        rows += measure_model(device, name, options, bandwidth)
    document["rows"] = rows
    if options.out:
        with open(options.out, "w") as file:
            json.dump(document, file, indent=1)
    else:
        write("fig7", document, [])
    print("model          way     dtype   B  128+100 ms  first ms  ms/token   bound        GB/s")
    for row in rows:
        print(line(row))
    missed = [row for row in rows if row["bar_ms"] is not None and row["token_ms"] > row["bar_ms"]]
    for row in missed:
        print(f"missed: {row['model']} batch {row['batch']}: {row['token_ms']:.3f} ms a token, the bar is {row['bar_ms']}")
    return 1 if options.check and missed else 0


def measure_model(device: Device, name: str, options: argparse.Namespace, bandwidth: float) -> list[dict[str, Any]]:
    from models.presets import preset
    from models.speeds import bytes_read

    config = preset(name)
    weights = random_weights(config, device, options.dtype)
    rows = []
    for way in options.ways:
        runner = runner_of(config, device, options.dtype, weights, sparse=EinsumMoE(config, device) if way == "einsum" else None)
        for batch in options.batches:
            kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * (PROMPT + NEW - STEADY // 2) * 2 * batch
            size = bytes_read(runner, batch) + kv
            found = measure(runner, batch, options.new)
            bound = size / bandwidth * 1e3
            bar = BARS.get((name, batch)) if way == "tables" and options.dtype == "fp16" and device.name == "cuda" else None
            found |= {"model": name, "way": way, "dtype": options.dtype, "batch": batch, "bound_ms": bound, "bar_ms": bar}
            found |= {"percent_of_bound": 100 * bound / found["token_ms"], "gb_s": size / found["token_ms"] / 1e6}
            rows.append(found)
            print(line(found), flush=True)
    return rows


def measure(runner: Any, batch: int, new: int) -> dict[str, Any]:
    from models.decode_graph import Decoder
    from models.generate import GenerateOptions, cache_size, generate

    rng = np.random.default_rng(0)
    prompts = rng.integers(0, runner.config.vocab_size, (batch, PROMPT)).tolist()
    options = GenerateOptions(new, batch_size=batch)
    decoder = None if runner.device.name == "cpu" or runner.graph_problem(batch) else Decoder(runner, runner.new_cache(*cache_size(prompts, options)))
    generate(runner, prompts, options, decoder=decoder)  # compiles, records, touches every weight
    totals, firsts, steps, steady = [], [], [], max(1, min(STEADY, new - 2))
    for _ in range(3):
        seconds = generate(runner, prompts, options, decoder=decoder)[0].token_times
        totals.append(seconds[-1])
        firsts.append(seconds[0])
        steps.append((seconds[-1] - seconds[-1 - steady]) / steady)
    return {"total_ms": 1e3 * median(totals), "first_ms": 1e3 * median(firsts), "token_ms": 1e3 * median(steps), "graph": decoder is not None and decoder.failure is None}


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['model']:14} {row['way']:7} {row['dtype']:5} {row['batch']:3d}  {row['total_ms']:10.1f} {row['first_ms']:9.2f} {row['token_ms']:9.3f} "
        f"{row['bound_ms']:7.3f} {row['percent_of_bound']:4.0f} % {row['gb_s']:6.0f}{'' if row['graph'] else '  no graph'}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], prog="python -m benchmarks.fig7")

    def names(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--models", type=names, default=list(MODELS))
    parser.add_argument("--ways", type=names, default=["tables", "einsum"])
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8])
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--new", type=int, default=NEW, help=f"tokens to generate; the bars are for {NEW}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--out", help="where the result file goes; default benchmarks/results/fig7.json")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
