"""Checks of the routing operations for any device: against the float64 reference, and by what must hold of any tables.

Outputs come from memory filled with NaN or the largest integer, so that what a kernel does not write is seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from l1_kernels.device import Device
from l1_kernels.weight import CARRIER, Weight, decode, encode
from l3_moe.kernels import MoEKernels
from l3_moe.routing import reference
from l3_moe.tables import RoutingTables

SHARE_TOLERANCE = 2e-6  # of 1: float32's rounding of exponentials and of a sum over E
GATED_TOLERANCE = 1e-5  # where the logits are a product of float32 too: about 1e-6 of their size, which is a few
SUM_TOLERANCE = 1e-6  # of the largest term: k products and sums
WHOLE = ("experts", "slots", "sources", "offsets", "dropped")
MODES = [(True, False), (True, True), (False, False)]  # softmax_first, renormalise


class Routed:
    """A device with its routing kernels, whose every new array is poisoned."""

    def __init__(self, device: Device, kernels: MoEKernels) -> None:
        self.device, self.kernels = device, kernels
        owner: Any = kernels if hasattr(kernels, "_empty") else device.kernels
        plain = owner._empty

        def empty(shape: Any, dtype: Any) -> Any:
            array = plain(shape, dtype)
            array.fill(np.nan if np.dtype(dtype).kind == "f" else np.iinfo(dtype).max)
            return array

        owner._empty = empty

    def up(self, host: np.ndarray) -> Any:
        return self.device.to_device(host)

    def down(self, array: Any) -> np.ndarray:
        self.device.synchronize()
        return self.device.to_host(array)

    def tables_down(self, tables: RoutingTables) -> RoutingTables:
        return RoutingTables(*(self.down(getattr(tables, field.name)) for field in fields(tables)))


def fresh() -> np.random.Generator:
    """Other numbers every run; the seed stands in the failure's captured output."""
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def expect_equal(got: RoutingTables, want: RoutingTables, share_tolerance: float = SHARE_TOLERANCE) -> None:
    for name in WHOLE:
        mine, theirs = getattr(got, name), getattr(want, name)
        assert mine.dtype == np.int32 and mine.shape == theirs.shape and (mine == theirs).all(), f"{name}: {mine} is not {theirs}"
    assert got.share.dtype == np.float32
    np.testing.assert_allclose(got.share, want.share, rtol=0, atol=share_tolerance)


def expect_sound(tables: RoutingTables, num_experts: int, capacity: int | None) -> None:
    """What must hold of any tables, by other means than the reference's."""
    num_tokens, top_k = tables.experts.shape
    assert ((tables.experts >= 0) & (tables.experts < num_experts)).all()
    assert all(len(set(row)) == top_k for row in tables.experts.tolist()), "a token visits an expert once"
    counts = np.diff(tables.offsets)
    assert tables.offsets[0] == 0 and (counts >= 0).all() and len(counts) == num_experts
    kept = int(tables.offsets[-1])
    rows = tables.slots[tables.slots >= 0]
    assert sorted(rows) == list(range(kept)), "slots are unique and leave no gap"
    assert kept + int(tables.dropped[0]) == num_tokens * top_k
    assert (tables.slots.reshape(-1)[tables.sources[:kept]] == np.arange(kept)).all(), "sources is the inverse of slots"
    assert (tables.sources[kept:] == -1).all()
    tokens = tables.sources[:kept] // top_k
    for e in range(num_experts):
        mine = tables.sources[tables.offsets[e] : tables.offsets[e + 1]]
        assert (tables.experts.reshape(-1)[mine] == e).all(), "a row lies with its expert"
        assert (np.diff(tokens[tables.offsets[e] : tables.offsets[e + 1]]) > 0).all(), "in token order"
    if capacity is None:
        assert int(tables.dropped[0]) == 0 and (tables.slots >= 0).all()
    else:
        wanted = np.bincount(tables.experts.reshape(-1), minlength=num_experts)
        assert (counts == np.minimum(wanted, capacity)).all()


