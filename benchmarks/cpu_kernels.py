"""Every CPU kernel at the shapes of SmolLM2-135M's decode step (batch 1), beside the memory's bandwidth.

    python benchmarks/cpu_kernels.py [--quick] [--dtype fp32|fp16|bf16|int8] [--context 256] [--batch 1]

For each operation: how often a step runs it, microseconds, the bytes it must move, GB/s, and the share of a read-only sum's
bandwidth over more than 1 GB in this run. Every layer has matrices and caches of its own. The operations are timed one by
one over all layers (where their bytes fit the last cache they beat the memory), and then a whole step in the model's order,
538 MB in fp32: that line counts. It has no sampling and no communication.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

THREADS = os.environ.setdefault("NUMBA_NUM_THREADS", str(len(os.sched_getaffinity(0))))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402
from numba import njit, prange, threading_layer  # noqa: E402

from l1_kernels.cpu_kernels import CpuKernels  # noqa: E402
from l1_kernels.weight import BYTES, CARRIER, Weight  # noqa: E402

LAYERS, D, H, G, HEAD, F, V = 30, 576, 9, 3, 64, 1536, 49152
MATRICES = {"qkv": ((H + 2 * G) * HEAD, D), "out": (D, H * HEAD), "up": (2 * F, D), "down": (D, F)}


@njit(fastmath=True)
def stretch_sum(x: np.ndarray) -> float:
    total = np.float32(0)
    for i in range(x.size):
        total += x[i]
    return total


@njit(parallel=True)
def read_only_sum(x: np.ndarray, totals: np.ndarray) -> None:
    """Sums float32 x, one stretch a thread."""
    parts = totals.size
    for p in prange(parts):
        totals[p] = stretch_sum(x[x.size * p // parts : x.size * (p + 1) // parts])


def seconds(call: Callable[[], object], repeats: int) -> float:
    """The best of `repeats` calls after one to compile and warm up: what others do on the machine only ever adds."""
    call()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def bandwidth(gib: float, repeats: int) -> float:
    """GB/s of a read-only sum over `gib` GiB."""
    x = np.ones(int(gib * 2**28), np.float32)
    totals = np.empty(int(THREADS), np.float32)
    return x.nbytes / seconds(lambda: read_only_sum(x, totals), repeats) / 1e9


def random_weight(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> Weight:
    """Any bits of small numbers: what they are does not change the time."""
    if dtype == "fp32":
        return Weight(rng.random(shape, np.float32), dtype)
    data = rng.integers(0, 100, shape, CARRIER[dtype])
    return Weight(data, dtype, rng.random(shape[0], np.float32) if dtype == "int8" else None)


@dataclass(frozen=True)
class Operation:
    name: str
    size: int  # bytes a run
    run: Callable[[int], object]  # of a layer; outside the layers of 0
    runs: int = LAYERS  # a step


def operations(kernels: CpuKernels, dtype: str, context: int, batch: int) -> tuple[list[Operation], list[Operation]]:
    """Those of a layer, in order, and those before and behind the layers."""
    rng = np.random.default_rng(0)
    cache_dtype = "fp32" if dtype == "int8" else dtype

    def floats(*shape: int) -> np.ndarray:
        return rng.random(shape, np.float32)

    rows, ends = np.arange(batch, dtype=np.int32), np.full(batch, context, np.int32)
    places = ends - np.int32(1)
    x, wide, narrow, qkv = floats(batch, D), floats(batch, 2 * F), floats(batch, F), floats(batch, H + 2 * G, HEAD)
    heads = floats(batch, H * HEAD)
    weights = [{name: random_weight(rng, shape, dtype) for name, shape in MATRICES.items()} for _ in range(LAYERS)]
    head, norm = random_weight(rng, (V, D), dtype), floats(D)
    zeros, table = np.zeros((batch, D), np.float32), floats(context, HEAD // 2)
    caches = [np.ones((2, batch, G, context, HEAD), CARRIER[cache_dtype]) for _ in range(LAYERS)]
    kv_bytes = 2 * batch * G * context * HEAD * BYTES[cache_dtype]

    def linear(name: str, x: np.ndarray) -> Operation:
        return Operation(f"linear {name}", weights[0][name].nbytes, lambda layer: kernels.linear(x, weights[layer][name]))

    rms_norm = Operation("rms_norm", 8 * batch * D + 4 * D, lambda _: kernels.rms_norm(x, norm, 1e-5))
    add = Operation("add", 12 * batch * D, lambda _: kernels.add(x, zeros))
    layer = [
        rms_norm,
        linear("qkv", x),
        Operation("rotary", 8 * batch * (H + G) * HEAD, lambda _: kernels.rotary(qkv, H + G, table, table, places, False)),
        Operation(
            "write_kv",
            2 * batch * G * HEAD * (4 + BYTES[cache_dtype]),
            lambda layer: kernels.write_kv(qkv, H, *caches[layer], cache_dtype, rows, places),
        ),
        Operation(
            "attention",
            kv_bytes + 8 * batch * H * HEAD,
            lambda layer: kernels.attention(qkv, H, *caches[layer], cache_dtype, rows, ends, 0, 0.125, None),
        ),
        linear("out", heads),
        add,
        rms_norm,
        linear("up", x),
        Operation("gate silu", 12 * batch * F, lambda _: kernels.gate(wide, "silu")),
        linear("down", narrow),
        add,
    ]
    ends_of_model = [
        Operation("embed", batch * D * (4 + BYTES[dtype]), lambda _: kernels.embed(head, places), 1),
        Operation("rms_norm", rms_norm.size, rms_norm.run, 1),
        Operation("linear head", head.nbytes, lambda _: kernels.linear(x, head), 1),
    ]
    return layer, ends_of_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a quarter of the memory, few repeats: for a look, not for a report")
    parser.add_argument("--dtype", default="fp32", choices=list(BYTES))
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    repeats = 5 if options.quick else 21

    roof = bandwidth(0.25 if options.quick else 1.1, 3 if options.quick else 7)
    print(f"{THREADS} threads ({threading_layer()}), {options.dtype}, batch {options.batch}, context {options.context}; sum {roof:.1f} GB/s")
    print(f"{'operation':<12} {'runs':>4} {'us':>9} {'KB':>9} {'GB/s':>6} {'% of sum':>8} {'ms a step':>9}")
    layer, ends_of_model = operations(CpuKernels(), options.dtype, options.context, options.batch)

    def over_layers(*parts: Operation) -> None:
        for i in range(LAYERS):
            for operation in parts:
                operation.run(i)

    def step() -> None:
        over_layers(*layer)
        for operation in ends_of_model:
            operation.run(0)

    for operation in dict.fromkeys([*layer, *ends_of_model]):
        runs = operation.runs * layer.count(operation) or 1
        one_by_one = partial(over_layers if operation.runs == LAYERS else lambda operation: operation.run(0), operation)
        run_s = seconds(one_by_one, repeats) / operation.runs
        rate = operation.size / run_s / 1e9
        print(
            f"{operation.name:<12} {runs:4} {run_s * 1e6:9.1f} {operation.size / 1e3:9.1f} {rate:6.1f} {rate / roof:8.0%} "
            f"{run_s * runs * 1e3:9.2f}"
        )
    step_s = seconds(step, repeats)
    rate = sum(operation.size * operation.runs for operation in [*layer, *ends_of_model]) / step_s / 1e9
    print(f"a step: {step_s * 1e3:.1f} ms, {options.batch / step_s:.1f} tokens/s, {rate:.1f} GB/s, {rate / roof:.0%} of the sum")


if __name__ == "__main__":
    main()
