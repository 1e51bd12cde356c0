"""All ranks of this run: MPI's start, and what the ranks must agree on before and while they work (design, sections 4, 6).

One `World` a process, made by `faults.run` and passed on. With one rank it does nothing and imports nothing.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from l1_kernels.errors import UserError
from l2_dense_parallel.board import ENDED, FAILED, open_board
from l2_dense_parallel.ranks import Launch
from l2_dense_parallel.sentinel import start_sentinel
from l2_dense_parallel.watchdog import Watchdog

START_LIMIT = 60.0  # s for MPI to start, and for the first exchange
TEXT_BYTES = 1024  # an error's text, as ranks exchange it


class World:
    """rank, size   of the whole run
    hosts        the machine of each rank, once started
    comm         MPI communicator of all ranks; None with one rank or before `start`
    watchdog     None with one rank or before `start`
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.rank, self.size = launch.rank, max(1, launch.size)
        self.hosts: tuple[str, ...] = ("",)
        self.comm: Any = None
        self.watchdog: Watchdog | None = None
        self._mpi: Any = None
        self._control: Any = None
        self._sentinel: Any = None  # held, so that Python does not ask after it
        self._started = False

    @property
    def everyone(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    def start(self) -> World:
        """Import MPI where a launcher started ranks, compare, and try one exchange. Raises UserError. Idempotent."""
        if self._started or not self.launch.needs_mpi:
            return self
        self._started = True
        late = f"MPI did not start within {START_LIMIT:.0f} s; see that every machine has this same Python environment"
        alarm = threading.Timer(START_LIMIT, self._end_now, [late])
        alarm.daemon = True
        alarm.start()
        try:
            self._mpi = import_mpi(self.launch)
            library = self._mpi.Get_library_version()
            check_launcher(self.launch, library, None)
            # MPI_THREAD_MULTIPLE: the watchdog must be able to abort. And a waiting rank then offers its core to others
            # (MPICH, 4 ranks on 2 idle cores: an 8 KB all-reduce takes 40 us, with any lower level 10 ms).
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # "suspicious MPI execution environment": said better below
                self._mpi.Init_thread(self._mpi.THREAD_MULTIPLE)
            world = self._mpi.COMM_WORLD
            check_launcher(self.launch, library, world.Get_size())
            self.rank, self.size = world.Get_rank(), world.Get_size()
            if self.size == 1:
                return self
            self.comm, self._control = world.Dup(), world.Dup()
            self.hosts = tuple(self.comm.allgather(self._mpi.Get_processor_name()))
            node = self.comm.Split_type(self._mpi.COMM_TYPE_SHARED, key=self.rank)
            board = open_board(node, self.rank, self.size)
            if node.rank == 0:
                self._sentinel = start_sentinel(board)
            self.watchdog = Watchdog(board, self._end_now)
            self.watchdog.start()
            self._self_test()
        finally:
            alarm.cancel()
        return self

    def _self_test(self) -> None:
        import numpy as np

        sums = np.arange(7, dtype=np.float32) + np.float32(self.rank)
        assert self.watchdog is not None
        with self.watchdog.waiting("set-up", "world", self.everyone, START_LIMIT):
            self.comm.Allreduce(self._mpi.IN_PLACE, sums)
        if not np.array_equal(sums, self.size * np.arange(7) + self.size * (self.size - 1) / 2):
            version = self._mpi.Get_library_version().split("\n")[0].strip()
            raise UserError(f"MPI sums wrongly over these {self.size} ranks ({version}); use another MPI (README)")

    # -- what ranks agree on -------------------------------------------------------------------------------------

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank. All ranks must call it."""
        if self.comm is None:
            return [value]
        assert self.watchdog is not None
        with self.watchdog.waiting("agree", "world", self.everyone):
            return self.comm.allgather(value)

    def agree(self, error: UserError | None) -> None:
        """All ranks call this after a step that may fail on some of them: if it did, every rank raises the same
        UserError, so that one line is printed and nobody waits for the others."""
        texts = self.exchange(None if error is None else one_line(error))
        if any(texts):
            raise UserError(merge_texts(texts))

    @contextmanager
    def agreement(self) -> Iterator[None]:
        """`with world.agreement(): load()`: a UserError inside on any rank is raised on every rank at the end."""
        error: UserError | None = None
        try:
            yield
        except UserError as raised:
            error = raised
        self.agree(error)

    def check_same_arguments(self, **seen: Any) -> None:
        """Refuse ranks that see different things: check_same_arguments(max_new_tokens=16, model=digest, prompts=[...])."""
        views = self.exchange({name: _summary(value) for name, value in seen.items()})
        difference = differing(views)
        if difference:
            raise UserError(difference)

    # -- leaving -------------------------------------------------------------------------------------------------

    def meet(self, text: str, seconds: float) -> list[str] | None:
        """Where a failing rank tells the others why: their texts too, if all of them fail within `seconds`; otherwise None."""
        if self._control is None:
            return [text] if self.size == 1 else None
        mine = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
        theirs = bytearray(TEXT_BYTES * self.size)
        request = self._control.Iallgather([mine, self._mpi.BYTE], [theirs, self._mpi.BYTE])
        if not _test_until(request, seconds):
            return None
        pieces = (theirs[i : i + TEXT_BYTES] for i in range(0, len(theirs), TEXT_BYTES))
        return [bytes(piece).rstrip(b"\0").decode(errors="ignore") for piece in pieces]

    def finish(self, seconds: float | None = None) -> bool:
        """Wait, without burning a core, until all ranks have ended; then end MPI. False if `seconds` pass before."""
        if self.comm is None or self.watchdog is None:
            return True
        self.watchdog.mark(ENDED)
        if not _test_until(self._control.Ibarrier(), seconds):
            return False
        self.watchdog.stop()
        self._mpi.Finalize()
        self.watchdog.board.leave_together(1.0)
        return True

    def abort(self, status: int) -> NoReturn:
        """End this rank and all others, now. `Abort` itself may block: then a bare exit ends the job."""
        self.mark_failed()
        flush()
        time.sleep(0.2)  # a launcher may drop what it has not read yet
        if self.comm is not None:
            fallback = threading.Timer(3.0, os._exit, [status])
            fallback.daemon = True
            fallback.start()
            if threading.current_thread() is threading.main_thread() or self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE:
                self._mpi.COMM_WORLD.Abort(status)
        os._exit(status)

    def mark_failed(self) -> None:
        """Whoever sees this rank end knows that it has spoken for itself."""
        if self.watchdog is not None:
            self.watchdog.mark(FAILED)

    def _end_now(self, reason: str) -> NoReturn:
        sys.stderr.write(f"error: {reason}\n")
        self.abort(1)


def import_mpi(launch: Launch) -> Any:
    """mpi4py's MPI, not yet initialised."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = True  # at exit, unless `finish` has done it
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"{launch.launcher} started {launch.size or 'several'} ranks, but mpi4py cannot be used ({one_line(error)}); "
            "install it with an MPI (README), or run without mpirun"
        ) from None
    return MPI


