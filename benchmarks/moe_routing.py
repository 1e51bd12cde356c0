"""Routing of a sparse layer by tables, beside one-hot einsums (paper, Section V-C: over 6 times faster) and beside a copy.

    python -m benchmarks.moe_routing [--tokens 8,16,...] [--top-k 1,2] [--check]

Gate, tables, dispatch and combine, the experts left out, of S tokens, k choices, E experts, D numbers a token, in fp16; every time is of a
CUDA graph of many calls one after the other, the median of 12 replays. "tables" is l3_moe/kernels.py: `route_rows` (gate, tables and
dispatch) and `combine`, as a layer calls them; "einsum" l3_moe/einsum_baseline.py, with room for ceil(1.25 k S / E) rows an expert. The
parts are timed alone: "gate" the product, "route" tables and dispatch behind it in one launch; "choose" and "dispatch" are the two launches
that this one replaces.

Bytes, each step's inputs once and its outputs once, float32 but for the rows:

    gate        4 S D + 4 E D + 4 S E
    tables      4 S E + 16 S k + 4 (E + 1) + 4
    dispatch    4 S D + 4 S k + 2 S k D
    combine     4 S k D + 8 S k + 8 S D        with the residual, which is read and written

The bound is these bytes at the rate of a copy of 1 GB (read and written bytes), measured in the same run, and 3.5 us for each of the four
steps. Arrays are the same in all calls, so L2 helps with those that fit. --check: status 1 unless tables are 6 times faster than einsums at
every size, and within twice the bound from 1024 tokens on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.limits import copy_bandwidth
from benchmarks.record import Others, circumstances, write
from l1_kernels.device import Device, open_device, prepare
from l1_kernels.errors import UserError
from l1_kernels.weight import Weight

TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
FACTOR = 1.25  # of the baseline's room
STEPS, STEP_US = 4, 3.5
FASTER, OF_BOUND, OF_BOUND_FROM = 6.0, 2.0, 1024  # the bars
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
COLUMNS = ("gate_us", "route_us", "combine_us", "tables_us", "bound_us", "of_bound", "einsum_us", "faster", "choose_us", "dispatch_us")
PACKAGES = ("strata-inference", "numpy", "numba", "numba-cuda", "cupy-cuda13x", "cupy-cuda12x")


def bytes_moved(num_tokens: int, num_experts: int, top_k: int, width: int) -> dict[str, int]:
    """By step; the formulas above."""
    pairs = num_tokens * top_k
    return {
        "gate": 4 * (num_tokens * width + num_experts * width + num_tokens * num_experts),
        "tables": 4 * num_tokens * num_experts + 16 * pairs + 4 * (num_experts + 1) + 4,
        "dispatch": 4 * num_tokens * width + 4 * pairs + 2 * pairs * width,
        "combine": 4 * pairs * width + 8 * pairs + 8 * num_tokens * width,
    }


def measure(device: Device, num_tokens: int, num_experts: int, top_k: int, width: int, copy_gb_s: float) -> dict[str, Any]:
    """One row of the result."""
    ways = calls(device, num_tokens, num_experts, top_k, width)
    times = {f"{name}_us": time_us(device, call, num_tokens) for name, call in ways.items()}
    moved = sum(bytes_moved(num_tokens, num_experts, top_k, width).values())
    bound = moved / copy_gb_s / 1e3 + STEPS * STEP_US
    return {
        "tokens": num_tokens, "top_k": top_k, "experts": num_experts, "width": width, "bytes": moved, **times, "bound_us": bound,
        "of_bound": times["tables_us"] / bound, "faster": times["einsum_us"] / times["tables_us"],
    }  # fmt: skip


def calls(device: Device, num_tokens: int, num_experts: int, top_k: int, width: int) -> dict[str, Callable[[], Any]]:
    """What to time, by the column's name; the launches of `route_rows` only where it is launches."""
    from l3_moe.einsum_baseline import EinsumRouting, capacity_of
    from l3_moe.kernels import open_moe_kernels

    rng = np.random.default_rng(0)
    kernels: Any = open_moe_kernels(device)

    def normal(*shape: int) -> Any:
        return device.to_device(rng.standard_normal(shape, dtype=np.float32))

    x, y, residual = normal(num_tokens, width), normal(num_tokens * top_k, width), normal(num_tokens, width)
    gate = device.weight(Weight(rng.standard_normal((num_experts, width), dtype=np.float32) * np.float32(0.02), "fp32"))
    how = (top_k, True, top_k > 1)  # softmax first; shares of several experts add up to 1
    tables, _ = kernels.route_rows(x, gate, *how, "fp16")
    room = capacity_of(num_tokens, top_k, num_experts, FACTOR)
    einsum = EinsumRouting(device, num_experts, *how, "fp16", room)
    spread = device.to_device(rng.standard_normal((num_experts * room, width), dtype=np.float32).astype(np.float16))
    logits = device.kernels.linear(x, gate)

    def by_tables() -> None:
        kernels.combine(y, kernels.route_rows(x, gate, *how, "fp16")[0], residual)

    def by_einsum() -> None:
        weights, _ = einsum.dispatch(x, gate)
        einsum.combine(spread, weights, residual)

    ways: dict[str, Callable[[], Any]] = {
        "tables": by_tables, "einsum": by_einsum, "combine": partial(kernels.combine, y, tables, residual),
        "choose": partial(kernels.tables, logits, *how), "dispatch": partial(kernels.dispatch, x, tables, "fp16"),
    }  # fmt: skip
    if device.name == "cuda":
        parts = kernels.gate_parts(x, gate)
        ways["gate"] = partial(kernels.gate_parts, x, gate)
        ways["route"] = partial(kernels.route_parts, parts, num_experts, top_k, top_k == 1, None, x, "fp16")
    return ways


