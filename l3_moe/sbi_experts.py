"""Experts by SBI-GeMM (l1_kernels/sbi_gemm), without a trip to the host: up in one launch, down in another, each reading the chosen experts alone.

    pairs    one token: each of its k experts by itself, at the speed of memory
    active   few tokens: each expert that has rows takes them on the tensor cores, 16 at a time, gathered where x lies
    rows     more, dispatched: the same for all E experts; one without rows costs nothing

Bytes at one token of top k: k * (up + down) and nothing of the other E - k experts. Beyond ROWS_AN_EXPERT rows for each expert LoopExperts is quicker: there
the products are bound by the tensor cores (paper, Section V-C and Fig 5).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from l1_kernels import checks
from l1_kernels.checks import INT32
from l1_kernels.fused_regions import FusedRegions, address
from l1_kernels.sbi_gemm import launch, plans
from l1_kernels.sbi_gemm.job import CARRIED, PER_LOAD, Job
from l1_kernels.sbi_gemm.launch import Operand
from l1_kernels.sbi_gemm.tensor import Tensor
from l1_kernels.weight import CARRIER, Array, Weight
from l3_moe.experts import LoopExperts
from l3_moe.gate import Routes
from layers.config import ModelConfig
from layers.weights import Linear, MoEWeights

ROWS_AN_EXPERT = 64


class SbiExperts:
    """An `Experts` (experts.py) on a GPU or the simulator, over fused regions; `many`: what takes over where each expert has many rows."""

    def __init__(self, config: ModelConfig, regions: FusedRegions, many: LoopExperts) -> None:
        self.config = config
        self.kernels = regions.kernels
        self.table = regions.table
        self.many = many
        self._plans: dict[Any, plans.Plan] = {}

    def rows_dtype(self, weights: MoEWeights) -> str:
        return CARRIED[weights.up.weight.dtype]

    def on_device(self, num_pairs: int, weights: MoEWeights) -> bool:
        few = num_pairs <= ROWS_AN_EXPERT * weights.up.weight.shape[0]
        return few and _alike(weights) and weights.up.weight.dtype != "fp32"

    def takes_few(self, num_tokens: int, weights: MoEWeights) -> bool:
        """Whether `pairs` (one token) or `active` does it."""
        return _alike(weights) and (num_tokens == 1 or weights.up.weight.dtype != "fp32")

    def pairs(self, x: Array, weights: MoEWeights, experts: Array) -> Array:
        """x [T, D] in the carrier of rows_dtype, experts int32 [T, k], each one of 0..E-1 -> float32 [T * k, D], row t * k + j what expert experts[t, j]
        makes of x[t]."""
        checks.ranked(experts, "experts", INT32, 2)
        num_tokens, top_k = experts.shape
        self._check(x, weights, num_tokens)
        return self._run("pairs", x, weights, experts.reshape(-1), num_tokens * top_k, num_tokens * top_k, top_k)

    def active(self, x: Array, weights: MoEWeights, tables: Routes) -> Array:
        """x [T, D] in the carrier of rows_dtype -> float32 [T * k, D], row slots[t, j] what the j-th expert of token t makes of it."""
        num_tokens, top_k = tables.slots.shape
        self._check(x, weights, num_tokens)
        return self._run("active", x, weights, tables.routes, tables.count, num_tokens * top_k, top_k)

    def _check(self, x: Array, weights: MoEWeights, num_tokens: int) -> None:
        checks.array(x, "x", np.dtype(CARRIER[self.rows_dtype(weights)]), (num_tokens, weights.up.weight.shape[2]))

    def __call__(self, rows: Array, weights: MoEWeights, offsets: Array) -> Array:
        num_experts = weights.up.weight.shape[0]
        checks.array(offsets, "offsets", INT32, (num_experts + 1,))
        checks.ranked(rows, "rows", np.dtype(CARRIER[self.rows_dtype(weights)]), 2)
        if not self.on_device(rows.shape[0], weights):
            return self.many(rows, weights, offsets)
        return self._run("rows", rows, weights, offsets, num_experts, rows.shape[0], 1)

    def _run(self, kind: str, x: Array, weights: MoEWeights, routes: Array, count: int, num_rows: int, share: int) -> Array:
        """Both launches; kind, routes, share: Job.experts; count: rows of blocks."""
        config, up, down = self.config, weights.up, weights.down
        width = up.weight.shape[1] // (2 if config.gated_ffn else 1)
        dtype = up.weight.dtype
        hidden = self.kernels.new((num_rows, width), CARRIER[CARRIED[dtype]])
        carried = dtype != "fp32"
        job = Job(dtype, carried=carried, activation=config.activation, gated=config.gated_ffn, carries=carried, experts=kind, gathers=kind == "active")
        self._launch(job, x, up, routes, count, share, hidden)
        y = self.kernels.new((num_rows, down.weight.shape[1]), np.float32)
        self._launch(Job(dtype, carried=carried, experts=kind, settled=True), hidden, down, routes, count, 1, y)
        return y

    def _launch(self, job: Job, x: Array, stack: Linear, routes: Array, count: int, share: int, y: Array) -> None:
        _, outputs, inner = stack.weight.shape
        plan = self._plan(job, outputs, inner, count, -(-y.shape[0] // count))
        flat = Weight(stack.weight.data.reshape(-1, inner), job.dtype, None if stack.weight.scale is None else stack.weight.scale.reshape(-1))
        bias = None if stack.bias is None else stack.bias.reshape(-1)
        launch.run_experts(self.kernels, job, plan, routes, count, share, Operand(x, flat, bias, y))

    def _plan(self, job: Job, outputs: int, inner: int, count: int, mean_rows: int) -> plans.Plan:
        """The tuner's plan for one matrix as large as all that are read; 8 or 16 rows at a time."""
        tokens = 1 if job.experts == "pairs" else 8 if mean_rows <= 4 else 16
        key = (job, tokens, outputs, inner, count)
        if key not in self._plans:
            plan = plans.choose(self.table, job, tokens, outputs * count, inner)
            if tokens > 1 and not isinstance(plan, Tensor):
                plan = plans.default(job, tokens, outputs * count, inner)
            self._plans[key] = plan
        return self._plans[key]


def _alike(weights: MoEWeights) -> bool:
    """What the kernels ask of both stacks: one dtype, whole 16 bytes, no rounded activations (W8A8)."""
    stacks = (weights.up.weight, weights.down.weight)
    return all(
        stack.dtype == stacks[0].dtype and stack.act is None and stack.shape[2] % PER_LOAD[stack.dtype] == 0 and address(stack.data) % 16 == 0
        for stack in stacks
    )


