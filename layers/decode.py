"""The inputs of a decode step, in the device's memory, where each step leaves the next one's: the host only fills them.

A `Batch` is made on the host for every pass. Here B slots stay, and the kernel that chooses the tokens moves them on
(l1_kernels/sampling/slots.py), so a step can follow a step with no upload between them, as a graph's replays do.

A slot that no sequence uses must harm nobody: it computes token 0 at place 0 of a cache row that no sequence has (there is
one, as B is at most the cache's rows), and stays at that place. A row's next owner writes its own keys there first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from l1_kernels.device import Device
from l1_kernels.sampling.slots import Slots

RING = 4  # tokens of so many steps stay readable: the host reads a step or two behind
TOKENS, ROWS, POSITIONS, ENDS, LAST, TURNS, PROMPTS, STEPS = range(8)


class DecodeState:
    """B = `size` slots over a cache of `num_rows` rows (at least B), in each of which `limit` places may be used.

    prompts, steps  int32 [B]: what names a slot's random numbers (l1_kernels/sampling/slots.py, Draw)
    seen            int8 [B, V], of the ids that a slot's sequence has; [B, 0] where vocab_size is 0: not kept
    """

    def __init__(self, device: Device, size: int, num_rows: int, limit: int, vocab_size: int = 0) -> None:
        if not 0 < size <= num_rows:
            raise ValueError(f"size: {size} slots over a cache of {num_rows} rows")
        self.size, self.num_rows, self.limit = size, num_rows, limit
        self._device = device
        self._fields = device.zeros((8, size), np.int32)
        self._ring, ring = device.mapped((RING, size), np.int32)
        fields = self._fields
        self.slots = Slots(fields[TOKENS], fields[ROWS], fields[POSITIONS], fields[ENDS], fields[LAST], fields[TURNS], ring)
        self.prompts, self.steps = fields[PROMPTS], fields[STEPS]
        self.seen = device.zeros((size, vocab_size), np.int8)

    def fill(
        self, tokens: Sequence[int], rows: Sequence[int], positions: Sequence[int],
        prompts: Sequence[int] = (), steps: Sequence[int] = (), seen: Sequence[Sequence[int]] = (),
    ) -> None:  # fmt: skip
        """The next step reads these tokens of n <= B sequences, each at its place in its row; the other slots are idle.
        prompts, steps, seen: where tokens are drawn, each sequence's number, its new tokens so far, and all its ids so far.

        A wrong index would write into another sequence's memory, so it raises ValueError here, on the host.
        """
        count = len(rows)
        if not 0 < count <= self.size or len(set(rows)) != count or not all(0 <= row < self.num_rows for row in rows):
            raise ValueError(f"rows: {list(rows)} for {self.size} slots over a cache of {self.num_rows} rows")
        if not all(0 <= position < self.limit for position in positions):
            raise ValueError(f"positions: {list(positions)} in a context of {self.limit}")
        fields = np.zeros((8, self.size), np.int32)
        taken = set(rows)
        spare = [row for row in range(self.num_rows) if row not in taken]
        fields[ROWS] = [*rows, *spare[: self.size - count]]
        fields[TOKENS, :count] = tokens
        fields[POSITIONS, :count] = positions
        fields[ENDS] = fields[POSITIONS] + 1
        fields[LAST, :count] = self.limit - 1
        fields[PROMPTS, : len(prompts)] = prompts
        fields[STEPS, : len(steps)] = steps
        self._fields[...] = self._device.to_device(fields)
        if self.seen.shape[1]:
            marks = np.zeros(self.seen.shape, np.int8)
            for mark, ids in zip(marks, seen, strict=False):
                mark[np.asarray(ids)] = 1
            self.seen[...] = self._device.to_device(marks)

    def force(self, tokens: Sequence[int]) -> None:
        """The first slots' next step reads these tokens in place of those that were chosen."""
        self.slots.tokens[: len(tokens)] = self._device.to_device(np.asarray(tokens, np.int32))

    def chosen(self, turn: int) -> np.ndarray:
        """int32 [B], on the host: what step `turn` since `fill` chose, once it is known to be done and for RING - 1 steps more."""
        return self._ring[turn % RING]


def bucket(count: int, num_rows: int) -> int:
    """How many slots to take for `count` sequences: a power of two, at most all rows, so that a few graphs serve all."""
    return min(1 << (count - 1).bit_length(), num_rows)
