"""A GPU a rank: `mpirun -n 2 python -m tests.l3_moe.exchange.gpu_program TP EP EXPERTS`. Every form with uneven numbers of tokens, then slots in a graph that is
replayed over other tokens than it was recorded with."""

from __future__ import annotations

import sys

from l2_dense_parallel.faults import run
from l2_dense_parallel.world import World

SIZE, TOP_K = 16, 2


def main(world: World) -> int:
    tp, ep, num_experts = map(int, sys.argv[1:])
    from l1_kernels.device import prepare

    prepare("cuda")
    import numpy as np

    from l1_kernels.device import open_device
    from l2_dense_parallel.mesh import MeshShape, build_mesh
    from l2_dense_parallel.open_collective import open_collective
    from l3_moe.exchange.open_exchange import FORMS, open_exchange
    from l3_moe.exchange.slots import SlotExchange

    world.start()
    mesh = build_mesh(world, MeshShape(tp, 1, world.size // tp, ep, world.size // ep))
    assert mesh is not None
    device = open_device("cuda", world.launch.local_rank)
    group = open_collective(world, mesh, "tp", "cuda", all_reduce="nccl")
    matrices = np.random.default_rng(0).integers(-3, 4, (num_experts, mesh.es, SIZE, SIZE)).astype(np.float32)

    def tokens_of(group_rank: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        rng = np.random.default_rng([group_rank, seed])
        x = rng.integers(-3, 4, (count, SIZE)).astype(np.float32)
        experts = np.array([rng.permutation(num_experts)[:TOP_K] for _ in range(count)], np.int32).reshape(count, TOP_K)
        share = rng.integers(1, 4, experts.shape).astype(np.float32)
        want = (np.einsum("td,tkde->tke", x, matrices.sum(1)[experts]) * share[..., None]).sum(1)
        return x, experts, share, want

    for form in FORMS:
        exchange = open_exchange(world, mesh, device, num_experts, form)
        assert exchange is not None
        first = exchange.placement.first_expert
        for counts in ((5, 2), (0, 3), (1, 0), (0, 0)):
            x, experts, share, want = tokens_of(mesh.dp_rank, counts[mesh.dp_rank % 2], 1)
            trip = exchange.dispatch(device.to_device(x), experts)
            y = device.empty(trip.rows.shape)
            for local, (begin, end) in enumerate(zip(trip.offsets.tolist(), trip.offsets[1:].tolist(), strict=False)):
                y[begin:end] = trip.rows[begin:end] @ device.to_device(matrices[first + local, mesh.es_rank])
            part = exchange.collect(trip, y, device.to_device(share))
            if group.size > 1:
                group.all_reduce(part)
            assert np.array_equal(device.to_host(part), want), (form, counts)

    exchange = open_exchange(world, mesh, device, num_experts, "pcc")
    assert exchange is not None
    slots = SlotExchange(exchange.hops["across"].peers, device)
    first, owned = exchange.placement.first_expert, exchange.placement.owned
    local = device.to_device(np.ascontiguousarray(matrices[first : first + owned, mesh.es_rank]))
    x, experts, share, _ = (device.to_device(array) for array in tokens_of(mesh.dp_rank, 4, 2))

    def step() -> object:
        arrived = slots.dispatch(x, experts, share)
        total = device.zeros((arrived.x.shape[0], SIZE))
        for expert in range(owned):
            weight = ((arrived.experts == first + expert) * arrived.share).sum(1)
            total += weight[:, None] * (arrived.x @ local[expert])
        return slots.collect(total)

    graph = device.capture(step)
    for seed in (3, 4, 5):
        new_x, new_experts, new_share, want = tokens_of(mesh.dp_rank, 4, seed)
        x[...], experts[...], share[...] = (device.to_device(array) for array in (new_x, new_experts, new_share))
        part = graph.replay()
        if group.size > 1:
            part = group.all_reduce(part.copy())
        assert np.array_equal(device.to_host(part), want), seed
    sys.stdout.write(f"right on GPU {world.launch.local_rank}\n")
    return 0


if __name__ == "__main__":
    run(main)
