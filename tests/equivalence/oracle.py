"""The oracle of the dtypes that have no golden values: the same model in float64, on the rounded weights.

It is the references of l1_kernels run in float64 under the layers of the project; that those layers are composed
rightly is what the golden values show.

int8 is rounded after it is sliced (models/loading.py): where tensor-parallel ranks hold columns of a matrix, each has scales of its own for
its rows, and the numbers of the whole are other ones than on one rank, by 1 to 2 % of the largest logit on these models. So the oracle takes
such a matrix as its ranks hold it (`as_held`). With W8A8 each rank rounds its part of x by itself too: that is left to W8A8's wide bar.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from l1_kernels.activation import reference as activation
from l1_kernels.attention import reference as attention
from l1_kernels.device import HostDevice
from l1_kernels.elementwise import reference as elementwise
from l1_kernels.embedding import reference as embedding
from l1_kernels.kv_write import reference as kv_write
from l1_kernels.linear import reference as linear
from l1_kernels.norm import reference as norm
from l1_kernels.rotary import reference as rotary
from l1_kernels.routing import reference as routing
from l1_kernels.weight import Weight, decode
from l2_dense_parallel.slicing import ExpertShard, Shard
from models.loading import Tensors


class Float64Kernels:
    """`kernels.Kernels` in float64. Keys and values are held in float32."""

    layer_norm = staticmethod(norm.layer_norm)
    rms_norm = staticmethod(norm.rms_norm)
    linear = staticmethod(linear.linear)
    activate = staticmethod(activation.activate)
    gate = staticmethod(activation.gate)
    add = staticmethod(elementwise.add)
    rotary = staticmethod(rotary.rotary)
    head_norm = staticmethod(norm.head_norm)
    sum_squares = staticmethod(norm.sum_squares)
    span_norm = staticmethod(norm.span_norm)
    write_kv = staticmethod(kv_write.write_kv)
    attention = staticmethod(attention.attention)
    route = staticmethod(routing.route)

    @staticmethod
    def embed(table: Weight, ids: np.ndarray, first: int = 0) -> np.ndarray:
        return embedding.embed(table, ids, first).astype(np.float64)


def oracle_device() -> Any:
    device = HostDevice("float64 references", Float64Kernels())  # type: ignore[arg-type]
    device.name = "float64"
    return device


def slices(tp: int, es: int) -> list[Shard]:
    """Ranks that have between them all of `tp` slices of the dense matrices, in order, and all of `es` slices of each expert."""
    return [Shard(i % tp, tp, ExpertShard(0, 1, i % es, es)) for i in range(max(tp, es))]


def as_held(whole: Tensors, held: Sequence[Tensors]) -> Tensors:
    """A layer's tensors, in which each int8 matrix that ranks hold columns of is what they hold, side by side. held: by each of `slices`."""
    joined: Tensors = {}
    for name, tensor in whole.items():
        if isinstance(tensor, Weight) and tensor.dtype == "int8" and held[0][name].shape[-1] < tensor.shape[-1]:
            parts = [decode(part.data, part.dtype, part.scale) for tensors in held if isinstance(part := tensors[name], Weight)]
            side_by_side = np.concatenate(parts, axis=-1)[..., : tensor.shape[-1]]  # after the last slice they begin again
            tensor = Weight(np.ascontiguousarray(side_by_side), "fp32")
        joined[name] = tensor
    return joined
