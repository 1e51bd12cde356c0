"""The generation loop: prompts in, new tokens and text out, any number of sequences side by side.

A step is one forward pass over a packed batch (no padding): whole prompts of sequences that begin, one token of each
that goes on. When a sequence ends, its cache row is given to the next prompt, which joins the others' next step.

    waiting prompts -> free rows -> forward -> logits [n, V] -> a token each -> text, or the end of the sequence
                           ^                                                            |
                           +------------------------------------------------------------+

With a `Decoder` (models/decode_graph.py) the steps in which no prompt begins are replays of a graph, each launched before
the tokens of the one before are read. An end is then noticed a step late, and what that step computed for the sequence dropped.

Rank 0 of the tensor-parallel group chooses the tokens and tells the others; all of them then take the same decisions.
(In a graph each rank chooses, from the same bits.)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from l1_kernels.errors import UserError
from layers.batch import Batch
from layers.config import ModelConfig
from models.groups import Groups, OneGroup
from models.sampling import Sampling, next_token, not_numbers
from models.stream import TextStream

if TYPE_CHECKING:
    from models.decode_graph import Decoder
    from models.tokenizer import Tokenizer


class Model(Protocol):
    """What generation asks of `models.runner.Runner`."""

    config: ModelConfig
    device: Any
    collective: Any

    def new_cache(self, num_rows: int, context: int) -> Any: ...

    def forward(self, batch: Batch, cache: Any) -> Any: ...

    def first_not_finite(self, batch: Batch, cache: Any) -> str: ...


AHEAD = 2  # replays between the device and the host: one runs while the other's tokens are read


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What `run` is told, beside the prompts. eos_ids: the config's and the tokenizer's, () to go on past them."""

    max_new_tokens: int = 128
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    batch_size: int = 8
    check_nan: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"--max-new-tokens must be at least 1, got {self.max_new_tokens}")
        if self.batch_size < 1:
            raise UserError(f"--batch-size must be at least 1, got {self.batch_size}")


@dataclass(slots=True)
class Result:
    """One prompt's outcome.

    token_ids      the new tokens, the one that ended the sequence too
    text           theirs, without an end token's and cut before a stop string; "" without a tokenizer
    finish_reason  "length" | "eos" | "stop"
    token_times    when each token was there, in seconds from the start of `generate`
    """

    index: int
    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    token_times: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Running:
    """A prompt that has a row of the cache."""

    result: Result
    stream: TextStream
    row: int

    @property
    def length(self) -> int:
        return len(self.result.prompt_ids) + len(self.result.token_ids)

    def take(self, token: int, now: float, on_text: Callable[[int, str], None] | None) -> None:
        """One new token, at `now`; finish_reason is set when it was the last."""
        result, stream = self.result, self.stream
        result.token_ids.append(token)
        result.token_times.append(now)
        text = stream.push(token)
        if text and on_text is not None:
            on_text(result.index, text)
        if stream.finish_reason is not None:
            result.text, result.finish_reason = stream.text, stream.finish_reason


def context_limit(config: ModelConfig) -> int:
    """The most tokens that a sequence may have. Dynamic rotary scaling is made to go past the trained positions."""
    if config.rope is not None and config.rope.kind == "dynamic":
        return int(config.max_positions * config.rope.factor)
    return config.max_positions


def check_prompts(config: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int, names: Sequence[str] = ()) -> None:
    """Raises UserError for a prompt that this model cannot continue by so many tokens. names: what to call each one."""
    limit = context_limit(config)
    for index, ids in enumerate(prompts):
        name = names[index] if names else f"prompt {index + 1}"
        if len(ids) == 0:
            raise UserError(f"{name}: is empty; give at least one token")
        outside = [i for i in ids if not 0 <= i < config.vocab_size]
        if outside:
            raise UserError(f"{name}: token id {outside[0]} is outside the vocabulary of {config.vocab_size}")
        if len(ids) > limit:
            raise UserError(f"{name}: {len(ids)} tokens are more than the model's {limit} positions; shorten it")
        if len(ids) == limit and max_new_tokens:
            raise UserError(f"{name}: {len(ids)} tokens fill the model's {limit} positions, which leaves none for new ones; shorten it")
        if len(ids) + max_new_tokens > limit:
            raise UserError(
                f"{name}: {len(ids)} tokens and {max_new_tokens} new ones are more than the model's {limit} positions; "
                f"--max-new-tokens can be {limit - len(ids)} at most"
            )


