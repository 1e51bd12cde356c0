"""The gate's softmax and top k of one token by one warp, as a device function of gpu.py.

Lane l holds the logits of experts [l c, (l + 1) c), c = 1, 2, 4, .. with 32 c >= E. Round j takes the largest logit that is left; of equal
ones the lowest lane's, and there the first: the lowest expert's. Nothing is read twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import groups, ptx
from l1_kernels.cuda_api import cuda
from l1_kernels.cuda_api import math as device_math

HELD = 32  # numbers that a lane asks for at a time
ZERO, INFINITY, NAN = np.float32(0), np.float32(np.inf), np.float32(np.nan)
ALL = groups.ALL_LANES
reduce_sum, reduce_max, ballot, lane_index = groups.reduce_sum, groups.reduce_max, groups.ballot, groups.lane


def parts_at_once(pieces: int, num_parts: int) -> int:
    """How many of a token's parts a lane asks for before it adds them: a divisor of them, 16 at most, as far as HELD goes."""
    return math.gcd(num_parts, min(16, HELD // pieces))


@cache
def make_load(pieces: int, at_once: int) -> Callable[..., Any]:
    """load(logits, num_parts, part, pitch, t, num_experts, values): this lane's experts of token t, out of a flat array. at_once: so many
    parts together, of `part` numbers that begin, as their rows of `pitch` numbers do, at multiples of 16 bytes; 0: there is one part."""
    wide, held_size = pieces % 4 == 0, max(1, at_once * pieces)

    @cuda.jit(device=True, forceinline=True)
    def load_part(logits, row, first, last, held, at):
        """From element `row` on; `last` is where the last access of a row may begin."""
        if wide:
            for i in range(0, pieces, 4):
                four = ptx.load16_floats(logits, row + min(first + i, last))
                held[at + i], held[at + i + 1], held[at + i + 2], held[at + i + 3] = four
        else:
            for i in range(pieces):
                held[at + i] = logits[row + min(first + i, last)]

    @cuda.jit(device=True, forceinline=True)
    def load_parts(logits, num_parts, part, pitch, t, num_experts, values):
        held = cuda.local.array(held_size, types.float32)
        row, last = t * pitch, pitch - (4 if wide else 1)
        for i in range(pieces):
            values[i] = ZERO
        for _ in range(num_parts // at_once):
            for u in range(at_once):
                load_part(logits, row + u * part, lane_index() * pieces, last, held, u * pieces)
            for u in range(at_once):
                for i in range(pieces):
                    values[i] += held[u * pieces + i]
            row += at_once * part

    @cuda.jit(device=True, forceinline=True)
    def load(logits, num_parts, part, pitch, t, num_experts, values):
        for i in range(pieces):
            values[i] = logits[t * pitch + min(lane_index() * pieces + i, num_experts - 1)]

    return load_parts if at_once else load


@cache
def make_choose(pieces: int, at_once: int) -> Callable[..., Any]:
    """choose(logits, num_parts, part, pitch, t, num_experts, top_k, over_all, experts, share, places, at): token t's k numbers of experts
    and share, both [T * k]; its experts go to places[at ..] too. over_all: share is a part of the sum over all E, otherwise over the k."""
    load = make_load(pieces, at_once)

    @cuda.jit(device=True, forceinline=True)
    def choose(logits, num_parts, part, pitch, t, num_experts, top_k, over_all, experts, share, places, at):
        values = cuda.local.array(pieces, types.float32)
        lane = lane_index()
        first = lane * pieces
        load(logits, num_parts, part, pitch, t, num_experts, values)
        broken = False
        for i in range(pieces):
            inside = first + i < num_experts
            broken = broken or (inside and values[i] != values[i])
            values[i] = values[i] if inside and values[i] > -INFINITY else -INFINITY
        taken, top, total = np.int32(0), ZERO, ZERO
        my_expert, my_weight = np.int32(0), ZERO  # lane j keeps choice j
        for j in range(top_k):
            best, place = -INFINITY, np.int32(-1)
            for i in range(pieces):
                if (taken >> i) & 1 == 0 and (place < 0 or values[i] > best):
                    best, place = values[i], np.int32(i)
            largest = reduce_max(best)
            winner = cuda.ffs(ballot(place >= 0 and best == largest)) - 1
            expert = cuda.shfl_sync(ALL, np.int32(first + place), winner)
            if lane == winner:
                taken |= np.int32(1) << place
            top = largest if j == 0 else top
            weight = device_math.exp(largest - top)
            total += weight
            if lane == j:
                my_expert, my_weight = expert, weight
        if over_all:
            part = ZERO
            for i in range(pieces):
                part += device_math.exp(values[i] - top) if first + i < num_experts else ZERO
            total = reduce_sum(NAN if broken else part)
        if lane < top_k:
            experts[t * top_k + lane] = my_expert
            share[t * top_k + lane] = my_weight / total
            places[at + lane] = my_expert

    return choose
