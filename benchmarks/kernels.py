"""SBI-GeMM beside cuBLAS on Table I's shapes, each against the bytes it must read: `python benchmarks/kernels.py [--quick]`.

One GPU; every time is of one CUDA graph of many launches over weights rotated through more than 1 GB, so that L2 holds none.
"bound" is the weights' bytes at the bandwidth of a kernel that only reads, measured in the same run. cuBLAS is the better of
cuBLAS and cuBLASLt through torch, where torch is installed, else CuPy's gemmEx, launched back to back.

    ours      x 16-bit, y float32, the tuned plan
    ahead     the same with each launch fetching the start of the next one's weights into L2, as layers do it
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from l1_kernels.device import Device, open_device, prepare
from l1_kernels.errors import UserError
from l1_kernels.sbi_gemm.tune import TOKENS, Tuner, shapes

LARGE = 64 << 20  # bytes of a large matrix
QUICK = ("gpt2-xl", "gpt-j-6b")
AHEADS = (0, 3 << 20)
LADDER_SHAPES = ((4096, 4096), (1600, 6400), (16384, 4096))


def time_cublas(device: Device, weights: list[Any], tokens: int) -> tuple[float, str]:
    """(milliseconds, which library) of x [tokens, K] @ w^T in fp16."""
    if importlib.util.find_spec("torch") is None:
        return _time_cupy(device, weights, tokens), "cupy gemmEx, eager"
    import torch

    matrices = [torch.as_tensor(weight.data.view(np.float16), device="cuda") for weight in weights]
    x = torch.randn(tokens, matrices[0].shape[1], device="cuda", dtype=torch.float16)
    best = (np.inf, "")
    for library in ("cublas", "cublaslt"):
        torch.backends.cuda.preferred_blas_library(library)
        for matrix in matrices[:2]:
            torch.nn.functional.linear(x, matrix)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for matrix in matrices:
                torch.nn.functional.linear(x, matrix)
        best = min(best, (_time_torch(graph) / len(matrices), f"torch {torch.__version__}, {library}, in a graph"))
    return best


def _time_torch(graph: Any) -> float:
    """timing.time_replays with torch's own stream and events."""
    import torch

    from l1_kernels.sbi_gemm.timing import WARM_SECONDS

    until = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < until:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(np.median(times))


def _time_cupy(device: Device, weights: list[Any], tokens: int) -> float:
    from l1_kernels.linear.cublas import Gemm
    from l1_kernels.sbi_gemm.timing import time_replays

    gemm, inner = Gemm(), weights[0].data.shape[1]
    x = device.xp.random.standard_normal((tokens, inner), dtype=np.float32).astype(np.float16).view(np.uint16)
    y = device.empty((tokens, weights[0].data.shape[0]), np.float32)
    return time_replays(device, lambda: [gemm(x, weight.data, "fp16", y) for weight in weights]) / len(weights)


def measure(device: Device, dtype: str, tokens: int, quick: bool) -> Iterator[dict[str, Any]]:
    from l1_kernels.sbi_gemm import plans
    from l1_kernels.sbi_gemm.job import Job

    tuner = Tuner(device, dtype)
    table = plans.load_table(device.description)
    for name, outputs, inner, *_ in shapes():
        if quick and not name.startswith(QUICK):
            continue
        plan = plans.choose(table, Job(dtype, carried=True), tokens, outputs, inner)
        ours, ahead = (tuner.time(plan, tokens, outputs, inner, False, amount) for amount in AHEADS)
        cublas, library = time_cublas(device, tuner.pool.matrices(outputs, inner), tokens) if dtype == "fp16" else (None, "")
        yield {
            "name": name, "dtype": dtype, "tokens": tokens, "outputs": outputs, "inner": inner,
            "bytes": outputs * inner * tuner.pool.itemsize, "plan": repr(plan),
            "ours_us": 1e3 * ours, "ahead_us": 1e3 * ahead, "cublas_us": None if cublas is None else 1e3 * cublas, "library": library,
        }  # fmt: skip


