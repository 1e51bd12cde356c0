"""The collective of a rank's group: which implementation, by where the arrays are and whether ranks share a GPU."""

from __future__ import annotations

from l1_kernels.kernels import Kernels
from l2_dense_parallel.collectives import Collective, NoCollective
from l2_dense_parallel.mesh import Mesh
from l2_dense_parallel.world import World

ALL_REDUCES = ("auto", "nccl", "one-shot")  # --all-reduce


def open_collective(
    world: World, mesh: Mesh, axis: str, device: str = "cpu", share_gpu: bool = False, kernels: Kernels | None = None, all_reduce: str = "auto"
) -> Collective:
    """The collective of this rank's group on `axis` ("tp", "dp", ...). device: "cpu" | "sim" | "cuda"; all ranks of the
    group call it together, on cuda after each has made its GPU current.

    share_gpu   ranks share a GPU, which NCCL refuses, so device arrays go through host memory
    kernels     of the device, on cuda: for sums over peer memory (None: NCCL alone)
    all_reduce  of ALL_REDUCES: "nccl" alone; "one-shot", over peer memory, for every message that has room; "auto": the faster for its size
    """
    communicator = mesh.communicators.get(axis)
    if communicator is None or world.watchdog is None:
        return NoCollective()
    from l2_dense_parallel.mpi_collective import MPICollective, StagedCollective

    members = mesh.members[axis]
    arguments = (communicator, world.watchdog, axis, members)
    if device != "cuda":
        return MPICollective(*arguments)
    if share_gpu:
        return StagedCollective(*arguments)
    if kernels is None or all_reduce == "nccl":
        from l2_dense_parallel.nccl_collective import NCCLCollective

        return NCCLCollective(*arguments)
    from l1_kernels.gpu_kernels import GpuKernels
    from l2_dense_parallel.peer_collective import PeerCollective

    assert isinstance(kernels, GpuKernels)
    return PeerCollective(*arguments, kernels, [world.hosts[member] for member in members], all_reduce)