def check_tables(
    on: Routed, logits: np.ndarray, top_k: int, softmax_first: bool = True, renormalise: bool = False, capacity: int | None = None
) -> RoutingTables:
    """The device's tables of these logits, on the host, after comparing them with the reference's."""
    got = on.tables_down(on.kernels.tables(on.up(logits), top_k, softmax_first, renormalise, capacity))
    expect_equal(got, reference.tables(logits.astype(np.float64), top_k, softmax_first, renormalise, capacity))
    expect_sound(got, logits.shape[1], capacity)
    return got


def check_random(
    on: Routed, num_tokens: int, num_experts: int, top_k: int, softmax_first: bool, renormalise: bool, capacity: int | None
) -> None:
    rng = fresh()
    logits = normal(rng, num_tokens, num_experts) * 3
    logits[rng.random(num_tokens) < 0.2] = 1.5  # all equal: the lowest experts win
    logits[-1, -1] = logits[-1].max() + 1  # the last expert is best
    check_tables(on, logits, top_k, softmax_first, renormalise, capacity)


def check_crowd(on: Routed, num_tokens: int, num_experts: int, expert: int) -> None:
    """All tokens to one expert, with room for all and with room for three."""
    logits = np.zeros((num_tokens, num_experts), np.float32)
    logits[:, expert] = 5
    got = check_tables(on, logits, 1)
    assert (got.slots[:, 0] == np.arange(num_tokens)).all()
    got = check_tables(on, logits, 1, capacity=3)
    assert got.dropped[0] == max(0, num_tokens - 3) and (got.slots[3:] == -1).all()


def check_not_finite(on: Routed, num_tokens: int, num_experts: int, top_k: int) -> None:
    """Logits that are NaN, or infinite: the same tables each time, every index in range, and NaN comes last."""
    rng = fresh()
    logits = normal(rng, num_tokens, num_experts)
    for value in (np.nan, -np.inf):
        logits[rng.random(logits.shape) < 0.3] = value
    logits[0] = np.nan
    first = check_tables(on, logits, top_k, softmax_first=False)
    assert first.experts[0].tolist() == list(range(top_k)) and np.isnan(first.share[0]).all()
    again = on.tables_down(on.kernels.tables(on.up(logits), top_k, False, False))
    assert all((getattr(first, name) == getattr(again, name)).all() for name in WHOLE)
    check_tables(on, logits, top_k, softmax_first=True)


def check_given_choice(on: Routed, num_tokens: int, num_experts: int, top_k: int, capacity: int | None) -> None:
    """A choice with experts of somebody else's (outside of 0..E-1) and with one expert twice."""
    rng = fresh()
    experts = rng.integers(-2, num_experts + 2, (num_tokens, top_k)).astype(np.int32)
    experts[rng.random(experts.shape) < 0.1] = np.iinfo(np.int32).max
    share = normal(rng, num_tokens, top_k)
    up = on.up(experts), on.up(share)
    got = on.kernels.tables_of(*up, num_experts, capacity)
    assert got.experts is up[0] and got.share is up[1]
    expect_equal(on.tables_down(got), reference.tables_of(experts, share, num_experts, capacity))


