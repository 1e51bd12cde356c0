"""What a tensor-parallel rank with a GPU tells its watchdog. On two GPUs: tests/models/test_stuck_ranks.py."""

from __future__ import annotations

from array import array

import pytest

from l2_dense_parallel.board import DEVICE, ENDED, PROGRESS, SINCE, SLOTS, STATE, WORKING, Board
from l2_dense_parallel.collectives import NoCollective
from l2_dense_parallel.device_watch import DeviceWatch
from l2_dense_parallel.watchdog import GROUPS, OPERATIONS, POLL, STANDSTILL, Watchdog
from tests.l2_dense_parallel.fake_gpu import FakeDevice, Machine

LAYERS = 12
LOOKS = round(STANDSTILL / POLL)


def boards(ranks: int) -> list[Watchdog]:
    slots = array("d", [0.0] * ranks * SLOTS)
    return [Watchdog(Board(slots, tuple(range(ranks)), row, True), lambda reason: None) for row in range(ranks)]


def watch_of(watchdog: Watchdog, device: FakeDevice, members: tuple[int, ...] = (0, 1)) -> DeviceWatch:
    said, says = device.mapped(1, "float64")
    device.to_host(says)  # it is zero by then
    return DeviceWatch(watchdog, "tp", members, said, says)


def waits(watchdog: Watchdog, watch: DeviceWatch) -> None:
    """For its device, for some seconds already; what its thread would do is done."""
    watch.__enter__()
    watchdog.board.slots[watchdog.board.base + SINCE] -= 3 * POLL
    assert watchdog.progress is not None
    watchdog.board.slots[watchdog.board.base + PROGRESS] = watchdog.progress()


def look(watchdog: Watchdog, times: int) -> str:
    for _ in range(times):
        watchdog._standstill.look()
    return watchdog._hopeless()


def test_a_long_pass_counts_layer_by_layer_as_the_device_comes_there() -> None:
    """Two passes, short waits between them. The watchdog sees the number grow, and never before the device has done the work."""
    (watchdog,) = boards(1)
    with Machine(seed=3) as machine:
        device = FakeDevice(machine)
        watch, seen, ends, done = watch_of(watchdog, device), [0.0], list[float](), [0]
        assert watchdog.progress == watch.progress
        for first in (0, LAYERS):
            for layer in range(LAYERS):
                device.launch(lambda layer=layer, first=first: done.__setitem__(0, first + layer + 1))  # type: ignore[misc]
                watch.mark((layer + 1) / (LAYERS + 1))
            device.launch(lambda: ends.append(watch.progress()))
            end = device.event()
            end.record()
            with watch:
                assert watchdog.board.field(0, STATE) == DEVICE
                while not end.done:
                    before = watch.progress()
                    assert before - int(before) <= (done[0] - first) / (LAYERS + 1) + 1e-9
                    seen.append(before)
            seen.append(watch.progress())
            with watch:  # a launch of a graph
                pass
            seen.append(watch.progress())
    assert watchdog.board.field(0, STATE) == WORKING
    assert seen == sorted(seen) and seen[-1] == 4.0
    assert ends == [LAYERS / (LAYERS + 1), 2 + LAYERS / (LAYERS + 1)]


def test_a_wait_that_fails_is_over() -> None:
    (watchdog,) = boards(1)
    with Machine(seed=1) as machine:
        watch = watch_of(watchdog, FakeDevice(machine))
        with pytest.raises(ZeroDivisionError), watch:
            raise ZeroDivisionError
    assert watchdog.board.field(0, STATE) == WORKING


def test_the_one_that_has_come_least_far_is_late() -> None:
    """Both wait for their devices: the first has launched a step that the second has not."""
    first, second = boards(2)
    with Machine(seed=1) as machine:
        one, other = (watch_of(watchdog, FakeDevice(machine)) for watchdog in (first, second))
        for watch in (one, one, one, other, other):
            with watch:
                pass
        waits(first, one)
        waits(second, other)
        assert look(first, LOOKS) == ""
        assert look(first, 1).startswith("nothing has moved for 20 s, for want of rank 1; rank 0 in the device (tp), rank 1 in the device (tp)")


def test_one_that_does_something_else_is_late() -> None:
    first, second = boards(2)
    with Machine(seed=1) as machine:
        waits(first, watch_of(first, FakeDevice(machine)))
        second.enter(OPERATIONS.index("barrier"), GROUPS.index("tp"), (0, 1))
        assert look(first, LOOKS + 1).startswith("nothing has moved for 20 s, for want of rank 1;")


def test_those_that_have_done_their_part_are_not() -> None:
    """Ranks 2 and 3, a second copy of the model, have their results and wait for the first one's; rank 4 has had no GPU."""
    ranks = boards(5)
    with Machine(seed=1) as machine:
        watches = [watch_of(watchdog, FakeDevice(machine)) for watchdog in ranks[:4]]
        for watch in (watches[0], watches[0], watches[1]):
            with watch:
                pass
        waits(ranks[0], watches[0])
        waits(ranks[1], watches[1])
        for watchdog in ranks[2:4]:
            watchdog.enter(OPERATIONS.index("gather"), GROUPS.index("dp"), (0, 2))
            watchdog.board.slots[watchdog.board.base + PROGRESS] = 0.0
        ranks[4].mark(ENDED)
        assert look(ranks[0], LOOKS + 1).startswith("nothing has moved for 20 s, for want of rank 1;")


def test_a_host_has_nothing_to_say() -> None:
    collective = NoCollective()
    with collective.watched() as nothing, collective.watched():
        assert nothing is None
    collective.mark(0.5)
