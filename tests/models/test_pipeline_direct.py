"""Hidden states that stay on devices: right whatever order streams and hosts come to things in, and nobody waits for ever.

The stages are real but for their arithmetic (a number a token, which depends on all tokens of its row before it); the GPUs are tests/l2_dense_parallel/fake_gpu.py's.
"""

from __future__ import annotations

import queue
import threading
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from l2_dense_parallel.board import SLOTS, Board
from l2_dense_parallel.collectives import NoCollective
from l2_dense_parallel.pipeline.nccl_pipe import NCCLPipe
from l2_dense_parallel.pipeline.simulate import Bar
from l2_dense_parallel.pipeline.stages import Stage
from l2_dense_parallel.watchdog import Watchdog
from layers.batch import Batch
from models.generate import GenerateOptions
from models.pipeline import Plan, Room, generate_pipelined
from models.sampling import Sampling
from tests.l2_dense_parallel import fake_gpu
from tests.l2_dense_parallel.fake_gpu import FakeCommunicator, FakeDevice, FakeLink, Machine, Stuck, raw

WIDTH, VOCABULARY = 5, 61


def mixed(state: int, number: int, stage: int) -> int:
    return (state * 31 + number * 7 + stage + 1) % 9973


class Cache:
    """A state a row in place of keys and values; a work that is done twice or out of its turn leaves another one."""

    def __init__(self, rows: int, context: int) -> None:
        self.num_rows, self.context, self.lengths = rows, context, np.zeros(rows, np.int32)
        self.states = np.zeros((rows, context + 1), np.int64)  # after so many tokens

    def begin_pass(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return rows

    def open_layer(self, index: int) -> None:
        return None

    def close_layer(self, index: int) -> None:
        return None


class Runner:
    """A stage of one layer, with kernels that are launched and not done: what models/pipeline.py and stage_graph.py ask of a runner."""

    rotary = None

    def __init__(self, device: FakeDevice, index: int, count: int) -> None:
        self.device, self.stage = device, Stage(range(index, index + 1), index, count)
        self.config = SimpleNamespace(rope=None, max_positions=4096, vocab_size=VOCABULARY, hidden_size=WIDTH)
        self.collective = NoCollective()

    def check(self, batch: Batch, cache: Cache) -> None:
        return None

    def new_cache(self, rows: int, context: int, rows_at_once: int) -> Cache:
        return Cache(rows, context)

    def stage_pass(self, batch: Batch, cache: Any, x: Any) -> Any:
        upload = self.device.to_device
        numbers = upload(batch.tokens), upload(batch.rows), upload(batch.positions), upload(batch.ends)
        return self.layers(SimpleNamespace(tokens=numbers[0], rows=numbers[1], positions=numbers[2], ends=numbers[3]), cache, x)

    def layers(self, step: Any, cache: Any, x: Any) -> Any:
        y = self.device.empty((len(step.tokens), WIDTH), np.float32) if x is None else x
        tokens, rows, positions, to = raw_row(step.tokens), raw_row(step.rows), raw_row(step.positions), raw(y)
        states, stage = getattr(cache, "_cache", cache).states, self.stage.index

        def kernel() -> None:
            for t, (token, row, position) in enumerate(zip(tokens().tolist(), rows().tolist(), positions().tolist(), strict=True)):
                number = int(to[t, 0]) if stage else token
                assert not stage or (to[t] == to[t, 0] + np.arange(WIDTH)).all()
                states[row, position + 1] = mixed(int(states[row, position]), number, stage)
                to[t] = states[row, position + 1] + np.arange(WIDTH)

        cache.open_layer(0)
        self.device.launch(kernel)
        cache.close_layer(0)
        return y

    def head(self, y: Any) -> Any:
        return self._logits(y, list(range(len(y))))

    def logits(self, batch: Batch, y: Any) -> Any:
        return self._logits(y, batch.outputs.tolist())

    def _logits(self, y: Any, outputs: list[int]) -> Any:
        source = raw(y)

        def write(to: np.ndarray) -> None:
            to[...] = 0
            to[np.arange(len(outputs)), source[outputs, 0].astype(int) % VOCABULARY] = 1

        return self.device.made((len(outputs), VOCABULARY), np.float32, write)


def raw_row(numbers: Any) -> Any:
    """A kernel's view of an array, or of a row of one (stage_graph.py slices its int32 [4, n])."""
    if numbers.size * numbers.itemsize == len(numbers.memory):
        found = raw(numbers)
        return lambda: found
    whole = np.frombuffer(numbers.memory, np.int32).reshape(4, -1)
    at = (numbers.__array_interface__["data"][0] - whole.__array_interface__["data"][0]) // (4 * whole.shape[1])
    return lambda: whole[at]


def expected(prompts: list[list[int]], stages: int, new: int, eos: tuple[int, ...]) -> list[list[int]]:
    found = []
    for prompt in prompts:
        states, tokens = [0] * stages, []
        coming = list(prompt)
        while len(tokens) < new:
            for token in coming:
                number = token
                for stage in range(stages):
                    states[stage] = number = mixed(states[stage], number, stage)
            tokens.append(number % VOCABULARY)
            coming = tokens[-1:]
            if tokens[-1] in eos:
                break
        found.append(tokens)
    return found


class Run:
    """One generation over `stages` threads."""

    def __init__(
        self, stages: int, plan: Plan, prompts: list[list[int]], new: int, seed: int, eos: tuple[int, ...] = (), sampling: Sampling | None = None,
        graphs: bool = True, ahead_bytes: int = 4 * WIDTH * 3, batch_size: int = 64, runs: int = 1, break_it: Any = None,
    ) -> None:  # fmt: skip
        queues: dict[Any, queue.Queue] = {(a, b): queue.Queue() for a in range(stages) for b in range(stages)}
        self.results: list[Any] = [None] * stages
        self.bars: list[list[Bar]] = [[] for _ in range(stages)]
        self.faults: list[BaseException] = []
        self.progress: list[float] = [0.0] * stages
        with Machine(seed) as self.machine:
            links = [FakeLink(self.machine, number) for number in range(stages - 1)]

            def host(stage: int) -> None:
                try:
                    device = FakeDevice(self.machine)
                    board = Board(array("d", [0.0] * SLOTS), (stage,), 0, False)
                    watchdog = Watchdog(board, lambda reason: None)
                    pipe = NCCLPipe(
                        FakeCommunicator(self.machine, queues, stage, stages), watchdog, tuple(range(stages)), device,  # type: ignore[arg-type]
                        links[stage - 1] if stage else None, links[stage] if stage < stages - 1 else None, ahead_bytes,
                    )  # fmt: skip
                    if break_it is not None:
                        break_it(pipe)
                    runner: Any = Runner(device, stage, stages)
                    options = GenerateOptions(new, sampling or Sampling(), eos_ids=eos, batch_size=batch_size)
                    room = Room()
                    for _ in range(runs):
                        self.bars[stage].clear()
                        self.results[stage] = generate_pipelined(runner, pipe, prompts, options, plan, bars=self.bars[stage], graphs=graphs, room=room)
                    assert watchdog.progress is not None
                    device.to_host(device.zeros(1))
                    self.progress[stage] = watchdog.progress()
                except BaseException as fault:
                    self.faults.append(fault)
                    self.machine.stuck = True  # the others need not wait for it

            hosts = [threading.Thread(target=host, args=(stage,), daemon=True) for stage in range(stages)]
            for thread in hosts:
                thread.start()
            for thread in hosts:
                thread.join()

    @property
    def tokens(self) -> list[list[int]]:
        if self.faults:
            raise self.faults[0]
        return [result.token_ids for result in self.results[0]]


def ragged(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, rng.integers(1, 7)).tolist() for _ in range(count)]


