"""Every wait for the device in the loops goes through the collective, and what the watchdog is told ends a run that stands and no other."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from l1_kernels.device import CpuDevice, HostEvent
from l1_kernels.errors import UserError
from l2_dense_parallel import watchdog as watchdog_module
from l2_dense_parallel.board import PROGRESS, SLOTS, Board
from l2_dense_parallel.collectives import NoCollective
from l2_dense_parallel.device_watch import DeviceWatch
from l2_dense_parallel.slicing import Shard
from l2_dense_parallel.watchdog import Watchdog
from layers.batch import Batch
from models.build import build_runner
from models.decode_graph import Decoder
from models.encode import embed, fill_masks
from models.encode_graph import EncodeGraphs
from models.generate import GenerateOptions, cache_size, generate
from models.loading import open_checkpoint
from models.marking import LONG
from models.runner import Runner
from models.sampling import Sampling
from models.scoring import score, windows

CASES = Path(__file__).parents[1] / "conformance"


class Bracket(NoCollective):
    """Knows whether somebody waits, and what was marked."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.waits = False, 0
        self.marks: list[float] = []

    @contextmanager
    def watched(self) -> Iterator[None]:  # type: ignore[override]
        assert not self.inside
        self.inside = True
        yield
        self.inside = False

    def mark(self, part: float) -> None:
        self.marks.append(part)

    def waited(self, *_: object) -> None:
        assert self.inside, "the host waits for the device, and nobody is told"
        self.waits += 1


class StrictDevice(CpuDevice):
    """Nobody may wait for it but inside of the collective's bracket; nobody may compile or run operations inside."""

    def __init__(self, collective: Bracket) -> None:
        super().__init__()
        self.collective = collective

    def to_host(self, array: Any) -> np.ndarray:
        self.collective.waited()
        return super().to_host(array)

    def event(self) -> Any:
        event = HostEvent()
        event.synchronize = self.collective.waited  # type: ignore[method-assign]
        return event

    def current_stream(self) -> Any:
        return SimpleNamespace(synchronize=self.collective.waited)

    def to_device(self, host: np.ndarray) -> Any:
        assert not self.collective.inside
        return super().to_device(host)


def strict(case: str) -> tuple[Runner, Bracket]:
    collective = Bracket()
    return build_runner(open_checkpoint(CASES / case), StrictDevice(collective), "fp32", Shard(), collective), collective


PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


@pytest.mark.parametrize(("case", "replays"), [("gpt2", False), ("gpt2", True), ("mixtral", False)])
@pytest.mark.parametrize("options", [GenerateOptions(6, batch_size=2), GenerateOptions(6, Sampling(temperature=1.0, seed=3), check_nan=True)], ids=["greedy", "checked"])
def test_generation(case: str, replays: bool, options: GenerateOptions) -> None:
    runner, collective = strict(case)
    decoder = None
    if replays:
        decoder = Decoder(runner, runner.new_cache(*cache_size(PROMPTS, options)), Sampling() if options.check_nan else options.sampling)  # type: ignore[arg-type]
    results = generate(runner, PROMPTS, options, decoder=decoder)
    assert [len(result.token_ids) for result in results] == [6, 6, 6] and collective.waits >= 6
    assert collective.marks == []  # short passes cost nothing


def test_where_numbers_end_is_looked_for() -> None:
    runner, collective = strict("gpt2")
    down = runner.weights.layer(1).ffn_down
    assert down is not None
    down.weight.data[0, 0] = np.nan
    looks: list[bool] = []

    class Finite:
        """Of a device: whoever asks waits."""

        def __init__(self, x: np.ndarray) -> None:
            self.x = x

        def all(self) -> Finite:
            return self

        def __bool__(self) -> bool:
            looks.append(collective.inside)
            return bool(np.isfinite(self.x).all())

    runner.device.xp = SimpleNamespace(isfinite=Finite)
    with pytest.raises(UserError, match="first in layer 1"):
        generate(runner, PROMPTS, GenerateOptions(2, check_nan=True))
    assert looks == [True] * 3


def test_scoring_and_encoding() -> None:
    runner, collective = strict("gpt2")
    score(runner, list(windows(PROMPTS, 4)))
    assert collective.waits == 3
    runner, collective = strict("bert")
    for passes in (None, EncodeGraphs(runner, 2, 4)):
        embed(runner, PROMPTS, 2, passes=passes)
        fill_masks(runner, PROMPTS, 5, 2, 2, passes=passes)
    assert collective.waits >= 2 * 3


