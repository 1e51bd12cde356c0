"""Hidden states from GPU to GPU, and ranks that wait for a GPU in vain. What needs no GPU: tests/models/test_pipeline_direct.py, test_watchdog_device.py."""

from __future__ import annotations

import sys

import pytest

from tests.l2_dense_parallel.launch import HERE, Ended, environment, mpirun, start


def on_gpus(ranks: int, program: str, limit: float) -> Ended:
    return start([*mpirun(), "-n", str(ranks), sys.executable, str(HERE / "pipe_program.py"), program], environment(), limit)


@pytest.mark.gpu2
@pytest.mark.mpi
def test_what_is_sent_arrives_in_its_order() -> None:
    ended = on_gpus(2, "order", 180.0)
    assert ended.status == 0, ended.err
    assert ended.out.count("right on stage") == 2


@pytest.mark.gpu2
@pytest.mark.mpi
def test_a_send_that_nobody_takes_ends_the_run() -> None:
    ended = on_gpus(2, "stuck", 120.0)
    assert ended.status != 0 and ended.seconds < 30.0 + 30.0, ended.seconds  # CuPy and NCCL start in the second half minute at most
    assert "survived" not in ended.out
    assert len(ended.errors) == 1 and ended.errors[0].startswith("error: nothing has moved for 20 s, for want of rank 1")


@pytest.mark.gpu2
@pytest.mark.mpi
def test_a_device_that_works_long_is_waited_for() -> None:
    ended = on_gpus(2, "long", 180.0)
    assert ended.status == 0, ended.err
    assert ended.out.count("done") == 2


@pytest.mark.gpu2
@pytest.mark.mpi
def test_an_ended_stage() -> None:
    ended = on_gpus(2, "leave", 120.0)
    assert ended.status != 0 and ended.seconds < 60.0
    assert ended.errors == ["error: rank 1 has ended while rank 0 waits in the device (pp)"]
