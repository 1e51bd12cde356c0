"""Which layers a stage has: contiguous, and as equal in bytes as they can be (paper, Section IV-B).

The embedding lies on the first stage and the head on the last; a table that is both lies on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from l1_kernels.errors import UserError
from l2_dense_parallel.slicing import TensorSlice, global_tensors, layer_tensors
from layers.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage `index` of `count`, with the model's `layers`. Alone (count 1) it is the whole model."""

    layers: range
    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def holds(self, name: str, config: ModelConfig) -> bool:
        """Whether the stage has tensor `name` of those outside the layers."""
        return (self.is_first and of_embedding(name)) or (self.is_last and of_head(name, config))


def of_embedding(name: str) -> bool:
    return name.startswith("embed.") and not name.startswith("embed.project_out")


def of_head(name: str, config: ModelConfig) -> bool:
    return not of_embedding(name) or (name == "embed.tokens" and config.tie_embeddings)


def whole(config: ModelConfig) -> Stage:
    return Stage(range(config.num_layers))


def make_stages(config: ModelConfig, count: int) -> list[Stage]:
    """The stages, balanced by the numbers in their tensors. UserError where there are fewer layers than stages, or for an encoder."""
    if count > 1 and not config.causal:
        raise UserError(f"--pp {count}: an encoder's passes have nothing to overlap; leave --pp away")
    if count > config.num_layers:
        raise UserError(f"--pp {count}: the model has {config.num_layers} layers, and a stage needs one; --pp may be at most {config.num_layers}")
    costs = [sum(map(_size, layer_tensors(config, layer).values())) for layer in range(config.num_layers)]
    for name, part in global_tensors(config).items():
        costs[0] += _size(part) if of_embedding(name) else 0
        costs[-1] += _size(part) if of_head(name, config) else 0
    return [Stage(layers, index, count) for index, layers in enumerate(balanced(costs, count))]


def _size(part: TensorSlice) -> int:
    return prod(part.whole_shape)


def balanced(costs: Sequence[int], parts: int) -> list[range]:
    """`costs` in so many contiguous parts, none empty, whose largest sum is the least possible; of those, the first parts short."""
    count = len(costs)
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # least[p][i]: the best largest sum of items i.. in p parts
    least = [[0] * (count + 1) for _ in range(parts + 1)]
    for p in range(1, parts + 1):
        for i in range(count - p, -1, -1):
            if p == 1:
                least[p][i] = sums[count] - sums[i]
            else:
                least[p][i] = min(max(sums[j] - sums[i], least[p - 1][j]) for j in range(i + 1, count - p + 2))
    best, found, start = least[parts][0], [], 0
    for p in range(parts, 1, -1):
        stop = next(j for j in range(start + 1, count - p + 2) if sums[j] - sums[start] <= best and least[p - 1][j] <= best)
        found.append(range(start, stop))
        start = stop
    return [*found, range(start, count)]
