"""A stage of ranks under mpirun: `mpirun -n 16 python -m tests.l3_moe.exchange.program TP EP EXPERTS`. Every form, over real MPI.

Each rank compares what comes back with all experts applied on the spot; rank 0 prints a JSON line a form: the messages and bytes of every rank.
"""

from __future__ import annotations

import json
import sys

from l2_dense_parallel.faults import run
from l2_dense_parallel.world import World

TOKENS, SIZE = 8, 4


def main(world: World) -> int:
    tp, ep, num_experts = map(int, sys.argv[1:])
    from l1_kernels.device import prepare

    prepare("cpu")
    import numpy as np

    from l1_kernels.device import open_device
    from l2_dense_parallel.mesh import MeshShape, build_mesh
    from l3_moe.exchange.open_exchange import FORMS, open_exchange

    world.start()
    shape = MeshShape(tp, 1, world.size // tp, ep, world.size // ep)
    mesh = build_mesh(world, shape)
    assert mesh is not None
    device = open_device("cpu")
    groups = {name: mesh.shape.groups(name) for name in ("tp", "dp", "ep", "es")}
    if mesh.rank == 0:
        print(json.dumps({"groups": groups}))
    rng = np.random.default_rng(0)
    matrices = rng.integers(-3, 4, (num_experts, shape.es, SIZE, SIZE)).astype(np.float32)
    tokens = rng.integers(-3, 4, (shape.dp, TOKENS, SIZE)).astype(np.float32)[mesh.dp_rank]
    experts = np.tile(np.arange(num_experts, dtype=np.int32), (TOKENS, 1))  # every expert, so that everybody has rows for everybody
    share = np.ones(experts.shape, np.float32)
    want = np.einsum("td,kde->te", tokens, matrices.sum(1))
    for form in FORMS:
        exchange = open_exchange(world, mesh, device, num_experts, form)
        assert exchange is not None
        trip = exchange.dispatch(tokens, experts)
        y = np.empty_like(trip.rows)
        for local, (first, last) in enumerate(zip(trip.offsets, trip.offsets[1:], strict=False)):
            y[first:last] = trip.rows[first:last] @ matrices[exchange.placement.first_expert + local, mesh.es_rank]
        part = exchange.collect(trip, y, share)
        if "tp" in mesh.communicators:
            from l2_dense_parallel.open_collective import open_collective

            open_collective(world, mesh, "tp").all_reduce(part)
        assert np.array_equal(part, want), form
        sent = {name: {what: [count, found.bytes[what]] for what, count in found.messages.items()} for name, found in exchange.counters().items()}
        everyones = world.exchange(sent)
        if mesh.rank == 0:
            print(json.dumps({"form": form, "sent": everyones}))
    return 0


if __name__ == "__main__":
    run(main)