def check_launcher(launch: Launch, library: str, mpi_size: int | None) -> None:
    """The launcher and the MPI library that mpi4py found must be of one kind, or every rank believes it is alone.

    mpi_size None: MPI has not started yet, and must not: MPICH under Open MPI's mpirun ends the process in its start."""
    foreign = launch.launcher == "Open MPI's mpirun" and library.startswith(("MPICH", "Intel", "MVAPICH"))
    if launch.size == 0 or (not foreign if mpi_size is None else launch.size == mpi_size):
        return
    found = " ".join(library.replace("\0", " ").split("\n")[0].replace("Version:", "").split(",")[0].split())
    beside = os.path.join(os.path.dirname(sys.executable), "mpirun")
    if launch.launcher == "srun":
        mend = "start with `srun --mpi=pmix` or `--mpi=pmi2`, or with that MPI's own mpirun"
    else:
        mend = f"use {beside if os.path.exists(beside) else 'its mpirun'}, or reinstall mpi4py for the launcher's MPI (README)"
    raise UserError(
        f"launcher started {launch.size} ranks where MPI says {mpi_size or 1}: it is {launch.launcher}, but mpi4py found {found}; {mend}"
    )


def one_line(error: BaseException | str) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def flush() -> None:
    """Flush both streams; a reader that has gone away is no fault of ours."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass


def merge_texts(texts: list[str | None]) -> str:
    """Errors of several ranks as one line: said once if they are all the same, else each with its ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text:
            ranks.setdefault(text, []).append(rank)
    if len(ranks) == 1 and (text := next(iter(ranks))) and (len(ranks[text]) == len(texts) or ranks[text] == [0]):
        return text
    return "; ".join(f"{name_ranks(who)}: {text}" for text, who in ranks.items())


def name_ranks(ranks: list[int]) -> str:
    """[1] -> "rank 1"; [0, 2, 3] -> "ranks 0, 2, 3"; long lists are cut."""
    shown = ", ".join(str(rank) for rank in ranks[:6]) + (", ..." if len(ranks) > 6 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def differing(views: list[dict[str, str]]) -> str:
    """What each rank sees, by name -> "" or one line that names the first thing seen differently, and by whom."""
    for name in dict.fromkeys(name for view in views for name in view):
        ranks: dict[str, list[int]] = {}
        for rank, view in enumerate(views):
            ranks.setdefault(view.get(name, "not there"), []).append(rank)
        if len(ranks) > 1:
            what = " but ".join(f"{value} on {name_ranks(who)}" for value, who in list(ranks.items())[:3])
            return f"the ranks see different arguments: {name} is {what}; give all ranks the same command and files"
    return ""


def _summary(value: Any) -> str:
    """Short values as they are, so that the message can show them; long ones with a digest."""
    if isinstance(value, Mapping):
        value = sorted(value.items())
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:20]}... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def _test_until(request: Any, seconds: float | None) -> bool:
    """Poll an MPI request, ever more seldom, so that ranks still at work keep the cores."""
    end = None if seconds is None else time.monotonic() + seconds
    pause = 1e-4
    while not request.Test():
        if end is not None and time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    return True
