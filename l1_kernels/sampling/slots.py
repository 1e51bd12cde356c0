"""What a decode step that needs no host reads and leaves behind: one slot a sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from l1_kernels import checks
from l1_kernels.checks import FLOAT32, INT32
from l1_kernels.weight import Array


@dataclass(frozen=True, slots=True)
class Slots:
    """int32 [B] each in the device's memory, but `ring`.

    tokens     the token that the step reads; sampling writes the one that it chose
    rows       the sequence's row of the cache; stays
    positions  the token's place; sampling moves it on by one, up to `last`
    ends       positions + 1 (`Kernels.attention`)
    last       the last place that the slot may reach; stays. 0 for a slot that nobody uses: it never leaves its place
    turns      steps since the slots were filled
    ring       [R, B], in memory that the host reads: step `turn` leaves its tokens in row turn % R, or -1 where the
               logits have a NaN, or an infinity as their largest
    """

    tokens: Array
    rows: Array
    positions: Array
    ends: Array
    last: Array
    turns: Array
    ring: Array


def check(logits: Array, slots: Slots) -> None:
    """logits must be float32 [B, V] with V > 0, and the slots theirs."""
    checks.ranked(logits, "logits", FLOAT32, 2)
    if logits.shape[1] == 0:
        checks.reject("logits", "[B, V] with V > 0", checks.describe(logits))
    size = logits.shape[:1]
    for name in ("tokens", "positions", "ends", "last", "turns"):
        checks.array(getattr(slots, name), f"slots.{name}", INT32, size)
    checks.ranked(slots.ring, "slots.ring", INT32, 2)
    if slots.ring.shape[0] == 0 or slots.ring.shape[1:] != size:
        checks.reject("slots.ring", f"[R, {size[0]}] with R > 0", checks.describe(slots.ring))


def advance(slots: Slots, chosen: np.ndarray) -> None:
    """NumPy: the slots after a step that chose `chosen` int32 [B]."""
    slots.ring[slots.turns % slots.ring.shape[0], np.arange(len(chosen))] = chosen
    slots.tokens[...] = chosen
    np.minimum(slots.positions + 1, slots.last, out=slots.positions)
    np.add(slots.positions, 1, out=slots.ends)
    np.add(slots.turns, 1, out=slots.turns)
