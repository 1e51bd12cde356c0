"""experts[t] = the k largest of logits[t], best first;  weights = softmax over all E, or over those k

logits [T, E] -> experts int32 [T, k], weights [T, k]. Reads 4*T*E bytes; T*E exponentials and T*E*k comparisons at most.
Paper, Section V.B: the gating function, kept as a table instead of one-hot masks.
"""

from __future__ import annotations

import numpy as np


def _softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - x.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def route(logits: np.ndarray, top_k: int, softmax_first: bool, renormalise: bool) -> tuple[np.ndarray, np.ndarray]:
    """softmax_first: probabilities over all E, then the top k, divided by their sum if renormalise. Otherwise: softmax
    over the top k logits. Ties go to the lowest expert (a stable sort)."""
    experts = np.argsort(-logits, axis=-1, kind="stable")[:, :top_k]
    scores = _softmax(logits) if softmax_first else logits
    weights = np.take_along_axis(scores, experts, axis=-1)
    if not softmax_first:
        weights = _softmax(weights)
    elif renormalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return experts.astype(np.int32), weights
