"""Ranks of test_nccl_pipe.py: `mpirun -n 2 python tests/l2_dense_parallel/pipe_program.py PROGRAM`, each with a GPU of its own."""

from __future__ import annotations

import sys
from typing import Any

from l2_dense_parallel import faults
from l2_dense_parallel.world import World

MUCH = 1 << 18, 1 << 10  # a GiB: more than NCCL's buffers take without a receiver (64 MB they do)


def opened(world: World) -> tuple[Any, Any]:
    from l1_kernels.device import open_device, prepare

    prepare("cuda")
    from l2_dense_parallel.mesh import MeshShape, build_mesh
    from l2_dense_parallel.pipeline.open_pipe import open_pipe

    mesh = build_mesh(world.start(), MeshShape(pp=world.size))
    assert mesh is not None
    device = open_device("cuda", world.launch.local_rank)
    pipe = open_pipe(world, mesh, device)
    assert pipe is not None and pipe.direct
    return device, pipe


def order(world: World) -> None:
    """300 works of random sizes, on both sides of what is received ahead of time. Each stage adds one, after some work that takes its time, and lets memory go that
    the next work gets; the last one checks all numbers."""
    import numpy as np

    device, pipe = opened(world)
    xp, rng, width = device.xp, np.random.default_rng(4), 512
    sizes = rng.choice([1, 3, 16, 64, 500, 513, 2000, 9000], 300).tolist()  # rows of 2 KiB; 512 are a MiB
    slow = xp.ones((1500, 1500), xp.float32)
    right = []
    for number, rows in enumerate(sizes):
        if pipe.stage:
            x = device.empty((rows, width))
            pipe.receive_hidden(x)
        else:
            x = xp.full((rows, width), number, xp.float32)
        if (number + pipe.stage) % 3 == 0:
            slow = slow @ slow * xp.float32(1 / 1500)
        x += 1
        if pipe.stage < pipe.size - 1:
            pipe.send_hidden(x)
        else:
            right.append((x == number + pipe.size).all())
        pipe.mark()
        del x
        xp.full((rows, width), -7, xp.float32)  # in the memory of x, if it is free
    pipe.flush()
    device.synchronize()
    assert all(bool(one) for one in right)
    assert len(right) == (300 if pipe.stage == pipe.size - 1 else 0)
    print("right on stage", pipe.stage, flush=True)


def stuck(world: World) -> None:
    """Stage 1 waits for something that nobody sends, and not for what stage 0 does."""
    import numpy as np

    device, pipe = opened(world)
    if pipe.stage == 0:
        pipe.send_hidden(device.zeros(MUCH))
        pipe.flush()
    else:
        pipe.receive(0, np.zeros(4, np.int32))
    print("survived", flush=True)


def long(world: World) -> None:
    """Stage 1's device works for longer than a standstill may last, and says so at times."""
    import time

    device, pipe = opened(world)
    if pipe.stage == 0:
        pipe.send_hidden(device.zeros((1 << 14, 1 << 10)))
        pipe.flush()
    else:
        x, end = device.zeros((8192, 8192)), time.monotonic() + 35.0
        while time.monotonic() < end:
            for _ in range(20):
                x = x @ x
            pipe.mark(0.5 if pipe._said[0] != 0.5 else 0.25)
            with pipe.watched():
                device.synchronize()
        y = device.empty((1 << 14, 1 << 10))
        pipe.receive_hidden(y)
        device.synchronize()
    print("done", flush=True)


def leave(world: World) -> None:
    device, pipe = opened(world)
    if pipe.stage == 0:
        pipe.send_hidden(device.zeros(MUCH))
        pipe.flush()
        print("survived", flush=True)


if __name__ == "__main__":
    faults.run(lambda world: {"order": order, "stuck": stuck, "long": long, "leave": leave}[sys.argv[1]](world))
