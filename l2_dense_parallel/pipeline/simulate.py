"""What a schedule would take: its works played through the stages, event by event, with times that are given and not measured.

    an event       a stage is done with a work                     -> its result is on its way, and the stage takes up its next work
                   hidden states, or tokens, have arrived          -> the stage that waited for them goes on
    a work begins  as soon as all that schedule.py lists is there: the stage before, or the tokens, and the stage itself

Each stage sees only its own order and what has arrived, as the ranks do; a schedule that waits for ever is found out. Sending occupies
neither side: it delays who receives. A sequence that has ended leaves its micro-batch, and a micro-batch that is empty is left out. Stage 0
learns that only from its last tokens, but tokens come back in the order of the works, so what it does next waits for later ones anyway.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from l2_dense_parallel.pipeline.schedule import Schedule, Work


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds, or any other unit.

    prompt_fixed, prompt_each   a stage's work of prompts: fixed + each * sequences
    token_fixed, token_each     the same of tokens. Weights are read once a work, which is the fixed part
    send_hidden                 from a stage to the next
    send_tokens                 from the last stage to stage 0; with one stage they are there already
    slowness                    what each stage's works take, as a multiple of the above (the last one has the head); empty: 1 for all
    """

    prompt_fixed: float = 0.0
    prompt_each: float = 0.0
    token_fixed: float = 0.0
    token_each: float = 0.0
    send_hidden: float = 0.0
    send_tokens: float = 0.0
    slowness: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        works = (self.prompt_fixed, self.prompt_each, self.token_fixed, self.token_each)
        if not all(0 <= number < float("inf") for number in (*works, self.send_hidden, self.send_tokens, *self.slowness)):
            raise ValueError("Times: a time is a number, at least 0")

    def seconds(self, stage: int, work: Work, sequences: int) -> float:
        """Of a work with so many sequences."""
        fixed, each = (self.token_fixed, self.token_each) if work.number else (self.prompt_fixed, self.prompt_each)
        return (fixed + each * sequences) * (self.slowness[stage] if self.slowness else 1)


@dataclass(frozen=True, slots=True)
class Bar:
    """A stage's work, as the chart shows it. `sequences`: those of the micro-batch that have not ended."""

    stage: int
    work: Work
    sequences: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Trace:
    """When every stage did every work; it begins at 0. Empty works are not in it."""

    stages: int
    bars: tuple[Bar, ...]  # by start, then stage

    def of(self, stage: int) -> tuple[Bar, ...]:
        """A stage's works in its order."""
        return tuple(bar for bar in self.bars if bar.stage == stage)

    @property
    def total(self) -> float:
        """Until the last stage has made the last token."""
        return max(bar.end for bar in self.bars)

    @property
    def first_token(self) -> float:
        """Until every sequence has its first token: the end of the last prompts on the last stage."""
        return max(bar.end for bar in self.of(self.stages - 1) if bar.work.number == 0)

    def busy(self, stage: int) -> float:
        return sum(bar.seconds for bar in self.of(stage))

    def idle(self, stage: int) -> float:
        """The bubbles: between the stage's first start and its last end."""
        bars = self.of(stage)
        return bars[-1].end - bars[0].start - self.busy(stage)

    def idle_of_run(self, stage: int) -> float:
        """The same over the whole run: what it waits for its first work and after its last one, too."""
        return self.total - self.busy(stage)


def simulate(schedule: Schedule, passes: int, times: Times, ended: Sequence[int] | None = None) -> Trace:
    """Plays `passes` passes. ended[i], at least 1: the passes that sequence i takes part in; without it all take part in all.

    ValueError for lengths or times that do not fit the schedule; RuntimeError for a schedule that waits for ever.
    """
    sequences = schedule.prompt_parts[-1].stop
    if passes < 1:
        raise ValueError(f"simulate: {passes} passes")
    if ended is not None and (len(ended) != sequences or min(ended) < 1):
        raise ValueError(f"simulate: a length of at least 1 for each of {sequences} sequences, not {list(ended)}")
    if times.slowness and len(times.slowness) != schedule.stages:
        raise ValueError(f"simulate: {len(times.slowness)} values of slowness for {schedule.stages} stages")
    play = _Play(schedule, passes, times, [passes] * sequences if ended is None else ended)
    play.run()
    return Trace(schedule.stages, tuple(sorted(play.bars, key=lambda bar: (bar.start, bar.stage))))


class _Play:
    """The state of a simulation: where each stage is in its order, whether it is at work, and what has arrived there."""

    def __init__(self, schedule: Schedule, passes: int, times: Times, ended: Sequence[int]) -> None:
        self.schedule, self.times = schedule, times
        living = {work: sum(work.number < ended[i] for i in schedule.sequences(work)) for work in schedule.works(passes)}
        self.living = {work: sequences for work, sequences in living.items() if sequences}
        self.order = list(self.living)
        self.place = [0] * schedule.stages
        self.at_work = [False] * schedule.stages
        self.arrived: list[set[Work]] = [set() for _ in range(schedule.stages)]  # hidden states; at stage 0 tokens
        self.bars: list[Bar] = []
        self.events: list[tuple[float, int, int, Work | None]] = []  # time, a number for ties, stage, what arrives there (None: it is free)
        self.ties = count()

    def run(self) -> None:
        for stage in range(self.schedule.stages):
            self.begin_next(stage, 0.0)
        while self.events:
            now, _, stage, arrived = heapq.heappop(self.events)
            if arrived is None:
                self.at_work[stage] = False
            else:
                self.arrived[stage].add(arrived)
            self.begin_next(stage, now)
        waiting = [(stage, self.order[place]) for stage, place in enumerate(self.place) if place < len(self.order)]
        if waiting:
            raise RuntimeError("simulate: " + ", ".join(f"stage {stage} waits for ever before {work}" for stage, work in waiting))

    def begin_next(self, stage: int, now: float) -> None:
        if self.at_work[stage] or self.place[stage] == len(self.order):
            return
        work = self.order[self.place[stage]]
        if not self.needs(stage, work) <= self.arrived[stage]:
            return
        self.place[stage] += 1
        self.at_work[stage] = True
        sequences = self.living[work]
        end = now + self.times.seconds(stage, work, sequences)
        self.bars.append(Bar(stage, work, sequences, now, end))
        self.event(end, stage, None)
        if stage < self.schedule.stages - 1:
            self.event(end + self.times.send_hidden, stage + 1, work)
        else:
            self.event(end + (self.times.send_tokens if stage else 0), 0, work)

    def needs(self, stage: int, work: Work) -> set[Work]:
        """What must have arrived."""
        return {work} if stage else {before for before in self.schedule.tokens_from(work) if before in self.living}

    def event(self, time: float, stage: int, arrived: Work | None) -> None:
        heapq.heappush(self.events, (time, next(self.ties), stage, arrived))
