"""From the logits of one position to the next token, in NumPy: what every device must choose.

    penalise repeated tokens -> divide by temperature -> keep the top k -> keep the smallest set of mass p -> draw

float64 from float32 logits, one sequence at a time, so a sequence's token does not depend on what else is in the batch. The
one random number of a step comes from a counter-based stream that is addressed, not advanced: (seed, prompt index, step)
name it (Philox4x64, Salmon et al., SC 2011).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from l1_kernels.sampling.slots import Draw, Slots, advance


def greedy(logits: np.ndarray, slots: Slots) -> None:
    """tokens[b] = the lowest v with logits[b, v] = max over V, or -1 where that is not a number; then each slot moves on."""
    best = np.argmax(logits, axis=1)  # the first of equals; a NaN, if there is one
    sound = np.isfinite(np.take_along_axis(logits, best[:, None], axis=1)[:, 0])
    advance(slots, np.where(sound, best, -1).astype(np.int32))


def sample(logits: np.ndarray, slots: Slots, draw: Draw) -> None:
    """The same by `choose`. The steps count on, and what was chosen has been seen."""
    chosen = np.empty(len(logits), np.int32)
    for b, row in enumerate(logits):
        seen = np.flatnonzero(draw.seen[b]) if draw.penalty != 1.0 else ()
        number = uniform(draw.seed, int(draw.prompts[b]), int(draw.steps[b]))
        chosen[b] = choose(row, seen, draw.temperature, draw.top_k, draw.top_p, draw.penalty, number)
        if draw.penalty != 1.0 and chosen[b] >= 0:
            draw.seen[b, chosen[b]] = 1
    np.add(draw.steps, 1, out=draw.steps)
    advance(slots, chosen)


def choose(
    logits: np.ndarray, seen: Sequence[int] | np.ndarray, temperature: float, k: int, p: float, penalty: float, number: float
) -> int:
    """The next token's id, or -1 where the largest of the logits is no number.

    logits float32 [V]; seen: the ids so far, for the penalty; number: the random one in [0, 1)
    """
    if penalty != 1.0 and len(seen):
        logits = penalise(logits, seen, penalty)
    best = int(np.argmax(logits))
    if not np.isfinite(logits[best]):
        return -1
    if temperature == 0.0:
        return best
    kept = top_k(logits, k)
    scaled = (logits[kept].astype(np.float64) - float(logits[best])) / temperature
    probabilities = np.exp(scaled)
    probabilities /= probabilities.sum()
    if p < 1.0:
        nucleus = top_p(probabilities, p)
        kept, probabilities = kept[nucleus], probabilities[nucleus]
    # The cumulated sum runs in the order of ids, not of probabilities: two nearly equal tokens may change places in an
    # ordering by the last bit of a logit, and with it by the number of ranks; a sum over ids moves by that bit only.
    cumulated = np.cumsum(probabilities)
    drawn = np.searchsorted(cumulated, number * cumulated[-1], side="right")
    return int(kept[min(drawn, len(kept) - 1)])


def uniform(seed: int, prompt: int, step: int) -> float:
    """The number in [0, 1) that belongs to step `step` of prompt `prompt` under `seed`."""
    bits = np.random.Philox(key=np.array([seed, prompt], np.uint64), counter=np.array([0, 0, 0, step], np.uint64))
    return float(np.random.Generator(bits).random())


def penalise(logits: np.ndarray, seen: Sequence[int] | np.ndarray, penalty: float) -> np.ndarray:
    """A copy of logits float32 [V] with every seen token's moved down (penalty > 1)."""
    out = logits.astype(np.float64)
    ids = np.unique(np.asarray(seen, np.int64))
    out[ids] = np.where(out[ids] > 0, out[ids] / penalty, out[ids] * penalty)
    return out.astype(np.float32)


def top_k(logits: np.ndarray, k: int) -> np.ndarray:
    """The ids, ascending, of the k largest of logits [V]; the lowest ids where several are equal. k = 0: all of them."""
    size = len(logits)
    if k == 0 or k >= size:
        return np.arange(size)
    smallest_kept = np.partition(logits, size - k)[size - k]
    above = np.flatnonzero(logits > smallest_kept)
    equal = np.flatnonzero(logits == smallest_kept)[: k - len(above)]
    return np.sort(np.concatenate([above, equal]))


def top_p(probabilities: np.ndarray, p: float) -> np.ndarray:
    """Indices, ascending, of the fewest probabilities [n] that sum to at least p; the lower index where two are equal."""
    order = np.argsort(-probabilities, kind="stable")
    before = np.cumsum(probabilities[order]) - probabilities[order]  # the mass of all better ones
    count = max(1, int(np.count_nonzero(before < p)))
    return np.sort(order[:count])
