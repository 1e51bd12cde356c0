"""Fig 10a: what each of layer 1's ideas gives to a decode step: launches one by one, Deep-Fusion, SBI-GeMM, a CUDA graph.

    python -m benchmarks.fig10a [--models gpt2-xl,gpt-j-6b] [--batches 1,8,16] [--no-regions]

Random weights, one set for all stages, fp16, a token a sequence at place 136. A step is embedding, layers, head and the choice of
the token; nothing is read by the host. Each stage is timed launched from Python and as a graph: the paper's order is launched first, then
a graph of the last, but a graph helps the unfused stage too, and most, so it stands beside every stage.

    unfused   a launch an operation, products by cuBLAS     open_device(fused=False), --no-fusion
    fused     Deep-Fusion around cuBLAS's products          open_device(gemm="cublas")
    sbi       + SBI-GeMM                                    open_device(overlap=False)
    overlap   + launches that begin before the last one ended   open_device(), what a user gets

Then each region alone, as the launches of a whole graph whose weights (keys and values) are others in every launch, so that L2 holds none:
the paper gives the gain of each over unfused kernels with cuBLAS. Its figure of the steps has no numbers on its axis.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.limits import limits as measure_limits
from benchmarks.random_model import random_weights, runner_of
from benchmarks.record import circumstances, write
from l1_kernels.device import Device, open_device, prepare
from l1_kernels.regions import CacheArgs, NormArgs
from l1_kernels.sbi_gemm.timing import ROTATED_BYTES, time_graph, time_replays
from l1_kernels.weight import CARRIER
from layers.config import ModelConfig
from layers.decode import DecodeState
from layers.rotary import Rotary

MODELS = ("gpt2-xl", "gpt-j-6b")
PLACE, CONTEXT = 136, 144
RUN = 8  # steps that are launched one after the other and timed together
MOST_CACHES = 128
STAGES: dict[str, dict[str, Any]] = {"unfused": {"fused": False}, "fused": {"gemm": "cublas"}, "sbi": {"overlap": False}, "overlap": {}}
# Over unfused kernels with cuBLAS, on the paper's GPUs; facts of Section VII.
PAPER_GAINS = {"norm + qkv": 1.5, "attend": 2.9, "norm + ff1 + act": 3.0, "ff2 + residual": 1.2}
PACKAGES = ("strata-inference", "numpy", "numba", "numba-cuda", "cupy-cuda13x", "cupy-cuda12x")


def measure_steps(devices: dict[str, Device], name: str, config: ModelConfig, batches: list[int], read_gb_s: float) -> Iterator[dict[str, Any]]:
    """A row for each batch and stage; `devices` by stage."""
    from models.speeds import bytes_read

    first = next(iter(devices.values()))
    weights = random_weights(config, first, "fp16")
    for batch in batches:
        for stage, device in devices.items():
            runner = runner_of(config, device, "fp16", weights)
            kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * (PLACE + 1) * 2 * batch
            bound = (bytes_read(runner, batch) + kv) / read_gb_s / 1e6
            found = time_step(device, runner, batch)
            yield {
                "model": name, "batch": batch, "stage": stage, "bound_ms": bound, **found,
                "launched_percent_of_bound": 100 * bound / found["launched_ms"], "graph_percent_of_bound": 100 * bound / found["graph_ms"],
            }  # fmt: skip


def time_step(device: Device, runner: Any, batch: int) -> dict[str, float]:
    """launched_ms and graph_ms of one decode step, and how many launches from Python it takes (the library's own not counted)."""
    cache = runner.new_cache(batch, CONTEXT)
    for layer in cache.layers:
        for array in (layer.k, layer.v):
            array[...] = random_bits(device, array.shape)
    state = DecodeState(device, batch, batch, CONTEXT)
    tokens = np.random.default_rng(0).integers(0, runner.config.vocab_size, batch).tolist()

    def step() -> Any:
        logits = runner.decode(state.slots, cache)
        device.kernels.greedy(logits, state.slots)
        return logits

    def begin() -> None:
        state.fill(tokens, list(range(batch)), [PLACE] * batch)
        device.synchronize()

    begin()
    step()  # compiles
    before = device.launches()
    step()
    launches = device.launches() - before
    begin()
    launched = time_replays(device, lambda: [step() for _ in range(RUN)], 5) / RUN
    begin()
    graph = device.capture(step)
    begin()
    return {"launched_ms": launched, "graph_ms": time_replays(device, lambda: [graph.replay() for _ in range(RUN)], 5) / RUN, "launches": launches}


def random_bits(device: Device, shape: tuple[int, ...]) -> Any:
    numbers = device.xp.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    return numbers.astype(np.float16).view(np.uint16)


REGION_STAGES = ("unfused", "fused", "sbi", "overlap")


def measure_regions(devices: dict[str, Device], name: str, config: ModelConfig, batch: int, pool: Any, read_gb_s: float) -> Iterator[dict[str, Any]]:
    """A row for each region: microseconds by stage, and the gain of the last over "unfused". `pool`: timing.WeightPool."""
    for region, (size, make) in regions_of(config, batch, pool).items():
        row: dict[str, Any] = {"model": name, "batch": batch, "region": region, "bytes": size, "bound_us": size / read_gb_s / 1e3}
        for stage in REGION_STAGES:
            row[f"{stage}_us"] = 1e3 * time_graph(devices[stage], list(make(devices[stage])))
        row |= {"gain": row["unfused_us"] / row["overlap_us"], "gain_of_fusion": row["unfused_us"] / row["fused_us"], "paper_gain": PAPER_GAINS[region]}
        row["percent_of_bound"] = 100 * row["bound_us"] / row["overlap_us"]
        yield row


Maker = Callable[[Device], Iterator[Callable[[], Any]]]


def regions_of(config: ModelConfig, batch: int, pool: Any) -> dict[str, tuple[int, Maker]]:
    """name -> (bytes that a launch must read, calls for a device: one for each matrix, or pair of caches, of the rotation)."""
    size, ffn = config.hidden_size, config.ffn_size
    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
    rows = (heads + 2 * kv_heads) * width

    def floats(device: Device, *shape: int) -> Any:
        return device.xp.random.default_rng(1).standard_normal(shape, dtype=np.float32)

    def norm(device: Device) -> NormArgs:
        return NormArgs("layernorm", floats(device, size), floats(device, size), 1e-5)

    def norm_linear(device: Device) -> Iterator[Callable[[], Any]]:
        x, before, bias = floats(device, batch, size), norm(device), floats(device, rows)
        for weight in pool.matrices(rows, size):
            yield partial(device.regions.norm_linear, x, before, weight, bias)

    def feed_forward(device: Device) -> Iterator[Callable[[], Any]]:
        x, before, bias = floats(device, batch, size), norm(device), floats(device, ffn)
        for weight in pool.matrices(ffn, size):
            yield partial(device.regions.norm_feed_forward, x, before, weight, bias, config.activation, False)

    def linear_add(device: Device) -> Iterator[Callable[[], Any]]:
        weights = pool.matrices(size, ffn)
        up = pool.matrices(ffn, size)[0]
        # What the region before hands on: float32, or 16 bits.
        hidden = device.regions.norm_feed_forward(floats(device, batch, size), norm(device), up, None, config.activation, False)
        bias, residual = floats(device, size), floats(device, batch, size)
        for weight in weights:
            yield partial(device.regions.linear_add, hidden, weight, bias, residual)

    kv_bytes = 2 * batch * kv_heads * width * (PLACE + 1) * 2
    count = max(2, min(MOST_CACHES, ROTATED_BYTES // kv_bytes))

    def attend(device: Device) -> Iterator[Callable[[], Any]]:
        qkv = floats(device, batch, heads + 2 * kv_heads, width)
        numbers = (np.arange(batch), np.full(batch, PLACE), np.full(batch, PLACE + 1))
        order, positions, ends = (device.to_device(n.astype(np.int32)) for n in numbers)
        turned = None if config.rope is None else Rotary(config.rope, config.max_positions, device).at(positions)
        for _ in range(count if device.name == "cuda" else 2):
            k, v = (device.empty((batch, kv_heads, CONTEXT, width), CARRIER["fp16"]) for _ in range(2))
            k[...] = v[...] = random_bits(device, k.shape)
            cache = CacheArgs(k, v, "fp16", order, positions, ends, distinct=True)
            yield partial(device.regions.attend, qkv, heads, turned, cache, 0, config.scale(0), None)

    return {
        "norm + qkv": (2 * rows * size, norm_linear),
        "attend": (kv_bytes, attend),
        "norm + ff1 + act": (2 * ffn * size, feed_forward),
        "ff2 + residual": (2 * ffn * size, linear_add),
    }


def show_step(row: dict[str, Any]) -> str:
    return (
        f"{row['model']:10} {row['batch']:3} {row['stage']:8} launched {row['launched_ms']:7.3f} ms ({row['launched_percent_of_bound']:3.0f} %)   "
        f"graph {row['graph_ms']:7.3f} ms ({row['graph_percent_of_bound']:3.0f} % of the bound of {row['bound_ms']:.3f})   {row['launches']} launches"
    )


def show_region(row: dict[str, Any]) -> str:
    times = " ".join(f"{stage} {row[stage + '_us']:6.2f}" for stage in REGION_STAGES)
    return (
        f"{row['model']:10} {row['batch']:3} {row['region']:18} us: {times}   bound {row['bound_us']:6.2f}   "
        f"gain {row['gain']:4.2f}x (fusion alone {row['gain_of_fusion']:4.2f}x), paper {row['paper_gain']}x"
    )


def main() -> None:
    options = arguments()
    prepare("cuda")
    devices = {stage: open_device("cuda", **STAGES[stage]) for stage in options.stages}
    from l1_kernels.sbi_gemm.timing import WeightPool
    from models.presets import preset

    device = next(iter(devices.values()))
    document = circumstances(PACKAGES)
    document["machine"]["gpu"] = device.description
    document["limits"] = limits = measure_limits(device)
    print(f"{device.description}: read {limits['read_gb_s']:.0f} GB/s, copy {limits['copy_gb_s']:.0f} GB/s", flush=True)
    document["steps"], document["regions"] = [], []
    for name in options.models:
        for row in measure_steps(devices, name, preset(name), options.batches, limits["read_gb_s"]):
            document["steps"].append(row)
            print(show_step(row), flush=True)
        gc.collect()  # the weights of one model before those of the next
    if not options.no_regions and set(REGION_STAGES) <= devices.keys():
        pool = WeightPool(device, "fp16")
        device.synchronize()
        for name in options.models:
            for batch in options.batches:
                for row in measure_regions(devices, name, preset(name), batch, pool, limits["read_gb_s"]):
                    document["regions"].append(row)
                    print(show_region(row), flush=True)
    print(write(options.out, document, []))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], prog="python -m benchmarks.fig10a")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1])
    parser.add_argument("--stages", type=lambda text: text.split(","), default=list(STAGES), help="of steps; regions need the first four")
    parser.add_argument("--no-regions", action="store_true", help="whole steps only")
    parser.add_argument("--out", default="fig10a", help="name of the result file in benchmarks/results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
