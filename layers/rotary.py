"""Rotary positions: the tables of cosines and sines that `kernels.rotary` turns queries and keys by.

angle[p, i] = p * f[i],  f[i] = theta^(-2i / r),  i = 0 .. r/2 - 1, with r the dimensions of a head that turn. The four ways to stretch a model to longer
contexts only change f (and, for yarn, scale the tables). Computed in float64 once, held as float32.

| kind    | f becomes                                                                                       |
| ------- | ----------------------------------------------------------------------------------------------- |
| linear  | f / factor: positions squeezed                                                                  |
| dynamic | theta grows with the length n of the pass: theta * (factor * max(n, M) / M - factor + 1)^(r/(r-2)) |
| llama3  | long waves / factor, short ones kept, a linear blend between                                     |
| yarn    | the same idea with the ramp laid over the index i; cos and sin also times attention_factor        |
"""

from __future__ import annotations

import math

import numpy as np

from l1_kernels.device import Device
from l1_kernels.regions import RotaryArgs
from l1_kernels.weight import Array
from layers.batch import Batch
from layers.config import RopeConfig


class Rotary:
    """Gives each pass its tables: one table for all positions, or (dynamic) one made for the pass."""

    def __init__(self, rope: RopeConfig, max_positions: int, device: Device) -> None:
        self.rope = rope
        self.device = device
        self.table: tuple[Array, Array] | None = None
        if rope.kind != "dynamic":
            angles = np.arange(max_positions, dtype=np.float64)[:, None] * frequencies(rope)
            self.table = self._tables(angles)

    def step(self, batch: Batch, positions: Array) -> RotaryArgs:
        """`positions` is batch.positions already on the device."""
        if self.table is not None:
            return self.at(positions)
        # A cached key keeps the frequencies of the pass that computed it, so only this pass's tokens are in the table.
        bases = dynamic_base(self.rope, batch.pass_lengths())
        angles = batch.positions[:, None] * inverse_frequencies(self.rope.dim, bases[:, None])
        index = self.device.to_device(np.arange(len(batch.tokens), dtype=np.int32))
        return RotaryArgs(*self._tables(angles), index, self.rope.interleaved)

    def at(self, positions: Array) -> RotaryArgs:
        """For positions int32 [T] that only the device knows. Not for dynamic scaling, whose tables the host makes anew."""
        if self.table is None:
            raise ValueError("at: dynamic rotary scaling has no table of all positions")
        return RotaryArgs(*self.table, positions, self.rope.interleaved)

    def _tables(self, angles: np.ndarray) -> tuple[Array, Array]:
        scale = self.rope.attention_factor
        cos, sin = np.cos(angles) * scale, np.sin(angles) * scale
        return self.device.to_device(cos.astype(np.float32)), self.device.to_device(sin.astype(np.float32))


def inverse_frequencies(dim: int, theta: float | np.ndarray) -> np.ndarray:
    """theta^(-2i/dim), float64 [dim/2] (or broadcast over theta)."""
    return np.asarray(theta, np.float64) ** (-np.arange(0, dim, 2) / dim)


def dynamic_base(rope: RopeConfig, lengths: np.ndarray) -> np.ndarray:
    """theta for a pass that ends at `lengths` tokens (dynamic NTK). Unscaled up to the trained context."""
    trained = rope.original_positions
    stretch = rope.factor * np.maximum(lengths, trained) / trained - (rope.factor - 1)
    return rope.theta * stretch ** (rope.dim / (rope.dim - 2))


def frequencies(rope: RopeConfig) -> np.ndarray:
    """f, float64 [r/2], of every kind that does not depend on the length."""
    plain = inverse_frequencies(rope.dim, rope.theta)
    if rope.kind == "none":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    raise ValueError(f"frequencies: rope kind {rope.kind!r} depends on the length")


def _llama3(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    turns = rope.original_positions * plain / (2 * math.pi)  # full turns within the trained context
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return keep * plain + (1 - keep) * plain / rope.factor


def _yarn(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    def index_of(turns: float) -> float:
        """The (real) index i whose wave makes `turns` full turns within the trained context."""
        return rope.dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = np.clip((np.arange(rope.dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return (1 - ramp) * plain + ramp * plain / rope.factor
