"""PCC, parallelism-coordinated communication (paper, Section V-B, Figure 5): an all-to-all that knows of tensor parallelism.

The L = tp ranks of a tensor-parallel group hold the same tokens, for the all-reduce before has replicated them. So only ranks with the same tp_rank,
one of each group ("across": p/L of them), need to talk to each other. The paper's four steps, before the experts and after:

    1 transform and split   sort by destination, keep this rank's share
    2 all-to-all            within the tensor-parallel group, and across groups
    3 all-gather            in the tensor-parallel group
    4 transform             into what the next operator reads

Three ways to take them (messages a rank, p ranks of which L are a group; docs/layer3.md has the bytes and a picture with the ranks):

                     there: within  across      back: across  within  gather
    FourStepPCC             L - 1   p/L - 1           p/L - 1   L - 1   L - 1     as if tokens were not replicated: each rank splits off its 1/L
    GatheringPCC            -       p/L - 1           p/L - 1   -       L - 1     1 is a local slice: a rank keeps what goes to its own tp_rank
    PCC                     -       p/L - 1           p/L - 1   -       -         ... and 3 is the sum that the block makes anyway

`PCC` runs. Where there are replicas the local slice costs nothing and saves a message to each rank of the group. The all-gather gives all rows
to all ranks, k of them a token, and then every rank adds up the same; the all-reduce adds while it sends, T rows whatever k is, and the shared expert,
cut over the tensor-parallel ranks, needs it in any case. (Before the experts step 3 has nothing to do in any of them: the slices of one expert lie in different
groups unless a group has all experts, and each gets its rows in step 2.)
"""

from __future__ import annotations

import numpy as np

from l1_kernels.device import Device
from l1_kernels.weight import Array
from l2_dense_parallel.collectives import Counters
from l3_moe.exchange.forms import RowExchange, Trip, by_destination, by_tokens
from l3_moe.exchange.hop import Hop
from l3_moe.exchange.peers import Peers
from l3_moe.exchange.placement import Placement


class PCC(RowExchange):
    """There: step 1 is a local slice, step 2 goes across alone. Back: across, and the block's all-reduce."""

    def __init__(self, placement: Placement, device: Device, across: Peers) -> None:
        """across: the ranks with this one's tp_rank, by dp_rank."""
        super().__init__(placement, device, {"across": Hop(across, device, [[position] for position in placement.across()])})

    def mine(self, experts: np.ndarray, of: Placement) -> np.ndarray:
        return by_destination(experts, of)

    def order(self, of: Placement) -> list[int]:
        return of.across()


class GatheringPCC(PCC):
    """As PCC, but on the way back rows are gathered in the tensor-parallel group, and every rank has the whole sum."""

    def __init__(self, placement: Placement, device: Device, across: Peers, group: Peers) -> None:
        """group: the tensor-parallel ranks."""
        super().__init__(placement, device, across)
        self.group = group

    def gathered(self, trip: Trip, y: Array, share: Array) -> Array:
        """3 all-gather: every rank knows the gate's choice for these tokens, and so what each of the others has. 4 transform: the sum."""
        everyones = [self.split(trip.experts, _at(self.placement, position)) for position in self.placement.tp_group()]
        counts = [len(pairs.sources) for pairs in everyones]
        starts = np.cumsum([0, *counts])
        places = np.full(trip.pairs.places.shape, -1)
        for pairs, first in zip(everyones, starts, strict=False):
            places = np.where(pairs.places >= 0, pairs.places + first, places)
        return _once(self.placement, self.sum(places, self.group.gather(y, counts), share))

    def counters(self) -> dict[str, Counters]:
        return {**super().counters(), "tp": self.group.counters}


class FourStepPCC(RowExchange):
    """All four steps, for tokens that need not be replicated."""

    def __init__(self, placement: Placement, device: Device, group: Peers, across: Peers) -> None:
        """group: the tensor-parallel ranks; across: those with this one's tp_rank, by dp_rank."""
        through = [_at(placement, position).across() for position in placement.tp_group()]
        hops = {"tp": Hop(group, device, through), "across": Hop(across, device, [[position] for position in placement.across()])}
        super().__init__(placement, device, hops)
        self.group = group

    def mine(self, experts: np.ndarray, of: Placement) -> np.ndarray:
        return by_tokens(experts, of)

    def gathered(self, trip: Trip, y: Array, share: Array) -> Array:
        """Each rank adds up its own part of the tokens; the parts are gathered."""
        num_tokens, ranks = len(trip.experts), self.placement.tp
        own = self.sum(trip.pairs.places, y, share)
        starts = [rank * num_tokens // ranks for rank in range(ranks + 1)]
        counts = [last - first for first, last in zip(starts, starts[1:], strict=False)]
        me = self.placement.tp_rank
        return _once(self.placement, self.group.gather(own[starts[me] : starts[me + 1]], counts))


def _at(placement: Placement, position: int) -> Placement:
    return Placement(placement.tp, placement.dp, placement.ep, placement.es, position, placement.num_experts)


def _once(placement: Placement, whole: Array) -> Array:
    """All ranks of the group have all of it, and the block adds up theirs: so it is one rank's part."""
    return whole if placement.tp_rank == 0 else whole * 0
