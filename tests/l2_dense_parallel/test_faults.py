"""Every way to fail, on one rank and on several: one message, the right status, and no rank that waits for good."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from l2_dense_parallel.faults import classify
from l2_dense_parallel.world import differing, merge_texts, name_ranks
from tests.l2_dense_parallel.launch import HERE, alone, environment, on_ranks

LIMIT = 30.0  # s: a fault on any rank ends all ranks within it (design, section 6)


# -- one process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "status", "err"),
    [("user", 2, "error: --tp 3 does not divide the model's 4 heads\n"), ("text", 1, "a last word\n"), ("exit0", 0, ""), ("exit3", 3, "")],
)
def test_alone(how: str, status: int, err: str) -> None:
    ended = alone("fail", how, "all")
    assert (ended.status, ended.err) == (status, err)


def test_alone_our_fault_has_a_traceback() -> None:
    ended = alone("fail", "exception", "all")
    assert ended.status == 1
    assert ended.err.startswith("Traceback") and ended.err.endswith("ZeroDivisionError: a fault of ours\n")


def test_alone_a_fault_in_a_thread() -> None:
    ended = alone("fail", "thread", "all")
    assert ended.status == 1 and ended.seconds < LIMIT
    assert ended.err.endswith("ZeroDivisionError: integer division or modulo by zero\n")


def test_alone_a_wrong_option() -> None:
    pytest.importorskip("typer")
    ended = alone("usage")
    assert ended.status == 2
    assert len(ended.err.splitlines()) == 1 and ended.err.startswith("error: ") and "--number" in ended.err


def test_alone_interrupted() -> None:
    ended = alone("fail", "interrupt", "all")
    assert (ended.status, ended.err) == (130, "")


def test_a_reader_that_goes_away() -> None:
    with subprocess.Popen(
        [sys.executable, str(HERE / "program.py"), "pipe"], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(LIMIT) == 141


def test_too_little_memory_is_the_users_to_mend() -> None:
    status, text = classify(MemoryError("Unable to allocate 7.28 TiB"))
    assert status == 2 and "7.28 TiB" in text and "smaller batch" in text


# -- the launcher and MPI ----------------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize(
    "variables",
    [
        {"PMI_SIZE": "2", "PMI_RANK": "0"},
        {"PMI_SIZE": "2"},
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"},
    ],
)
def test_the_launcher_started_two_ranks_where_mpi_says_one(variables: dict[str, str]) -> None:
    ended = alone("arguments", "model", **variables)
    assert ended.status == 2 and len(ended.err.splitlines()) == 1
    assert "launcher started 2 ranks where MPI says 1" in ended.err and "mpi4py found" in ended.err and "mpi" in ended.err.split(";")[1]


@pytest.mark.mpi
def test_no_mpi4py() -> None:
    ended = on_ranks(2, "no_mpi4py")
    assert ended.status != 0 and len(ended.errors) == 1
    assert "started 2 ranks, but mpi4py cannot be used" in ended.errors[0]


# -- ranks: the same fault on all ----------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_have_the_same_error(ranks: int) -> None:
    ended = on_ranks(ranks, "fail", "user", "all")
    assert ended.status != 0 and ended.seconds < LIMIT
    assert ended.errors == ["error: --tp 3 does not divide the model's 4 heads"]
    assert "Traceback" not in ended.err


@pytest.mark.mpi
def test_all_ranks_have_errors_of_their_own() -> None:
    ended = on_ranks(2, "fail", "each", "all")
    assert ended.status != 0
    assert ended.errors == ["error: rank 0: file 0 is missing; rank 1: file 1 is missing"]


@pytest.mark.mpi
def test_all_ranks_have_our_fault() -> None:
    ended = on_ranks(2, "fail", "exception", "all")
    assert ended.status != 0 and ended.err.count("Traceback") == 1


@pytest.mark.mpi
def test_a_wrong_option_is_said_once() -> None:
    pytest.importorskip("typer")
    ended = on_ranks(2, "usage")
    assert ended.status != 0 and len(ended.errors) == 1 and "--number" in ended.errors[0]


# -- ranks: a fault on one, while the others wait for it -------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "how", "who", "words"),
    [
        (2, "user", "1", ["error: rank 1: --tp 3 does not divide"]),
        (2, "user", "0", ["error: --tp 3 does not divide"]),
        (2, "exception", "0", ["rank 0 of 2:", "Traceback", "a fault of ours"]),
        (4, "exception", "2", ["rank 2 of 4:", "Traceback", "a fault of ours"]),
        (2, "thread", "1", ["Traceback", "ZeroDivisionError"]),
        (2, "exit0", "1", ["rank 1 has ended while rank 0 waits in all_reduce (tp)"]),
        (4, "exit0", "0", ["rank 0 has ended while rank", "waits in all_reduce (tp)"]),
        (2, "exit3", "1", []),
        (2, "kill", "1", []),
        (2, "interrupt", "1", []),
    ],
)
def test_a_fault_on_one_rank(ranks: int, how: str, who: str, words: list[str]) -> None:
    ended = on_ranks(ranks, "fail", how, who)
    assert ended.status != 0 and ended.seconds < LIMIT
    assert "survived" not in ended.out
    for word in words:
        assert word in ended.err
    assert len(ended.errors) <= 1
    assert ended.err.count("Traceback") == (how in ("exception", "thread"))


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_wait_in_different_calls(ranks: int) -> None:
    ended = on_ranks(ranks, "fail", "barrier", "1")
    assert ended.status != 0 and ended.seconds < LIMIT
    assert len(ended.errors) == 1 and "the ranks wait in different calls" in ended.errors[0]
    assert "rank 0 in all_reduce (tp), rank 1 in barrier (tp)" in ended.errors[0]
    assert "program.py" in ended.err  # where this rank's call is


@pytest.mark.mpi
def test_a_rank_that_ends_too_soon() -> None:
    ended = on_ranks(2, "leave", "0")
    assert ended.status != 0 and ended.seconds < LIMIT
    assert ended.errors == ["error: rank 0 has ended while rank 1 waits in agree (world)"]


@pytest.mark.mpi
def test_a_fault_before_mpi_has_started() -> None:
    ended = on_ranks(2, "early", "1")
    assert ended.status != 0 and ended.seconds < LIMIT
    assert "before MPI" in ended.err and ended.err.count("Traceback") == 1


@pytest.mark.mpi
@pytest.mark.slow
def test_slow_is_no_fault() -> None:
    ended = on_ranks(2, "uneven", "17")  # longer than the watchdog gives ranks that all wait
    assert ended.status == 0 and ended.err == ""
    assert ended.out.count("done") == 2


# -- ranks: agreement ------------------------------------------------------------------------------------------------------


@pytest.mark.mpi
def test_an_error_on_one_rank_is_told_to_all() -> None:
    ended = on_ranks(2, "agreed", "1")
    assert ended.status != 0 and ended.seconds < 10
    assert ended.errors == ["error: rank 1: weights.bin is truncated"]


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("name", "words"),
    [("--max-new-tokens", "--max-new-tokens is 16 on rank 0 but 17 on rank 1"), ("model", "model is 'aaa")],
)
def test_ranks_that_see_different_arguments(name: str, words: str) -> None:
    ended = on_ranks(2, "arguments", name)
    assert ended.out.count("same on rank") == 2  # equal ones pass
    assert ended.status != 0 and len(ended.errors) == 1
    assert f"error: the ranks see different arguments: {words}" in ended.errors[0]


def test_texts_of_several_ranks_are_one_line() -> None:
    assert merge_texts(["a", "a"]) == "a"
    assert merge_texts(["a", None]) == "a"
    assert merge_texts([None, "a"]) == "rank 1: a"
    assert merge_texts([None, "a", "b", "a"]) == "ranks 1, 3: a; rank 2: b"
    assert name_ranks(list(range(9))) == "ranks 0, 1, 2, 3, 4, 5, ..."


def test_differing() -> None:
    assert differing([{"a": "1"}, {"a": "1"}]) == ""
    assert "b is 2 on rank 0 but not there on ranks 1, 2" in differing([{"a": "1", "b": "2"}, {"a": "1"}, {"a": "1"}])


def test_nothing_is_left_in_shared_memory() -> None:
    assert not list(Path("/dev/shm").glob("strata-*"))