EARLY = tuple(range(0, VOCABULARY, 9))


@pytest.mark.parametrize("name", ["lockstep", "queued", "hybrid"])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(("count", "eos"), [(1, ()), (2, EARLY), (5, ()), (9, EARLY)])
def test_tokens_are_right_in_every_order(name: str, stages: int, count: int, eos: tuple[int, ...]) -> None:
    """And each link's sends and receives are the same ones, in the same order."""
    prompts = ragged(count, count)
    for seed in range(3):
        # 0: no receive ahead of time; else those of up to three tokens, or all.
        run = Run(stages, Plan(name), prompts, 7, seed, eos, graphs=seed != 1, ahead_bytes=[0, 4 * WIDTH * 3, 4096][seed], batch_size=6)
        assert run.tokens == expected(prompts, stages, 7, eos)
        for link in range(stages - 1):
            assert run.machine.sent[link] == run.machine.received[link] and run.machine.sent[link]
        works = [[bar.work for bar in bars] for bars in run.bars]
        assert all(some == works[0] for some in works)
        assert run.progress == [len(works[0])] * stages  # what the watchdog is told


def test_uneven_micro_batches_and_a_room_that_is_used_again() -> None:
    prompts = ragged(7, 5)
    for seed, plan in enumerate([Plan("hybrid", 5, 3), Plan("hybrid", 1, 4), Plan("queued", 3)]):
        assert Run(3, plan, prompts, 6, seed, EARLY, runs=3).tokens == expected(prompts, 3, 6, EARLY)


def test_sampled_tokens_do_not_depend_on_the_order() -> None:
    sampling = Sampling(temperature=0.01, repetition_penalty=1.0, seed=3)  # so cold that the largest is taken
    prompts = ragged(5, 6)
    assert Run(2, Plan("hybrid"), prompts, 6, 1, sampling=sampling).tokens == expected(prompts, 2, 6, ())


@pytest.mark.parametrize("damage", ["kept", "follow", "read"])
def test_the_fake_finds_what_is_not_ordered(damage: str) -> None:
    """Without any one of the pipe's three precautions some order gives wrong tokens."""

    def break_it(pipe: Any) -> None:
        if damage == "kept":  # what is sent is let go at once

            class Nothing(list):
                def append(self, item: Any) -> None:
                    return None

            pipe._kept = Nothing()
        elif damage == "follow":  # a send does not wait for what makes its array
            pipe._follow = lambda stream: None
        else:  # a buffer is overwritten before it was read
            pipe._receives.wait_event = lambda event: None

    prompts = ragged(8, 7)
    want = expected(prompts, 3, 7, ())
    for seed in range(20):
        run = Run(3, Plan("hybrid"), prompts, 7, seed, ahead_bytes=4096, break_it=break_it)
        assert all(isinstance(fault, Stuck | AssertionError) for fault in run.faults), run.faults  # numbers that make no sense, or others than the right ones
        if run.faults or run.tokens != want:
            return
    raise AssertionError("no order of twenty shows it")


def test_receives_in_another_order_are_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake that cannot see a deadlock proves nothing: a stage that never receives its third."""
    monkeypatch.setattr(fake_gpu, "PATIENCE", 1.0)

    def break_it(pipe: Any) -> None:
        real, calls = pipe.receive_hidden, 0

        def losing(out: Any) -> None:
            nonlocal calls
            calls += 1
            if calls != 3:
                real(out)

        pipe.receive_hidden = losing

    run = Run(2, Plan("queued"), ragged(4, 8), 5, 0, break_it=break_it)
    assert run.faults
