"""routing/reference.py in loops: k times the best expert that is not taken yet, then a counting sort of the pairs. T = 1 costs some
microseconds in place of hundreds; otherwise bound by the bytes that dispatch and combine copy."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def choose(logits, over_all, experts, share):
    """Into experts, share [T, k]. over_all: the softmax's sum runs over all E, otherwise over the k."""
    num_tokens, num_experts = logits.shape
    taken = np.empty(num_experts, np.bool_)
    ordered = np.empty(num_experts, np.float32)
    for t in range(num_tokens):
        taken[:] = False
        for e in range(num_experts):
            ordered[e] = -np.inf if np.isnan(logits[t, e]) else logits[t, e]
        for j in range(experts.shape[1]):
            best = -1
            for e in range(num_experts):
                if not taken[e] and (best < 0 or ordered[e] > ordered[best]):
                    best = e
            taken[best] = True
            experts[t, j] = best
            share[t, j] = np.exp(ordered[best] - ordered[experts[t, 0]])
        total = np.float32(0)
        if over_all:
            for e in range(num_experts):
                total += np.exp(logits[t, e] - ordered[experts[t, 0]])
        else:
            for j in range(experts.shape[1]):
                total += share[t, j]
        for j in range(experts.shape[1]):
            share[t, j] /= total


@njit(cache=True)
def sort(experts, capacity, slots, sources, offsets, dropped):
    """experts [T * k], slots [T * k], sources [T * k], offsets [E + 1], dropped [1]."""
    num_pairs, num_experts = experts.shape[0], offsets.shape[0] - 1
    offsets[:] = 0
    dropped[0] = 0
    for pair in range(num_pairs):
        e = experts[pair]
        if 0 <= e < num_experts:
            if offsets[e + 1] < capacity:
                offsets[e + 1] += 1
            else:
                dropped[0] += 1
    for e in range(num_experts):
        offsets[e + 1] += offsets[e]
    next_row = offsets[:-1].copy()
    sources[offsets[num_experts] :] = -1
    for pair in range(num_pairs):
        e = experts[pair]
        slots[pair] = -1
        if 0 <= e < num_experts and next_row[e] < offsets[e + 1]:
            slots[pair] = next_row[e]
            sources[next_row[e]] = pair
            next_row[e] += 1


@njit(cache=True)
def gather(source, sources, top_k, count, rows):
    """rows[:count] = source[sources // k], of numbers of any type."""
    for row in range(count):
        rows[row] = source[sources[row] // top_k]


@njit(cache=True)
def combine(y, slots, share, residual):
    """residual [T, D] += the weighted sum of each token's rows of y."""
    for t in range(slots.shape[0]):
        for j in range(slots.shape[1]):
            row = slots[t, j]
            if row >= 0:
                for d in range(y.shape[1]):
                    residual[t, d] += share[t, j] * y[row, d]
