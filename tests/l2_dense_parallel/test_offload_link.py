from __future__ import annotations

import pytest

from l2_dense_parallel.offload_link import gain, main, seconds_of_pass


def test_what_nothing_or_one_alone_takes() -> None:
    assert seconds_of_pass(5, 2.0, 1.0, ((), ())) == pytest.approx(10)
    assert seconds_of_pass(1, 2.0, 3.0, ((0,), ())) == pytest.approx(5)
    assert seconds_of_pass(1, 2.0, 3.0, ((0,), (0,))) == pytest.approx(8)  # the link is shared
    assert seconds_of_pass(1, 2.0, 3.0, ((0,), (0,)), shared=False) == pytest.approx(5)


def test_turns_gain_where_work_and_copies_alternate_and_nothing_where_one_of_them_is_all() -> None:
    together, turns = gain(28, 1.0, 1e-6)
    assert together / turns == pytest.approx(1, abs=1e-3)
    together, turns = gain(28, 1e-6, 1.0)  # the link carries the same bytes either way
    assert together / turns == pytest.approx(1, abs=0.08)
    for copy in (0.3, 0.7, 1.0, 1.5):
        together, turns = gain(28, 1.0, copy)
        assert together >= turns - 1e-9
    assert together > 0


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--layers", "4", "--layer-ms", "1", "--copy-ms", "1"]) == 0
    assert " x" in capsys.readouterr().out
    assert main(["--layers", "0"]) == 2 and capsys.readouterr().err.count("\n") == 1
