"""A board in shared memory on which the ranks of one machine write what they are doing.

A rank that waits in a collective looks there before it gives up: is the other still working (then waiting is right),
has it ended, does it run at all, or does it wait in another call? Two cache lines of doubles a rank, each written by its owner
alone, so that no lock and no MPI is needed, and a call costs about a microsecond.

PROGRESS is how far a rank's device has come, in works (with the part of the one under way), as the device itself says; UNKNOWN where it says nothing.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from array import array
from typing import Any

SLOTS = 16  # doubles a rank
STATE, SINCE, CALLS, OPERATION, GROUP, PID, CLAIM, BEAT, PROGRESS, GONE = range(10)
UNKNOWN = -1.0
WORKING, WAITING, DEVICE, ENDED, FAILED = (float(i) for i in range(5))


class Board:
    """Slot `row * SLOTS + field` is field of the row-th rank of this machine; `ranks[row]` is its number in the world."""

    def __init__(self, slots: Any, ranks: tuple[int, ...], row: int, complete: bool, file: int = -1) -> None:
        self.slots = slots
        self.ranks = ranks
        self.row = row
        self.base = row * SLOTS
        self.complete = complete  # every rank of the world is on it
        self.file = file  # descriptor of the memory, for another process; -1: there is none
        slots[self.base + PID] = float(os.getpid())
        slots[self.base + PROGRESS] = UNKNOWN

    def field(self, row: int, field: int) -> float:
        return self.slots[row * SLOTS + field]

    def marks(self) -> list[tuple[int, int, int]]:
        """(rank, its process, where its state is: the byte of the file) of each row."""
        width = self.slots.itemsize
        return [(rank, int(self.field(row, PID)), (row * SLOTS + STATE) * width) for row, rank in enumerate(self.ranks)]

    def alive(self, row: int) -> bool:
        """Whether the process of that rank still exists."""
        try:
            os.kill(int(self.field(row, PID)), 0)
        except ProcessLookupError:
            return False
        except OSError:
            pass
        return True

    def beat(self) -> None:
        """This rank runs. Its watchdog says so at each look."""
        self.slots[self.base + BEAT] += 1.0

    def leave_together(self, seconds: float) -> None:
        """Wait, for so long at most, until MPI has ended on all ranks here: a launcher that sees one leave with an error kills those that are still at it."""
        self.slots[self.base + GONE] = 1.0
        end = time.monotonic() + seconds
        while time.monotonic() < end and not all(self.field(row, GONE) for row in range(len(self.ranks))):
            time.sleep(0.002)

    def claim_report(self) -> bool:
        """True for the first rank of this machine that asks: it reports the fault for all (ranks ask at different times)."""
        if any(self.field(row, CLAIM) for row in range(len(self.ranks)) if row != self.row):
            return False
        self.slots[self.base + CLAIM] = 1.0
        return True


def processor_time(pid: int) -> float | None:
    """What all threads of a process have had, in ticks (1/100 s mostly); -1 if there is none, None where the system does not say."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()  # the program's name, in brackets, may hold anything
        return float(fields[11]) + float(fields[12])  # of users, of the system
    except OSError:
        return -1.0 if os.path.exists("/proc/self/stat") else None


class Standstill:
    """For how many looks in a row no rank's host has begun or ended a call and no rank's device has come further."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.looks = 0
        self._seen: list[tuple[float, ...]] = []

    def look(self) -> None:
        rows = range(len(self.board.ranks))
        now = [tuple(self.board.field(row, field) for field in (STATE, CALLS, PROGRESS)) for row in rows]
        self.looks = self.looks + 1 if now == self._seen else 0
        self._seen = now


class Pulse:
    """Whether the rank of a row still runs, as another rank sees it that looks again and again.

    It runs if its watchdog beats. That thread cannot while a long call holds Python's lock (a kernel over a long prompt, the
    compiler): then the process uses up processor time. One that does neither for many looks in a row has been stopped, or
    waits for a system call that does not return. Looks are counted, not seconds: nothing of the kind is true of a
    machine that has slept for an hour."""

    def __init__(self, board: Board, row: int) -> None:
        self.board = board
        self.row = row
        self.still = 0  # looks in a row without a sign of life
        self._beat = -1.0
        self._time: float | None = -1.0

    def look(self) -> None:
        beat = self.board.field(self.row, BEAT)
        if beat != self._beat:  # nearly always: then nothing need be asked of the system
            self._beat, self.still = beat, 0
            return
        time = processor_time(int(self.board.field(self.row, PID)))
        self.still = self.still + 1 if time is not None and time == self._time else 0
        self._time = time


def private_board(rank: int, size: int) -> Board:
    """Where memory cannot be shared: this rank alone is on it."""
    return Board(array("d", [0.0] * SLOTS), (rank,), 0, size == 1)


def open_board(node_comm: Any, rank: int, size: int) -> Board:
    """Collective over the ranks of one machine (an MPI communicator). The file is unlinked before it is used, so none
    is ever left behind. Falls back to a private board on every rank alike."""
    ranks = tuple(node_comm.allgather(rank))
    length = len(ranks) * SLOTS * 8
    path, memory, descriptor = "", None, -1
    if node_comm.rank == 0:
        path = _make_file(length)
    path = node_comm.bcast(path, root=0)
    try:
        descriptor = os.open(path, os.O_RDWR)
        memory = mmap.mmap(descriptor, length)
    except OSError:
        pass
    everyone = all(node_comm.allgather(memory is not None))
    if node_comm.rank == 0 and path:
        os.unlink(path)
    if memory is None or not everyone:
        return private_board(rank, size)
    board = Board(memoryview(memory).cast("d"), ranks, node_comm.rank, len(ranks) == size, descriptor)
    node_comm.Barrier()
    # Ranks in containers of their own cannot see each other's processes: then nobody's absence means anything.
    if not all(node_comm.allgather(all(board.alive(row) for row in range(len(ranks))))):
        return private_board(rank, size)
    return board


def _make_file(length: int) -> str:
    """A new file of zeros; "" where there is no room (its pages are reserved: a full tmpfs must not be a SIGBUS later)."""
    for folder in ("/dev/shm", tempfile.gettempdir()):
        try:
            descriptor, path = tempfile.mkstemp(prefix="strata-", dir=folder)
        except OSError:
            continue
        try:
            os.write(descriptor, bytes(length))
            return path
        except OSError:
            os.unlink(path)
        finally:
            os.close(descriptor)
    return ""
