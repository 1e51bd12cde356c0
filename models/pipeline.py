"""Generation by a pipeline of stages (paper, Section IV-B): every stage works its schedule off, and waits only for what a work needs.

    stage 0      knows the tokens: it says which sequences of a work still run, and makes their hidden states
    others       are told which, take the hidden states, and pass theirs on
    last stage   chooses a token for each, and sends them back to stage 0

Prompts are taken `batch_size` at a time. A work whose sequences have all ended is left out.
`PipelinedModel` is the other way to run stages: one pass at a time, for whatever asks a model for logits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from l1_kernels.errors import UserError
from l2_dense_parallel.pipeline.pipe import Pipe
from l2_dense_parallel.pipeline.schedule import Schedule, Work, make_schedule
from l2_dense_parallel.pipeline.simulate import Bar, Trace
from layers.batch import Batch
from layers.protocols import Cache
from models.generate import GenerateOptions, Result, Running, cache_size, check_prompts, text_stream
from models.runner import Runner
from models.sampling import next_token
from models.stage_graph import StageGraphs
from models.tokenizer import Tokenizer

OnText = Callable[[int, str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """--schedule, --prompt-micro-batches, --token-micro-batches."""

    schedule: str = "hybrid"
    prompt_micro_batches: int | None = None
    token_micro_batches: int | None = None

    def of(self, stages: int, sequences: int) -> Schedule:
        return make_schedule(self.schedule, stages, sequences, self.prompt_micro_batches, self.token_micro_batches)


def generate_pipelined(
    runner: Runner, pipe: Pipe, prompts: Sequence[Sequence[int]], options: GenerateOptions, plan: Plan, tokenizer: Tokenizer | None = None,
    on_text: OnText | None = None, indices: Sequence[int] | None = None, bars: list[Bar] | None = None,
    graphs: bool = False,
) -> list[Result]:  # fmt: skip
    """As `models.generate.generate`, on all stages together; only stage 0 has the results, the others return []. bars: gets when this stage
    worked, in seconds of time.perf_counter. graphs: token passes are replays; the runner must have no `step_problem`."""
    check_prompts(runner.config, prompts, options.max_new_tokens)
    numbers = list(indices or range(len(prompts)))
    results: list[Result] = []
    start = time.perf_counter()
    for first in range(0, len(prompts), options.batch_size):
        some = prompts[first : first + options.batch_size]
        schedule = plan.of(pipe.size, len(some))
        stage: _First | _Later
        if pipe.stage == 0:
            stage = _First(runner, pipe, schedule, options, some, numbers[first:], graphs, tokenizer, on_text, start)
        else:
            stage = _Later(runner, pipe, schedule, options, some, numbers[first:], graphs)
        results += stage.run()
        if bars is not None:
            bars += stage.bars
    pipe.flush()
    return results


def measured(stages: Sequence[Sequence[Bar]]) -> Trace:
    """The bars of all stages, on one machine's clock, as a trace in ms that begins at 0."""
    begin = min(bar.start for bars in stages for bar in bars)
    bars = (Bar(b.stage, b.work, b.sequences, 1e3 * (b.start - begin), 1e3 * (b.end - begin)) for some in stages for b in some)
    return Trace(len(stages), tuple(sorted(bars, key=lambda bar: (bar.start, bar.stage))))


class _Stage:
    """What all stages know: the prompts, so how long each sequence is at each pass."""

    def __init__(
        self, runner: Runner, pipe: Pipe, schedule: Schedule, options: GenerateOptions, prompts: Sequence[Sequence[int]], graphs: bool
    ) -> None:
        self.runner, self.pipe, self.schedule, self.options, self.prompts = runner, pipe, schedule, options, prompts
        rows, context = cache_size(prompts, options)
        most = max(len(part) for part in (*schedule.prompt_parts, *schedule.token_parts))
        self.cache: Cache = runner.new_cache(len(prompts), context, most)
        self.bars: list[Bar] = []
        self.graphs = StageGraphs(runner, self.cache) if graphs else None

    def work(self, work: Work, batch: Batch, x: np.ndarray | None) -> np.ndarray:
        """Of this stage's layers, on the host: hidden states, or on the last stage logits."""
        runner = self.runner
        if self.graphs is not None and work.number > 0:
            return runner.device.to_host(self.graphs(batch, x))
        y = runner.stage_pass(batch, self.cache, None if x is None else runner.device.to_device(x))
        return runner.device.to_host(runner.logits(batch, y) if self.pipe.stage == self.pipe.size - 1 else y)

    def done(self, work: Work, alive: list[int], start: float) -> None:
        self.bars.append(Bar(self.pipe.stage, work, len(alive), start, time.perf_counter()))

    def batch(self, work: Work, alive: Sequence[int], tokens: Sequence[int]) -> Batch:
        """The pass of the sequences `alive`, whose last tokens (of a token pass) are `tokens`."""
        if work.number == 0:
            return Batch.prompts([self.prompts[i] for i in alive], list(alive))
        return Batch.step(tokens, list(alive), [len(self.prompts[i]) + work.number - 1 for i in alive])


