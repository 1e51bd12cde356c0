"""Fig 8: a dense model over pipeline stages, prompts of 512 tokens and 50 more; throughput, first tokens and idle time, schedule by schedule.

    mpirun -n 2 python -m benchmarks.fig8 [--model gpt-j-6b] [--batches 8,16,24,32] [--plans lockstep,hybrid] [--tp 1] [--check]

Random weights of Table I's shapes. Each batch runs by `lockstep` (as training does), `queued`, `hybrid`, and `equal`: hybrid with as many micro-batches of prompts as
stages, which is Fig 13's comparison (fig13.py) of first tokens. Beside what is measured stands what the event simulator makes of the run's own work times: the
mean of a stage's prompt works per sequence, and of its token works; links and hosts cost it nothing. So what is measured can be short of it by what they cost, and no more.

Bars (--check): at each batch queued and hybrid gain over lockstep at least 0.9 of what is simulated; hybrid's first tokens over equal's likewise; every stage of every
plan idles at most a tenth of the run longer than simulated; and hybrid's best rate over all batches is no less than lockstep's best.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.pipeline_run import PACKAGES, Stand, common_arguments, numbers, show, timed
from benchmarks.record import circumstances, write
from l1_kernels.errors import UserError
from l2_dense_parallel.faults import run
from l2_dense_parallel.world import World
from models.pipeline import Plan

PLANS = ("lockstep", "queued", "hybrid", "equal")
SHARE, IDLE = 0.9, 0.1  # of the simulated gain; of the run, beyond the simulated idle time


def plan_of(name: str, batch: int, stages: int) -> Plan:
    return Plan("hybrid", min(batch, stages), min(batch, stages)) if name == "equal" else Plan(name)


def gains(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At equal batch: throughput over lockstep's, and hybrid's first tokens over equal micro-batches'; measured, simulated, and the one as a share of the other."""
    found = []
    for batch in dict.fromkeys(row["batch"] for row in rows):
        by = {row["plan"]: row for row in rows if row["batch"] == batch}
        pairs = [("lockstep", name, "", name) for name in ("queued", "hybrid")] + [("equal", "hybrid", "first_tokens_", "hybrid, first tokens")]
        for base, name, key, shown in pairs:
            if base in by and name in by:
                gain, said = (by[base][which] / by[name][which] for which in (f"{key or 'total_'}ms", f"simulated_{key}ms"))
                found.append({"batch": batch, "plan": shown, "over": base, "gain": gain, "simulated": said, "of_simulated": gain / said})
    return found


def bests(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each plan at the batch at which it is fastest."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["plan"] not in found or row["tokens_per_s"] > found[row["plan"]]["tokens_per_s"]:
            found[row["plan"]] = {"batch": row["batch"], "tokens_per_s": row["tokens_per_s"]}
    return found


def bars_missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each bar that does not hold."""
    missed = [
        f"batch {gain['batch']} {gain['plan']}: {gain['gain']:.3f} x over {gain['over']} is {gain['of_simulated']:.2f} of the simulated {gain['simulated']:.3f}, bar {SHARE}"
        for gain in gains(rows)
        if not gain["of_simulated"] >= SHARE
    ]
    for row in rows:
        for stage, (idle, said) in enumerate(zip(row["idle"], row["simulated_idle"], strict=True)):
            if not idle <= said + IDLE:
                missed.append(f"batch {row['batch']} {row['plan']}: stage {stage} idles {100 * idle:.0f} % of the run, simulated {100 * said:.0f} %")
    best = bests(rows)
    if {"lockstep", "hybrid"} <= best.keys() and not best["hybrid"]["tokens_per_s"] >= best["lockstep"]["tokens_per_s"]:
        missed.append(f"hybrid's best {best['hybrid']['tokens_per_s']:.0f} tokens/s is below lockstep's {best['lockstep']['tokens_per_s']:.0f}")
    return missed


def compare(world: World, options: argparse.Namespace) -> int:
    """All of it; the exit status."""
    if unknown := set(options.plans) - set(PLANS):
        raise UserError(f"--plans {','.join(unknown)}: have {', '.join(PLANS)}")
    start = time.perf_counter()
    stand = Stand(world, options)
    runner = stand.runner(stand.device)
    document = circumstances(PACKAGES)
    document["machine"]["gpu"], document["model"], document["mesh"] = stand.device.description, options.model, stand.mesh.describe()
    document["pipe"] = type(stand.pipe).__name__
    rows: list[dict[str, Any]] = []
    for batch in options.batches:
        for name in options.plans:
            row = timed(stand, runner, name, plan_of(name, batch, stand.pipe.size), batch, options.prompt, options.new, options.repeats)
            if row is not None:
                rows.append(row)
                print(show(row), flush=True)
    if world.rank:
        return world.exchange(0)[0] if options.check else 0
    document["rows"], document["gains"], document["best"] = rows, gains(rows), bests(rows)
    for gain in document["gains"]:
        print(
            f"batch {gain['batch']:3} {gain['plan']:20} {gain['gain']:.3f} x over {gain['over']}, simulated {gain['simulated']:.3f} ({gain['of_simulated']:.2f} of it)"
        )
    print("best: " + ", ".join(f"{name} {best['tokens_per_s']:.0f} tokens/s at batch {best['batch']}" for name, best in document["best"].items()))
    best = document["best"]
    if "lockstep" in best:
        print("at each one's best batch, over lockstep: " + ", ".join(f"{name} {best[name]['tokens_per_s'] / best['lockstep']['tokens_per_s']:.3f} x" for name in best))
    document["bars_missed"] = bars_missed(rows)
    for line in document["bars_missed"]:
        print(f"missed: {line}", file=sys.stderr, flush=True)
    print(f"median of {options.repeats} runs; {time.perf_counter() - start:.0f} s; {write(options.out, document, [])}")
    status = int(bool(document["bars_missed"]))
    return world.exchange(status)[0] if options.check else 0


def main(world: World) -> int:
    return compare(world, arguments())


def arguments() -> argparse.Namespace:
    parser = common_arguments("fig8", (__doc__ or "").split("\n")[0], "fig8")
    parser.add_argument("--batches", type=numbers, default=[8, 16, 24, 32])
    parser.add_argument("--plans", type=lambda text: text.split(","), default=list(PLANS), help=f"of {', '.join(PLANS)}")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
