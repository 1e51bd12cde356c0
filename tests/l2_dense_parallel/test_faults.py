"""Every way to fail, on one rank and on several: one message, the right status, and no rank that waits for good."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from l2_dense_parallel.board import PID, SINCE, SLOTS, Board, Pulse
from l2_dense_parallel.faults import classify
from l2_dense_parallel.watchdog import DEADLOCK, GROUPS, OPERATIONS, POLL, SILENCE, Watchdog
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
    assert ended.left_behind == []
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


# -- ranks: a fault on one, in each part of a run ----------------------------------------------------------------------------


IN_A_RUN = [
    ("--tp", "loading", "exception", 1, "rank 1 of 2:\n"),
    ("--pp", "prefill", "exception", 0, "rank 0 of 2:\n"),
    ("--pp", "decode", "exception", 1, "rank 1 of 2:\n"),
    ("--pp", "loading", "exit0", 1, "rank 1 has ended while rank 0 waits in agree (world)"),
    ("--tp", "prefill", "exit0", 0, "rank 0 has ended while rank 1 waits in all_reduce (tp)"),
    ("--pp", "decode", "exit0", 1, "rank 1 has ended while rank 0 waits in receive (pp)"),
    ("--tp", "loading", "kill", 0, "rank 0 was killed"),
    ("--pp", "prefill", "kill", 1, "rank 1 was killed"),
    ("--tp", "decode", "kill", 1, "rank 1 was killed"),
    ("--pp", "loading", "stop", 1, "rank 1 does not run (stopped, or its system hangs) while rank 0 waits in agree (world)"),
    ("--tp", "prefill", "stop", 0, "rank 0 does not run (stopped, or its system hangs) while rank 1 waits in all_reduce (tp)"),
    ("--pp", "decode", "stop", 1, "rank 1 does not run (stopped, or its system hangs) while rank 0 waits in receive (pp)"),
    ("--tp", "end", "stop", 1, "rank 1 does not run (stopped, or its system hangs) while rank 0 has ended"),
]


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(("axis", "phase", "how", "who", "words"), IN_A_RUN, ids=[" ".join(map(str, case[:4])) for case in IN_A_RUN])
def test_a_fault_in_a_run(axis: str, phase: str, how: str, who: int, words: str) -> None:
    silence = "" if phase == "decode" else "2"  # the real one once
    ended = on_ranks(2, "generate", phase, how, str(who), silence, "run", "--device", "cpu", axis, "2", "--max-new-tokens", "8", "--json")
    assert ended.status != 0 and ended.seconds < LIMIT
    assert words in ended.err
    assert len(ended.errors) == (how != "exception")
    assert ended.err.count("Traceback") == (how == "exception")
    assert ('"token_ids"' in ended.out) == (phase == "end")
    assert ended.left_behind == []  # a stopped process does not end by itself


# -- whether a rank runs -----------------------------------------------------------------------------------------------------

SLEEPS, WORKS = "import time\nwhile True: time.sleep(9)", "while True: pass"


@contextmanager
def two_rows(program: str) -> Iterator[tuple[Board, Board, subprocess.Popen]]:
    """A board whose row 0 is this process, and row 1 one that runs `program` and does not beat by itself."""
    slots = array("d", [0.0] * 2 * SLOTS)
    mine, other = Board(slots, (0, 1), 0, True), Board(slots, (0, 1), 1, True)
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            slots[SLOTS + PID] = process.pid
            time.sleep(0.2)  # it has started
            yield mine, other, process
        finally:
            process.kill()


def looks(pulse: Pulse, count: int) -> int:
    for _ in range(count):
        time.sleep(0.1)
        pulse.look()
    return pulse.still


def test_a_rank_that_works_in_one_long_call_runs() -> None:
    with two_rows(WORKS) as (mine, _, process):
        pulse = Pulse(mine, 1)
        assert looks(pulse, 8) <= 2  # other work may have the cores for a moment
        process.send_signal(signal.SIGSTOP)
        assert looks(pulse, 8) >= 6
        process.send_signal(signal.SIGCONT)
        assert looks(pulse, 8) <= 2


def test_a_rank_that_beats_runs() -> None:
    with two_rows(SLEEPS) as (mine, other, process):
        pulse = Pulse(mine, 1)
        looks(pulse, 5)
        assert pulse.still >= 3
        other.beat()
        assert looks(pulse, 1) == 0
        process.kill()
        process.wait()
        assert looks(pulse, 5) >= 3


def test_a_stopped_rank_is_no_deadlock() -> None:
    """Both wait, one because it was stopped while it waited: the words are of that one."""
    with two_rows(SLEEPS) as (mine, other, _):
        watchdog = Watchdog(mine, lambda reason: None)
        watchdog.enter(OPERATIONS.index("barrier"), GROUPS.index("tp"), (0, 1))
        Watchdog(other, lambda reason: None).enter(OPERATIONS.index("all_reduce"), GROUPS.index("tp"), (0, 1))
        for board in (mine, other):
            board.slots[board.base + SINCE] -= DEADLOCK + 1
        assert "different calls" in watchdog._hopeless()
        (pulse,) = watchdog._pulses
        pulse.still = int(SILENCE / POLL) // 2
        assert watchdog._hopeless() == ""
        pulse.still = int(SILENCE / POLL)
        assert watchdog._hopeless() == "rank 1 does not run (stopped, or its system hangs) while rank 0 waits in barrier (tp)"


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
