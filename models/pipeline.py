"""Generation by a pipeline of stages (paper, Section IV-B): every stage works its schedule off, and waits only for what a work needs.

    stage 0      knows the tokens: it says which sequences of a work still run, and makes their hidden states
    others       are told which, take the hidden states, and pass theirs on
    last stage   chooses a token for each, and sends them back to stage 0

Prompts are taken `batch_size` at a time. A work whose sequences have all ended is left out.
Over a pipe that is `direct` (GPUs with a link of their own) hidden states stay on the devices and the host only enqueues: it takes the next work up while
the device is at one, and the last stage sends tokens back as they are done. Over any other pipe a work is done when the next one begins.
`PipelinedModel` is the other way to run stages: one pass at a time, for whatever asks a model for logits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from l1_kernels.device import Device
from l1_kernels.errors import UserError
from l1_kernels.weight import Array
from l2_dense_parallel.pipeline.pipe import Pipe, passed
from l2_dense_parallel.pipeline.schedule import Schedule, Work, make_schedule
from l2_dense_parallel.pipeline.simulate import Bar, Trace
from layers.batch import Batch
from layers.protocols import Cache
from models.generate import GenerateOptions, Result, Running, cache_size, check_prompts, text_stream
from models.marking import MarkingCache
from models.runner import Runner
from models.sampling import next_token, not_numbers
from models.stage_graph import StageGraphs
from models.tokenizer import Tokenizer

OnText = Callable[[int, str], None]
ROUND = 64  # tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """--schedule, --prompt-micro-batches, --token-micro-batches."""

    schedule: str = "hybrid"
    prompt_micro_batches: int | None = None
    token_micro_batches: int | None = None

    def of(self, stages: int, sequences: int) -> Schedule:
        return make_schedule(self.schedule, stages, sequences, self.prompt_micro_batches, self.token_micro_batches)


class Room:
    """A stage's cache and its graphs, kept from one run to the next, which then neither allocates nor records what it has."""

    def __init__(self) -> None:
        self.cache: Cache | None = None
        self.graphs: StageGraphs | None = None
        self._made: Any = None

    def make(self, stage: _Stage, rows: int, context: int, rows_at_once: int, graphs: bool) -> None:
        if graphs:  # a few tokens more or less are no reason to record anew
            context = -(-context // ROUND) * ROUND
        wanted = (stage.runner, rows, context, rows_at_once, graphs)
        if wanted == self._made:
            if self.cache is not None:
                self.cache.lengths[:] = 0
            return
        self.cache = self.graphs = None  # let go before as much again is taken
        self.cache = stage.runner.new_cache(rows, context, rows_at_once)
        self.graphs = StageGraphs(stage.runner, self.cache, stage.pipe.watched) if graphs else None
        self._made = wanted


def generate_pipelined(
    runner: Runner, pipe: Pipe, prompts: Sequence[Sequence[int]], options: GenerateOptions, plan: Plan, tokenizer: Tokenizer | None = None,
    on_text: OnText | None = None, indices: Sequence[int] | None = None, bars: list[Bar] | None = None,
    graphs: bool = False, room: Room | None = None,
) -> list[Result]:  # fmt: skip
    """As `models.generate.generate`, on all stages together; only stage 0 has the results, the others return []. bars: gets when this stage
    worked, in seconds of time.perf_counter, by the device's clock. graphs: token passes are replays; the runner must have no `step_problem`. room: of an earlier call with this pipe."""
    check_prompts(runner.config, prompts, options.max_new_tokens)
    numbers = list(indices or range(len(prompts)))
    results: list[Result] = []
    room = room or Room()
    clock = None if bars is None else Clock(runner.device, pipe)
    start = time.perf_counter()
    for first in range(0, len(prompts), options.batch_size):
        some = prompts[first : first + options.batch_size]
        schedule = plan.of(pipe.size, len(some))
        stage: _First | _Later
        if pipe.stage == 0:
            stage = _First(runner, pipe, schedule, options, some, numbers[first:], graphs, room, clock, tokenizer, on_text, start)
        else:
            stage = _Later(runner, pipe, schedule, options, some, numbers[first:], graphs, room, clock)
        results += stage.run()
    pipe.flush()
    if clock is not None and bars is not None:
        bars += clock.bars()
    return results


class Clock:
    """When a stage's works began and ended, as its device came to them."""

    def __init__(self, device: Device, pipe: Pipe) -> None:
        self._device, self._pipe = device, pipe
        self._works: list[tuple[Work, int, Any, Any]] = []
        self._zero = self.now()
        with pipe.watched():
            self._zero.synchronize()
        self._seconds = time.perf_counter()

    def now(self) -> Any:
        event = self._device.event()
        event.record()
        return event

    def note(self, work: Work, sequences: int, start: Any) -> None:
        """A work that ends here, in the order of the current stream."""
        self._works.append((work, sequences, start, self.now()))

    def bars(self) -> list[Bar]:
        def seconds(event: Any) -> float:
            return self._seconds + self._device.elapsed_ms(self._zero, event) / 1e3

        return [Bar(self._pipe.stage, work, count, seconds(start), seconds(end)) for work, count, start, end in self._works]


def measured(stages: Sequence[Sequence[Bar]]) -> Trace:
    """The bars of all stages, on one machine's clock, as a trace in ms that begins at 0."""
    begin = min(bar.start for bars in stages for bar in bars)
    bars = (Bar(b.stage, b.work, b.sequences, 1e3 * (b.start - begin), 1e3 * (b.end - begin)) for some in stages for b in some)
    return Trace(len(stages), tuple(sorted(bars, key=lambda bar: (bar.start, bar.stage))))


class _Stage:
    """What all stages know: the prompts, so how long each sequence is at each pass."""

    def __init__(
        self, runner: Runner, pipe: Pipe, schedule: Schedule, options: GenerateOptions, prompts: Sequence[Sequence[int]], graphs: bool, room: Room,
        clock: Clock | None,
    ) -> None:  # fmt: skip
        self.runner, self.pipe, self.schedule, self.options, self.prompts, self.clock = runner, pipe, schedule, options, prompts, clock
        self.last = pipe.stage == pipe.size - 1
        # The largest logit needs no host; all other ways to choose do. Ranks of a tensor-parallel group hold the same bits, so they choose alike.
        self.choose: Callable[[Array], Array] | None = None
        if self.last and pipe.direct and options.sampling.greedy and not options.check_nan:
            self.choose = self._largest
        rows, context = cache_size(prompts, options)
        room.make(self, len(prompts), context, max(len(part) for part in (*schedule.prompt_parts, *schedule.token_parts)), graphs)
        self.cache: Any = room.cache
        self.graphs = room.graphs
        self._start: Any = None

    def _largest(self, logits: Array) -> Array:
        """The first of the largest of each row; -1 where it is no number."""
        xp = self.runner.device.xp
        return xp.where(xp.isfinite(xp.max(logits, axis=1)), xp.argmax(logits, axis=1), -1)

    def compute(self, work: Work, batch: Batch) -> Array:
        """Launches this stage's layers: hidden states, of which the caller is the only user; on the last stage logits, or the tokens that `choose` makes of them."""
        runner, pipe = self.runner, self.pipe
        if self.graphs is not None and work.number > 0:
            y = self.graphs(batch, self._receive)
            if not self.last:  # the graph's own array is overwritten by its next replay, perhaps before it is sent
                return runner.device.xp.array(y) if pipe.direct else y
            return y if self.choose is None else self.choose(y)
        x = None if pipe.stage == 0 else runner.device.empty((len(batch.tokens), runner.config.hidden_size), np.float32)
        self._receive(x)
        cache = self.cache if not pipe.direct else MarkingCache(self.cache, pipe.mark, len(runner.stage.layers))
        y = runner.stage_pass(batch, cache, x)
        if not self.last:
            return y
        y = runner.logits(batch, y)
        return y if self.choose is None else self.choose(y)

    def _receive(self, out: Array | None) -> None:
        """What the work begins with: hidden states, None on the first stage."""
        if out is not None:
            self.pipe.receive_hidden(out)
        if self.clock is not None:
            self._start = self.clock.now()

    def done(self, work: Work, alive: list[int]) -> None:
        if self.clock is not None:
            self.clock.note(work, len(alive), self._start)

    def batch(self, work: Work, alive: Sequence[int], tokens: Sequence[int]) -> Batch:
        """The pass of the sequences `alive`, whose last tokens (of a token pass) are `tokens`."""
        if work.number == 0:
            return Batch.prompts([self.prompts[i] for i in alive], list(alive))
        return Batch.step(tokens, list(alive), [len(self.prompts[i]) + work.number - 1 for i in alive])


class _First(_Stage):
    def __init__(
        self, runner: Runner, pipe: Pipe, schedule: Schedule, options: GenerateOptions, prompts: Sequence[Sequence[int]], indices: Sequence[int],
        graphs: bool, room: Room, clock: Clock | None, tokenizer: Tokenizer | None, on_text: OnText | None, start: float,
    ) -> None:  # fmt: skip
        super().__init__(runner, pipe, schedule, options, prompts, graphs, room, clock)
        self.sequences = [
            Running(Result(index, list(ids)), text_stream(options, tokenizer), row)
            for row, (index, ids) in enumerate(zip(indices, prompts, strict=False))
        ]
        self.on_text, self.start = on_text, start
        self.out: deque[tuple[Work, list[int]]] = deque()  # works whose tokens are on their way

    def run(self) -> list[Result]:
        for work in self.schedule.works(self.options.max_new_tokens):
            needed = set(self.schedule.tokens_from(work))
            while any(sent in needed for sent, _ in self.out):
                self._take()
            alive = [i for i in self.schedule.sequences(work) if not self.sequences[i].result.finish_reason]
            if not alive and not self.out and all(sequence.result.finish_reason for sequence in self.sequences):
                break
            self._send(work, alive)
        while self.out:
            self._take()
        self.pipe.send(1, header(len(self.prompts)))
        return [sequence.result for sequence in self.sequences]

    def _send(self, work: Work, alive: list[int]) -> None:
        if not alive:
            return
        self.pipe.send(1, header(len(self.prompts), work, alive))
        tokens = [self.sequences[i].result.token_ids[-1] for i in alive] if work.number else []
        y = self.compute(work, self.batch(work, alive, tokens))
        if self.pipe.direct:
            self.done(work, alive)
        self.pipe.send_hidden(y)
        self.pipe.mark()
        self.out.append((work, alive))
        if not self.pipe.direct:
            self.done(work, alive)

    def _take(self) -> None:
        """The tokens of the oldest work that is out."""
        _, alive = self.out.popleft()
        tokens = self.pipe.receive(self.pipe.size - 1, np.empty(len(alive), np.int32))
        now = time.perf_counter() - self.start
        for i, token in zip(alive, tokens.tolist(), strict=True):
            self.sequences[i].take(token, now, self.on_text)


@dataclass(slots=True)
class _Coming:
    """What the last stage's device still has to bring to the host: `event` has passed when it is there."""

    alive: list[int]
    found: np.ndarray
    event: Any


class _Later(_Stage):
    """Any stage but the first. It follows what it is told: the works that come, in the schedule's order, less those that have ended."""

    def __init__(
        self, runner: Runner, pipe: Pipe, schedule: Schedule, options: GenerateOptions, prompts: Sequence[Sequence[int]], indices: Sequence[int],
        graphs: bool, room: Room, clock: Clock | None,
    ) -> None:  # fmt: skip
        super().__init__(runner, pipe, schedule, options, prompts, graphs, room, clock)
        self.indices = indices
        self.chosen: list[list[int]] = [[] for _ in prompts]
        self.coming: deque[_Coming] = deque()  # of works that are enqueued, the oldest first

    def run(self) -> list[Result]:
        pipe = self.pipe
        while True:
            self._serve()
            told = pipe.receive(pipe.stage - 1, header(len(self.prompts)))
            if not self.last:
                pipe.send(pipe.stage + 1, told)
            count, number, part, *rest = told.tolist()
            if count == 0:
                while self.coming:
                    self._give_back()
                return []
            work, alive = Work(number, part), rest[:count]
            y = self.compute(work, self.batch(work, alive, [0] * count))
            if not self.last:
                if pipe.direct:
                    self.done(work, alive)
                pipe.send_hidden(y)
                pipe.mark()
            elif not pipe.direct:
                pipe.send(0, np.asarray(self._choose(alive, self.runner.device.to_host(y)), np.int32))
            else:
                self._fetch(alive, y)
                self.done(work, alive)
                pipe.mark()
                # Only where no rank asks another: a tensor-parallel group's ranks may see a header and a token in different orders.
                if self.choose is None and self.runner.collective.size > 1:
                    self._give_back()
            if not pipe.direct:
                self.done(work, alive)

    def _fetch(self, alive: list[int], y: Array) -> None:
        """Enqueues the way of logits [n, V] or tokens [n] to the host."""
        device = self.runner.device
        found = device.pinned(y.shape, y.dtype)
        device.copy(found.reshape(1, len(alive), -1), y.reshape(1, len(alive), -1), device.current_stream())
        event = device.event()
        event.record()
        self.coming.append(_Coming(alive, found, event))

    def _serve(self) -> None:
        """Sends tokens back as they are done, until the next work is announced. Tokens first: stage 0 has nothing to do without them."""
        while self.coming:
            with self.pipe.watched():
                while not (done := passed(self.coming[0].event)) and not self.pipe.ready(self.pipe.stage - 1):
                    time.sleep(0)
            if not done:
                return
            self._give_back()

    def _give_back(self) -> None:
        one = self.coming.popleft()
        with self.pipe.watched():
            one.event.synchronize()
        self.pipe.send(0, np.asarray(self._choose(one.alive, one.found), np.int32))

    def _choose(self, alive: list[int], found: np.ndarray) -> list[int]:
        """On the last stage: the next token of each, from tokens [n] that the device has chosen, or from logits [n, V] on the first tensor-parallel rank."""
        runner, options = self.runner, self.options
        if found.ndim == 1:
            for i, token in zip(alive, found.tolist(), strict=True):
                if token < 0:
                    raise not_numbers(self.indices[i], len(self.chosen[i]))
                self.chosen[i].append(token)
            return found.tolist()
        logits = found
        if options.check_nan and not np.isfinite(logits).all():
            first = alive[int(np.flatnonzero(~np.isfinite(logits).all(axis=1))[0])]
            raise UserError(
                f"--check-nan: logits of prompt {self.indices[first] + 1} are not all finite at new token {len(self.chosen[first]) + 1}: "
                "try --dtype fp32 (or bf16); without --pp the layer is named"
            )
        tokens = None
        if runner.collective.rank == 0:
            tokens = []
            for row, i in zip(logits, alive, strict=True):
                seen = [*self.prompts[i], *self.chosen[i]] if options.sampling.repetition_penalty != 1.0 else ()
                tokens.append(next_token(row, seen, options.sampling, self.indices[i], len(self.chosen[i])))
        tokens = runner.collective.broadcast(tokens)
        for i, token in zip(alive, tokens, strict=True):
            self.chosen[i].append(token)
        return tokens


def header(sequences: int, work: Work | None = None, alive: Sequence[int] = ()) -> np.ndarray:
    """int32 [3 + sequences], what goes before a work: how many sequences, its pass and part, which; without a work 0: there is no more."""
    told = np.zeros(3 + sequences, np.int32)
    if work is not None:
        told[:3] = len(alive), work.number, work.part
        told[3 : 3 + len(alive)] = alive
    return told


class PipelinedModel:
    """A stage's runner that answers like a whole model's: every stage calls `forward` with the same batch, and all get the logits.
    One pass at a time goes through the stages, so all but one of them wait: for scoring and for comparison, not for speed."""

    def __init__(self, runner: Runner, pipe: Pipe) -> None:
        self.runner, self.pipe = runner, pipe
        self.config, self.device, self.collective, self.dtype = runner.config, runner.device, runner.collective, runner.dtype

    def new_cache(self, num_rows: int, context: int) -> Cache:
        return self.runner.new_cache(num_rows, context)

    def forward(self, batch: Batch, cache: Cache) -> Any:
        """Logits float32 [n, V] on the device."""
        pipe, runner = self.pipe, self.runner
        stage, last = pipe.stage, pipe.size - 1
        x = None
        if stage > 0:
            x = runner.device.empty((len(batch.tokens), self.config.hidden_size), np.float32)
            pipe.receive_hidden(x)
        x = runner.stage_pass(batch, cache if not pipe.direct else MarkingCache(cache, pipe.mark, len(runner.stage.layers)), x)
        if stage < last:
            pipe.send_hidden(x)
            pipe.mark()
            logits = pipe.receive(last, np.empty((len(batch.outputs), self.config.vocab_size), np.float32))
        else:
            y = runner.logits(batch, x)
            pipe.mark()
            with pipe.watched():
                logits = np.ascontiguousarray(runner.device.to_host(y))
            for other in range(last):
                pipe.send(other, logits)
        pipe.flush()
        return runner.device.to_device(logits)

    def limit(self, cache: Cache) -> int:
        return self.runner.limit(cache)

    def graph_problem(self) -> str | None:
        return self.runner.graph_problem()

    def first_not_finite(self, batch: Batch, cache: Cache) -> str:
        return "one of the pipeline's stages"
