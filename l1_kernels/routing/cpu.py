"""routing/reference.py without sorting: k times the largest of the E logits that is not taken yet. 1-2 us at T = 1 instead
of 40."""

from __future__ import annotations

import numpy as np
from numba import njit


def route(logits: np.ndarray, softmax_first: bool, renormalise: bool, experts: np.ndarray, weights: np.ndarray) -> None:
    """As the reference, into experts and weights [T, k]. Arguments are checked by the caller."""
    _route(logits, softmax_first, renormalise or not softmax_first, experts, weights)


@njit(cache=True)
def _route(logits, over_all, renormalise, experts, weights):
    num_tokens, num_experts = logits.shape
    taken = np.empty(num_experts, np.bool_)
    for t in range(num_tokens):
        taken[:] = False
        for j in range(experts.shape[1]):
            best = -1
            for e in range(num_experts):
                if not taken[e] and (best < 0 or logits[t, e] > logits[t, best]):
                    best = e
            taken[best] = True
            experts[t, j] = best
        # exp(logit - largest), divided by its sum over all experts or over the chosen: softmax over k equals
        # softmax over E renormalised
        largest = logits[t, experts[t, 0]]
        total = np.float32(0)
        if over_all and not renormalise:
            for e in range(num_experts):
                total += np.exp(logits[t, e] - largest)
        else:
            for j in range(experts.shape[1]):
                total += np.exp(logits[t, experts[t, j]] - largest)
        for j in range(experts.shape[1]):
            weights[t, j] = np.exp(logits[t, experts[t, j]] - largest) / total
