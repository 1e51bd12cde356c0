"""Fig 8's arithmetic: the simulator told a run's own times gives the run back, and gains are those of equal batches."""

from __future__ import annotations

import pytest

from benchmarks.fig8 import gains, show, times_of
from l2_dense_parallel.pipeline.schedule import make_schedule
from l2_dense_parallel.pipeline.simulate import Times, simulate


@pytest.mark.parametrize("name", ["lockstep", "queued", "hybrid"])
def test_a_run_is_simulated_by_its_own_times(name: str) -> None:
    schedule = make_schedule(name, 3, 7)
    run = simulate(schedule, 6, Times(prompt_each=2.0, token_fixed=5.0, slowness=(1.0, 1.5, 0.5)))
    again = simulate(schedule, 6, times_of(run))
    assert again.total == pytest.approx(run.total) and again.first_token == pytest.approx(run.first_token)
    assert [again.idle(stage) for stage in range(3)] == pytest.approx([run.idle(stage) for stage in range(3)])


def test_gains() -> None:
    def row(plan: str, total: float, said: float, first: float) -> dict[str, object]:
        return {"plan": plan, "batch": 8, "total_ms": total, "simulated_ms": said, "first_tokens_ms": first}

    found = gains([row("lockstep", 30, 28, 9), row("queued", 20, 20, 9), row("hybrid", 15, 14, 6), row("equal", 18, 18, 9)])
    assert found[0] == {"batch": 8, "plan": "queued", "gain": 1.5, "simulated": 1.4, "of_simulated": 1.5 / 1.4}
    assert found[1]["gain"] == 2 and found[1]["of_simulated"] == pytest.approx(1) and found[2]["gain"] == 1.5
    line = show(row("hybrid", 15, 14, 6) | {"tokens_per_s": 3.0, "idle": [0.5, 0.25]})  # type: ignore[arg-type]
    assert "idle 50, 25 %" in line