def check_layout(on: Routed, num_tokens: int, num_experts: int, top_k: int, width: int, dtype: str, capacity: int | None = None) -> None:
    """dispatch and combine, each with and without what it may be without."""
    rng = fresh()
    tables = on.kernels.tables(on.up(normal(rng, num_tokens, num_experts)), top_k, True, True, capacity)
    host = on.tables_down(tables)
    kept = int(host.offsets[-1])
    x = normal(rng, num_tokens, width)
    rows = on.down(on.kernels.dispatch(on.up(x), tables, dtype))
    assert rows.dtype == CARRIER[dtype] and rows.shape == (num_tokens * top_k, width)
    np.testing.assert_array_equal(rows[:kept], encode(x, dtype)[host.sources[:kept] // top_k])

    y = normal(rng, num_tokens * top_k, width)
    y[kept:] = np.nan  # nobody's rows
    before = normal(rng, num_tokens, width)
    wide = replace(host, share=host.share.astype(np.float64))
    bar = SUM_TOLERANCE * (np.abs(y[:kept]).max(initial=0) + np.abs(before).max(initial=0))
    for residual in (before, None):
        start = None if residual is None else on.up(residual.copy())
        out = on.kernels.combine(on.up(y), tables, start)
        assert residual is None or out is start
        want = reference.combine(y.astype(np.float64), wide, np.zeros(x.shape) if residual is None else residual.astype(np.float64))
        got = on.down(out)
        assert got.dtype == np.float32 and got.shape == want.shape
        assert np.abs(got - want).max(initial=0) <= bar  # a NaN fails too
    again = on.down(on.kernels.combine(on.up(y), tables, None))
    np.testing.assert_array_equal(again, got)


def check_round_trip(on: Routed, num_tokens: int, num_experts: int, top_k: int, width: int) -> None:
    """Rows dispatched and combined with no expert in between: each token times the sum of its shares, 1 where nothing is dropped."""
    rng = fresh()
    x = normal(rng, num_tokens, width)
    tables = on.kernels.tables(on.up(normal(rng, num_tokens, num_experts)), top_k, True, True)
    rows = on.kernels.dispatch(on.up(x), tables, "fp16")
    y = on.up(decode(on.down(rows), "fp16"))
    np.testing.assert_allclose(on.down(on.kernels.combine(y, tables, None)), decode(encode(x, "fp16"), "fp16"), rtol=1e-5, atol=1e-6)


def check_no_tokens(on: Routed) -> None:
    """A rank may have no tokens in a step: shapes come out, and no expert has any row."""
    tables = on.kernels.tables(on.up(np.zeros((0, 5), np.float32)), 2, True, False)
    host = on.tables_down(tables)
    assert host.experts.shape == host.share.shape == host.slots.shape == (0, 2) and host.sources.shape == (0,)
    assert host.offsets.tolist() == [0] * 6 and host.dropped.tolist() == [0]
    x = on.up(np.zeros((0, 8), np.float32))
    assert on.kernels.dispatch(x, tables, "bf16").shape == (0, 8)
    gate = on.device.weight(Weight(np.ones((5, 32), np.float32), "fp32"))
    tables, rows = on.kernels.route_rows(on.up(np.zeros((0, 32), np.float32)), gate, 2, True, False, "fp16")
    assert rows.shape == (0, 32) and on.down(tables.offsets).tolist() == [0] * 6
    assert on.kernels.combine(x, tables, x) is x and on.kernels.combine(x, tables, None).shape == (0, 8)


def check_rejections(on: Routed) -> None:
    """A bad argument is named, before anything runs."""
    kernels, zeros = on.kernels, on.device.zeros
    logits, x, y, experts, share = zeros((3, 4)), zeros((3, 8)), zeros((6, 8)), zeros((3, 2), np.int32), zeros((3, 2))
    good = kernels.tables(logits, 2, True, False)
    bad: list[tuple[str, Callable[[], object]]] = [
        ("logits", lambda: kernels.tables(zeros((3, 4), np.float64), 2, True, False)),
        ("logits", lambda: kernels.tables(zeros(4), 2, True, False)),
        ("logits", lambda: kernels.tables(zeros((4, 3)).T, 2, True, False)),
        ("top_k", lambda: kernels.tables(logits, 5, True, False)),
        ("top_k", lambda: kernels.tables(logits, 0, True, False)),
        ("capacity", lambda: kernels.tables(logits, 2, True, False, 0)),
        ("experts", lambda: kernels.tables_of(zeros((3, 2), np.int64), share, 4)),
        ("experts", lambda: kernels.tables_of(zeros((3, 0), np.int32), zeros((3, 0)), 4)),
        ("share", lambda: kernels.tables_of(experts, zeros((3, 3)), 4)),
        ("num_experts", lambda: kernels.tables_of(experts, share, 0)),
        ("capacity", lambda: kernels.tables_of(experts, share, 4, -1)),
        ("gate", lambda: kernels.route_rows(x, Weight(zeros((4, 8), np.uint16), "fp16"), 2, True, False, "fp16")),
        ("gate.data", lambda: kernels.route_rows(x, Weight(zeros(8), "fp32"), 2, True, False, "fp16")),
        ("x", lambda: kernels.route_rows(x, Weight(zeros((4, 9)), "fp32"), 2, True, False, "fp16")),
        ("top_k", lambda: kernels.route_rows(x, Weight(zeros((4, 8)), "fp32"), 5, True, False, "fp16")),
        ("dtype", lambda: kernels.route_rows(x, Weight(zeros((4, 8)), "fp32"), 2, True, False, "int8")),
        ("capacity", lambda: kernels.route_rows(x, Weight(zeros((4, 8)), "fp32"), 2, True, False, "bf16", 0)),
        ("x", lambda: kernels.dispatch(zeros((2, 8)), good, "fp16")),
        ("x", lambda: kernels.dispatch(zeros((3, 8), np.float64), good, "fp16")),
        ("dtype", lambda: kernels.dispatch(x, good, "int8")),
        ("tables.slots", lambda: kernels.dispatch(x, replace(good, slots=zeros((2, 2), np.int32)), "fp16")),
        ("tables.sources", lambda: kernels.dispatch(x, replace(good, sources=zeros(5, np.int32)), "fp16")),
        ("tables.share", lambda: kernels.combine(y, replace(good, share=zeros((3, 2), np.float64)), None)),
        ("y", lambda: kernels.combine(zeros((5, 8)), good, None)),
        ("residual", lambda: kernels.combine(y, good, zeros((3, 9)))),
    ]
    for name, call in bad:
        with pytest.raises(ValueError, match=rf"argument {name}\b"):
            call()


def check_route_rows(
    on: Routed, num_tokens: int, num_experts: int, top_k: int, width: int, dtype: str, capacity: int | None = None
) -> None:
    """The gate's product, tables and rows together, of tokens whose choice float32's rounding does not decide."""
    rng = fresh()
    gate = normal(rng, num_experts, width) * np.float32(0.05)
    x = clear_choices(rng, gate, num_tokens, top_k)
    logits = x.astype(np.float64) @ gate.T.astype(np.float64)
    tables, rows = on.kernels.route_rows(on.up(x), on.device.weight(Weight(gate, "fp32")), top_k, True, False, dtype, capacity)
    got = on.tables_down(tables)
    expect_equal(got, reference.tables(logits, top_k, True, False, capacity), share_tolerance=GATED_TOLERANCE)
    expect_sound(got, num_experts, capacity)
    kept = int(got.offsets[-1])
    found = on.down(rows)
    assert found.dtype == CARRIER[dtype] and found.shape == (num_tokens * top_k, width)
    np.testing.assert_array_equal(found[:kept], encode(x, dtype)[got.sources[:kept] // top_k])


def clear_choices(rng: np.random.Generator, gate: np.ndarray, num_tokens: int, top_k: int) -> np.ndarray:
    """x [T, D] whose best top_k + 1 logits lie apart by more than a float32 product errs."""
    x = normal(rng, num_tokens, gate.shape[1])
    if top_k == len(gate):
        top_k -= 1
    while True:
        best = -np.sort(-(x.astype(np.float64) @ gate.T.astype(np.float64)), axis=1)[:, : top_k + 1]
        near = (best[:, :-1] - best[:, 1:] < 1e-4).any(axis=1)
        if not near.any():
            return x
        x[near] = normal(rng, int(near.sum()), gate.shape[1])
