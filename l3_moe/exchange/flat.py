"""Flat all-to-all: every rank sends to every other of the stage. p - 1 messages there and p - 1 back; the baseline (paper, Section V-B).

The tensor-parallel ranks share the tokens out, so that no row is sent twice; more does this form not know of them.
"""

from __future__ import annotations

import numpy as np

from l1_kernels.device import Device
from l3_moe.exchange.forms import RowExchange, by_tokens
from l3_moe.exchange.hop import Hop
from l3_moe.exchange.peers import Peers
from l3_moe.exchange.placement import Placement


class FlatExchange(RowExchange):
    def __init__(self, placement: Placement, device: Device, stage: Peers) -> None:
        """stage: all p ranks, by position."""
        super().__init__(placement, device, {"stage": Hop(stage, device, [[position] for position in range(placement.ranks)])})

    def mine(self, experts: np.ndarray, of: Placement) -> np.ndarray:
        return by_tokens(experts, of)
