"""Starts one of the small programs in program.py under mpirun, for the tests of this folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from l2_dense_parallel.ranks import THREAD_VARIABLES

HERE = Path(__file__).parent


@dataclass
class Ended:
    status: int
    out: str
    err: str
    seconds: float
    left_behind: list[int]  # processes that are still there, whoever started them

    @property
    def errors(self) -> list[str]:
        """The lines that are ours: a launcher adds its own."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


@cache
def mpirun() -> list[str]:
    """The mpirun beside this Python, else the first on the path; Open MPI's must be told to start more ranks than cores."""
    beside = Path(sys.executable).with_name("mpirun")
    command = str(beside) if beside.exists() else shutil.which("mpirun")
    assert command is not None
    version = subprocess.run([command, "--version"], capture_output=True, text=True).stdout
    return [command, "--oversubscribe"] if "Open MPI" in version else [command]


def environment(**changes: str) -> dict[str, str]:
    """This process's, less what a launcher told it and the thread counts that another test has set in it."""
    told = ("PMI", "OMPI_COMM_", "SLURM_", "MPI_LOCAL", *THREAD_VARIABLES)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(told)}
    allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = os.pathsep.join([str(HERE.parents[1]), *filter(None, [kept.get("PYTHONPATH")])])
    return {**kept, **allow, "PYTHONPATH": path, **changes}


def start(command: list[str], env: dict[str, str], limit: float) -> Ended:
    began = time.monotonic()
    mark = f"STRATA_TEST={os.getpid()}-{began}"  # all processes of this start have it in their environment

    def heed_interrupts() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job, which CI may be, is started to ignore them

    env = {**env, **dict([mark.split("=")])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit, preexec_fn=heed_interrupts)
    seconds = time.monotonic() - began
    patience = time.monotonic() + 2.0  # one that has closed its output may yet be leaving
    while (left := having(mark)) and time.monotonic() < patience:
        time.sleep(0.02)
    return Ended(done.returncode, done.stdout, done.stderr, seconds, left)


def having(mark: str) -> list[int]:
    """Processes with this NAME=VALUE in their environment; none where there is no /proc. A zombie has none."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
        except OSError:
            pass
    return found


def on_ranks(ranks: int, *arguments: str, limit: float = 60.0, **env: str) -> Ended:
    """`mpirun -n RANKS python program.py ARGUMENTS`."""
    return start([*mpirun(), "-n", str(ranks), sys.executable, str(HERE / "program.py"), *arguments], environment(**env), limit)


def alone(*arguments: str, limit: float = 60.0, **env: str) -> Ended:
    """`python program.py ARGUMENTS`, with `env` telling it what a launcher would."""
    return start([sys.executable, str(HERE / "program.py"), *arguments], environment(**env), limit)
