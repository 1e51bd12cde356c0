"""Which rank does what: the mesh (paper, Section IV-A and Figure 4; design, section 4).

    ranks = pp * dp * tp = pp * ep * es

The ranks of one pipeline stage are seen twice. The dense parts see dp groups of tp ranks that lie side by side (a tensor
is cut over neighbours, which share a machine); the experts see es sets of ep owners, and the slices of one expert lie
ep apart. The paper's example, 16 ranks, tp = 4, dp = 4, ep = 8, es = 2:

    dense    {0 1 2 3} {4 5 6 7} {8 9 10 11} {12 13 14 15}     a row: one tp group
    experts  {0 8} {1 9} {2 10} ... {7 15}                      a pair: the two slices of one expert

`position` is a rank's place in the mesh: (stage * dp + dp_rank) * tp + tp_rank = (stage * es + es_rank) * ep + ep_rank.
Everything but `build_mesh` is plain arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from l1_kernels.errors import UserError
from l2_dense_parallel.slicing import ExpertShard, Shard
from l2_dense_parallel.world import World

AXES = ("tp", "dp", "pp", "ep", "es")


@dataclass(frozen=True, slots=True)
class MeshShape:
    """The five degrees. A dense model has ep = es = 1, and then only pp * dp * tp counts the ranks."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    es: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ValueError(f"MeshShape: {axis} must be positive, got {getattr(self, axis)}")
        if self.ep * self.es not in (1, self.dp * self.tp):
            raise ValueError(f"MeshShape: ep * es = {self.ep} * {self.es} is not dp * tp = {self.dp} * {self.tp}")

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.tp

    def coordinates(self, position: int) -> dict[str, int]:
        """position -> its rank on each axis. Of a dense model every rank is the one expert's only owner (0, 0)."""
        stage, inside = divmod(position, self.dp * self.tp)
        sparse = self.ep * self.es > 1
        return {
            "pp": stage,
            "dp": inside // self.tp,
            "tp": inside % self.tp,
            "es": inside // self.ep if sparse else 0,
            "ep": inside % self.ep if sparse else 0,
        }

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """The groups of an axis: positions that differ on this axis alone, in the order of their rank on it."""
        if axis in ("ep", "es") and self.ep * self.es == 1:
            return [(position,) for position in range(self.size)]
        others = {"tp": ("pp", "dp"), "dp": ("pp", "tp"), "pp": ("dp", "tp"), "ep": ("pp", "es"), "es": ("pp", "ep")}[axis]
        found: dict[tuple[int, ...], list[int]] = {}
        for position in range(self.size):
            at = self.coordinates(position)
            found.setdefault(tuple(at[other] for other in others), []).append(position)
        return [tuple(group) for group in found.values()]


@dataclass(frozen=True, slots=True)
class Mesh:
    """One rank's view. `communicators[axis]` is MPI's for its group (absent where the group is this rank alone), and
    `members[axis]` the world ranks in it, in order. `order`: the world rank at each position, () where that is the same."""

    shape: MeshShape = field(default_factory=MeshShape)
    rank: int = 0
    communicators: dict[str, Any] = field(default_factory=dict)
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    order: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return self.shape.size

    @property
    def tp(self) -> int:
        return self.shape.tp

    @property
    def pp(self) -> int:
        return self.shape.pp

    @property
    def dp(self) -> int:
        return self.shape.dp

    @property
    def ep(self) -> int:
        return self.shape.ep

    @property
    def es(self) -> int:
        return self.shape.es

    @property
    def tp_rank(self) -> int:
        return self.shape.coordinates(self.rank)["tp"]

    @property
    def pp_rank(self) -> int:
        return self.shape.coordinates(self.rank)["pp"]

    @property
    def dp_rank(self) -> int:
        return self.shape.coordinates(self.rank)["dp"]

    @property
    def ep_rank(self) -> int:
        return self.shape.coordinates(self.rank)["ep"]

    @property
    def es_rank(self) -> int:
        return self.shape.coordinates(self.rank)["es"]

    @property
    def shard(self) -> Shard:
        """What this rank holds of tensors that are cut over tp, and of experts."""
        if self.ep * self.es == 1:
            return Shard(self.tp_rank, self.tp)
        return Shard(self.tp_rank, self.tp, ExpertShard(self.ep_rank, self.ep, self.es_rank, self.es))

    @property
    def stage_members(self) -> tuple[int, ...]:
        """World ranks of this rank's pipeline stage, by position: all that its experts are shared over."""
        per_stage = self.dp * self.tp
        positions = range(self.pp_rank * per_stage, (self.pp_rank + 1) * per_stage)
        return tuple(self.order[p] if self.order else p for p in positions)

    def describe(self) -> dict[str, int]:
        """{"tp": ..., "pp": ..., ...}, as `run --json` prints it."""
        return {axis: getattr(self.shape, axis) for axis in ("tp", "pp", "dp", "ep", "es")}

    def my_share(self, count: int) -> range:
        """Which of `count` prompts this dp group takes: dealt out in turn, so that lengths mix. May be empty."""
        return range(self.dp_rank, count, self.dp)


