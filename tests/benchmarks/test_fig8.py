"""Fig 8's arithmetic: the simulator told a run's own times gives the run back, and gains are those of equal batches."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from benchmarks import fig13
from benchmarks.fig8 import bars_missed, bests, gains
from benchmarks.pipeline_run import show, times_of
from benchmarks.record import RESULTS, ROOT
from l2_dense_parallel.pipeline.schedule import make_schedule
from l2_dense_parallel.pipeline.simulate import Times, simulate


@pytest.mark.parametrize("name", ["lockstep", "queued", "hybrid"])
def test_a_run_is_simulated_by_its_own_times(name: str) -> None:
    schedule = make_schedule(name, 3, 7)
    run = simulate(schedule, 6, Times(prompt_each=2.0, token_fixed=5.0, slowness=(1.0, 1.5, 0.5)))
    again = simulate(schedule, 6, times_of(run))
    assert again.total == pytest.approx(run.total) and again.first_token == pytest.approx(run.first_token)
    assert [again.idle(stage) for stage in range(3)] == pytest.approx([run.idle(stage) for stage in range(3)])


def row(plan: str, total: float, said: float, first: float, batch: int = 8, idle: float = 0.2) -> dict[str, Any]:
    return {
        "plan": plan, "batch": batch, "total_ms": total, "simulated_ms": said, "first_tokens_ms": first, "simulated_first_tokens_ms": first,
        "tokens_per_s": 1000 * batch / total, "idle": [idle, 0.25], "simulated_idle": [0.15, 0.25],
    }  # fmt: skip


GOOD = [row("lockstep", 30, 28, 9), row("queued", 20, 20, 9), row("hybrid", 15, 14, 6), row("equal", 18, 18, 9)]


def test_gains() -> None:
    found = gains(GOOD)
    assert found[0] == {"batch": 8, "plan": "queued", "over": "lockstep", "gain": 1.5, "simulated": 1.4, "of_simulated": 1.5 / 1.4}
    assert found[1]["gain"] == 2 and found[1]["of_simulated"] == pytest.approx(1)
    assert found[2]["plan"] == "hybrid, first tokens" and found[2]["over"] == "equal" and found[2]["gain"] == 1.5
    assert "idle 20, 25 % (simulated 15, 25)" in show(GOOD[2])
    assert gains(GOOD[3:]) == []


def test_each_plan_has_a_best_batch_of_its_own() -> None:
    rows = [*GOOD, row("lockstep", 90, 90, 9, batch=16), row("hybrid", 20, 20, 9, batch=16)]
    assert bests(rows)["lockstep"] == {"batch": 8, "tokens_per_s": 8000 / 30} and bests(rows)["hybrid"]["batch"] == 16


def test_bars_can_be_missed() -> None:
    assert bars_missed(GOOD) == []
    slow = [GOOD[0], row("queued", 24, 20, 9), *GOOD[2:]]
    assert len(bars_missed(slow)) == 1 and "batch 8 queued: 1.250 x over lockstep is 0.89 of the simulated 1.400" in bars_missed(slow)[0]
    late = [*GOOD[:2], GOOD[2] | {"first_tokens_ms": 8}, GOOD[3]]
    assert len(bars_missed(late)) == 1 and "first tokens" in bars_missed(late)[0]
    lazy = [*GOOD[:3], row("equal", 18, 18, 9, idle=0.26)]
    assert bars_missed(lazy) == ["batch 8 equal: stage 0 idles 26 % of the run, simulated 15 %"]
    worse = [GOOD[0], row("hybrid", 31, 28, 6)]
    assert any("below lockstep's" in line for line in bars_missed(worse))
    assert bars_missed([row("lockstep", float("nan"), 28, 9), *GOOD[1:]])


def test_fig13_is_fig8_with_two_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fig13", "--batches", "24", "--check"])
    options = fig13.arguments()
    assert options.plans == ["equal", "hybrid"] and options.batches == [24] and options.check and options.out == "fig13"


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("program", ["fig8", "fig10b"])
def test_the_programs_run(program: str) -> None:
    """On the CPU, on two layers. Bars are not asked for: two ranks share the cores."""
    name = f"test_{program}"
    path = RESULTS / f"{name}.json"
    batches = ["--batches", "2,3"] if program != "fig10b" else ["--most", "4", "--budget", "0.8"]
    sizes = ["--model", "gpt-neo-2.7b", "--layers", "2", "--prompt", "5", "--new", "3", *batches, "--repeats", "1", "--dtype", "fp32"]
    command = ["mpirun", "-n", "2", sys.executable, "-m", f"benchmarks.{program}", "--device", "cpu", "--out", name, *sizes]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-4000:]
        document = json.loads(path.read_text())
    finally:
        path.unlink(missing_ok=True)
    assert all(found["total_ms"] > 0 and len(found["idle"]) == 2 and found["simulated_ms"] > 0 for found in document["rows"])
    plans = {"fig8": {"lockstep", "queued", "hybrid", "equal"}, "fig10b": {"baseline", "schedule", "memory"}}[program]
    assert {found["plan"] for found in document["rows"]} >= plans
