"""What lies where in a window: the memory that a rank lets its peers write to. Words of 4 bytes, in this order:

    epochs [blocks]                       how many exchanges each block has been through; this rank's alone
    flags  [2, blocks, MAX_RANKS]         the epoch for which rank r's part is there, by slot, block and r
    parts  [2, ranks, blocks, chunk]      what rank r sent, float32, by slot, r and block

A window is all zeros before the first exchange. A block's place is its own for good, whatever the size of a message: so the blocks of one
number on all ranks go through the epochs together, and have nothing to do with the other blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_RANKS = 8  # of one machine; a block's flags of a slot fill a sector of 32 bytes
THREADS = 256  # of a block of a sum
CHUNK = 4 * THREADS  # numbers of a block
BLOCKS = 64
MAX_NUMBERS = BLOCKS * CHUNK
MAX_TOKENS, MAX_WIDTH = 16, 8192  # of a sum with a norm, a block a token


@dataclass(frozen=True, slots=True)
class Layout:
    """ranks; blocks, a multiple of 4; chunk: numbers that a block exchanges at most, a multiple of 4; first: word of the window where this
    begins, a multiple of 4. So parts lie at multiples of 16 bytes."""

    ranks: int
    blocks: int
    chunk: int
    first: int = 0

    @property
    def flags(self) -> int:
        return self.first + self.blocks

    @property
    def parts(self) -> int:
        return self.flags + 2 * self.blocks * MAX_RANKS

    @property
    def end(self) -> int:
        return self.parts + 2 * self.ranks * self.blocks * self.chunk


def sum_layout(ranks: int) -> Layout:
    """Of the sums of gpu.py."""
    return Layout(ranks, BLOCKS, CHUNK)


def norm_layout(ranks: int) -> Layout:
    """Of norm.py's, behind that of sums: its blocks hold other numbers, so they must not share places."""
    return Layout(ranks, MAX_TOKENS, MAX_WIDTH, sum_layout(ranks).end)


def window_words(ranks: int) -> int:
    """Words of 4 bytes of a rank's window."""
    return norm_layout(ranks).end
