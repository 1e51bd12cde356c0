"""Recording a graph on all ranks of a model, or on none: a rank that went on without it would leave the others waiting."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from l1_kernels.device import Device, Graph
from l2_dense_parallel.collectives import Collective

Result = TypeVar("Result")


def capture(device: Device, collective: Collective, step: Callable[[], Result]) -> Graph[Result]:
    """`device.capture`, which waits for its first call of `step`: so that call waits by itself, watched. What compiles is not, for others wait for it."""
    waits = True

    def call() -> Result:
        nonlocal waits
        result = step()
        if waits:
            waits = False
            with collective.watched():
                device.current_stream().synchronize()
        return result

    graph = device.capture(call)
    waits = False  # on the host only a replay calls it
    return graph


def record_together(collective: Collective, record: Callable[[], None]) -> str | None:
    """Calls `record`. Why it failed, on this rank or another, the same line on all; None where it went well on all. Rank 0 warns."""
    failure = None
    try:
        record()
    except Exception as error:  # whatever the driver, NCCL or a library has against it
        lines = str(error).strip().splitlines()
        failure = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    parts = collective.gather(failure)
    failure = collective.broadcast(next(filter(None, parts), None) if parts is not None else None)
    if failure is not None and collective.rank == 0:
        print(f"warning: a step cannot be recorded as a graph ({failure}); going on without", file=sys.stderr, flush=True)
    return failure
