"""A wait for a device that leads nowhere ends, and one for a device that works does not."""

from __future__ import annotations

from array import array

import pytest

from l2_dense_parallel.board import DEVICE, PROGRESS, SINCE, SLOTS, WAITING, Board
from l2_dense_parallel.watchdog import GROUPS, OPERATIONS, PATIENCE, POLL, STANDSTILL, Watchdog

LOOKS = round(STANDSTILL / POLL)
PP = GROUPS.index("pp")


def watchdogs(ranks: int, complete: bool = True) -> list[Watchdog]:
    """Of all ranks, each at work; nothing beats but by hand."""
    slots = array("d", [0.0] * ranks * SLOTS)
    numbers = tuple(range(ranks))
    return [Watchdog(Board(slots, numbers, row, complete), lambda reason: None) for row in numbers]


def waits(watchdog: Watchdog, came: float | None, operation: str = "the device", group: int = PP) -> None:
    """For its device, which has come so far (None: it does not say), or in a call on the host."""
    watchdog.enter(OPERATIONS.index(operation), group, watchdog.board.ranks, DEVICE if operation == "the device" else WAITING)
    watchdog.board.slots[watchdog.board.base + SINCE] -= 3 * POLL
    if came is not None:
        watchdog.board.slots[watchdog.board.base + PROGRESS] = came


def look(watchdog: Watchdog, times: int) -> str:
    for _ in range(times):
        watchdog._standstill.look()
    return watchdog._hopeless()


def test_all_wait_and_no_device_comes_further() -> None:
    first, second = watchdogs(2)
    waits(first, 5.0)
    waits(second, 3.4)
    assert look(first, LOOKS) == ""  # the first look has nothing to compare with
    assert look(first, 1) == (
        "nothing has moved for 20 s, for want of rank 1; rank 0 in the device (pp), rank 1 in the device (pp); "
        "rank 0's device 5.00 works, rank 1's device 3.40 works"
    )


def test_one_that_waits_elsewhere_is_late() -> None:
    first, second = watchdogs(2)
    waits(first, 2.0)
    waits(second, 2.0, "receive")
    assert look(first, LOOKS + 1).startswith("nothing has moved for 20 s, for want of rank 1; rank 0 in the device (pp), rank 1 in receive (pp)")
    assert look(second, LOOKS + 1).startswith("nothing has moved for 20 s, for want of rank 1")  # whichever speaks


def test_a_long_prompt_is_no_standstill() -> None:
    """A rank's device is in the layers of a long pass: each of them counts."""
    first, second = watchdogs(2)
    waits(first, 1.0)
    waits(second, 0.0)
    for layer in range(12):
        second.board.slots[second.board.base + PROGRESS] = layer / 13
        assert look(first, LOOKS - 1) == ""


def test_a_rank_at_its_own_work_is_waited_for() -> None:
    first, second = watchdogs(2)
    waits(first, 1.0)
    assert look(first, 3 * LOOKS) == ""
    waits(second, 1.0)
    assert look(first, LOOKS) == "" != look(first, 1)
    second.leave()
    assert look(first, 3 * LOOKS) == ""


def test_calls_that_come_and_go_are_no_standstill() -> None:
    first, second = watchdogs(2)
    waits(first, 1.0)
    for _ in range(10):
        waits(second, 1.0, "receive")
        assert look(first, LOOKS - 1) == ""


@pytest.mark.parametrize("complete", [True, False])
def test_where_a_device_says_nothing_only_patience_is_left(complete: bool) -> None:
    """As where another machine's ranks are not seen."""
    first, second = watchdogs(2, complete)
    waits(first, 1.0)
    waits(second, None if complete else 1.0)
    assert look(first, 5 * LOOKS) == ""
    first.board.slots[first.board.base + SINCE] -= PATIENCE
    assert "longer than 900 s" in look(first, 1)


def test_the_thread_ends_a_run_that_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of it, with a shorter time: progress is asked for, and the end is said once with the late rank."""
    import threading

    from l2_dense_parallel import watchdog as module

    monkeypatch.setattr(module, "POLL", 0.02)
    monkeypatch.setattr(module, "STANDSTILL", 0.4)
    monkeypatch.setattr(module, "SILENCE", 60.0)
    said: list[str] = []
    ended = threading.Event()

    def end(reason: str) -> None:
        said.append(reason)
        ended.set()

    first, second = watchdogs(2)
    first._end = end
    first.progress = iter([*(float(n) for n in range(30)), *[29.0] * 10000]).__next__
    waits(second, 7.0)
    waits(first, None)
    first.start()
    assert ended.wait(10.0)
    first.stop()
    assert first.board.field(0, PROGRESS) == 29.0  # it was not ended while its device went on
    (reason,) = said
    assert "for want of rank 1" in reason and "rank 0's device 29.00 works" in reason
