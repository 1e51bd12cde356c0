"""Collectives over GPUs, by NCCL through CuPy (design, section 2). CuPy is imported only when one is made.

Arrays are reduced in GPU memory, on the current CuPy stream and without waiting, so that a CUDA graph can capture them;
Python objects and barriers still go by MPI.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from l1_kernels.errors import UserError
from l1_kernels.weight import Array
from l2_dense_parallel.collectives import check_float32
from l2_dense_parallel.device_watch import DeviceWatch
from l2_dense_parallel.mpi_collective import MPICollective
from l2_dense_parallel.watchdog import Watchdog
from l2_dense_parallel.world import merge_texts, one_line

START_LIMIT = 60.0  # s for NCCL to connect


class NCCLCollective(MPICollective):
    """CuPy arrays. This rank's GPU is the current one, and no other rank's: NCCL refuses two ranks on one GPU."""

    capturable = True

    def __init__(self, communicator: Any, watchdog: Watchdog, group: str, members: tuple[int, ...]) -> None:
        super().__init__(communicator, watchdog, group, members)
        failure = ""
        identity: Any = None
        try:
            self._cupy, self._nccl = _import_nccl()
            identity = self._nccl.get_unique_id() if self.rank == 0 else None
        except (UserError, RuntimeError) as error:
            failure = one_line(error)
        with watchdog.waiting("set-up", group, members, START_LIMIT):
            failures = communicator.allgather(failure)  # a rank without NCCL must not leave the others waiting
            if any(failures):
                raise UserError(merge_texts(failures))
            identity = communicator.bcast(identity, root=0)
            try:
                self._nccl_comm = self._nccl.NcclCommunicator(self.size, identity, self.rank)
            except self._nccl.NcclError as error:
                raise UserError(
                    f"NCCL cannot connect the GPUs of ranks {', '.join(map(str, members))} ({one_line(error)}); NCCL_DEBUG=WARN says why, "
                    "and --share-gpu goes by way of host memory"
                ) from None
        self._watch = DeviceWatch(watchdog, group, members, *_mapped_number(self._cupy))

    def all_reduce(self, x: Array) -> Array:
        check_float32(x, "all_reduce")
        self.counters.add("all_reduce", x.nbytes)
        nccl = self._nccl
        self._nccl_comm.allReduce(x.data.ptr, x.data.ptr, x.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, self._stream())
        return x

    def all_gather(self, x: Array) -> Array:
        check_float32(x, "all_gather", 2)
        self.counters.add("all_gather", x.nbytes)
        n, m = x.shape
        parts = self._cupy.empty((self.size, n, m), self._cupy.float32)
        self._nccl_comm.allGather(x.data.ptr, parts.data.ptr, x.size, self._nccl.NCCL_FLOAT32, self._stream())
        return self._cupy.ascontiguousarray(parts.transpose(1, 0, 2)).reshape(n, self.size * m)

    def synchronize(self) -> None:
        """Wait for the current stream, watched: a partner that has ended would otherwise leave it hanging. Raises the
        error that NCCL met in the background, if any."""
        with self._watch:
            self._cupy.cuda.get_current_stream().synchronize()
        self._nccl_comm.check_async_error()

    def watched(self) -> AbstractContextManager[None]:
        return self._watch

    def mark(self, part: float) -> None:
        self._watch.mark(part)

    def _stream(self) -> int:
        return self._cupy.cuda.get_current_stream().ptr


def _import_nccl() -> tuple[Any, Any]:
    try:
        import cupy
        from cupy.cuda import nccl
    except ImportError as error:
        raise UserError(f"--device cuda needs CuPy ({one_line(error)}); install this package's CUDA extra (README)") from None
    if not nccl.available:
        raise UserError("several GPUs need NCCL, which CuPy does not find; install this package's CUDA extra (README), or use --share-gpu")
    return cupy, nccl


def _mapped_number(cupy: Any) -> tuple[np.ndarray, Array]:
    """float64 [1] in page-locked memory, which has one address for both sides, as the host and as this rank's GPU see it (`CudaDevice.mapped`)."""
    import cupyx

    host = cupyx.zeros_pinned(1, np.float64)
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, cupy.cuda.Device().id)
    return host, cupy.ndarray(host.shape, host.dtype, cupy.cuda.MemoryPointer(memory, 0))
