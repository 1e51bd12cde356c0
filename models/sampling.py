"""From the logits of one position to the next token.

    penalise repeated tokens -> divide by temperature -> keep the top k -> keep the smallest set of mass p -> draw

Everything runs on the host in float64 from float32 logits, one sequence at a time, so a sequence's token does not
depend on what else is in the batch. The one random number of a step comes from a counter-based stream that is
addressed, not advanced: (seed, prompt index, step) name it (Philox4x64, Salmon et al., SC 2011).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from l1_kernels.errors import UserError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen. The defaults are greedy decoding.

    temperature         0: the token with the largest logit, the lowest id where several are
    top_k               keep the k largest logits; 0: all
    top_p               keep the fewest tokens whose probabilities reach p, at least one; 1: all
    repetition_penalty  divides a seen token's logit where positive, multiplies it where negative (arXiv 1909.05858); 1: none
    seed                names the random stream
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        def check(ok: bool, flag: str, rule: str, value: object) -> None:
            if not ok:
                raise UserError(f"{flag} must be {rule}, got {value}")

        check(math.isfinite(self.temperature) and self.temperature >= 0, "--temperature", "0 or a positive number", self.temperature)
        check(self.top_k >= 0, "--top-k", "0 (all) or a positive number", self.top_k)
        check(0 < self.top_p <= 1, "--top-p", "above 0 and at most 1", self.top_p)
        penalty = self.repetition_penalty
        check(math.isfinite(penalty) and penalty > 0, "--repetition-penalty", "a positive number", penalty)
        check(0 <= self.seed < 2**64, "--seed", "between 0 and 2^64 - 1", self.seed)


    @property
    def greedy(self) -> bool:
        """Whether the token is the largest of the logits as they are."""
        return self.temperature == 0.0 and self.repetition_penalty == 1.0


def not_numbers(prompt: int, step: int, what: str = "no numbers") -> UserError:
    """A 16-bit dtype overflowed, or the checkpoint is broken."""
    return UserError(f"the logits of prompt {prompt} became {what} at new token {step}: try --dtype fp32 (or bf16)")


def uniform(seed: int, prompt: int, step: int) -> float:
    """The number in [0, 1) that belongs to step `step` of prompt `prompt` under `seed`."""
    bits = np.random.Philox(key=np.array([seed, prompt], np.uint64), counter=np.array([0, 0, 0, step], np.uint64))
    return float(np.random.Generator(bits).random())


def next_token(logits: np.ndarray, seen: Sequence[int], sampling: Sampling, prompt: int, step: int) -> int:
    """The next token's id.

    logits  float32 [V]
    seen    the ids so far, prompt and generated
    prompt  the prompt's index among all prompts of the command, step the new token's index: they name the random number

    Raises UserError where the logits are not numbers any more (a 16-bit dtype overflowed, or the checkpoint is broken).
    """
    if sampling.repetition_penalty != 1.0 and len(seen):
        logits = penalise(logits, seen, sampling.repetition_penalty)
    best = int(np.argmax(logits))  # the first of equals; a NaN, if there is one
    if not np.isfinite(logits[best]):
        raise not_numbers(prompt, step, str(logits[best]))
    if sampling.temperature == 0.0:
        return best

    kept = top_k(logits, sampling.top_k)
    scaled = (logits[kept].astype(np.float64) - float(logits[best])) / sampling.temperature
    probabilities = np.exp(scaled)
    probabilities /= probabilities.sum()
    if sampling.top_p < 1.0:
        nucleus = top_p(probabilities, sampling.top_p)
        kept, probabilities = kept[nucleus], probabilities[nucleus]
    # The cumulated sum runs in the order of ids, not of probabilities: two nearly equal tokens may change places in an
    # ordering by the last bit of a logit, and with it by the number of ranks; a sum over ids moves by that bit only.
    cumulated = np.cumsum(probabilities)
    drawn = np.searchsorted(cumulated, uniform(sampling.seed, prompt, step) * cumulated[-1], side="right")
    return int(kept[min(drawn, len(kept) - 1)])


def penalise(logits: np.ndarray, seen: Sequence[int], penalty: float) -> np.ndarray:
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
