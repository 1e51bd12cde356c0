"""The exchange of a rank's experts: which form, and over which groups of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from l1_kernels.device import Device
from l2_dense_parallel.collectives import Collective
from l2_dense_parallel.device_watch import DeviceWatch, WatchedAlone
from l2_dense_parallel.mesh import Mesh
from l2_dense_parallel.world import World
from l3_moe.exchange.flat import FlatExchange
from l3_moe.exchange.forms import RowExchange
from l3_moe.exchange.hierarchical import HierarchicalExchange, node_size
from l3_moe.exchange.pcc import PCC
from l3_moe.exchange.peers import NoPeers, Peers
from l3_moe.exchange.placement import Placement

FORMS = ("pcc", "flat", "hierarchical")  # --all-to-all


def open_exchange(world: World, mesh: Mesh, device: Device, num_experts: int, form: str = "pcc", share_gpu: bool = False) -> RowExchange | None:
    """All ranks of the mesh call it together. None where there is nothing to exchange and no whole experts are owned: one rank, or every expert a slice
    over the one tensor-parallel group, which is a dense feed-forward's case."""
    if mesh.ep * mesh.es == 1 or (mesh.ep == 1 and mesh.dp == 1):
        return None
    placement = Placement.of(mesh.shape, mesh.rank, num_experts)

    def peers(group: str, positions: Sequence[int]) -> Peers:
        return _open_peers(world, mesh, device, group, positions, share_gpu)

    if form == "flat":
        return FlatExchange(placement, device, peers("stage", range(placement.ranks)))
    if form == "hierarchical":
        size = node_size([world.hosts[member] for member in mesh.stage_members])
        first, local = placement.position // size * size, placement.position % size
        node = peers("node", range(first, first + size))
        return HierarchicalExchange(placement, device, node, peers("across", range(local, placement.ranks, size)))
    return PCC(placement, device, peers("across", placement.across()))


def watch_exchange(world: World, mesh: Mesh, device: Device, collective: Collective) -> Collective:
    """The collective of a rank that shares experts with others. One of a group of one waits for nobody by itself, but its GPU may wait for the exchange's
    other ranks: then its waits are watched."""
    if device.name != "cuda" or collective.size > 1 or world.watchdog is None or mesh.dp == 1:
        return collective
    return WatchedAlone(DeviceWatch(world.watchdog, "stage", mesh.stage_members, *device.mapped(1, np.float64)))


def _open_peers(world: World, mesh: Mesh, device: Device, group: str, positions: Sequence[int], share_gpu: bool) -> Peers:
    """positions: of this rank's stage, this one's among them. Its members call this together, and nobody else does."""
    if len(positions) == 1 or world.comm is None or world.watchdog is None:
        return NoPeers()
    from l3_moe.exchange.mpi_peers import MPIPeers, StagedPeers

    members = tuple(mesh.stage_members[position] for position in positions)
    communicator = world.comm.Create_group(world.comm.Get_group().Incl(list(members)))
    arguments = (communicator, world.watchdog, group, members)
    if device.name != "cuda":
        return MPIPeers(*arguments)
    if share_gpu:
        return StagedPeers(*arguments)
    from l3_moe.exchange.nccl_peers import open_nccl_peers

    return open_nccl_peers(*arguments, device)
