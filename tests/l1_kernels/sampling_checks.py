"""The checks of choosing tokens, for any device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from l1_kernels.device import Device, open_device
from l1_kernels.sampling import reference
from l1_kernels.sampling.slots import Draw, Slots
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


DRAWS = {
    "plain": (1.3, 0, 1.0, 1.0),
    "cold": (0.05, 0, 1.0, 1.0),
    "top k": (1.0, 5, 1.0, 1.0),
    "one": (1.0, 1, 1.0, 1.0),
    "more than all": (2.0, 10**6, 0.999, 1.0),
    "top p": (1.5, 0, 0.8, 1.0),
    "nothing but the best": (1.0, 0, 1e-9, 1.0),
    "both": (1.1, 20, 0.9, 1.0),
    "penalty": (0.9, 20, 0.95, 1.4),
    "greedy with a penalty": (0.0, 0, 1.0, 1.4),
    "a penalty below 1": (1.0, 7, 0.7, 0.7),
}


def check_sample(device: Device, case: str, size: int, width: int, ties: bool = False) -> None:
    """The reference's tokens, step after step on fresh logits: rounding may move a border by 1e-15, which no draw meets."""
    rng = fresh()
    temperature, top_k, top_p, penalty = DRAWS[case]
    slots, ring = slots_of(device, size, rng)
    numbers = (temperature, top_k, top_p, penalty, int(rng.integers(1 << 63)) * 2 + 1)
    prompts, steps = (rng.integers(0, 1 << 31, size).astype(np.int32) for _ in range(2))
    seen = (rng.random((size, width)) < 0.3).astype(np.int8)
    draw = Draw(*numbers, *(device.to_device(part.copy()) for part in (prompts, steps, seen)))
    want_slots, _ = slots_of(open_device("cpu"), size, fresh())
    want_draw = Draw(*numbers, prompts, steps, seen)
    for _ in range(3):
        logits = normal(rng, size, width) * 3
        if ties:
            logits = np.round(logits) + np.float32(0)  # many equals, at every border; both zeros
            logits[:, ::5] = -np.inf
            logits[:, 0] = 1
        reference.sample(logits.copy(), want_slots, want_draw)
        device.kernels.sample(device.to_device(logits.copy()), slots, draw)
        device.synchronize()
        assert device.to_host(slots.tokens).tolist() == want_slots.tokens.tolist()
    assert (device.to_host(draw.steps) == want_draw.steps).all() and (device.to_host(draw.prompts) == prompts).all()
    assert (device.to_host(draw.seen) == want_draw.seen).all()


def check_bad_draws(device: Device) -> None:
    slots, _ = slots_of(device, 2, fresh())
    good = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "penalty": 1.5, "seed": 0}
    arrays = {"prompts": device.zeros(2, np.int32), "steps": device.zeros(2, np.int32), "seen": device.zeros((2, 5), np.int8)}
    for name, wrong in (
        ("draw.prompts", {"prompts": device.zeros(3, np.int32)}),
        ("draw.steps", {"steps": device.zeros(2, np.int64)}),
        ("draw.seen", {"seen": device.zeros((2, 4), np.int8)}),
        ("draw", {"top_p": 0.0}),
    ):
        with pytest.raises(ValueError, match=f"argument {name} "):
            device.kernels.sample(device.zeros((2, 5)), slots, Draw(**{**good, **arrays, **wrong}))
