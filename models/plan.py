"""Before anything is read: every tensor a rank needs, found, its shape checked, and cut into pieces to read.

A checkpoint with something missing, misshapen or left over is refused here, in one line, with nothing half-loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from l1_kernels.errors import UserError
from l2_dense_parallel.slicing import Shard, TensorSlice, global_tensors, layer_tensors
from layers.config import ModelConfig
from models.checkpoint.reader import Reader
from models.families.family import Family
from models.families.sources import Stored


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of ours that lie in one stored tensor.

    rows, columns  in our orientation; `columns` is None for a vector
    expert         the matrix of a stored stack; None: no stack
    zeros          rows of zeros that follow (the padding of a vocabulary)
    """

    name: str
    rows: slice
    columns: slice | None
    transposed: bool = False
    expert: int | None = None
    zeros: int = 0

    @property
    def num_rows(self) -> int:
        return len(range(self.rows.start, self.rows.stop, self.rows.step or 1))


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    part: TensorSlice
    pieces: tuple[Piece, ...]


Planned = dict[str, PlannedTensor]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank reads: canonical name -> pieces, outside the layers and for each of `layers`."""

    ends: Planned
    layers: tuple[Planned, ...]


class _Planner:
    def __init__(self, reader: Reader, family: Family, config: ModelConfig) -> None:
        self.reader, self.family, self.config = reader, family, config
        self.stored = {family.plain(name): name for name in reader.names()}
        self.used: set[str] = set()

    def tensors(self, wanted: Mapping[str, TensorSlice], sources: Mapping[str, Stored], layer: int | None) -> Planned:
        planned = {}
        for name, part in wanted.items():
            source, suffix = self._source(name, sources)
            pieces = self._pieces(source, suffix, part, layer)
            if part.held:
                planned[name] = PlannedTensor(part, tuple(pieces))
        return planned

    def _source(self, name: str, sources: Mapping[str, Stored]) -> tuple[Stored, str]:
        if name in sources:
            return sources[name], ""
        stem, _, suffix = name.rpartition(".")
        if stem not in sources:
            raise ValueError(f"family {self.family.name} does not say where {name} is stored")
        return sources[stem], "." + suffix

    def _pieces(self, source: Stored, suffix: str, part: TensorSlice, layer: int | None) -> list[Piece]:
        one_each = any("{e}" in name for name in source.names)
        transposed = source.transposed and part.width > 0
        pieces = []
        for expert in range(part.experts or 1):

            def stored(name: str, expert: int = expert) -> str:
                return self._find(name.format(i=layer, e=expert) + suffix)

            for name, rows in source.stored_rows(part.sections).items():
                shape: tuple[int, ...] = (rows,) + ((part.width,) if part.width else ())
                shape = shape[::-1] if transposed else shape
                self._check_shape(stored(name), shape if one_each or not part.experts else (part.experts, *shape))
            if part.experts and expert not in part.owned:
                continue
            for section, chosen in enumerate(part.rows):
                inside = range(min(chosen.start, part.sections[section]), min(chosen.stop, part.sections[section]))
                columns = slice(part.columns.start, part.columns.stop) if part.width else None
                spans = source.locate(section, inside, part.sections, self.config)
                stack = expert if part.experts and not one_each else None
                found = [Piece(stored(name), span, columns, transposed, stack) for name, span in spans]
                padding = len(chosen) - len(inside)
                pieces += found + ([Piece("", slice(0, 0), columns, zeros=padding)] if padding else [])
        return [piece for piece in pieces if piece.num_rows or piece.zeros]

    def _find(self, plain: str) -> str:
        if plain not in self.stored:
            raise UserError(f"{self.reader.path}: tensor {plain} is missing")
        name = self.stored[plain]
        self.used.add(name)
        return name

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if self.reader.shape(name) != shape:
            raise UserError(
                f"{self.reader.where(name)}: tensor {name} has shape {list(self.reader.shape(name))}; the config asks for {list(shape)}"
            )
        self.reader.dtype(name)  # refuses what it cannot read

    def check_leftovers(self) -> None:
        tied = {f"{name}.weight" for name in self.family.ends["head"].names} if self.config.tie_embeddings else set()
        for plain, name in self.stored.items():
            if name not in self.used and plain not in tied and not self.family.ignores(plain):
                raise UserError(
                    f"{self.reader.where(name)}: tensor {name} is not part of this {self.family.name} model as {self.reader.config_path.name} describes it"
                )


def make_plan(reader: Reader, family: Family, config: ModelConfig, shard: Shard, layers: Iterable[int] | None = None) -> Plan:
    """The plan of a rank that holds `layers` (None: all). The whole checkpoint is checked, whatever the rank holds."""
    planner = _Planner(reader, family, config)
    ends = planner.tensors(global_tensors(config, shard), family.ends, None)
    every = [planner.tensors(layer_tensors(config, layer, shard), family.layer, layer) for layer in range(config.num_layers)]
    planner.check_leftovers()
    held = range(config.num_layers) if layers is None else layers
    return Plan(ends, tuple(every[layer] for layer in held))
