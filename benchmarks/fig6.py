"""Fig 6: latency of the paper's dense models on one GPU: a prompt of 128 tokens and 8 more, batch 1, 8 and 16.

    python -m benchmarks.fig6 [--models gpt2-xl,gpt-j-6b] [--dtypes fp16,int8] [--batches 1,8,16] [--peer]

Random weights of Table I's shapes (benchmarks/random_model.py): only the time is of interest. A decode step reads every weight
once, so its bound is bytes of weights / bandwidth, a read-only sum over more than 1 GB measured in the same run; keys and
values come on top (they are counted too). The steady step is the mean of the last 32 of 48 tokens, context 144 to 176.
--peer times Hugging Face transformers (eager, fp16) on the same shapes in the same run, where torch is installed.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from typing import Any

import numpy as np

from benchmarks.random_model import random_runner
from benchmarks.record import circumstances, write
from l1_kernels.device import Device, open_device, prepare

PROMPT, NEW, STEADY, WARM = 128, 8, 32, 16
MODELS = ("gpt2-xl", "gpt-neo-2.7b", "gpt-j-6b", "gpt-13b", "gpt-neox-20b")
# ms for prompt 128 + 8 tokens, batch 1 / 8 / 16, on one A100 or as many as Table I says, read off the paper's chart: fp16, int8.
PAPER = {
    "gpt2-xl": ((57, 66, 102), (53, 65, 85)),
    "gpt-j-6b": ((95, 147, 209), (75, 104, 143)),
    "gpt-13b": ((175, 265, 373), (122, 172, 245)),
    "gpt-neox-20b": ((180, 258, 352), (118, 178, 248)),
}


def main() -> None:
    options = arguments()
    prepare("cuda")
    device = open_device("cuda")
    from models.speeds import read_bandwidth

    document = circumstances(("strata-inference", "numpy", "numba", "numba-cuda", "cupy-cuda13x", "cupy-cuda12x", "torch", "transformers"))
    document["machine"]["gpu"] = device.description
    bandwidth = read_bandwidth(device)
    document["read_gb_s"] = bandwidth / 1e9
    print(f"{device.description}: read-only sum {bandwidth / 1e9:.0f} GB/s", flush=True)
    rows: list[dict[str, Any]] = []
    for name in options.models:
        for dtype in options.dtypes:
            rows += measure_model(device, name, dtype, options.batches, bandwidth)
        if options.peer:
            from benchmarks.peer_gpu import measure_peer

            rows += measure_peer(name, options.batches, PROMPT, NEW, STEADY, WARM)
    document["rows"] = rows
    if options.out:
        with open(options.out, "w") as file:
            json.dump(document, file, indent=1)
    else:
        write("fig6", document, [])
    show(rows)


def measure_model(device: Device, name: str, dtype: str, batches: list[int], bandwidth: float) -> list[dict[str, Any]]:
    from models.presets import preset
    from models.speeds import bytes_read

    config = preset(name)
    runner = random_runner(config, device, dtype)
    rows = []
    for batch in batches:
        found = measure(device, runner, batch)
        kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * (PROMPT + WARM + STEADY // 2) * 2 * batch
        bound = (bytes_read(runner, batch) + kv) / bandwidth * 1e3
        column = (1, 8, 16).index(batch) if batch in (1, 8, 16) else None
        paper = PAPER.get(name, ((), ()))[dtype == "int8"]
        found |= {"model": name, "engine": "strata", "dtype": dtype, "batch": batch, "bound_ms": bound, "percent_of_bound": 100 * bound / found["token_ms"]}
        found["paper_ms"] = paper[column] if column is not None and paper else None
        rows.append(found)
        print(line(found), flush=True)
    return rows


def measure(device: Device, runner: Any, batch: int) -> dict[str, Any]:
    from models.decode_graph import Decoder
    from models.generate import GenerateOptions, cache_size, generate

    rng = np.random.default_rng(0)
    prompts = rng.integers(0, runner.config.vocab_size, (batch, PROMPT)).tolist()
    long, short = (GenerateOptions(n, batch_size=batch) for n in (WARM + STEADY, NEW))
    decoder = None if runner.graph_problem() else Decoder(runner, runner.new_cache(*cache_size(prompts, long)))
    generate(runner, prompts, short, decoder=decoder)  # compiles, records, touches every weight

    def times(options: GenerateOptions) -> list[float]:
        return generate(runner, prompts, options, decoder=decoder)[0].token_times

    totals, firsts, steps = [], [], []
    for _ in range(3):
        seconds = times(short)
        totals.append(seconds[-1])
        firsts.append(seconds[0])
        seconds = times(long)
        steps.append((seconds[-1] - seconds[WARM - 1]) / STEADY)
    return {"total_ms": 1e3 * median(totals), "first_ms": 1e3 * median(firsts), "token_ms": 1e3 * median(steps), "graph": decoder is not None and decoder.failure is None}


def line(row: dict[str, Any]) -> str:
    bound = f"{row['bound_ms']:7.2f} {row['percent_of_bound']:4.0f} %" if "bound_ms" in row else " " * 14
    paper = f"{row['paper_ms']:5d}" if row.get("paper_ms") else "    -"
    return (
        f"{row['model']:14} {row['engine']:12} {row['dtype']:5} {row['batch']:3d}  {row['total_ms']:8.1f} {row['first_ms']:8.2f} "
        f"{row['token_ms']:8.3f} {bound}  {paper}"
    )


def show(rows: list[dict[str, Any]]) -> None:
    print("model          engine       dtype   B  128+8 ms  first ms ms/token   bound          paper")
    for row in rows:
        print(line(row))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], prog="python -m benchmarks.fig6")

    def names(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--models", type=names, default=list(MODELS))
    parser.add_argument("--dtypes", type=names, default=["fp16", "int8"])
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 16])
    parser.add_argument("--peer", action="store_true", help="time Hugging Face transformers beside it")
    parser.add_argument("--out", help="where the result file goes; default benchmarks/results/fig6.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
