"""The top k of one token's logits by one warp, as a device function: k times the best expert that comes after the last one in the order
(larger logit, then lower index), so nothing is marked as taken and ties go to the lowest expert. A NaN comes last."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from l1_kernels import groups
from l1_kernels.cuda_api import cuda, math

ZERO, INFINITY = np.float32(0), np.float32(np.inf)
reduce_sum, reduce_max, lane_index = groups.reduce_sum, groups.reduce_max, groups.lane


@cache
def make_choose() -> Callable[..., Any]:
    """choose(logits, t, num_experts, over_all, experts, share): token t's row of logits [T, E or more], in global or shared memory -> its row of experts int32 [T, k] and share float32
    [T, k], written by lane 0. over_all: shares are parts of the sum over all experts, otherwise over the chosen."""

    @cuda.jit(device=True)
    def choose(logits, t, num_experts, over_all, experts, share):
        lane = lane_index()
        top_k = experts.shape[1]
        top, total = ZERO, ZERO
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
            total += weight
            if lane == 0:
                experts[t, j] = last_expert
                share[t, j] = weight
        if over_all:
            part = ZERO
            for e in range(lane, num_experts, 32):
                part += math.exp(logits[t, e] - top)
            total = reduce_sum(part)
        if lane == 0:
            for j in range(top_k):
                share[t, j] /= total

    return choose
