"""What launchers' variables mean, and how many threads a rank takes."""

from __future__ import annotations

import os
import sys

import pytest

from l2_dense_parallel.ranks import Launch, read_launch, thread_plan, threads_per_rank, usable_cores, yield_when_crowded
from tests.l2_dense_parallel.launch import alone

MPICH = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_RANK": "5", "PMIX_NAMESPACE": "job",
}  # fmt: skip
SRUN = {
    "SLURM_STEP_NUM_TASKS": "9", "SLURM_PROCID": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
    "SLURM_NTASKS": "9",
}  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Launch()),
        (MPICH, Launch("MPICH's mpirun", 3, 4, 1, 2)),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, Launch("MPICH's mpirun", 1, 2, 1, 2)),
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, Launch("MPICH's mpirun", 0, 1, 0, 1)),
        ({"PMI_SIZE": "2"}, Launch("MPICH's mpirun", 0, 2, 0, 2)),  # MPI is asked, and says that there is one
        ({"SLURM_STEP_NUM_TASKS": "9"}, Launch()),
        (OPEN_MPI, Launch("Open MPI's mpirun", 5, 8, 1, 4)),
        (SRUN, Launch("srun", 8, 9, 0, 1)),
        ({**SRUN, "SLURM_NODEID": "1", "SLURM_LOCALID": "3", "SLURM_PROCID": "7"}, Launch("srun", 7, 9, 3, 4)),
        ({**SRUN, **MPICH}, Launch("MPICH's mpirun", 3, 4, 1, 2)),  # mpirun inside an allocation
        ({"SLURM_NTASKS": "9", "SLURM_PROCID": "0"}, Launch()),  # a batch script: no step, so no ranks
        ({"PMI_SIZE": "two", "PMI_RANK": "0"}, Launch()),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "job"}, Launch("a PMIx launcher", 1, 0, 1, 1)),
    ],
)
def test_reads_launchers(variables: dict[str, str], expected: Launch) -> None:
    assert read_launch(variables) == expected


def test_mpi_is_needed_only_with_ranks() -> None:
    assert not read_launch({}).needs_mpi
    assert not read_launch({"PMI_SIZE": "1", "PMI_RANK": "0"}).needs_mpi
    assert read_launch(MPICH).needs_mpi
    assert read_launch({"PMIX_RANK": "0", "PMIX_NAMESPACE": "job"}).needs_mpi


def test_threads_are_the_share_of_the_cores() -> None:
    cores = usable_cores()
    assert 1 <= cores <= (os.cpu_count() or 1)
    assert threads_per_rank(Launch()) == cores
    for local_size in (2, 3, 1000):
        assert 1 <= threads_per_rank(Launch("x", 0, local_size, 0, local_size)) <= max(1, cores // local_size)


def test_what_the_user_has_set_stays() -> None:
    environ = {"NUMBA_NUM_THREADS": "7"}
    assert thread_plan(Launch("x", 0, 999, 0, 999), environ) == 1
    assert environ == {"NUMBA_NUM_THREADS": "7", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environ = {"OMP_NUM_THREADS": "3"}
    assert thread_plan(Launch(), environ) == 3
    assert set(environ.values()) == {"3"} and len(environ) == 4


def test_ranks_sleep_while_waiting_only_where_cores_are_few() -> None:
    environ: dict[str, str] = {}
    assert not yield_when_crowded(Launch(), environ) and not environ
    assert yield_when_crowded(Launch("x", 0, 9999, 0, 9999), environ)
    assert environ["MPIR_CVAR_ENABLE_HEAVY_YIELD"] == "1"


def test_threads_are_set_before_numpy_and_mpi_are_imported() -> None:
    ended = alone("threads", PMI_SIZE="64", PMI_RANK="1", MPI_LOCALNRANKS="64", MPI_LOCALRANKID="1", OMP_NUM_THREADS="")
    assert ended.out.split() == ["threads", "1", "1", "False", "False"], ended.err


def test_reading_the_launch_imports_nothing_heavy() -> None:
    assert "l2_dense_parallel.ranks" in sys.modules
    ended = alone("threads")
    assert ended.status == 0 and ended.out.split()[3:] == ["False", "False"], ended.err
