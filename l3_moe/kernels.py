"""The operations of a sparse layer's routing, for any device; l3_moe/routing has them for the CPU, the GPU and the simulator."""

from __future__ import annotations

from typing import Any, Protocol

from l1_kernels.device import Device
from l1_kernels.weight import Array, Weight
from l3_moe.tables import RoutingTables


class MoEKernels(Protocol):
    """Outputs are new arrays of the device unless said otherwise. A bad argument raises ValueError that names it."""

    def tables(self, logits: Array, top_k: int, softmax_first: bool, renormalise: bool, capacity: int | None = None) -> RoutingTables:
        """logits float32 [T, E]: the gate's softmax, the top k and the tables. softmax_first: probabilities over all E, then the top k,
        divided by their sum if `renormalise`; otherwise a softmax over the top k logits. A NaN counts as the least logit.

        capacity: the most pairs of one expert, in token order; None: no pair is ever dropped."""
        ...

    def tables_of(self, experts: Array, share: Array, num_experts: int, capacity: int | None = None) -> RoutingTables:
        """The tables of a choice that exists already: experts int32 [T, k], share float32 [T, k], both kept as they are. A pair whose
        expert is not one of 0..E-1 gets no row, and does not count as dropped: it is somebody else's."""
        ...

    def dispatch(self, x: Array, tables: RoutingTables, dtype: str) -> Array:
        """rows[slots[t, j]] = x[t]: x float32 [T, D] -> [T * k, D] in the carrier of `dtype` ("fp32", "fp16", "bf16"). Rows past offsets[E]
        are not written."""
        ...

    def route_rows(
        self, x: Array, gate: Weight, top_k: int, softmax_first: bool, renormalise: bool, dtype: str, capacity: int | None = None
    ) -> tuple[RoutingTables, Array]:
        """`tables` of the logits x @ gate^T, and `dispatch` of x: x float32 [T, D], gate [E, D] of fp32. On a GPU all but the product is one
        launch (paper: everything but the last transformation fused), and the product is exact to float32 while |x| < 65504."""
        ...

    def combine(self, y: Array, tables: RoutingTables, residual: Array | None) -> Array:
        """residual[t] += sum over j of share[t, j] * y[slots[t, j]]: y float32 [T * k, D], residual float32 [T, D] in place, and returned;
        None: onto zeros, in a new array. Added in the order of j; a pair with no row adds nothing."""
        ...


def open_moe_kernels(device: Device) -> MoEKernels:
    if device.name == "cpu":
        from l3_moe.routing.cpu_launch import CpuMoEKernels

        return CpuMoEKernels(device.kernels)
    from l1_kernels.gpu_kernels import GpuKernels
    from l3_moe.routing.gpu_launch import GpuMoEKernels

    kernels: Any = device.kernels
    assert isinstance(kernels, GpuKernels)
    return GpuMoEKernels(kernels, _multiprocessors(device), lambda: getattr(device.current_stream(), "ptr", 0))


def _multiprocessors(device: Device) -> int:
    """How many blocks certainly run at once. The simulator runs any number; few keep it quick."""
    if device.name != "cuda":
        return 4
    return int(device.xp.cuda.runtime.getDeviceProperties(device.index)["multiProcessorCount"])
