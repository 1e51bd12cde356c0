"""One all-to-all of rows with uneven counts, there and back.

Rows are always sorted by destination, then expert. So no row carries a label: a table of counts [destinations, E/ep] says whose each one is, and
the tables alone travel first, in a message of their own.

    there    send part j to peer j            received: [source][destination][expert]
             regroup                          [destination][expert][source]            sorted again, for the next hop or for the experts
    back     undo the regrouping, send each part to whom it came from: the rows come home in the order in which they left
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from l1_kernels.device import Device
from l1_kernels.weight import Array
from l3_moe.exchange.peers import Peers


@dataclass(frozen=True, slots=True)
class Leg:
    """A hop that has been made. rows [n, D], sorted; table [destinations through this rank, E/ep]."""

    rows: Array
    table: np.ndarray
    sent: list[int]
    received: list[int]
    order: np.ndarray | None  # rows = arrived[order]; None: as they came


class Hop:
    """`through[j]`: the destinations (positions) that peer j's part is for, equally many for every peer."""

    def __init__(self, peers: Peers, device: Device, through: list[list[int]]) -> None:
        if len(through) != peers.size or len({len(part) for part in through}) != 1:
            raise ValueError(f"Hop: destinations for {peers.size} peers, equally many each, are wanted; got {through}")
        self.peers = peers
        self.device = device
        self.through = through

    @property
    def order(self) -> list[int]:
        """All destinations, as rows must be sorted."""
        return [destination for part in self.through for destination in part]

    def there(self, rows: Array, table: np.ndarray) -> Leg:
        """rows [n, D] sorted by `order` and expert; table [len(order), E/ep]."""
        tables = table.reshape(self.peers.size, -1, table.shape[-1])
        arrived = self.peers.swap_counts(tables)
        sent, received = tables.sum((1, 2)).tolist(), arrived.sum((1, 2)).tolist()
        order = regrouping(arrived)
        return Leg(self._taken(self.peers.swap(rows, sent, received, "rows there"), order), arrived.sum(0), sent, received, order)

    def back(self, leg: Leg, rows: Array) -> Array:
        """rows [n, D] as `leg.rows` were -> [m, D] as the rows that `there` was given."""
        undo = None if leg.order is None else np.argsort(leg.order)
        return self.peers.swap(self._taken(rows, undo), leg.received, leg.sent, "rows back")

    def _taken(self, rows: Array, order: np.ndarray | None) -> Array:
        return rows if order is None else rows[self.device.to_device(order)]


def regrouping(arrived: np.ndarray) -> np.ndarray | None:
    """arrived [sources, destinations, E/ep]: counts of rows that lie in this order -> the order that has the source innermost, or None: they lie so."""
    if arrived.shape[0] == 1:
        return None
    sources, destinations, experts = arrived.shape
    block = np.arange(destinations * experts)
    key = np.repeat(np.tile(block, sources), arrived.ravel())
    return np.argsort(key, kind="stable")
