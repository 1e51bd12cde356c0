"""Fig 12: BERT-base and DistilBERT, one text of 128 tokens, fp16, a pass as one graph replay.

    python -m benchmarks.fig12 [--models bert-base,distilbert] [--peer]

Random weights of the models' shapes (benchmarks/random_model.py). "replay" is the device's time of one pass, the median of 30;
"text" the host's, from ids on the host to hidden states on the host; "launched" the pass without a graph. The bound is the larger of
weights / read bandwidth and operations / cuBLAS's rate on a large product, all measured in the same run. --peer: transformers'
models in the same run, eager and under torch.compile with CUDA graphs, where torch is installed.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import numpy as np

from benchmarks.limits import limits as measure_limits
from benchmarks.limits import product_rate
from benchmarks.random_model import random_runner
from benchmarks.record import circumstances, write
from l1_kernels.device import Device, open_device, prepare
from layers.config import ModelConfig

TOKENS = 128
# ms on an A100, batch 1, 128 tokens: DeepSpeed's, and E.T.'s, which the paper compares with.
PAPER = {"bert-base": (0.9, 1.25), "distilbert": (0.4, 0.7)}
PACKAGES = ("strata-inference", "numpy", "numba", "numba-cuda", "cupy-cuda13x", "cupy-cuda12x", "torch", "transformers")


def measure(device: Device, name: str, config: ModelConfig, dtype: str, num_tokens: int, limits: dict[str, float]) -> dict[str, Any]:
    """One row of the result."""
    from l1_kernels.sbi_gemm.timing import time_replays
    from layers.batch import Batch
    from models.encode_graph import EncodeGraphs

    runner = random_runner(config, device, dtype)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, num_tokens)
    batch = Batch.encode([ids])
    graphs = EncodeGraphs(runner, 1, num_tokens)
    graph = graphs.graph_of(batch)
    assert graph is not None, graphs.failure
    plain_cache = runner.new_cache(1, num_tokens)
    runner.hidden(batch, plain_cache)
    before = device.launches()
    runner.hidden(batch, plain_cache)
    launches = device.launches() - before
    replay = time_replays(device, graph.replay, 30)
    weights, operations = weight_bytes(config, dtype), flops(config, num_tokens)
    bounds = weights / limits["read_gb_s"] / 1e6, operations / limits["fp16_tflop_s"] / 1e9
    return {
        "model": name, "engine": "strata", "dtype": dtype, "tokens": num_tokens, "replay_ms": replay,
        "text_ms": host_ms(lambda: device.to_host(graphs.hidden(batch)), 30),
        "launched_ms": time_replays(device, lambda: runner.hidden(batch, plain_cache), 10), "launches": launches,
        "recording_s": graphs.recording_s, "weight_bytes": weights, "gflop": operations / 1e9,
        "bytes_bound_ms": bounds[0], "flop_bound_ms": bounds[1], "percent_of_bound": 100 * max(bounds) / replay,
    }  # fmt: skip


def weight_bytes(config: ModelConfig, dtype: str) -> int:
    """Of the matrices that a pass reads whole (of the tables it reads a row a token)."""
    from l1_kernels.weight import BYTES

    kv = 2 * config.num_kv_heads * config.head_dim
    inner = config.num_heads * config.head_dim
    layer = config.hidden_size * (inner + kv) + inner * config.hidden_size + (3 if config.gated_ffn else 2) * config.hidden_size * config.ffn_size
    return config.num_layers * layer * BYTES[dtype]


def flops(config: ModelConfig, num_tokens: int) -> int:
    """Multiplications and additions: 2 a weight and token, and 4 d a head and pair of tokens."""
    attention = 4 * config.num_heads * config.head_dim * num_tokens * num_tokens
    return 2 * weight_bytes(config, "int8") * num_tokens + config.num_layers * attention


def host_ms(call: Any, count: int) -> float:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * median(times)


def line(row: dict[str, Any]) -> str:
    def number(key: str) -> str:
        return f"{row[key]:8.3f}" if row.get(key) is not None else f"{'-':>8}"

    bound = f"{row['percent_of_bound']:6.0f} %" if "percent_of_bound" in row else f"{'-':>8}"
    paper = " / ".join(map(str, PAPER.get(row["model"], ())))
    return f"{row['model']:12} {row['engine']:24} {number('replay_ms')} {number('text_ms')} {number('launched_ms')} {bound}   {paper}"


def main() -> None:
    options = arguments()
    prepare("cuda")
    device = open_device("cuda")
    from models.presets import preset

    document = circumstances(PACKAGES)
    document["machine"]["gpu"] = device.description
    document["limits"] = limits = measure_limits(device) | {"fp16_tflop_s": product_rate(device) / 1e12}
    print(f"{device.description}: read {limits['read_gb_s']:.0f} GB/s, copy {limits['copy_gb_s']:.0f} GB/s, fp16 {limits['fp16_tflop_s']:.0f} TFLOP/s")
    rows: list[dict[str, Any]] = []
    print(f"{'':12} {'engine':24} {'replay':>8} {'text':>8} {'launched':>8} {'of bound':>8}   paper: DeepSpeed / E.T., A100, ms", flush=True)
    for name in options.models:
        found = [measure(device, name, preset(name), "fp16", TOKENS, limits)]
        if options.peer:
            from benchmarks.peer_encoder import measure_peer

            found += measure_peer(name, TOKENS)
        for row in found:
            rows.append(row | {"paper_ms": PAPER.get(name)})
            print(line(row), flush=True)
    document["rows"] = rows
    write(options.out, document, [])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], prog="python -m benchmarks.fig12")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(PAPER))
    parser.add_argument("--peer", action="store_true", help="time Hugging Face transformers beside it")
    parser.add_argument("--out", default="fig12", help="name of the result file in benchmarks/results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
