"""An all-to-all whose sizes everybody knows: a slot for each token at each peer. No counts, so nothing that the host would have to wait for.

A step of T tokens on every rank sends each peer T rows: every token, whatever experts it chose, with its choice beside it.

    there   packed float32 [T, D + 2k]  =  x | experts (bits) | share           the same T rows to each peer: an all-gather
    here    the tokens of all peers [n T, D]: this rank's experts on those that chose them, times their shares, summed a token     -> [n T, D]
    back    to each peer the T rows that are its tokens', which it adds up over the peers in their order                            -> [T, D]

For decode: T is a few, and counts would be a trip to the host in every layer. A token that a peer's experts are not wanted for takes its slot all the same:
the numbers are T (D + 2k) a peer there and T D back, at any routing. Counted rows are k es / L a token, whatever the peers: fewer where peers are many.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from l1_kernels.device import Device
from l1_kernels.weight import Array
from l3_moe.exchange.peers import Peers


@dataclass(frozen=True, slots=True)
class Slots:
    """Every peer's tokens, on the device, peer by peer: x float32 [n T, D], experts int32 [n T, k], share float32 [n T, k]."""

    x: Array
    experts: Array
    share: Array


class SlotExchange:
    """`peers` have T tokens each, in every call the same T on all of them."""

    def __init__(self, peers: Peers, device: Device) -> None:
        self.peers = peers
        self.device = device

    def dispatch(self, x: Array, experts: Array, share: Array) -> Slots:
        """x float32 [T, D], experts int32 [T, k], share float32 [T, k], contiguous, of the device."""
        if self.peers.size == 1:
            return Slots(x, experts, share)
        num_tokens, size = x.shape
        top_k = experts.shape[1]
        packed = self.device.empty((num_tokens, size + 2 * top_k), np.float32)
        packed[:, :size] = x
        packed[:, size : size + top_k] = experts.view(np.float32)
        packed[:, size + top_k :] = share
        everyones = self.peers.gather(packed, [num_tokens] * self.peers.size)
        xp = self.device.xp
        x, bits, share = (xp.ascontiguousarray(part) for part in (everyones[:, :size], everyones[:, size : size + top_k], everyones[:, size + top_k :]))
        return Slots(x, bits.view(np.int32), share)

    def collect(self, y: Array) -> Array:
        """y float32 [n T, D], this rank's part for every peer's tokens -> [T, D], all peers' parts for its own."""
        ranks = self.peers.size
        if ranks == 1:
            return y
        counts = [y.shape[0] // ranks] * ranks
        parts = self.peers.swap(y, counts, counts, "rows back").reshape(ranks, counts[0], y.shape[1])
        out = parts[0]
        for part in parts[1:]:
            out += part
        return out
