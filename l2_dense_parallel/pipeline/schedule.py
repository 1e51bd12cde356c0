"""In which order the stages of a pipeline work: plain data, that the executor runs, the simulator times and the picture draws.

Sequences 0 .. n-1 generate side by side. Pass 0 reads their prompts, pass k their k-th new token; each pass of a sequence gives one
token. A pass is cut into micro-batches, and a `Work` is a micro-batch's way through one stage. All stages do their works in the
same order. A work of stage s waits for

    the stage's work before it                      a stage does one thing at a time
    the same work of stage s - 1                    hidden states
    stage 0, pass k > 0: its sequences' tokens      the last stage's works of pass k - 1 that hold them
    stage 0 of `lockstep`: all of pass k - 1        the pipeline drains

    lockstep   as training does: one number of micro-batches, and a pass begins when the last one has left the pipeline
    queued     a micro-batch re-enters as soon as its tokens are there: the pipeline is empty only at the start and at the end (paper, Figure 2)
    hybrid     more micro-batches for prompts, which are bound by operations and lose little by being small, than for tokens, whose every
               micro-batch reads all weights again: as many as stages (paper, Figure 3)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

NAMES = ("hybrid", "queued", "lockstep")


@dataclass(frozen=True, slots=True)
class Work:
    """Micro-batch `part` of pass `number`."""

    number: int
    part: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """What `stages` stages do with n sequences.

    prompt_parts, token_parts   the sequences of each micro-batch of pass 0, and of each later one: every sequence once
    drains                      whether a pass waits for all of the one before
    """

    name: str
    stages: int
    prompt_parts: tuple[range, ...]
    token_parts: tuple[range, ...]
    drains: bool

    def parts(self, number: int) -> tuple[range, ...]:
        return self.token_parts if number else self.prompt_parts

    def sequences(self, work: Work) -> range:
        return self.parts(work.number)[work.part]

    def works(self, passes: int) -> Iterator[Work]:
        """Every stage's order, for so many passes."""
        for number in range(passes):
            for part in range(len(self.parts(number))):
                yield Work(number, part)

    def tokens_from(self, work: Work) -> tuple[Work, ...]:
        """The works of the pass before whose tokens this one reads, or waits for."""
        if work.number == 0:
            return ()
        before = self.parts(work.number - 1)
        mine = self.sequences(work)
        return tuple(
            Work(work.number - 1, part)
            for part, sequences in enumerate(before)
            if self.drains or (sequences.start < mine.stop and mine.start < sequences.stop)
        )


def divided(count: int, parts: int) -> tuple[range, ...]:
    """`count` sequences in up to `parts` micro-batches, none empty, the first ones larger by one where it does not divide."""
    if count < 1 or parts < 1:
        raise ValueError(f"divided: {count} sequences in {parts} micro-batches")
    parts = min(parts, count)
    bounds = [count * i // parts for i in range(parts + 1)]
    sizes = sorted((b - a for a, b in zip(bounds, bounds[1:], strict=False)), reverse=True)
    starts = [sum(sizes[:i]) for i in range(parts)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def make_schedule(name: str, stages: int, sequences: int, prompt_micro_batches: int | None = None, token_micro_batches: int | None = None) -> Schedule:
    """name: one of NAMES. Micro-batches default to the stages; `hybrid`'s of prompts to twice as many. `lockstep` and `queued` have one number for
    both, so there the two, if both are given, must agree (ValueError)."""
    if name not in NAMES:
        raise ValueError(f"make_schedule: {name!r} is not one of {', '.join(NAMES)}")
    if stages < 1:
        raise ValueError(f"make_schedule: {stages} stages")
    if name == "hybrid":
        prompts = 2 * stages if prompt_micro_batches is None else prompt_micro_batches
        tokens = stages if token_micro_batches is None else token_micro_batches
    else:
        given = {n for n in (prompt_micro_batches, token_micro_batches) if n is not None}
        if len(given) > 1:
            raise ValueError(f"schedule {name}: prompts and tokens have the same micro-batches, not {prompt_micro_batches} and {token_micro_batches}")
        prompts = tokens = given.pop() if given else stages
    return Schedule(name, stages, divided(sequences, prompts), divided(sequences, tokens), drains=name == "lockstep")
