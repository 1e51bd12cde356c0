"""Hierarchical all-to-all: first within a machine of G ranks, then between ranks with the same place in their machines.

    hop 1, within     to local rank i of this machine: all that is for the local ranks i of any machine      G - 1 messages
    hop 2, across     to the same local rank of each machine: what is for it                                p/G - 1

Fewer messages than p - 1, at the price of sending (nearly) every row twice, the first time over the faster links. It knows nothing of replicas: PCC
takes the machine to be the tensor-parallel group, finds every token on all its ranks already, and so needs no hop 1 on the way there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from l1_kernels.device import Device
from l3_moe.exchange.forms import RowExchange, by_tokens
from l3_moe.exchange.hop import Hop
from l3_moe.exchange.peers import Peers
from l3_moe.exchange.placement import Placement


class HierarchicalExchange(RowExchange):
    def __init__(self, placement: Placement, device: Device, node: Peers, across: Peers) -> None:
        """node: positions [n * G, (n + 1) * G); across: those with the same place in their node."""
        size, place = node.size, placement.position % node.size
        through = [list(range(local, placement.ranks, size)) for local in range(size)]
        hops = {"node": Hop(node, device, through), "across": Hop(across, device, [[to] for to in through[place]])}
        super().__init__(placement, device, hops)

    def mine(self, experts: np.ndarray, of: Placement) -> np.ndarray:
        return by_tokens(experts, of)


def node_size(hosts: Sequence[str]) -> int:
    """G for ranks that lie on these machines, by position: a machine's ranks, where all have as many side by side; otherwise, or on one machine,
    the divisor of p nearest its square root, which makes G - 1 + p/G - 1 least."""
    ranks = len(hosts)
    here = hosts.count(hosts[0])
    if 1 < here < ranks and all(len({*hosts[first : first + here]}) == 1 for first in range(0, ranks, here)) and ranks % here == 0:
        return here
    return min((size for size in range(1, ranks + 1) if ranks % size == 0), key=lambda size: (size + ranks // size, size))
