"""Where experts live: arithmetic on positions in a pipeline stage (design, section 4; paper, Figure 4).

A stage's p ranks are seen twice: position = dp_rank * tp + tp_rank = es_rank * ep + ep_rank. Expert e belongs to owner e // (E/ep), whose slices
lie at es_rank * ep + owner. The paper's 16 ranks, tp = 4, ep = 8, es = 2, one expert an owner:

    position    0  1  2  3 | 4  5  6  7 | 8  9 10 11 | 12 13 14 15       | between tensor-parallel groups
    expert      0  1  2  3   4  5  6  7   0  1  2  3    4  5  6  7       its slice 0, then its slice 1
"""

from __future__ import annotations

from dataclasses import dataclass

from l2_dense_parallel.mesh import MeshShape


@dataclass(frozen=True, slots=True)
class Placement:
    """One rank's view: `position` of the stage's p = tp * dp = ep * es."""

    tp: int
    dp: int
    ep: int
    es: int
    position: int
    num_experts: int

    def __post_init__(self) -> None:
        if self.tp * self.dp != self.ep * self.es or not 0 <= self.position < self.ranks:
            raise ValueError(f"Placement: tp {self.tp} x dp {self.dp} and ep {self.ep} x es {self.es} are not the same ranks, or {self.position} is none of them")
        if self.num_experts % self.ep:
            raise ValueError(f"Placement: {self.num_experts} experts do not divide over {self.ep} owners")

    @classmethod
    def of(cls, shape: MeshShape, position: int, num_experts: int) -> Placement:
        """position: in the whole mesh."""
        inside = position % (shape.tp * shape.dp)
        return cls(shape.tp, shape.dp, shape.ep, shape.es, inside, num_experts)

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    @property
    def tp_rank(self) -> int:
        return self.position % self.tp

    @property
    def dp_rank(self) -> int:
        return self.position // self.tp

    @property
    def owned(self) -> int:
        """Experts of an owner."""
        return self.num_experts // self.ep

    @property
    def first_expert(self) -> int:
        """Of this rank's."""
        return self.position % self.ep * self.owned

    def owners(self, expert: int) -> list[int]:
        """Positions of the slices of an expert."""
        return [es_rank * self.ep + expert // self.owned for es_rank in range(self.es)]

    def tp_group(self) -> list[int]:
        """Positions that have the same tokens as this one."""
        return [self.dp_rank * self.tp + i for i in range(self.tp)]

    def across(self) -> list[int]:
        """Positions with this one's tp_rank, one of each tensor-parallel group: whom PCC sends to."""
        return [group * self.tp + self.tp_rank for group in range(self.dp)]
