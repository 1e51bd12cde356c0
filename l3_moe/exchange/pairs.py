"""The rows that a rank sends, and their order. Host arithmetic on the gate's choice, with no communication.

    experts [T, k]  ->  candidates [T, k * es]      a row for each slice of each chosen expert; candidate j * es + s goes to position s * ep + owner
                        of these the ones that are mine to send (`Chooser`: the forms differ in this)
                        sorted by destination, then expert, then token         so a table of counts says all about them:

    table [destinations, E/ep]     rows for each destination's experts
    sources [n]                    the token of each row, so that rows = x[sources]
    places [T, k * es]             the row of each candidate, -1: not mine, so that out[t] = sum of share * y[places[t]]

Paper, Section V-B: the token-to-expert and expert-to-token tables, here over ranks. O(T k es log) and no one-hot anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from l3_moe.exchange.placement import Placement


@dataclass(frozen=True, slots=True)
class Pairs:
    """As above; int64 host arrays."""

    table: np.ndarray
    sources: np.ndarray
    places: np.ndarray


def destinations(experts: np.ndarray, placement: Placement) -> np.ndarray:
    """experts [T, k] -> position [T, k * es] that each candidate goes to."""
    owner = experts[:, :, None] // placement.owned
    return (owner + placement.ep * np.arange(placement.es)).reshape(len(experts), experts.shape[1] * placement.es)


def pairs_of(experts: np.ndarray, placement: Placement, order: Sequence[int], mine: np.ndarray) -> Pairs:
    """experts int [T, k], -1: dropped. order: the destinations that rows are sorted by. mine bool [T, k * es]: the candidates to send; their
    destinations must be in `order`."""
    to = destinations(experts, placement)
    mine = mine & np.repeat(experts >= 0, placement.es, axis=1)
    rank_of = np.full(placement.ranks, -1)
    rank_of[np.asarray(order)] = np.arange(len(order))
    key = rank_of[to] * placement.owned + np.repeat(experts % placement.owned, placement.es, axis=1)
    candidates = np.flatnonzero(mine.ravel())
    keys = key.ravel()[candidates]
    if len(keys) and keys.min() < 0:
        raise ValueError("pairs_of: a candidate's destination is not in `order`")
    candidates = candidates[np.argsort(keys, kind="stable")]
    places = np.full(to.size, -1)
    places[candidates] = np.arange(len(candidates))
    table = np.bincount(keys, minlength=len(order) * placement.owned).reshape(len(order), placement.owned)
    return Pairs(table, candidates // max(1, to.shape[1]), places.reshape(to.shape))
