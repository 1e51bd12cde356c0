"""From the logits of one position to the next token.

The arithmetic is in l1_kernels/sampling, for the host and for the GPU; here is what the user chooses by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from l1_kernels.errors import UserError
from l1_kernels.sampling.reference import choose, penalise, top_k, top_p, uniform


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


def not_numbers(prompt: int, step: int) -> UserError:
    """A 16-bit dtype overflowed, or the checkpoint is broken."""
    return UserError(f"the logits of prompt {prompt} became NaN or infinite at new token {step}: try --dtype fp32 (or bf16)")


def next_token(logits: np.ndarray, seen: Sequence[int], sampling: Sampling, prompt: int, step: int) -> int:
    """The next token's id.

    logits  float32 [V]
    seen    the ids so far, prompt and generated
    prompt  the prompt's index among all prompts of the command, step the new token's index: they name the random number

    Raises UserError where the logits are not numbers any more (a 16-bit dtype overflowed, or the checkpoint is broken).
    """
    number = uniform(sampling.seed, prompt, step) if sampling.temperature else 0.0
    token = choose(logits, seen, sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty, number)
    if token < 0:
        raise not_numbers(prompt, step)
    return token


__all__ = ["Sampling", "next_token", "not_numbers", "penalise", "top_k", "top_p", "uniform"]
