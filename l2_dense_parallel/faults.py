"""One wrapper around a program's main(): every way to fail becomes one message and one exit status, on all ranks.

    0    done
    2    the user can mend it (UserError, a wrong option, too little memory): one line `error: ...` on standard error, no traceback
    1    our fault: a traceback
    130  interrupted;   141  the reader of our output went away (as for any Unix tool under SIGPIPE)

Under MPI neither `sys.exit` nor an uncaught exception on one rank ends the others: they would wait for it for good. So a
failing rank first offers its message to the rest (`World.meet`). If all of them fail together (a TP that does not
divide), rank 0 prints once and all leave with that status; if they do not come within `MEETING` seconds this rank
speaks for itself and aborts the job. Design, section 6.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from l1_kernels.errors import UserError
from l2_dense_parallel.ranks import read_launch, thread_plan, yield_when_crowded
from l2_dense_parallel.world import World, flush, merge_texts, one_line

MEETING = 3.0  # s for the other ranks to fail too
FAREWELL = 8.0  # s for the other ranks to end after a sys.exit(0)


def run(main: Callable[[World], int | None]) -> NoReturn:
    """Call main(world) and end the process. `main` calls `world.start()` once its arguments are read.

    Sets the number of threads before anything heavy is imported: the caller imports NumPy inside `main`."""
    if sys.stderr is None:  # closed by who started us: errors have nowhere to go but the exit status
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (it lives as long as the process)
    world = World(launch := read_launch())
    thread_plan(launch)
    yield_when_crowded(launch)
    threading.excepthook = lambda failed: _fail_in_thread(world, failed)
    deliberate = False  # sys.exit(0): others may know nothing of it
    try:
        try:
            status = main(world) or 0
        except SystemExit as leaving:
            status, deliberate = _exit_code(leaving), True
        if sys.stdout is not None:
            sys.stdout.flush()  # a BrokenPipeError shows here at the latest
        _leave(world, status, deliberate)
    except BaseException as error:
        _fail(world, error)


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    sys.stderr.write(f"{leaving.code}\n")
    return 1


def _leave(world: World, status: int, deliberate: bool) -> NoReturn:
    """End without an error. Ranks leave together: the first ones wait for the rest."""
    if world.comm is None:
        flush()
        if world.size > 1 and status:
            os._exit(status)
        raise _Done(status)
    patience = MEETING if status else FAREWELL if deliberate else None
    if not world.finish(patience):
        if not status:
            sys.stderr.write(f"error: rank {world.rank} has left by sys.exit({status}), and the others have not\n")
        world.abort(status or 1)
    flush()
    if status:
        os._exit(status)
    raise _Done(0)


class _Done(SystemExit):
    """The only SystemExit that leaves `run`: all ranks are ready to end."""


def _fail(world: World, error: BaseException) -> NoReturn:
    if isinstance(error, _Done):
        raise error
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "Abort":  # Abort: Click's and Typer's for Ctrl-C
        _exit_at_once(world, 130)
    if isinstance(error, BrokenPipeError):
        # What is still in the buffer must not raise once more while Python shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        _exit_at_once(world, 141)
    status, text = classify(error)
    details = "" if status == 2 else "".join(traceback.format_exception(error))
    if details and world.size > 1:
        details = f"rank {world.rank} of {world.size}:\n{details}"
    texts = _meet(world, text)
    if texts is None:  # only this rank fails, as far as it knows
        said = text if world.rank == 0 else f"rank {world.rank}: {text}"
        if world.watchdog is None or _speaks(world):
            sys.stderr.write(details or f"error: {said}\n")
        world.abort(status)
    if world.rank == 0:
        sys.stderr.write(details or f"error: {merge_texts(list(texts))}\n")
    flush()
    _part(world)
    os._exit(status)


def _fail_in_thread(world: World, failed: threading.ExceptHookArgs) -> None:
    """An uncaught exception in another thread ends the run too: the main thread may wait for that thread's work."""
    if failed.exc_type is SystemExit:
        return
    error = failed.exc_value or failed.exc_type()
    if isinstance(error, BrokenPipeError):
        _exit_at_once(world, 141)
    status, text = classify(error)
    sys.stderr.write(f"error: {text}\n" if status == 2 else "".join(traceback.format_exception(error)))
    world.abort(status)


def classify(error: BaseException) -> tuple[int, str]:
    """(exit status, its one line). A usage error of Click or Typer is known by its `format_message`, so that neither
    need be imported here."""
    if isinstance(error, UserError):
        return 2, one_line(error)
    if isinstance(error, MemoryError):  # NumPy's and CuPy's too, which say how much was asked for
        return 2, one_line(f"out of memory ({one_line(error)}): take fewer tokens, a smaller batch or model, or more ranks")
    message: Any = getattr(error, "format_message", None)
    if callable(message):
        context = getattr(error, "ctx", None)
        where = f" (see `{context.command_path} --help`)" if context is not None else ""
        return 2, one_line(message()) + where
    return 1, one_line(f"{type(error).__name__}: {error}")


def _meet(world: World, text: str) -> list[str] | None:
    """The texts of all ranks if all fail; None if not. A wrong option shows before MPI has started: start it, to ask."""
    if not world.launch.needs_mpi:
        return [text]
    try:
        world.start()
    except UserError:
        pass  # what has failed here is said, not why the ranks cannot agree on it
    if world.watchdog is not None:
        world.mark_failed()
        return world.meet(text, MEETING)
    # MPI cannot start (mpi4py is missing, or is another MPI's), so on no rank: rank 0 speaks, the others give it time to.
    if world.rank:
        time.sleep(1.0)
    return [text]


def _speaks(world: World) -> bool:
    """Several ranks of one machine may fail with the same fault while others do not: one of them reports it."""
    assert world.watchdog is not None
    time.sleep(0.05 * world.watchdog.board.row)
    return world.watchdog.board.claim_report()


def _part(world: World) -> None:
    """All fail together: end MPI in good order, so that the launcher adds no noise and passes our status on."""
    try:
        world.finish(MEETING)
    except Exception:  # MPI may be what has failed
        pass


def _exit_at_once(world: World, status: int) -> NoReturn:
    world.mark_failed()
    flush()
    os._exit(status)
