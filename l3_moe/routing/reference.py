"""experts, share = top k of the gate;   slots, sources, offsets = a stable sort of the pairs by expert;   dispatch, combine: copies by slot

The specification of l3_moe/kernels.py in NumPy, in the precision of its inputs (tests give float64).
"""

from __future__ import annotations

import numpy as np

from l3_moe.tables import RoutingTables


def choose(logits: np.ndarray, top_k: int, softmax_first: bool, renormalise: bool) -> tuple[np.ndarray, np.ndarray]:
    """logits [T, E] -> experts int32 [T, k], share [T, k]. A NaN is ordered as minus infinity; in a sum over all E it stays a NaN."""
    ordered = np.where(np.isnan(logits), -np.inf, logits)
    experts = np.argsort(-ordered, axis=-1, kind="stable")[:, :top_k]
    kept = np.take_along_axis(ordered, experts, axis=-1)
    with np.errstate(invalid="ignore"):  # where all are -inf, shares are NaN
        top = kept[:, :1]
        weights = np.exp(kept - top)
        over_all = softmax_first and not renormalise
        total = (np.exp(logits - top) if over_all else weights).sum(axis=-1, keepdims=True)
        return experts.astype(np.int32), weights / total


def tables_of(experts: np.ndarray, share: np.ndarray, num_experts: int, capacity: int | None = None) -> RoutingTables:
    """The pairs of each expert in token order, as far as the capacity goes, one expert after the other."""
    pairs = experts.reshape(-1)
    wanted = [np.flatnonzero(pairs == e) for e in range(num_experts)]
    kept = [mine[:capacity] for mine in wanted]
    offsets = np.cumsum([0, *map(len, kept)])
    sources, slots = np.full(pairs.size, -1), np.full(pairs.size, -1)
    sources[: offsets[-1]] = np.concatenate(kept)
    slots[sources[: offsets[-1]]] = np.arange(offsets[-1])
    dropped = np.array([sum(map(len, wanted)) - offsets[-1]])
    whole = (slots.reshape(experts.shape), sources, offsets, dropped)
    return RoutingTables(experts, share, *(array.astype(np.int32) for array in whole))


def tables(logits: np.ndarray, top_k: int, softmax_first: bool, renormalise: bool, capacity: int | None = None) -> RoutingTables:
    return tables_of(*choose(logits, top_k, softmax_first, renormalise), logits.shape[1], capacity)


def dispatch(x: np.ndarray, tables: RoutingTables) -> np.ndarray:
    """x [T, D] -> rows [T * k, D]; those past offsets[E] are NaN."""
    sources = tables.sources
    return np.where((sources >= 0)[:, None], x[sources // tables.top_k], np.nan)


def combine(y: np.ndarray, tables: RoutingTables, residual: np.ndarray) -> np.ndarray:
    """residual [T, D] and the weighted sum of each token's rows of y [T * k, D]."""
    out = residual.copy()
    for t, j in np.argwhere(tables.slots >= 0):
        out[t] += tables.share[t, j] * y[tables.slots[t, j]]
    return out
