"""The collective of a rank's group: which implementation, by where the arrays are and whether ranks share a GPU."""

from __future__ import annotations

from l2_dense_parallel.collectives import Collective, NoCollective
from l2_dense_parallel.mesh import Mesh
from l2_dense_parallel.world import World


def open_collective(world: World, mesh: Mesh, axis: str, device: str = "cpu", share_gpu: bool = False) -> Collective:
    """The collective of this rank's group on `axis` ("tp", "dp", ...). device: "cpu" | "sim" | "cuda"; all ranks of the
    group call it together, on cuda after each has made its GPU current. share_gpu: ranks share a GPU, which NCCL
    refuses, so device arrays go through host memory."""
    communicator = mesh.communicators.get(axis)
    if communicator is None or world.watchdog is None:
        return NoCollective()
    from l2_dense_parallel.mpi_collective import MPICollective, StagedCollective

    arguments = (communicator, world.watchdog, axis, mesh.members[axis])
    if device != "cuda":
        return MPICollective(*arguments)
    if share_gpu:
        return StagedCollective(*arguments)
    from l2_dense_parallel.nccl_collective import NCCLCollective

    return NCCLCollective(*arguments)
