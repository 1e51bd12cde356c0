"""What a decode step that needs no host reads and leaves behind: one slot a sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from l1_kernels import checks
from l1_kernels.checks import FLOAT32, INT32
from l1_kernels.weight import Array

INT8 = np.dtype(np.int8)


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


@dataclass(frozen=True, slots=True)
class Draw:
    """How a step chooses tokens that are not simply the largest (models/sampling.py says what each number means).

    prompts  int32 [B], steps int32 [B]: with `seed` they name each slot's random number; a step counts `steps` on
    seen     int8 [B, V]: 1 where the slot's sequence has the token; read and written only where penalty is not 1
    """

    temperature: float
    top_k: int
    top_p: float
    penalty: float
    seed: int
    prompts: Array
    steps: Array
    seen: Array


def check_draw(logits: Array, draw: Draw) -> None:
    """The draw's arrays must be those of logits float32 [B, V]."""
    checks.array(draw.prompts, "draw.prompts", INT32, logits.shape[:1])
    checks.array(draw.steps, "draw.steps", INT32, logits.shape[:1])
    checks.ranked(draw.seen, "draw.seen", INT8, 2)
    if draw.penalty != 1.0:
        checks.array(draw.seen, "draw.seen", INT8, logits.shape)
    if not (draw.temperature >= 0 and draw.top_k >= 0 and 0 < draw.top_p <= 1 and draw.penalty > 0):
        checks.reject("draw", "temperature >= 0, top_k >= 0, 0 < top_p <= 1, penalty > 0", draw)


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
