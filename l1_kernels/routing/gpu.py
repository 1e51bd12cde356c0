"""experts[t] = the k largest of logits[t], best first;  weights[t, j] = exp(l_j - l_0) / sum over all E, or over those k

logits float32 [T, E], experts int32 [T, k], weights float32 [T, k]: all in global memory. Reads 4*T*E bytes (k + 1 times, out
of L1), writes 8*T*k; T*E*k comparisons: a few microseconds of latency, whatever the sizes. Paper, Section V.B: the
gating function as a table instead of one-hot masks.

    warp t -> token t (a block each); lane l looks at experts l, l + 32, ...
    round j finds the best expert that comes after round j-1's in the order (larger logit, then lower index),
    so nothing is marked as taken and ties go to the lowest expert

Probabilities over all E, divided by the sum of the kept ones, are the softmax over the kept: one sum is enough.
The launcher rejects: logits that are not float32 [T, E], k outside 1..E. T = 0 launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import groups
from l1_kernels.carrier import F32_2D, I32_2D
from l1_kernels.cuda_api import cuda, math

ZERO, INFINITY = np.float32(0), np.float32(np.inf)
reduce_sum, reduce_max, lane_index = groups.reduce_sum, groups.reduce_max, groups.lane


@cache
def make_route() -> Callable[..., Any]:
    """kernel(logits, over_all, experts, weights)[T, 32]; over_all: the sum runs over all E."""

    @cuda.jit
    def route(logits, over_all, experts, weights):
        t = cuda.blockIdx.x
        lane = lane_index()
        num_experts, top_k = logits.shape[1], experts.shape[1]
        top, kept = ZERO, ZERO
        last, last_expert = INFINITY, -1
        for j in range(top_k):
            best, expert = -INFINITY, num_experts
            for e in range(lane, num_experts, 32):
                logit = logits[t, e]
                if not logit > -INFINITY:
                    logit = -INFINITY  # a NaN comes last, so that `expert` is always one of the E
                if logit < last or (logit == last and e > last_expert):
                    if logit > best or expert == num_experts:
                        best, expert = logit, e
            last = reduce_max(best)
            last_expert = -reduce_max(np.int32(-(expert if best == last else num_experts)))  # the lowest
            top = last if j == 0 else top
            weight = math.exp(last - top)
            kept += weight
            if lane == 0:
                experts[t, j] = last_expert
                weights[t, j] = weight
        total = kept
        if over_all:
            part = ZERO
            for e in range(lane, num_experts, 32):
                part += math.exp(logits[t, e] - top)
            total = reduce_sum(part)
        if lane == 0:
            for j in range(top_k):
                weights[t, j] /= total

    return route


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    yield "route", make_route(), (F32_2D, types.boolean, I32_2D, F32_2D)
