"""Which arguments of the routing operations are refused, on any device (l1_kernels/checks.py)."""

from __future__ import annotations

from l1_kernels import checks
from l1_kernels.checks import FLOAT32, INT32
from l1_kernels.weight import Array, Weight
from l3_moe.tables import RoutingTables

FLOATS = ("fp32", "fp16", "bf16")


def gate(logits: Array, top_k: int, capacity: int | None) -> None:
    checks.ranked(logits, "logits", FLOAT32, 2)
    if not 1 <= top_k <= logits.shape[1]:
        checks.reject("top_k", f"in 1..{logits.shape[1]} (logits' E)", top_k)
    room(capacity)


def choice(experts: Array, share: Array, num_experts: int, capacity: int | None) -> None:
    checks.ranked(experts, "experts", INT32, 2)
    if experts.shape[1] < 1:
        checks.reject("experts", "[T, k] with k >= 1", checks.describe(experts))
    checks.array(share, "share", FLOAT32, experts.shape)
    if num_experts < 1:
        checks.reject("num_experts", "at least 1", num_experts)
    room(capacity)


def gated(x: Array, gate: Weight, top_k: int, dtype: str, capacity: int | None) -> None:
    checks.matrix(gate, "gate")
    if gate.dtype != "fp32":
        checks.reject("gate", "a Weight of fp32", gate.dtype)
    checks.ranked(x, "x", FLOAT32, 2)
    if x.shape[1] != gate.shape[1]:
        checks.reject("x", f"[T, {gate.shape[1]}] (gate's D)", checks.describe(x))
    if not 1 <= top_k <= gate.shape[0]:
        checks.reject("top_k", f"in 1..{gate.shape[0]} (gate's E)", top_k)
    checks.known(dtype, "dtype", FLOATS)
    room(capacity)


def room(capacity: int | None) -> None:
    if capacity is not None and capacity < 1:
        checks.reject("capacity", "at least 1, or None for no limit", capacity)


def tables(given: RoutingTables) -> None:
    checks.ranked(given.experts, "tables.experts", INT32, 2)
    shape = given.experts.shape
    checks.array(given.share, "tables.share", FLOAT32, shape)
    checks.array(given.slots, "tables.slots", INT32, shape)
    checks.array(given.sources, "tables.sources", INT32, (shape[0] * shape[1],))
    checks.ranked(given.offsets, "tables.offsets", INT32, 1)


def dispatch(x: Array, given: RoutingTables, dtype: str) -> None:
    tables(given)
    checks.ranked(x, "x", FLOAT32, 2)
    if x.shape[0] != given.num_tokens:
        checks.reject("x", f"[{given.num_tokens}, D] (tables' T)", checks.describe(x))
    checks.known(dtype, "dtype", FLOATS)


def combine(y: Array, given: RoutingTables, residual: Array | None) -> None:
    tables(given)
    checks.ranked(y, "y", FLOAT32, 2)
    if y.shape[0] != given.num_tokens * given.top_k:
        checks.reject("y", f"[{given.num_tokens * given.top_k}, D] (tables' T * k)", checks.describe(y))
    if residual is not None:
        checks.array(residual, "residual", FLOAT32, (given.num_tokens, y.shape[1]))
