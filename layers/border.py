"""From a sum over ranks to the norm that comes after it, which the same launch may make; also from one layer to the next.

The runner has one `Border` a pass. A layer takes the rows that the last sum left there, and leaves those that `following` asks for.
"""

from __future__ import annotations

from dataclasses import dataclass

from l1_kernels.regions import NormArgs
from l1_kernels.weight import Array, Weight


@dataclass(frozen=True, slots=True)
class Reader:
    """What comes after a sum: a norm of it, and the weights of the one region that reads the norm's rows."""

    norm: NormArgs
    weights: tuple[Weight, ...]


@dataclass(slots=True)
class Border:
    rows: Array | None = None  # the norm of x [T, D] in 16 bits, made with the sum before
    following: Reader | None = None  # what the next layer begins with; None: nothing that a sum could make, or not known

    def take(self, x: Array, norm: NormArgs) -> tuple[Array, NormArgs | None]:
        """What the region after a sum begins with: x and its norm, or the rows as they are."""
        rows, self.rows = self.rows, None
        return (x, norm) if rows is None else (rows, None)
