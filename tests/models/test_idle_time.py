"""The schedules gain what the simulator says, measured on stages that sleep."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from l2_dense_parallel.pipeline.schedule import Work, make_schedule
from l2_dense_parallel.pipeline.simulate import Bar, Times, Trace, simulate

ROOT = Path(__file__).parents[2]
STAGES, SEQUENCES, NEW_TOKENS, PROMPT, TOKEN = 4, 8, 6, 0.02, 0.03
PLANS = [["lockstep"], ["queued"], ["hybrid"]]


def predicted(plan: list[str]) -> Trace:
    times = Times(prompt_each=PROMPT, token_fixed=TOKEN)
    return simulate(make_schedule(plan[0], STAGES, SEQUENCES), NEW_TOKENS, times)


@pytest.mark.mpi
def test_queued_and_hybrid_gain_what_is_predicted(tmp_path: Path) -> None:
    file = tmp_path / "cases.json"
    cases = [{"plan": plan, "sequences": SEQUENCES} for plan in [*PLANS, *PLANS]]  # the first round warms up
    file.write_text(json.dumps({"prompt": PROMPT, "token": TOKEN, "new_tokens": NEW_TOKENS, "cases": cases}))
    command = ["mpirun", "-n", str(STAGES), sys.executable, "-m", "tests.models.sleeping", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")][len(PLANS) :]
    found = {}
    for plan, rows in zip(PLANS, lines, strict=True):
        start = min(row[4] for row in rows)
        bars = [Bar(stage, Work(number, part), count, a - start, b - start) for stage, number, part, count, a, b in rows]
        found[plan[0]] = Trace(STAGES, tuple(sorted(bars, key=lambda bar: (bar.start, bar.stage))))
    want = {plan[0]: predicted(plan) for plan in PLANS}
    for name in found:
        assert [(b.stage, b.work, b.sequences) for s in range(STAGES) for b in found[name].of(s)] == [
            (b.stage, b.work, b.sequences) for s in range(STAGES) for b in want[name].of(s)
        ]
    for name in ("queued", "hybrid"):
        gain, said = found["lockstep"].total / found[name].total, want["lockstep"].total / want[name].total
        print(f"{name}: {gain:.3f} x lockstep, predicted {said:.3f}")
        assert said > 1.4 and abs(gain / said - 1) < 0.1
        idle = sum(found["lockstep"].idle_of_run(s) - found[name].idle_of_run(s) for s in range(STAGES))
        assert idle == pytest.approx(sum(want["lockstep"].idle_of_run(s) - want[name].idle_of_run(s) for s in range(STAGES)), rel=0.15)
    assert found["hybrid"].first_token < found["queued"].first_token
