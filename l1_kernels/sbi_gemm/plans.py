"""Which rung does a GeMM, and with what parameters: a table that the tuner (tune.py) measured on this GPU, or a default.

A table is a list of rows {"dtype", "tokens" (the bucket: 1, 8, 16), "outputs", "inner", "norm", "rung", "parameters"}, saved as
tuned/<GPU's name>.json. A shape that is not in it takes the row of its dtype and bucket whose shape is nearest, in octaves.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from l1_kernels.sbi_gemm.job import PER_LOAD, Job
from l1_kernels.sbi_gemm.tensor import Tensor
from l1_kernels.sbi_gemm.wide import Wide

Plan = Wide | Tensor
RUNGS: dict[str, type[Plan]] = {"wide": Wide, "tensor": Tensor}
FOLDER = Path(__file__).parent / "tuned"


def bucket(num_tokens: int) -> int:
    return 1 if num_tokens == 1 else 8 if num_tokens <= 8 else 16


def file_of(gpu: str) -> Path:
    return FOLDER / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json")


def load_table(gpu: str) -> list[dict[str, Any]]:
    """The tuner's rows for a GPU of this name; none if it was never tuned."""
    path = file_of(gpu)
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []


def takes(job: Job, num_tokens: int, *sizes: int) -> bool:
    """Whether a kernel of ours does this job with these K: whole 16 bytes, and fp32 for one token only."""
    if any(size < PER_LOAD[job.dtype] or size % PER_LOAD[job.dtype] for size in sizes) or (job.norm and sizes[0] % 8):
        return False
    return 1 <= num_tokens <= (1 if job.dtype == "fp32" else 16)


def choose(table: list[dict[str, Any]], job: Job, num_tokens: int, outputs: int, inner: int) -> Plan:
    """The plan for x [num_tokens, inner] and w [outputs, inner]."""
    tokens = bucket(num_tokens)
    dtype = "fp16" if job.dtype == "bf16" else job.dtype

    def distance(row: dict[str, Any]) -> float:
        octaves = abs(math.log2(row["outputs"] / outputs)) + abs(math.log2(row["inner"] / inner))
        return octaves + (0 if row["norm"] == bool(job.norm) else 3)

    rows = [row for row in table if row["dtype"] == dtype and row["tokens"] == tokens]
    if not rows:
        return fitted(default(job, tokens, outputs, inner), job)
    best = min(rows, key=distance)
    return fitted(RUNGS[best["rung"]](**best["parameters"]), job)


def default(job: Job, tokens: int, outputs: int, inner: int) -> Plan:
    """Without a table: enough warps for some 16 on each of 132 multiprocessors, by splitting K where there are few rows."""
    if job.dtype in ("int8",) or tokens > 1:
        splits = 8 if outputs >= 4096 or inner < 4096 else 16
        return Tensor(1, splits, 1, 2, 2 if tokens > 8 else 1)
    splits = 1
    while splits < 8 and outputs * splits < 8192:
        splits *= 2
    return Wide(2, splits, 8 // splits, 2)


def fitted(plan: Plan, job: Job) -> Plan:
    """A plan that the job can run: gate and up rows in one tile."""
    if isinstance(plan, Wide) and job.gated and plan.rows % 2:
        return replace(plan, rows=plan.rows * 2)
    return plan


__all__ = ["Plan", "bucket", "choose", "default", "file_of", "load_table", "takes"]
