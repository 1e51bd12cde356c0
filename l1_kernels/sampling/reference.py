"""tokens[b] = the lowest v with logits[b, v] = max over V, or -1 where that is not a number;  then each slot moves on

logits float32 [B, V]; slots.py says what moves. Reads 4*B*V bytes; B*V comparisons.
"""

from __future__ import annotations

import numpy as np

from l1_kernels.sampling.slots import Slots, advance


def greedy(logits: np.ndarray, slots: Slots) -> None:
    best = np.argmax(logits, axis=1)  # the first of equals; a NaN, if there is one
    sound = np.isfinite(np.take_along_axis(logits, best[:, None], axis=1)[:, 0])
    advance(slots, np.where(sound, best, -1).astype(np.int32))