def generate(
    runner: Model, prompts: Sequence[Sequence[int]], options: GenerateOptions, tokenizer: Tokenizer | None = None,
    on_text: Callable[[int, str], None] | None = None, indices: Sequence[int] | None = None, decoder: Decoder | None = None,
    groups: Groups | None = None,
) -> list[Result]:
    """Continue every prompt; results in the prompts' order.

    prompts  lists of ids; `check_prompts` says what they must be
    on_text  called with a prompt's index and the text that is new, as it comes, on every rank
    indices  each prompt's number in the whole command, where this rank sees only a part of them: it names the random
             numbers. Default: 0, 1, 2 ...
    decoder  replays graphs over its own cache (`cache_size` says how large it must be), decode steps always, passes with prompts
             from the second of a size on; None: every step from Python
    groups   the data-parallel groups that this one shares experts with: they call `generate` together, with prompts or without
    """
    groups = groups or OneGroup()
    check_prompts(runner.config, prompts, options.max_new_tokens)
    results = [Result(index, list(ids)) for index, ids in zip(indices or range(len(prompts)), prompts, strict=True)]
    num_rows, context = cache_size(prompts, options)
    cache = None if not prompts else runner.new_cache(num_rows, context) if decoder is None else decoder.cache
    waiting, running, free_rows = deque(results), list[Running](), list(reversed(range(num_rows)))
    start = time.perf_counter()

    while True:
        starting = []
        while waiting and free_rows:
            starting.append(Running(waiting.popleft(), text_stream(options, tokenizer), free_rows.pop()))
        sequences, begins = groups.agree([len(running) + len(starting), bool(starting)])
        if not sequences:
            return results
        if not begins and decoder is not None and decoder.begin(*_last_tokens(running), *_history(running), sequences):
            steps = _replayed_steps(runner, decoder, running, options, groups)
        elif not (running or starting):
            groups.idle()
            continue
        else:
            steps = _one_step(runner, cache, running, starting, options, decoder)
            running = running + starting
        for tokens in steps:
            now = time.perf_counter() - start
            for sequence, token in zip(running, tokens, strict=True):
                if not sequence.result.finish_reason:
                    sequence.take(token, now, on_text)
        free_rows += [sequence.row for sequence in running if sequence.result.finish_reason]
        running = [sequence for sequence in running if not sequence.result.finish_reason]


def cache_size(prompts: Sequence[Sequence[int]], options: GenerateOptions) -> tuple[int, int]:
    """(rows, context) of the cache that `generate` needs: the last new token is never fed back. (0, 0) without prompts."""
    if not prompts:
        return 0, 0
    return min(options.batch_size, len(prompts)), max(map(len, prompts)) + options.max_new_tokens - 1


def _one_step(
    runner: Model, cache: Any, running: list[Running], starting: list[Running], options: GenerateOptions, decoder: Decoder | None
) -> Iterator[list[int]]:
    """A pass from Python, or a replay (models/prompt_graph.py): the next token of all running sequences, then of those that start."""
    for sequence in starting:
        cache.lengths[sequence.row] = 0  # the row's last owner is gone
    batch = _next_batch(running, starting)
    found = runner.forward(batch, cache) if decoder is None else decoder.prompts.forward(batch)
    with runner.collective.watched():
        logits = runner.device.to_host(found)
    yield _choose(runner, logits, running + starting, options, batch, cache)