def time_us(device: Device, call: Callable[[], Any], num_tokens: int) -> float:
    """Microseconds of one of many calls in a graph."""
    from l1_kernels.sbi_gemm.timing import time_graph

    return 1e3 * time_graph(device, [call] * (30 if num_tokens <= 512 else 10))


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """The bars that do not hold, in words."""
    found = []
    for row in rows:
        name = f"{row['tokens']} tokens, k = {row['top_k']}"
        if row["faster"] < FASTER:
            found.append(f"{name}: {row['faster']:.2f} times faster than einsums, the bar is {FASTER:g}")
        if row["tokens"] >= OF_BOUND_FROM and row["of_bound"] > OF_BOUND:
            found.append(f"{name}: {row['of_bound']:.2f} times the bound, the bar is {OF_BOUND:g}")
    return found


def heading() -> str:
    return f"{'S':>5} {'k':>2}" + "".join(f" {column.removesuffix('_us'):>9}" for column in COLUMNS)


def line(row: dict[str, Any]) -> str:
    return f"{row['tokens']:5} {row['top_k']:2}" + "".join(f" {row[column]:9.2f}" if column in row else f" {'-':>9}" for column in COLUMNS)


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    prepare(options.device)
    try:
        device = open_device(options.device)
    except UserError as error:
        print(f"error: {error}")
        return 2
    document = circumstances(PACKAGES)
    document["machine"]["gpu"] = device.description
    with Others() as others:
        document["copy_gb_s"] = copy_gb_s = copy_bandwidth(device, COPY_BYTES[device.name]) / 1e9
        print(f"{device.description}: copy {copy_gb_s:.0f} GB/s; {options.experts} experts, {options.width} numbers a token, fp16; us")
        print(heading(), flush=True)
        rows = []
        for top_k in options.top_k:
            for num_tokens in options.tokens:
                rows.append(measure(device, num_tokens, options.experts, top_k, options.width, copy_gb_s))
                print(line(rows[-1]), flush=True)
    document["rows"] = rows
    if options.out:
        print(write(options.out, document, [others.cores]))
    missed = failures(rows)
    print("\n".join(missed) if missed else "all bars hold")
    return 1 if options.check and missed else 0


def arguments(given: list[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(n) for n in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], prog="python -m benchmarks.moe_routing")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=numbers, default=list(TOKENS), help="S, with commas between")
    parser.add_argument("--top-k", type=numbers, default=[1, 2])
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--width", type=int, default=4096, help="D")
    parser.add_argument("--out", default="moe_routing", help="name of the result file in benchmarks/results; empty: none")
    parser.add_argument("--check", action="store_true", help="status 1 unless the bars hold")
    return parser.parse_args(given)


if __name__ == "__main__":
    raise SystemExit(main())
