"""The routing tables of one sparse layer: which expert each token visits, and where its row lies among the dispatched ones.

Four tokens, three experts, top 2. Rows go expert by expert, and within an expert by ascending token:

    experts      slots       row   0  1  2 | 3  4  5 | 6  7
    t=0  0 1     0 3         of t  0  2  3 | 0  1  3 | 1  2
    t=1  2 1     6 4
    t=2  0 2     1 7         sources  0  4  6   1  3  7   2  5      (row -> t * k + j)
    t=3  0 1     2 5         offsets  0  3  6  8

`slots` and `sources` are each other's inverse: sources[slots[t, j]] = t * k + j. A one-hot mask says the same in T * E * C numbers, of
which T * k are not zero (einsum_baseline.py); the tables are O(T k) to write and to read (paper, Section V-C).
"""

from __future__ import annotations

from dataclasses import dataclass

from l1_kernels.weight import Array


@dataclass(frozen=True, slots=True)
class RoutingTables:
    """Arrays on the device, of T tokens, k choices a token, E experts. A (token, choice) is a pair.

    experts   int32 [T, k]    the experts a token visits, best first, ties to the lowest expert
    share     float32 [T, k]  what each one's output is multiplied by
    slots     int32 [T, k]    a pair's row among the dispatched; -1: it has none (beyond the capacity, or no expert of these E)
    sources   int32 [T * k]   row -> t * k + j; -1 past offsets[E]
    offsets   int32 [E + 1]   expert e has the rows offsets[e] up to offsets[e + 1]
    dropped   int32 [1]       pairs beyond the capacity
    """

    experts: Array
    share: Array
    slots: Array
    sources: Array
    offsets: Array
    dropped: Array

    @property
    def num_tokens(self) -> int:
        return int(self.experts.shape[0])

    @property
    def top_k(self) -> int:
        return int(self.experts.shape[1])

    @property
    def num_experts(self) -> int:
        return int(self.offsets.shape[0]) - 1
