"""Where a decode step's time goes: its kernels by name, from the GPU's own records of a few replays of the step's graph.

    python -m benchmarks.step_profile [--model gpt-j-6b] [--dtype fp16] [--batch 1] [--overlap]

Random weights, context 136. The records come through torch's profiler (CUPTI), which sees every kernel of the process, so torch must be installed. By
default launches do not overlap: with --overlap a kernel's time holds its wait for the one before.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from benchmarks.fig10a import CONTEXT, PLACE
from benchmarks.random_model import random_runner
from l1_kernels.device import open_device, prepare
from layers.decode import DecodeState

REPLAYS = 5
MOST = 12  # lines


def short_name(name: str) -> str:
    """numba's mangled name or a library's, as one word: the function's own name."""
    found = re.search(r"_3clocals_3e(?:d(\d+)|\d+)?(\w+?)B", name) or re.search(r"(\w+)\s*[<(]", name)
    return (found.group(found.lastindex or 0) if found else name)[:48]


def by_name(records: Iterable[tuple[str, float, float]], replays: int) -> tuple[float, list[tuple[str, float, float]]]:
    """records: (name, start, end) in us -> (us a step from the first start to the last end, [(name, times a step, us a step)] by time)."""
    times: dict[str, list[float]] = defaultdict(list)
    first, last = float("inf"), 0.0
    for name, start, end in records:
        times[name].append(end - start)
        first, last = min(first, start), max(last, end)
    rows = [(name, len(some) / replays, sum(some) / replays) for name, some in times.items()]
    return (last - first) / replays, sorted(rows, key=lambda row: -row[2])


def profile(device: Any, runner: Any, batch: int) -> list[tuple[str, float, float]]:
    """Every kernel of REPLAYS steps: (name, start, end) in us."""
    import torch
    from torch.profiler import ProfilerActivity

    cache = runner.new_cache(batch, CONTEXT)
    state = DecodeState(device, batch, batch, CONTEXT)

    def begin() -> None:
        state.fill([5] * batch, list(range(batch)), [PLACE] * batch)
        device.synchronize()

    def step() -> Any:
        logits = runner.decode(state.slots, cache)
        device.kernels.greedy(logits, state.slots)
        return logits

    begin()
    graph = device.capture(step)
    begin()
    graph.replay()
    device.synchronize()
    begin()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as records:
        for _ in range(REPLAYS):
            graph.replay()
        device.synchronize()
    return [(event.name, event.time_range.start, event.time_range.end) for event in records.events()]


def main() -> int:
    options = arguments()
    try:
        import torch  # noqa: F401
    except ImportError:
        print("error: the profile is read through torch's profiler: install torch", file=sys.stderr)
        return 2
    prepare("cuda")
    device = open_device("cuda", overlap=options.overlap)
    from models.presets import preset

    runner = random_runner(preset(options.model), device, options.dtype)
    step, rows = by_name(profile(device, runner, options.batch), REPLAYS)
    busy = sum(us for _, _, us in rows)
    print(f"{options.model} {options.dtype} batch {options.batch}: {step:.0f} us a step, kernels {busy:.0f} us")
    for name, count, us in rows[:MOST]:
        print(f"{count:7.1f} x {us / count:8.2f} us = {us:8.1f} us  {100 * us / step:3.0f} %  {short_name(name)}")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], prog="python -m benchmarks.step_profile")
    parser.add_argument("--model", default="gpt-j-6b")
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--overlap", action="store_true", help="launches overlap, as in use")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
