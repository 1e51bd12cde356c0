"""Ends a rank that would wait for good in a collective (design, section 6).

MPI has no timeouts: a rank whose partner left by `sys.exit(0)`, or waits in another call, hangs for ever. A thread looks
twice a second at what this rank waits for. Slow is not a fault, so a partner that is alive and working is waited for
(`PATIENCE` at most); the wait is ended where nobody can come any more:
- a member of the group has ended, or its process is gone;
- a rank of this machine has not run for `SILENCE` seconds, though its process is there (SIGSTOP, a hung file system);
- every rank of the world waits in some collective and nothing has moved for `DEADLOCK` seconds;
- every rank waits, some of them for their devices, and for `STANDSTILL` seconds no host and no device has come further. Devices that work say so
  (`progress`: at each layer of a long pass); where one of those waited for does not, only `PATIENCE` is left;
- `PATIENCE` is over, or the time that the caller set (`limit`).
Each completed call starts the clocks anew.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from l2_dense_parallel.board import (
    CALLS,
    DEVICE,
    ENDED,
    FAILED,
    GROUP,
    OPERATION,
    PROGRESS,
    SINCE,
    STATE,
    UNKNOWN,
    WAITING,
    WORKING,
    Board,
    Pulse,
    Standstill,
)

OPERATIONS = ("all_reduce", "all_gather", "broadcast", "barrier", "gather", "agree", "set-up", "the device", "receive", "all_to_all")
GROUPS = ("world", "tp", "dp", "pp", "ep", "es", "stage", "node", "across")
DEADLOCK = 15.0  # s; every call here takes far less once all have come
SILENCE = 15.0  # s
STANDSTILL = 20.0  # s; no layer of any pass takes as long
PATIENCE = 900.0  # s
POLL = 0.5  # s


class Watchdog:
    """Owned by the World of one rank. `enter` and `leave` bracket every blocking call, and cost about 1 us together.

    progress   how far this rank's device has come (board.PROGRESS), for whoever knows to set; called on the watchdog's thread, and must not wait
    """

    def __init__(self, board: Board, end: Callable[[str], None]) -> None:
        self.board = board
        self._end = end  # called with the reason, on the watchdog's thread; does not return
        self._members: tuple[int, ...] = ()
        self._limit = PATIENCE
        self.progress: Callable[[], float] | None = None
        self._standstill = Standstill(board)
        self._pulses = [Pulse(board, row) for row in range(len(board.ranks)) if row != board.row]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def enter(self, operation: int, group: int, members: tuple[int, ...], state: float = WAITING) -> None:
        """This rank is about to wait in OPERATIONS[operation] for the world ranks `members` of GROUPS[group]."""
        slots, base = self.board.slots, self.board.base
        self._members = members
        slots[base + OPERATION] = operation
        slots[base + GROUP] = group
        slots[base + SINCE] = time.monotonic()
        slots[base + CALLS] += 1
        slots[base + STATE] = state

    def leave(self) -> None:
        self.board.slots[self.board.base + STATE] = WORKING

    @contextmanager
    def waiting(self, operation: str, group: str, members: tuple[int, ...], limit: float = PATIENCE) -> Iterator[None]:
        """`enter` and `leave` for calls that are not hot, with a time limit of their own."""
        self._limit = limit
        self.enter(OPERATIONS.index(operation), GROUPS.index(group), members)
        try:
            yield
        finally:
            self.leave()
            self._limit = PATIENCE

    @contextmanager
    def waiting_for_device(self, group: str, members: tuple[int, ...]) -> Iterator[None]:
        """Waiting for a GPU's stream that holds collectives. Long work there is no deadlock, but a member that has ended
        is still a fault."""
        self.enter(OPERATIONS.index("the device"), GROUPS.index(group), members, DEVICE)
        try:
            yield
        finally:
            self.leave()

    def mark(self, state: float) -> None:
        """This rank has ended (ENDED) or failed (FAILED)."""
        self.board.slots[self.board.base + STATE] = state

    def _watch(self) -> None:
        before: tuple[float, str] | None = None
        while not self._stop.wait(POLL):
            self.board.beat()
            if self.progress is not None:
                self.board.slots[self.board.base + PROGRESS] = self.progress()
            for pulse in self._pulses:
                pulse.look()
            self._standstill.look()
            call = self.board.field(self.board.row, CALLS)
            reason = self._hopeless()
            # Twice in a row: a partner may have ended a moment after its part of the call was done.
            if reason and before == (call, reason.split(";")[0]):
                self._report(reason)
                return
            before = (call, reason.split(";")[0]) if reason else None

    def _hopeless(self) -> str:
        """Why the call that this rank is in, or its wait for the others at the end, can never be over; or ""."""
        board, row = self.board, self.board.row
        state = board.field(row, STATE)
        if state not in (WAITING, DEVICE, ENDED):
            return ""
        for pulse in self._pulses:  # of any rank, not of partners alone: these may wait for it on another machine
            if pulse.still * POLL >= SILENCE:
                here = f"waits in {self._call(row)}" if state != ENDED else "has ended"
                return f"rank {board.ranks[pulse.row]} does not run (stopped, or its system hangs) while rank {board.ranks[row]} {here}"
        if state == ENDED:
            return ""
        waited = time.monotonic() - board.field(row, SINCE)
        if waited < 2 * POLL:
            return ""
        me = f"rank {board.ranks[row]} waits in {self._call(row)}"
        partners = [other for other, rank in enumerate(board.ranks) if rank in self._members and other != row]
        for other in partners:
            if board.field(other, STATE) == ENDED:
                return f"rank {board.ranks[other]} has ended while {me}"
            if not board.alive(other):
                return f"rank {board.ranks[other]} is gone while {me}"
        rows = range(len(board.ranks))
        runs = all(pulse.still * POLL < 2.0 for pulse in self._pulses)  # else see above, soon
        stuck = runs and all(board.field(other, STATE) in (WAITING, ENDED, FAILED) for other in rows)
        moved = max(board.field(other, SINCE) for other in rows if board.field(other, STATE) == WAITING) if stuck else 0.0
        if board.complete and stuck and time.monotonic() - moved > DEADLOCK:
            return f"the ranks wait in different calls and none can go on; {self._everyone()}"
        if stands := self._standing():
            return stands
        if waited > self._limit:
            absent = [str(board.ranks[other]) for other in partners if self._call(other) != self._call(row)]
            who = f" for rank {', '.join(absent)}" if absent else ""
            return f"{me}{who}, longer than {self._limit:.0f} s; {self._everyone()}"
        return ""

    def _standing(self) -> str:
        """Why no device can go on, or "". Late are the ranks that wait somewhere else, but for those that have done their part of the work (they wait for
        other copies of the model, or have ended); if there are none, those whose devices have come least far."""
        board = self.board
        rows = range(len(board.ranks))
        states = [board.field(row, STATE) for row in rows]
        if not board.complete or self._standstill.looks * POLL < STANDSTILL or DEVICE not in states or WORKING in states:
            return ""
        known = [row for row in rows if board.field(row, PROGRESS) != UNKNOWN]
        if any(state == DEVICE and row not in known for row, state in enumerate(states)):
            return ""
        elsewhere = [row for row in rows if states[row] == WAITING and board.field(row, GROUP) != GROUPS.index("dp")]
        here = [row for row in rows if states[row] == DEVICE]
        least = min(board.field(row, PROGRESS) for row in here)
        late = elsewhere or [row for row in here if board.field(row, PROGRESS) == least]
        who = ", ".join(str(board.ranks[row]) for row in late)
        came = ", ".join(f"rank {board.ranks[row]}'s device {board.field(row, PROGRESS):.2f} works" for row in known)
        return f"nothing has moved for {STANDSTILL:.0f} s, for want of rank {who}; {self._everyone()}; {came}"

    def _call(self, row: int) -> str:
        state = self.board.field(row, STATE)
        if state in (WAITING, DEVICE):
            return f"{OPERATIONS[int(self.board.field(row, OPERATION))]} ({GROUPS[int(self.board.field(row, GROUP))]})"
        return {WORKING: "its own work", ENDED: "no call, it has ended", FAILED: "no call, it has failed"}[state]

    def _everyone(self) -> str:
        return ", ".join(f"rank {rank} in {self._call(row)}" for row, rank in enumerate(self.board.ranks))

    def _report(self, reason: str) -> None:
        time.sleep(0.05 * self.board.row)  # one rank of this machine speaks
        if self.board.claim_report():
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            if frame is not None:
                sys.stderr.write("".join(traceback.format_stack(frame)))
            self._end(reason)
        else:
            time.sleep(2.0)
            self.mark(FAILED)
            os._exit(1)