def _replayed_steps(runner: Model, decoder: Decoder, running: list[Running], options: GenerateOptions, groups: Groups) -> Iterator[list[int]]:
    """Steps of the same sequences until one of them, or of another group's, has ended; the caller takes each step's tokens before the next."""
    results = [sequence.result for sequence in running]

    def goes_on(ahead: int) -> bool:
        """Another step: none has ended, and some sequence may go on so far."""
        ended = any(result.finish_reason for result in results)
        wanted = any(len(result.token_ids) + ahead < options.max_new_tokens for result in results)
        any_ended, any_wanted = groups.agree([ended, wanted])
        return not any_ended and bool(any_wanted)

    if options.check_nan or options.sampling != decoder.sampling:  # chosen on the host
        if not decoder.sampling.greedy:
            raise ValueError("decoder: must choose as the options say, or the likeliest token")
        while goes_on(0):
            decoder.launch()
            if running:
                batch = Batch.step(*_last_tokens(running))
                tokens = _choose(runner, decoder.logits(), running, options, batch, decoder.cache)
                yield tokens
                decoder.force(tokens)
        return
    ahead: deque[int] = deque()
    while True:
        while len(ahead) < AHEAD and goes_on(len(ahead)):
            ahead.append(decoder.launch())
        if not ahead:
            return
        tokens = decoder.read(ahead.popleft())[: len(running)]  # without any, of the slot that stands for them
        for result, token in zip(results, tokens, strict=True):
            if token < 0 and not result.finish_reason:
                raise not_numbers(result.index, len(result.token_ids))
        yield tokens


def text_stream(options: GenerateOptions, tokenizer: Tokenizer | None) -> TextStream:
    token_bytes = None if tokenizer is None else tokenizer.token_bytes
    return TextStream(token_bytes, options.stop, options.eos_ids, options.stop_ids, options.max_new_tokens)


def _next_batch(running: list[Running], starting: list[Running]) -> Batch:
    """The last token of each running sequence, then the whole prompts of those that start: one output each, in that order."""
    parts = []
    if running:
        parts.append(Batch.step(*_last_tokens(running)))
    if starting:
        parts.append(Batch.prompts([s.result.prompt_ids for s in starting], [s.row for s in starting]))
    return Batch.join(parts) if len(parts) > 1 else parts[0]


def _last_tokens(running: list[Running]) -> tuple[list[int], list[int], list[int]]:
    """(tokens, rows, positions) of the tokens that the next step reads."""
    return [s.result.token_ids[-1] for s in running], [s.row for s in running], [s.length - 1 for s in running]


def _history(running: list[Running]) -> tuple[list[int], list[int], list[list[int]]]:
    """What the choice of the next tokens depends on beside the logits: each prompt's number, its step, and the ids so far."""
    results = [sequence.result for sequence in running]
    return [r.index for r in results], [len(r.token_ids) for r in results], [r.prompt_ids + r.token_ids for r in results]


def _choose(
    runner: Model, logits: np.ndarray, running: list[Running], options: GenerateOptions, batch: Batch, cache: Any
) -> list[int]:
    """logits [n, V], one row a running sequence -> their next tokens, decided on one rank. batch, cache: of the pass."""
    if options.check_nan and not np.isfinite(logits).all():
        first = int(np.flatnonzero(~np.isfinite(logits).all(axis=1))[0])
        broken = running[first].result
        raise UserError(
            f"--check-nan: logits of prompt {broken.index + 1} are not all finite at new token {len(broken.token_ids) + 1}, "
            f"first in {runner.first_not_finite(batch, cache)}: try --dtype fp32 (or bf16)"
        )
    tokens = None
    if runner.collective.rank == 0:
        tokens = []
        for row, sequence in zip(logits, running, strict=True):
            result = sequence.result
            seen = result.prompt_ids + result.token_ids if options.sampling.repetition_penalty != 1.0 else ()
            tokens.append(next_token(row, seen, options.sampling, result.index, len(result.token_ids)))
    return runner.collective.broadcast(tokens)


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one `generate`: the first prompt's first token, a step of one more token, and new tokens a second over all of it."""

    first_token_ms: float
    token_ms: float
    tokens_per_s: float

    @classmethod
    def of(cls, results: Sequence[Result]) -> Timing:
        times = [r.token_times for r in results if r.token_times]
        if not times:
            return cls(0.0, 0.0, 0.0)
        steps = sum(len(t) - 1 for t in times)
        between = sum(t[-1] - t[0] for t in times)
        total = max(t[-1] for t in times)
        return cls(
            first_token_ms=1e3 * min(t[0] for t in times),
            token_ms=1e3 * between / steps if steps else 0.0,
            tokens_per_s=sum(map(len, times)) / total if total else 0.0,
        )
