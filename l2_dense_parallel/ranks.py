"""What the launcher says: rank, ranks, and how many of them share this machine (paper, Section IV; design, section 4).

Read from environment variables, before anything heavy is imported: BLAS and numba take their number of threads from
the environment when they are loaded, and MPI is imported only where a launcher started ranks. Standard library only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Launch:
    """What one launcher told this process. size 0: there are ranks, and only MPI knows how many (PMIx alone)."""

    launcher: str = "none"  # the word for error messages: "Open MPI's mpirun", "srun", ...
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def needs_mpi(self) -> bool:
        return self.size != 1


# Who sets which variables: (launcher, size, rank, local rank, local size). The first whose size is set wins;
# a launcher inside a Slurm allocation sees both its own and Slurm's, so srun comes last.
_LAUNCHERS = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MVAPICH's mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("MPICH's mpirun", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # and Intel MPI's
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", ""),  # a batch script has SLURM_NTASKS but no step
)


def read_launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """The launcher's variables -> Launch; without any, one rank. A variable that is not a number counts as unset."""

    def number(name: str) -> int | None:
        text = environ.get(name, "")
        return int(text) if text.isdecimal() else None

    for launcher, size_name, rank_name, local_rank_name, local_size_name in _LAUNCHERS:
        size, rank = number(size_name), number(rank_name)
        if not size or (rank is None and launcher == "srun"):  # Slurm sets its size for a batch script's steps only
            continue
        rank = rank or 0  # a size alone: MPI will say whether there are ranks
        local_size = number(local_size_name) if local_size_name else _slurm_local_size(environ)
        local_size = local_size or (size if number(local_rank_name) is None else 1)
        local_rank = number(local_rank_name)
        return Launch(launcher, rank, size, rank % local_size if local_rank is None else local_rank, local_size)
    if environ.get("PMIX_RANK", "").isdecimal() and "PMIX_NAMESPACE" in environ:
        rank = int(environ["PMIX_RANK"])
        return Launch("a PMIx launcher", rank, 0, rank, 1)
    return Launch()


def _slurm_local_size(environ: Mapping[str, str]) -> int | None:
    """Tasks on this node from SLURM_STEP_TASKS_PER_NODE, a list such as "4(x2),3" indexed by SLURM_NODEID."""
    node = environ.get("SLURM_NODEID", "")
    counts: list[int] = []
    for tasks, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(tasks)] * int(repeat or 1)
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None


def usable_cores(pid: int = 0) -> int:
    """Cores that process `pid` (0: this one) may run on, within the container's CPU quota."""
    try:
        cores = len(os.sched_getaffinity(pid))
    except (AttributeError, OSError):  # not Linux, or the process is another user's
        cores = os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return max(1, cores)


def threads_per_rank(launch: Launch) -> int:
    """Usable cores / ranks of this machine, at least one.

    Open MPI binds each rank to some of the cores, and its share is what it is bound to: so the cores to deal out are
    those of the launcher (our parent process), and no rank takes more than it may run on."""
    if launch.local_size <= 1:
        return usable_cores()
    mine = usable_cores()
    return max(1, min(mine, max(mine, usable_cores(os.getppid())) // launch.local_size))


def thread_plan(launch: Launch, environ: MutableMapping[str, str] = os.environ) -> int:
    """Set the thread counts of BLAS and numba for this rank; returns them. Call it before NumPy is imported.

    What the user has set stays; OMP_NUM_THREADS, where set, speaks for those that are not. More threads than cores are
    ruinous here: two BLAS threads in each of two ranks on two cores made an 8 KB all-reduce take 2.5 ms, not 33 us."""
    asked = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    threads = int(asked) if asked.isdecimal() and int(asked) > 0 else threads_per_rank(launch)
    for name in THREAD_VARIABLES:
        if not environ.get(name):
            environ[name] = str(threads)
    return threads


def yield_when_crowded(launch: Launch, environ: MutableMapping[str, str] = os.environ) -> bool:
    """With more ranks than cores, tell MPI to sleep while it waits, not to spin; call it before MPI is imported.

    A spinning rank keeps the core from the one that it waits for. Measured, MPICH, 4 ranks on 2 busy cores: an 8 KB
    all-reduce takes 4-8 ms by default (sched_yield only offers the core), 0.6-1.1 ms with its heavy yield. With a core a
    rank that would cost 250 us instead of 20, so it is left alone there. Open MPI knows by itself, if it started the ranks."""
    if launch.local_size <= max(usable_cores(), usable_cores(os.getppid())):
        return False
    environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")
    environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    return True
