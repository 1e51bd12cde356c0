"""The step kernel's program: a row of int64 for each operation, addresses in bytes of global memory, 0 for what is absent.

A GeMM has up to two sources (x and weights whose products are added: region "inner"), or up to two groups of rows (two
weights on one x: region "rows"); its work is dealt out in tiles of 8 rows. An attention's items are (token, key head,
chunk of its query heads, stretch of the keys).

Item i of an operation is done by block (first + i) mod blocks: `first` goes on from one operation to the next, so that all
blocks get as many bytes, however few tiles one operation has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from l1_kernels import fused_regions
from l1_kernels.weight import Array, Weight

TILE = 8  # rows of weights
GEMM, ATTEND = 0, 1
ACTIVATE, GATED, ADD, CARRY = 1, 2, 4, 8  # flags of a group of rows

# Columns of every operation: its kind; whether it waits for all before it; the block of item 0
KIND, WAITS, FIRST = 0, 1, 2
# of a GeMM. A source: address of x [T, K] in 16 bits (float32 before a norm), K, weights, their scale
X, K, W, SCALE = 3, 4, 5, 6
SOURCE = 4  # columns from source 0 to source 1
# a group of rows: how many, tiles, bias, y, flags (group 1's weights and scale: those of source 1)
ROWS, TILES, BIAS, Y, FLAGS = 11, 12, 13, 14, 15
GROUP = 5
NORM, GAIN, SHIFT, EPS = 21, 22, 23, 24
# of an attention
QKV, HEADS, KV_HEADS, HEAD_DIM, CACHE_K, CACHE_V, PLACES, CACHE_ROWS, POSITIONS, ENDS = range(3, 13)
COS, SIN, ROTARY_ROW, HALF, INTERLEAVED, WINDOW, SOFTMAX_SCALE, SLOPES, OUT, SPLITS = range(13, 23)
WIDTH = 25


def address(array: Array | None) -> int:
    return 0 if array is None else fused_regions.address(array)


def float_bits(number: float) -> int:
    return int(np.float32(number).view(np.int32))


@dataclass
class Program:
    """Rows as they are appended, and the arrays that they name, kept alive."""

    blocks: int
    rows: list[np.ndarray] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    next_first: int = 0

    def row(self, kind: int, items: int, waits: bool) -> np.ndarray:
        """A new operation of so many items."""
        row = np.zeros(WIDTH, np.int64)
        row[KIND], row[WAITS], row[FIRST] = kind, waits, self.next_first
        self.next_first = (self.next_first + items) % self.blocks
        self.rows.append(row)
        return row

    def table(self) -> np.ndarray:
        return np.stack(self.rows)


@dataclass(frozen=True, slots=True)
class Group:
    """Weights [N, K] (gated: gate rows, then up rows) of one x, and what becomes of the sums."""

    weight: Weight
    bias: Array | None
    y: Array
    activate: bool = False
    gated: bool = False
    add: bool = False
    carry: bool = False

    @property
    def tiles(self) -> int:
        return -(-self.weight.data.shape[0] // TILE)


def set_source(row: np.ndarray, source: int, x: Array | None, weight: Weight, size: int) -> None:
    at = source * SOURCE
    row[X + at], row[K + at], row[W + at], row[SCALE + at] = address(x), size, address(weight.data), address(weight.scale)


def set_group(row: np.ndarray, group: int, part: Group) -> None:
    at = group * GROUP
    flags = ACTIVATE * part.activate | GATED * part.gated | ADD * part.add | CARRY * part.carry
    row[ROWS + at], row[TILES + at] = part.weight.data.shape[0], part.tiles
    row[BIAS + at], row[Y + at], row[FLAGS + at] = address(part.bias), address(part.y), flags
