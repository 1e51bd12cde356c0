"""The oracle of the dtypes that have no golden values: the same model in float64, on the rounded weights.

It is the references of l1_kernels run in float64 under the layers of the project; that those layers are composed
rightly is what the golden values show.
"""

from __future__ import annotations

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
from l1_kernels.weight import Weight


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
