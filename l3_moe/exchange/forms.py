"""What flat, hierarchical and PCC share: the same loop of verbs, there and back.

    there   split      the rows that are this rank's to send, sorted                        pairs.py
            hops       all-to-all, one or two, each with its counts first                   hop.py
    (experts)
    back    hops       the same ones backwards: rows come home in the order they left in
            gather     PCC with an all-gather: what the other tensor-parallel ranks sent for
            sum        each token's rows times their shares

What `collect` gives is this rank's part of the sum: the parts of the tensor-parallel ranks, which have the same tokens, add up to the layer's output,
as those of a dense feed-forward do, and the block's all-reduce adds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from l1_kernels.device import Device
from l1_kernels.weight import Array
from l2_dense_parallel.collectives import Counters
from l3_moe.exchange.hop import Hop, Leg
from l3_moe.exchange.pairs import Pairs, destinations, pairs_of
from l3_moe.exchange.placement import Placement


@dataclass(frozen=True, slots=True)
class Trip:
    """Rows that have arrived at their experts.

    rows     float32 [n, D] of the device, expert by expert
    offsets  int64 [E/ep + 1] on the host: this rank's expert e has the rows offsets[e] up to offsets[e + 1]
    """

    rows: Array
    offsets: np.ndarray
    experts: np.ndarray  # [T, k], what the gate chose for this rank's own tokens
    pairs: Pairs
    legs: tuple[Leg, ...]


class Exchange(Protocol):
    """All ranks of a stage call `dispatch`, then `collect`, a sparse layer; a rank without tokens too."""

    placement: Placement

    def dispatch(self, x: Array, experts: np.ndarray) -> Trip:
        """x float32 [T, D] of the device, the same on all tensor-parallel ranks; experts int [T, k] on the host, -1: dropped."""
        ...

    def collect(self, trip: Trip, y: Array, share: Array) -> Array:
        """y float32 [n, D], what the experts made of trip.rows; share float32 [T, k] of the device -> this rank's part [T, D]."""
        ...

    def counters(self) -> dict[str, Counters]:
        """What was sent, by the group it was sent in ("stage", "node", "across", "tp")."""
        ...


class RowExchange:
    """An `Exchange` that sends exactly the rows that are wanted. The forms below differ in their hops, in `mine`, and PCC in `gathered`."""

    def __init__(self, placement: Placement, device: Device, hops: dict[str, Hop]) -> None:
        self.placement = placement
        self.device = device
        self.hops = hops

    def dispatch(self, x: Array, experts: np.ndarray) -> Trip:
        pairs = self.split(experts, self.placement)
        rows, table = x[self.device.to_device(pairs.sources)], pairs.table
        legs = []
        for hop in self.hops.values():
            legs.append(hop.there(rows, table))
            rows, table = legs[-1].rows, legs[-1].table
        return Trip(rows, np.cumsum([0, *table[0]]), experts, pairs, tuple(legs))

    def collect(self, trip: Trip, y: Array, share: Array) -> Array:
        for hop, leg in reversed(list(zip(self.hops.values(), trip.legs, strict=True))):
            y = hop.back(leg, y)
        return self.gathered(trip, y, share)

    def split(self, experts: np.ndarray, of: Placement) -> Pairs:
        """What the rank at `of` sends. A rank can say it for any other that has the same tokens."""
        return pairs_of(experts, of, self.order(of), self.mine(experts, of))

    def order(self, of: Placement) -> list[int]:
        """How the rank at `of` sorts destinations; here the same on all that have the same tokens."""
        return next(iter(self.hops.values())).order

    def mine(self, experts: np.ndarray, of: Placement) -> np.ndarray:
        """bool [T, k * es]: the candidates that the rank at `of` sends. Of each token the tensor-parallel ranks send every candidate once."""
        raise NotImplementedError

    def gathered(self, trip: Trip, y: Array, share: Array) -> Array:
        return self.sum(trip.pairs.places, y, share)

    def sum(self, places: np.ndarray, y: Array, share: Array) -> Array:
        """out[t] = sum over candidates c of share[t, c // es] * y[places[t, c]], in the order of c: a token that has one choice less adds one less."""
        out = self.device.zeros((len(places), y.shape[1]), np.float32)
        for candidate in range(places.shape[1]):
            tokens = np.flatnonzero(places[:, candidate] >= 0)
            if len(tokens):
                at, rows = self.device.to_device(tokens), self.device.to_device(places[tokens, candidate])
                out[at] += share[at, candidate // self.placement.es][:, None] * y[rows]
        return out

    def counters(self) -> dict[str, Counters]:
        return {name: hop.peers.counters for name, hop in self.hops.items()}


def by_tokens(experts: np.ndarray, of: Placement) -> np.ndarray:
    """Each tensor-parallel rank sends for its own part of the tokens."""
    token = np.arange(len(experts))
    first, last = of.tp_rank * len(experts) // of.tp, (of.tp_rank + 1) * len(experts) // of.tp
    return np.repeat((token >= first)[:, None] & (token < last)[:, None], experts.shape[1] * of.es, axis=1)


def by_destination(experts: np.ndarray, of: Placement) -> np.ndarray:
    """Each tensor-parallel rank sends, of all tokens, what goes to ranks with its own tp_rank."""
    return destinations(experts, of) % of.tp == of.tp_rank
