"""Ranks of test_stuck_ranks.py: `mpirun -n 2 python tests/models/stuck_program.py WHAT ARGUMENT ...` is `python -m models.gpt ARGUMENT ...`, where rank 1
stops taking part, or is slow. Says on standard error when, in seconds of the machine's clock."""

from __future__ import annotations

import sys
import time
from typing import Any

from l2_dense_parallel import faults
from l2_dense_parallel.world import World

STEP = 20  # the replay at which something happens; in a long prompt's pass it is the second one's third layer: everything has been compiled and loaded
LONG_TIME = 1000.0  # s
SLOW = 25.0  # s of a rank's own work, longer than a standstill may last
SLOW_LAYER = 8.0  # s on the device; four of them are


def now(what: str) -> None:
    sys.stderr.write(f"{what} at {time.monotonic():.1f}\n")
    sys.stderr.flush()


def hold(device: Any, seconds: float) -> None:
    """The device's stream does nothing for so long; the host goes on."""
    device.current_stream().launch_host_func(time.sleep, seconds)


def barrier(graph: Any) -> None:
    """It waits for the others in another call."""
    graph._runner.collective.barrier()


def sleep(graph: Any) -> None:
    """Its launch does not return."""
    with graph._runner.collective.watched():
        time.sleep(LONG_TIME)


def device(graph: Any) -> None:
    """Its device does not come to the step; the host has launched it."""
    hold(graph._runner.device, LONG_TIME)


def leave(graph: Any) -> None:
    sys.exit(0)


def slow(graph: Any) -> None:
    time.sleep(SLOW)


def in_a_step(world: World, what: str) -> None:
    from models.decode_graph import DecodeGraph

    real, steps = DecodeGraph.replay, 0

    def replay(graph: DecodeGraph, turn: int) -> None:
        nonlocal steps
        steps += 1
        if steps == STEP and world.rank == 1:
            now(what)
            {"barrier": barrier, "sleep": sleep, "device": device, "leave": leave, "slow": slow}[what](graph)
        real(graph, turn)

    DecodeGraph.replay = replay  # type: ignore[method-assign]


def in_a_layer(world: World, what: str) -> None:
    """layer: rank 1's device stops between two layers of a long prompt; layers: all devices take long over each."""
    from models.marking import MarkingCache
    from models.runner import Runner

    real_pass, real_close = Runner.stage_pass, MarkingCache.close_layer
    devices: list[Any] = []
    passes = 0

    def stage_pass(runner: Runner, *given: Any) -> Any:
        devices[:] = [runner.device]
        return real_pass(runner, *given)

    def close_layer(cache: MarkingCache, index: int) -> None:
        nonlocal passes
        passes += index == 0
        if passes == 2 and what == "layers":
            hold(devices[0], SLOW_LAYER)
        if passes == 2 and what == "layer" and index == 2 and world.rank == 1:
            now(what)
            hold(devices[0], LONG_TIME)
        real_close(cache, index)

    Runner.stage_pass = stage_pass  # type: ignore[method-assign]
    MarkingCache.close_layer = close_layer  # type: ignore[method-assign]


def main(world: World) -> None:
    from l1_kernels.device import prepare
    from models.gpt import command_line, requested_device

    what, *arguments = sys.argv[1:]
    prepare(requested_device(arguments))
    (in_a_layer if what in ("layer", "layers") else in_a_step)(world, what)
    command_line(world, arguments)


if __name__ == "__main__":
    faults.run(main)