class _First(_Stage):
    def __init__(
        self, runner: Runner, pipe: Pipe, schedule: Schedule, options: GenerateOptions, prompts: Sequence[Sequence[int]], indices: Sequence[int],
        graphs: bool, tokenizer: Tokenizer | None, on_text: OnText | None, start: float,
    ) -> None:  # fmt: skip
        super().__init__(runner, pipe, schedule, options, prompts, graphs)
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
        start = time.perf_counter()
        self.pipe.send(1, header(len(self.prompts), work, alive))
        tokens = [self.sequences[i].result.token_ids[-1] for i in alive] if work.number else []
        self.pipe.send(1, sendable(self.work(work, self.batch(work, alive, tokens), None), getattr(self.runner.device, "name", "") != "cuda"))
        self.out.append((work, alive))
        self.done(work, alive, start)

    def _take(self) -> None:
        """The tokens of the oldest work that is out."""
        _, alive = self.out.popleft()
        tokens = self.pipe.receive(self.pipe.size - 1, np.empty(len(alive), np.int32))
        now = time.perf_counter() - self.start
        for i, token in zip(alive, tokens.tolist(), strict=True):
            self.sequences[i].take(token, now, self.on_text)


class _Later(_Stage):
    """Any stage but the first. It follows what it is told: the works that come, in the schedule's order, less those that have ended."""

    def __init__(
        self, runner: Runner, pipe: Pipe, schedule: Schedule, options: GenerateOptions, prompts: Sequence[Sequence[int]], indices: Sequence[int],
        graphs: bool,
    ) -> None:  # fmt: skip
        super().__init__(runner, pipe, schedule, options, prompts, graphs)
        self.indices = indices
        self.chosen: list[list[int]] = [[] for _ in prompts]

    def run(self) -> list[Result]:
        pipe, runner = self.pipe, self.runner
        while True:
            told = pipe.receive(pipe.stage - 1, header(len(self.prompts)))
            if pipe.stage < pipe.size - 1:
                pipe.send(pipe.stage + 1, told)
            count, number, part, *rest = told.tolist()
            if count == 0:
                return []
            work, alive = Work(number, part), rest[:count]
            batch = self.batch(work, alive, [0] * count)
            x = pipe.receive(pipe.stage - 1, np.empty((len(batch.tokens), runner.config.hidden_size), np.float32))
            start = time.perf_counter()
            y = self.work(work, batch, x)
            if pipe.stage < pipe.size - 1:
                pipe.send(pipe.stage + 1, sendable(y, getattr(runner.device, "name", "") != "cuda"))
            else:
                pipe.send(0, np.asarray(self._choose(alive, y), np.int32))
            self.done(work, alive, start)

    def _choose(self, alive: list[int], logits: np.ndarray) -> list[int]:
        """On the last stage: the next token of each, decided on its first tensor-parallel rank."""
        runner, options = self.runner, self.options
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


def sendable(x: np.ndarray, host: bool) -> np.ndarray:
    """x, or a copy where the next pass may write to it before it is sent: a host device's arrays and their views; a GPU's come as new ones."""
    return np.array(x, np.float32) if host else np.ascontiguousarray(x, np.float32)


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
            x = runner.device.to_device(pipe.receive(stage - 1, np.empty((len(batch.tokens), self.config.hidden_size), np.float32)))
        x = runner.stage_pass(batch, cache, x)
        if stage < last:
            pipe.send(stage + 1, runner.device.to_host(x))
            logits = pipe.receive(last, np.empty((len(batch.outputs), self.config.vocab_size), np.float32))
        else:
            logits = np.ascontiguousarray(runner.device.to_host(runner.logits(batch, x)))
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
