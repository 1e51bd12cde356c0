"""The checks of choosing tokens, for any device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from l1_kernels.device import Device
from l1_kernels.sampling.slots import Slots
from tests.l1_kernels.operation_checks import fresh, normal

RING = 3


def slots_of(device: Device, size: int, rng: np.random.Generator) -> tuple[Slots, np.ndarray]:
    """Slots at places of their own, some of which are the last; the ring as the host sees it."""
    places = rng.integers(0, 9, size).astype(np.int32)
    last = (places + rng.integers(0, 3, size)).astype(np.int32)
    host, ring = device.mapped((RING, size), np.int32)
    host[...] = -7
    turns = rng.integers(0, 9, size).astype(np.int32)
    fields = (np.full(size, -9, np.int32), np.arange(size, dtype=np.int32), places, places + 1, last, turns)
    return Slots(*(device.to_device(field.copy()) for field in fields), ring), host


def check_greedy(device: Device, size: int, width: int) -> None:
    rng = fresh()
    logits = normal(rng, size, width)
    logits[rng.integers(size)] = 1.5  # all equal: the lowest id
    if width > 2:
        row = logits[rng.integers(size)]
        row[[width - 1, width // 2]] = row.max() + 1  # two are largest
    slots, ring = slots_of(device, size, rng)
    before = {name: device.to_host(getattr(slots, name)).copy() for name in ("rows", "positions", "last", "turns")}
    want = logits.argmax(axis=1)
    device.kernels.greedy(device.to_device(logits), slots)
    device.synchronize()
    after = {name: device.to_host(getattr(slots, name)) for name in ("tokens", "rows", "positions", "ends", "last", "turns")}
    assert (after["tokens"] == want).all()
    assert (after["positions"] == np.minimum(before["positions"] + 1, before["last"])).all()
    assert (after["ends"] == after["positions"] + 1).all()
    assert (after["turns"] == before["turns"] + 1).all()
    assert (after["rows"] == before["rows"]).all() and (after["last"] == before["last"]).all()
    want_ring = np.full((RING, size), -7)
    want_ring[before["turns"] % RING, np.arange(size)] = want
    assert (ring == want_ring).all()


def check_broken_logits(device: Device) -> None:
    """A NaN anywhere, an infinity as the largest, or nothing but minus infinity: -1. Minus infinities among numbers: fine."""
    logits = normal(fresh(), 5, 37)
    logits[0, 36], logits[1, 3], logits[2], logits[3, 5:] = np.nan, np.inf, -np.inf, -np.inf
    slots, ring = slots_of(device, 5, fresh())
    device.kernels.greedy(device.to_device(logits), slots)
    device.synchronize()
    assert device.to_host(slots.tokens).tolist() == [-1, -1, -1, logits[3, :5].argmax(), logits[4].argmax()]


def check_rejections(device: Device) -> None:
    slots, _ = slots_of(device, 2, fresh())
    short, _ = slots_of(device, 1, fresh())
    fields = {name: getattr(slots, name) for name in Slots.__slots__}
    bad: list[tuple[str, Any, Slots]] = [
        ("logits", device.zeros((2, 5), np.float64), slots),
        ("logits", device.zeros((2, 0)), slots),
        ("slots.tokens", device.zeros((1, 5)), slots),
        *((f"slots.{name}", device.zeros((2, 5)), Slots(**fields | {name: getattr(short, name)})) for name in ("positions", "ends", "last", "turns", "ring")),
    ]
    for name, logits, given in bad:
        with pytest.raises(ValueError, match=f"argument {name} "):
            device.kernels.greedy(logits, given)
