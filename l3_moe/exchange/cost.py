"""What an all-to-all costs, by an alpha-beta model: a message takes alpha seconds to begin, and beta seconds a byte (paper, Section V-B).

Let a rank of p have B bytes of rows for all of them, evenly: of T tokens, k choices, es slices, over L tensor-parallel ranks B = T k es / L rows. What is for
itself stays. One way, counts aside:

    form            messages               bytes
    flat            p - 1                  B (p - 1) / p                                 the paper's p C1 + C2
    hierarchical    G - 1 + p/G - 1        B (G - 1) / G + B (p/G - 1) / (p/G)           each row twice; G = `group`
    pcc             p/L - 1                B (p/L - 1) / (p/L)                           L = `group`
    gathering       p/L - 1 + L - 1        ... + B (L - 1)                               the way back with an all-gather: the paper's p/L C1 + C2 + O(L)

`pcc` has no all-gather because the block's all-reduce makes the sum in any case; that is not counted here, nor is the same all-reduce of the other forms.
Counts are a message more for each of the way there, of 4 bytes an expert of the receiver: `counted`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FORMS = ("flat", "hierarchical", "pcc", "gathering")


@dataclass(frozen=True, slots=True)
class Way:
    """What one rank sends one way."""

    messages: int
    bytes: float

    def __add__(self, other: Way) -> Way:
        return Way(self.messages + other.messages, self.bytes + other.bytes)

    def seconds(self, alpha: float, beta: float) -> float:
        return self.messages * alpha + self.bytes * beta


def _among(ranks: int, size: float) -> Way:
    return Way(ranks - 1, size * (ranks - 1) / ranks)


def one_way(form: str, ranks: int, group: int, size: float) -> Way:
    """size: B; group: G of hierarchical, L of pcc and gathering (as its way back)."""
    if form not in FORMS or ranks % group:
        raise ValueError(f"one_way: {form} over {ranks} ranks in groups of {group}; have {', '.join(FORMS)}, and groups that divide")
    if form == "flat":
        return _among(ranks, size)
    across = _among(ranks // group, size)
    if form == "hierarchical":
        return _among(group, size) + across
    return across if form == "pcc" else across + Way(group - 1, size * (group - 1))


def alltoall_seconds(form: str, p: int, L: int, bytes: float, alpha: float, beta: float) -> float:
    """One way: p ranks in groups of L, of which each has so many `bytes` for all of them together."""
    return one_way(form, p, L, bytes).seconds(alpha, beta)


def exchange(form: str, ranks: int, group: int, size: float, experts_a_rank: int = 1, counted: bool = True) -> Way:
    """There and back through a sparse layer. experts_a_rank: E/ep; counted: rows in uneven numbers, their counts first."""
    there = one_way("pcc" if form == "gathering" else form, ranks, group, size)
    counts = 4.0 * experts_a_rank
    first = Way(there.messages, counts * (ranks - 1 if form == "flat" else _count_cells(form, ranks, group))) if counted else Way(0, 0.0)
    return first + there + one_way(form, ranks, group, size)


def _count_cells(form: str, ranks: int, group: int) -> int:
    """Tables that a rank sends, one for each destination: within a group those of all groups' ranks with that place."""
    across = ranks // group - 1
    return (group - 1) * (ranks // group) + across if form == "hierarchical" else across


def fit(ways: Sequence[Way], seconds: Sequence[float]) -> tuple[float, float]:
    """(alpha, beta), both at least 0, that make the relative errors of the model's seconds least."""
    rows = np.array([[way.messages, way.bytes] for way in ways], float) / np.asarray(seconds)[:, None]
    best = min((_solve(rows, kept) for kept in ((0, 1), (0,), (1,))), key=lambda found: (found[1], len(found[0])))
    return float(best[0][0]), float(best[0][1])


def _solve(rows: np.ndarray, kept: tuple[int, ...]) -> tuple[np.ndarray, float]:
    """Least squares of rows @ x = 1 with only these parameters; infinitely bad where one is negative."""
    x = np.zeros(2)
    x[list(kept)] = np.linalg.lstsq(rows[:, list(kept)], np.ones(len(rows)), rcond=None)[0]
    error = float(((rows @ x - 1) ** 2).sum())
    return x, error if x.min() >= 0 else np.inf
