"""What a pass reads on the device: a `Batch` that was uploaded, or the slots of a decode step, which live there."""

from __future__ import annotations

from dataclasses import dataclass

from l1_kernels.regions import RotaryArgs
from l1_kernels.weight import Array


@dataclass(frozen=True, slots=True)
class Step:
    """The same for every layer of a pass. int32 [T] each, as in layers/batch.py; `rotary` None for other positions, `types`
    None for type 0 everywhere, `distinct`: no two tokens share a row (`regions.CacheArgs`)."""

    tokens: Array
    rows: Array
    positions: Array
    ends: Array
    rotary: RotaryArgs | None
    types: Array | None = None
    distinct: bool = False