def tp_degrees(num_heads: int, num_kv_heads: int, ranks: int) -> list[int]:
    """Every TP degree up to `ranks` that slices the heads: each rank has whole query heads, and whole KV heads or one."""
    return [
        tp
        for tp in range(1, min(ranks, num_heads) + 1)
        if num_heads % tp == 0 and (num_kv_heads % tp == 0 or tp % num_kv_heads == 0)
    ]


def choose_shape(
    ranks: int,
    num_heads: int,
    num_kv_heads: int,
    num_experts: int = 0,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    streamed: bool = False,
) -> MeshShape:
    """The mesh of `ranks` ranks: what was asked for (None: not asked), the rest by the rule of the design, section 4.

    Raises UserError for a mesh that cannot be, naming those that can."""
    for flag, degree in (("--tp", tp), ("--pp", pp), ("--ep", ep)):
        if degree is not None and degree < 1:
            raise UserError(f"{flag} {degree} must be at least 1")
    stages = pp or 1
    if ranks % stages:
        raise UserError(f"--pp {stages} does not divide the {ranks} ranks; --pp may be {_either(_divisors(ranks))}, or start {stages * (tp or 1)} ranks (mpirun -n)")
    stage_ranks = ranks // stages
    degrees = tp_degrees(num_heads, num_kv_heads, max(ranks, num_heads))
    fitting = [degree for degree in degrees if stage_ranks % degree == 0]
    if tp is None:
        tp = 1 if streamed else max(fitting)
    if tp not in degrees:
        kv = "" if num_kv_heads == num_heads else f" and {num_kv_heads} KV heads"
        raise UserError(
            f"--tp {tp} does not divide the model's {num_heads} heads{kv}; --tp may be {_either(degrees)}, and --pp takes further ranks"
        )
    if tp not in fitting:
        of = f"the {ranks} ranks" if stages == 1 else f"the {stage_ranks} ranks of a pipeline stage"
        raise UserError(f"--tp {tp} does not divide {of}; --tp may be {_either(fitting)}, or start {tp * stages} ranks (mpirun -n)")
    if num_experts == 0:
        if ep not in (None, 1):
            raise UserError(f"--ep {ep}: this model has no experts; leave --ep away")
        return MeshShape(tp, stages, stage_ranks // tp)
    owners = [degree for degree in _divisors(stage_ranks) if num_experts % degree == 0]
    if ep is None:
        ep = math.gcd(stage_ranks, num_experts)
    if ep not in owners:
        both = f"the {stage_ranks} ranks and the model's {num_experts} experts"
        raise UserError(f"--ep {ep} must divide {both}; --ep may be {_either(owners)}")
    return MeshShape(tp, stages, stage_ranks // tp, ep, stage_ranks // ep)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _either(numbers: Sequence[int]) -> str:
    """[1, 2, 4] -> "1, 2 or 4"."""
    *first, last = (str(n) for n in numbers)
    return f"{', '.join(first)} or {last}" if first else last


def placement(hosts: Sequence[str], taking_part: Sequence[int] | None = None) -> list[int]:
    """World ranks in mesh order: those of one machine side by side (machines by first appearance), so that tp groups stay
    inside a machine where they can, however the launcher numbered the ranks."""
    chosen = list(range(len(hosts)) if taking_part is None else taking_part)
    order = {host: i for i, host in reversed(list(enumerate(hosts)))}
    return sorted(chosen, key=lambda rank: (order[hosts[rank]], rank))


def build_mesh(world: World, shape: MeshShape, taking_part: Sequence[int] | None = None) -> Mesh | None:
    """Split MPI's communicator into the mesh's groups. All ranks of the world call it together; one that is not in
    `taking_part` (default: all) gets None and stands aside."""
    order = placement(world.hosts, taking_part)
    if len(order) != shape.size:
        raise ValueError(f"build_mesh: shape has {shape.size} ranks, {len(order)} take part")
    if world.comm is None:
        return Mesh(shape)
    assert world.watchdog is not None
    position = order.index(world.rank) if world.rank in order else None
    communicators: dict[str, Any] = {}
    members: dict[str, tuple[int, ...]] = {}
    with world.watchdog.waiting("set-up", "world", world.everyone):
        for axis in AXES:
            groups = shape.groups(axis)
            color, key = len(groups), 0  # those who stand aside share a group that nobody uses
            if position is not None:
                color = next(i for i, group in enumerate(groups) if position in group)
                key = groups[color].index(position)
            communicator = world.comm.Split(color, key)
            if position is not None:
                members[axis] = tuple(order[p] for p in groups[color])
                if len(groups[color]) > 1:
                    communicators[axis] = communicator
    return None if position is None else Mesh(shape, position, communicators, members, tuple(order))
