"""The pipe of a rank's stage: which implementation, by where hidden states are and whether ranks share a GPU."""

from __future__ import annotations

from l1_kernels.device import Device
from l2_dense_parallel.mesh import Mesh
from l2_dense_parallel.pipeline.nccl_pipe import open_nccl_pipe
from l2_dense_parallel.pipeline.pipe import MPIPipe, Pipe
from l2_dense_parallel.world import World


def open_pipe(world: World, mesh: Mesh, device: Device | None = None, share_gpu: bool = False) -> Pipe | None:
    """This rank's, or None where the mesh has one stage. All ranks of the mesh call it together. device: where hidden states are, the host's where it is
    None; share_gpu: ranks share a GPU, which NCCL refuses, so they go through host memory."""
    communicator = mesh.communicators.get("pp")
    if communicator is None or world.watchdog is None:
        return None
    if device is None or device.name != "cuda" or share_gpu:
        return MPIPipe(communicator, world.watchdog, mesh.members["pp"])
    return open_nccl_pipe(communicator, world.watchdog, mesh.members["pp"], device)