def climb(device: Device) -> Iterator[dict[str, Any]]:
    """The ladder at batch 1, x float32."""
    from functools import partial

    from l1_kernels.sbi_gemm import ladder
    from l1_kernels.sbi_gemm.timing import WeightPool, time_graph

    pool = WeightPool(device, "fp16")
    for outputs, inner in LADDER_SHAPES:
        weights = pool.matrices(outputs, inner)
        x = device.xp.random.standard_normal((1, inner), dtype=np.float32)
        for rung in ladder.RUNGS:
            calls = [partial(ladder.prepare(rung, device.kernels, weight), x) for weight in weights]  # type: ignore[arg-type]
            microseconds = 1e3 * time_graph(device, calls, 5)
            yield {"rung": rung, "outputs": outputs, "inner": inner, "microseconds": microseconds, "gb_s": weights[0].data.nbytes / microseconds / 1e3}


def mean(ratios: list[float]) -> float:
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else float("nan")


def summary(rows: list[dict[str, Any]], bandwidth: float) -> list[str]:
    lines = [f"{'':24} {'GeMMs':>5} {'x cuBLAS':>8} {'ahead':>6} {'% of bound':>10} {'ahead':>6} {'>= 64 MB':>8} {'ahead':>6}"]
    for dtype, tokens in sorted({(row["dtype"], row["tokens"]) for row in rows}):
        some = [row for row in rows if row["dtype"] == dtype and row["tokens"] == tokens]
        large = [row for row in some if row["bytes"] >= LARGE]
        cells = []
        for key in ("ours_us", "ahead_us"):
            bound = [100 * row["bytes"] / bandwidth / 1e3 / row[key] for row in some]
            bound_large = [100 * row["bytes"] / bandwidth / 1e3 / row[key] for row in large]
            against = [row["cublas_us"] / row[key] for row in some if row["cublas_us"]]
            cells.append((mean(against), mean(bound), mean(bound_large)))
        (a, b, c), (d, e, f) = cells
        lines.append(f"{dtype + ', batch ' + str(tokens):24} {len(some):5} {a:8.3f} {d:6.3f} {b:10.1f} {e:6.1f} {c:8.1f} {f:6.1f}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"only {' and '.join(QUICK)}")
    parser.add_argument("--ladder", action="store_true", help="every rung, too")
    parser.add_argument("--tokens", action="append", type=int, choices=TOKENS, help="repeatable; default all")
    parser.add_argument("--dtype", action="append", choices=("fp16", "int8"), help="repeatable; default both")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kernels.json")
    given = parser.parse_args(arguments)
    prepare("cuda")
    try:
        device = open_device("cuda")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from l1_kernels.sbi_gemm.timing import read_bandwidth

    bandwidth = read_bandwidth(device)
    rows: list[dict[str, Any]] = []
    for dtype in given.dtype or ("fp16", "int8"):
        for tokens in given.tokens or TOKENS:
            for row in measure(device, dtype, tokens, given.quick):
                rows.append(row)
                rates = [row["bytes"] / row[key] / 1e3 if row[key] else 0 for key in ("ours_us", "ahead_us", "cublas_us")]
                print(f"{dtype} {tokens:3} {row['name']:20} GB/s: ours {rates[0]:5.0f} ahead {rates[1]:5.0f} cuBLAS {rates[2]:5.0f}", flush=True)
    rungs = list(climb(device)) if given.ladder else []
    bandwidth = max(bandwidth, read_bandwidth(device))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"gpu": device.description, "read_gb_s": bandwidth, "rows": rows, "ladder": rungs}
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{device.description}, reading {bandwidth:.0f} GB/s; {given.out}")
    for rung in dict.fromkeys(row["rung"] for row in rungs):
        rates = [f"{row['outputs']} x {row['inner']} {row['gb_s']:5.0f}" for row in rungs if row["rung"] == rung]
        print(f"{rung:10} GB/s: {'   '.join(rates)}")
    print("\n".join(summary(rows, bandwidth)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
