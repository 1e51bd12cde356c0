"""From how many tokens on is cuBLAS faster than SBI-GeMM? Regions 3 and 4, each way, for 1 to 32 tokens of Table I's shapes.

    python -m benchmarks.switchover [--models gpt2-xl,gpt-j-6b] [--out FILE]

One GPU, fp16. A time is of one CUDA graph of a region over weights rotated through more than 1 GB: with SBI-GeMM one launch, with
cuBLAS everything that library_regions.py puts around the product. Above 16 tokens SBI-GeMM has no kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import circumstances, write
from l1_kernels.device import Device, open_device, prepare

MODELS = ("gpt2-xl", "gpt-j-6b")
TOKENS = (1, 2, 4, 8, 12, 16, 24, 32)


def measure(device: Device, name: str, ways: dict[str, Any], pool: Any, tokens: list[int]) -> list[dict[str, Any]]:
    """linear_add of ffn.down and norm_feed_forward of ffn.up."""
    from l1_kernels.regions import NormArgs
    from l1_kernels.sbi_gemm.job import MAX_TOKENS
    from l1_kernels.sbi_gemm.timing import time_graph
    from models.presets import preset

    config = preset(name)
    wide, narrow = config.ffn_size, config.hidden_size
    xp, rows = device.xp, []
    norm = NormArgs("layernorm", xp.ones(narrow, np.float32), xp.zeros(narrow, np.float32), 1e-5)
    for count in tokens:
        x = xp.random.standard_normal((count, narrow), dtype=np.float32)
        hidden = xp.random.standard_normal((count, wide), dtype=np.float32).astype(np.float16).view(np.uint16)
        for region, (outputs, inner) in {"linear_add": (narrow, wide), "norm_feed_forward": (wide, narrow)}.items():
            weights, bias, total = pool.matrices(outputs, inner), xp.zeros(outputs, np.float32), xp.zeros((count, outputs), np.float32)
            row: dict[str, Any] = {"model": name, "region": region, "tokens": count, "outputs": outputs, "inner": inner}
            for way, regions in ways.items():
                if way == "sbi" and count > MAX_TOKENS:
                    continue
                if region == "linear_add":
                    calls = [partial(regions.linear_add, hidden, weight, bias, total) for weight in weights]
                else:
                    calls = [partial(regions.norm_feed_forward, x, norm, weight, bias, "gelu_new", False) for weight in weights]
                row[f"{way}_us"] = 1e3 * time_graph(device, calls, 5)
            rows.append(row)
            print(line(row), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    cells = "".join(f"{way} {row[f'{way}_us']:7.2f} us  " if f"{way}_us" in row else f"{way}       -     " for way in ("sbi", "cublas"))
    return f"{row['model']:14} {row['region']:18} {row['tokens']:3} tokens  {cells}"


def main(arguments: list[str] | None = None) -> int:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], prog="python -m benchmarks.switchover")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--tokens", type=numbers, default=list(TOKENS))
    parser.add_argument("--out", type=Path, help="where the result file goes; default benchmarks/results/switchover.json")
    given = parser.parse_args(arguments)
    prepare("cuda")
    document = circumstances(("strata-inference", "numpy", "numba", "numba-cuda", "cupy-cuda13x", "cupy-cuda12x"))
    ways = {"sbi": open_device("cuda").regions, "cublas": open_device("cuda", gemm="cublas").regions}
    device = open_device("cuda")
    from l1_kernels.sbi_gemm.timing import WeightPool

    document["machine"]["gpu"] = device.description
    pool = WeightPool(device, "fp16")
    document["rows"] = [row for name in given.models for row in measure(device, name, ways, pool, given.tokens)]
    if given.out:
        given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    else:
        write("switchover", document, [])
    return 0


if __name__ == "__main__":
    sys.exit(main())