def test_a_long_pass_is_marked_layer_by_layer() -> None:
    runner, collective = strict("gpt2")
    count, layers = 20, len(runner.blocks)
    for rows, marked in ((LONG // count, False), (LONG // count + 1, True)):
        batch = Batch.prompts([list(range(1, 1 + count))] * rows, list(range(rows)))
        plain, cache = runner.forward(batch, runner.new_cache(rows, count)), runner.new_cache(rows, count)
        assert collective.marks == []  # there is one rank
        collective.size = 2
        runner._reduce.collective = NoCollective()  # sums of one
        collective.all_gather = lambda x: x  # type: ignore[method-assign]
        np.testing.assert_array_equal(runner.forward(batch, cache), plain)
        assert cache.lengths.tolist() == [count] * rows
        collective.size = 1
        assert collective.marks == ([(layer + 1) / (layers + 1) for layer in range(layers)] if marked else [])


# -- the decode loop of two ranks, as threads -----------------------------------------------------------------------------


class Meeting:
    """Two devices, on which a step is done when both ranks have launched it."""

    def __init__(self) -> None:
        self.launched = [0, 0]
        self.over = threading.Event()

    def event(self, rank: int) -> Any:
        at = 0

        def record(stream: Any = None) -> None:
            nonlocal at
            self.launched[rank] += 1
            at = self.launched[rank]

        def synchronize() -> None:
            while min(self.launched) < at:
                if self.over.wait(0.002):
                    raise InterruptedError

        return SimpleNamespace(record=record, synchronize=synchronize)


class Watched(NoCollective):
    def __init__(self, watch: DeviceWatch) -> None:
        super().__init__()
        self.watch = watch

    def watched(self) -> Any:
        return self.watch

    def mark(self, part: float) -> None:
        self.watch.mark(part)


def decode(monkeypatch: pytest.MonkeyPatch, at_step_20: Callable[[Runner, Meeting], None]) -> tuple[str, list[int]]:
    """What the first rank's watchdog says ("": nothing), and how many tokens each of two ranks came to. at_step_20: what rank 1 does before it goes on."""
    monkeypatch.setattr(watchdog_module, "POLL", 0.02)
    monkeypatch.setattr(watchdog_module, "STANDSTILL", 0.4)
    monkeypatch.setattr(watchdog_module, "SILENCE", 60.0)
    warm, options = build_runner(open_checkpoint(CASES / "gpt2"), CpuDevice(), "fp32", Shard(), NoCollective()), GenerateOptions(40)
    # On the host a replay is work, in the bracket, and its first one compiles.
    generate(warm, [[1, 2, 3]], options, decoder=Decoder(warm, warm.new_cache(1, 43)))  # type: ignore[arg-type]
    slots, meeting, said, tokens = array("d", [0.0] * 2 * SLOTS), Meeting(), list[str](), [0, 0]

    def end(reason: str) -> None:
        said.append(reason)
        meeting.over.set()

    watchdogs = [Watchdog(Board(slots, (0, 1), row, True), end) for row in (0, 1)]

    def host(rank: int) -> None:
        device = CpuDevice()
        watch = DeviceWatch(watchdogs[rank], "tp", (0, 1), *device.mapped(1, np.float64))
        device.event = lambda: meeting.event(rank)  # type: ignore[method-assign]
        runner = build_runner(open_checkpoint(CASES / "gpt2"), device, "fp32", Shard(), Watched(watch))
        decoder = Decoder(runner, runner.new_cache(1, 43))  # type: ignore[arg-type]
        launch = decoder.launch

        def launching() -> int:
            if rank == 1 and meeting.launched[1] == 20:
                at_step_20(runner, meeting)
            return launch()

        decoder.launch = launching  # type: ignore[method-assign]

        def count(*_: Any) -> None:
            tokens[rank] += 1

        monkeypatch.setattr(decoder, "read", lambda turn, read=decoder.read: (read(turn), count())[0])
        try:
            generate(runner, [[1, 2, 3]], options, decoder=decoder)
        except InterruptedError:
            pass
        watch._watchdog.leave()

    hosts = [threading.Thread(target=host, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in hosts:
        thread.start()
    watchdogs[0].start()
    while any(thread.is_alive() for thread in hosts):  # rank 1's watchdog has no thread: two would end the process
        time.sleep(0.01)
        if watchdogs[1].progress is not None:
            slots[SLOTS + PROGRESS] = watchdogs[1].progress()
    watchdogs[0].stop()
    return "".join(said), tokens


def test_a_rank_that_stops_in_a_step_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(runner: Runner, meeting: Meeting) -> None:
        with runner.collective.watched():
            meeting.over.wait(20.0)

    said, tokens = decode(monkeypatch, sleep)
    assert "for want of rank 1; rank 0 in the device (tp), rank 1 in the device (tp)" in said
    assert tokens[0] == 20


def test_a_slow_rank_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said, tokens = decode(monkeypatch, lambda runner, meeting: time.sleep(1.5))
    assert (said, tokens) == ("", [39, 39])
