"""Times every candidate plan on this GPU and saves the best of each shape: `python -m l1_kernels.sbi_gemm.tune`.

The result, tuned/<GPU's name>.json, is what FusedRegions opens with on a GPU of that name. Tuning takes some minutes, most
of which is compilation.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from l1_kernels.device import Device, open_device, prepare
from l1_kernels.errors import UserError

HIDDEN = {"gpt2-xl": 1600, "gpt-neo-2.7b": 2560, "gpt-j-6b": 4096, "gpt-13b": 5120, "gpt-neox-20b": 6144}
HEADS = {"gpt2-xl": 50257, "gpt-neo-2.7b": 50257, "gpt-j-6b": 50400, "gpt-13b": 50257, "gpt-neox-20b": 50432}
PARALLEL = ("gpt-j-6b", "gpt-neox-20b")
DTYPES = ("fp16", "int8")
TOKENS = (1, 8, 16)
SLACK = 0.01  # a simpler plan that is slower by no more is noise


def shapes() -> Iterator[tuple[str, int, int, bool, str]]:
    """(name, outputs, inner, whether to time it behind a norm too, Job's pair or "") of Table I's GeMMs."""
    for model, size in HIDDEN.items():
        yield f"{model} qkv", 3 * size, size, False, ""
        yield f"{model} out", size, size, False, ""
        yield f"{model} up", 4 * size, size, True, ""
        yield f"{model} down", size, 4 * size, False, ""
        yield f"{model} head", HEADS[model], size, False, ""
    for model in PARALLEL:  # whose regions 3 and 4 are one launch each
        yield f"{model} qkv, up", 7 * HIDDEN[model], HIDDEN[model], False, "rows"
        yield f"{model} out, down", HIDDEN[model], 5 * HIDDEN[model], False, "inner"


def candidates(dtype: str, tokens: int, norm: bool) -> list[Any]:
    """The plans to try. With a norm, few large blocks that make it once (`blocks` on a multiprocessor), too."""
    from l1_kernels.sbi_gemm.tensor import Tensor
    from l1_kernels.sbi_gemm.wide import Wide

    columns = 2 if tokens > 8 else 1
    plans: list[Any] = []
    if tokens == 1 and dtype != "int8":
        plans += [Wide(*numbers) for numbers in (WIDE_NORM if norm else WIDE)]
    for t, s, g, u, blocks in TENSOR_INT8 if dtype == "int8" else TENSOR:
        few = tokens == 1 and dtype != "int8" and s < 8  # where Wide is the better one
        if not few and (not norm or blocks or u * s == 8):
            plans.append(Tensor(t, s, g, u, columns, blocks))
    return plans


# rows, splits, groups, unroll, blocks
WIDE = (
    (1, 1, 4, 4, 0), (2, 1, 4, 2, 0), (4, 1, 4, 2, 0), (2, 2, 4, 2, 0), (2, 4, 2, 2, 0), (2, 1, 4, 4, 0), (2, 1, 2, 4, 0), (2, 2, 4, 4, 0),
    (1, 4, 2, 4, 0), (4, 2, 4, 2, 0), (1, 8, 1, 4, 0),
)  # fmt: skip
WIDE_NORM = ((2, 1, 8, 2, 0), (4, 1, 8, 1, 0), (1, 1, 8, 4, 3), (2, 1, 8, 2, 3), (4, 1, 8, 1, 3))
# tiles, splits, groups, unroll, blocks
TENSOR = ((1, 4, 1, 2, 0), (1, 8, 1, 1, 0), (1, 8, 1, 2, 0), (1, 16, 1, 1, 0), (2, 8, 1, 1, 0), (1, 4, 1, 1, 3), (1, 8, 1, 1, 2), (1, 4, 2, 2, 0), (2, 4, 1, 1, 0))
TENSOR_INT8 = ((1, 4, 1, 4, 0), (1, 4, 1, 2, 0), (1, 8, 1, 2, 0), (1, 16, 1, 1, 0), (1, 8, 1, 1, 2), (1, 8, 1, 4, 0), (1, 4, 2, 2, 0), (2, 4, 1, 2, 0), (2, 8, 1, 2, 0), (1, 16, 1, 2, 0), (2, 4, 1, 4, 0), (2, 16, 1, 1, 0))


class Tuner:
    """Times plans on one GPU."""

    def __init__(self, device: Device, dtype: str) -> None:
        from l1_kernels.sbi_gemm.timing import WeightPool

        self.device, self.dtype = device, dtype
        self.pool = WeightPool(device, dtype)
        self.multiprocessors: int = device.regions.multiprocessors  # type: ignore[attr-defined]

    def time(self, plan: Any, tokens: int, outputs: int, inner: int, norm: bool, ahead_bytes: int = 0, pair: str = "") -> float:
        """Milliseconds of one launch: norm (or 16-bit x) + GeMM + bias. pair: of Job, a layer's whose attention and feed-forward stand side by
        side: 3 of 7 parts of the outputs are the first product's, or one of 5 of the inner size."""
        if pair:
            return self._time_pair(plan, tokens, outputs, inner, pair)
        from l1_kernels.fused_regions import ahead_width
        from l1_kernels.sbi_gemm import launch
        from l1_kernels.sbi_gemm.job import Job
        from l1_kernels.sbi_gemm.timing import time_graph

        device: Any = self.device
        xp = device.xp
        job = Job(self.dtype, norm="layernorm" if norm else None, carried=not norm)
        x = xp.random.standard_normal((tokens, inner), dtype=xp.float32)
        if not norm:
            x = x.astype(xp.float16).view(xp.uint16)
        gain, shift, bias = xp.ones(inner, xp.float32), xp.zeros(inner, xp.float32), xp.zeros(outputs, xp.float32)
        y = device.empty((tokens, outputs), np.float32)
        weights = self.pool.matrices(outputs, inner)
        width = ahead_width(weights[0].data, ahead_bytes)
        calls = []
        for i, weight in enumerate(weights):
            operand = launch.Operand(x, weight, bias, y, *((gain, shift, 1e-5) if norm else ()))
            following = weights[(i + 1) % len(weights)].data
            calls.append(partial(launch.run, device.kernels, job, plan, self.multiprocessors, operand, None, following, width))
        return time_graph(device, calls)

    def _time_pair(self, plan: Any, tokens: int, outputs: int, inner: int, pair: str) -> float:
        from l1_kernels.sbi_gemm import launch
        from l1_kernels.sbi_gemm.job import CARRIED, Job
        from l1_kernels.sbi_gemm.timing import time_graph
        from l1_kernels.weight import CARRIER, Weight

        device: Any = self.device
        xp = device.xp
        side = pair == "rows"
        job = Job(self.dtype, carried=True, activation="gelu_new" if side else None, add=not side, carries=side, pair=pair)
        x = xp.random.standard_normal((tokens, inner), dtype=xp.float32).astype(xp.float16).view(xp.uint16)
        calls = []
        for weight in self.pool.matrices(outputs, inner):
            flat, scale = weight.data.reshape(-1), weight.scale
            first = outputs // 7 * 3 * inner if side else inner // 5 * outputs
            sizes = ((outputs // 7 * 3, inner), (outputs // 7 * 4, inner)) if side else ((outputs, inner // 5), (outputs, inner // 5 * 4))
            operands: list[launch.Operand] = []
            for data, (num_out, size) in zip((flat[:first], flat[first:]), sizes, strict=True):
                part = Weight(data.reshape(num_out, size), self.dtype, None if scale is None else scale[:num_out])
                carrier = CARRIER[CARRIED[self.dtype]] if side and operands else np.float32
                operands.append(
                    launch.Operand(xp.ascontiguousarray(x[:, :size]), part, xp.zeros(num_out, xp.float32), device.zeros((tokens, num_out), carrier))
                )
            a, b = operands
            calls.append(partial(launch.run, device.kernels, job, plan, self.multiprocessors, a, b))
        return time_graph(device, calls)

    def best(self, tokens: int, outputs: int, inner: int, norm: bool, pair: str = "") -> tuple[Any, dict[str, float]]:
        """(the best plan, all times in microseconds)."""
        times: dict[str, float] = {}
        plans = candidates(self.dtype, tokens, norm)
        for plan in plans:
            try:
                times[repr(plan)] = 1e3 * self.time(plan, tokens, outputs, inner, norm, pair=pair)
            except Exception as error:  # a plan that this GPU has no room for
                print(f"{plan}: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
        least = min(times.values())
        return next(plan for plan in plans if times.get(repr(plan), np.inf) <= least * (1 + SLACK)), times


def tune(device: Device, dtypes: tuple[str, ...], tokens: tuple[int, ...], norms: tuple[bool, ...] = (False, True)) -> dict[str, Any]:
    rows = []
    for dtype in dtypes:
        tuner = Tuner(device, dtype)
        for count in tokens:
            for name, outputs, inner, behind_norm, pair in shapes():
                for norm in norms:
                    if norm and not behind_norm:
                        continue
                    plan, times = tuner.best(count, outputs, inner, norm, pair)
                    microseconds = times[repr(plan)]
                    rate = outputs * inner * tuner.pool.itemsize / microseconds / 1e3
                    print(f"{dtype} {count:3} {name:20} {'norm' if norm else '':5} {microseconds:7.1f} us {rate:5.0f} GB/s {plan}", flush=True)
                    rows.append(
                        {
                            "dtype": dtype, "tokens": count, "outputs": outputs, "inner": inner, "norm": norm,
                            "rung": type(plan).__name__.lower(), "parameters": asdict(plan), "microseconds": round(microseconds, 2),
                            "tried": {key: round(value, 2) for key, value in times.items()},
                        }
                    )  # fmt: skip
        del tuner
    return {"gpu": device.description, "rows": rows}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="default: tuned/<GPU's name>.json of this package")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="repeatable; default all")
    parser.add_argument("--tokens", action="append", type=int, choices=TOKENS, help="repeatable; default all")
    parser.add_argument("--norm", action="append", choices=("without", "with"), help="GeMMs without or with a norm as prologue; default both")
    parser.add_argument("--keep-times", action="store_true", help="save every candidate's time, not only the best one's")
    given = parser.parse_args(arguments)
    prepare("cuda")
    try:
        device = open_device("cuda")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from l1_kernels.sbi_gemm.plans import file_of

    start = time.perf_counter()
    norms = tuple(choice == "with" for choice in given.norm or ("without", "with"))
    result = tune(device, tuple(given.dtype or DTYPES), tuple(given.tokens or TOKENS), norms)
    if not given.keep_times:
        for row in result["rows"]:
            del row["tried"]
    path = given.out or file_of(device.description)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{path}: {len(result['rows'])} shapes in {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
