"""A small process that says which rank has been killed: `start_sentinel`, and, run as a file, the process itself.

MPICH's mpirun kills all ranks within milliseconds of one's death, before another can speak, and names the dead one by its process
id. This process belongs to no launcher (a session of its own), waits until the first rank ends, and says who it was unless that
rank, or one that ends all, has left a mark on the board. So it stays no longer than they do.

One a run, where all ranks are on one machine: over several, a rank killed because of another machine's looks like the first.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from l2_dense_parallel.board import Board


def start_sentinel(board: Board) -> subprocess.Popen | None:
    """Called on the machine's first rank. None where there cannot be one: then the launcher's words must do."""
    if board.file < 0 or not board.complete or not hasattr(os, "pidfd_open"):
        return None
    from l2_dense_parallel.board import ENDED, FAILED  # here: the process itself cannot import it

    rows = [f"{rank}:{pid}:{state}" for rank, pid, state in board.marks()]
    # No site, no PYTHONPATH: it needs the standard library alone, and starts in 15 ms, beside us.
    command = [sys.executable, "-I", "-S", __file__, str(board.file), str(ENDED), str(FAILED), *rows]
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[board.file], start_new_session=True, cwd="/"
        )
    except OSError:
        return None


def watch(file: int, ended: float, failed: float, rows: list[tuple[int, ...]]) -> str:
    """Wait for the first rank to end, and return what there is to say. rows: its number, its process, and where in `file` the
    double of its state is; ended, failed: the states of a rank that leaves by itself."""
    memory = mmap.mmap(file, 0, prot=mmap.PROT_READ)
    poll = select.poll()
    watched: dict[int, tuple[int, int]] = {}
    for rank, pid, state in rows:
        descriptor = os.pidfd_open(pid)
        watched[descriptor] = rank, state
        poll.register(descriptor, select.POLLIN)
    dead = sorted(watched[descriptor] for descriptor, _ in poll.poll())
    states = {state: struct.unpack_from("d", memory, state)[0] for _, _, state in rows}
    killed = [rank for rank, state in dead if states[state] not in (ended, failed)]
    if not killed or failed in states.values():
        return ""
    return f"error: rank {', '.join(map(str, killed))} was killed (from outside, or for want of memory) or has crashed\n"


if __name__ == "__main__":
    try:
        rows = [tuple(map(int, row.split(":"))) for row in sys.argv[4:]]
        said = watch(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), rows)
        os.write(2, said.encode())
    except OSError:  # no pidfd_open in this kernel or container, or the rank died while this started
        pass
