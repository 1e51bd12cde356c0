"""A layer's weights by role. Loading gives flat names (docs/notation.md lists them); blocks read these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass

from l1_kernels.weight import Array, Weight

Tensors = Mapping[str, Weight | Array]


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Array  # [D]
    bias: Array | None


@dataclass(frozen=True, slots=True)
class Linear:
    weight: Weight  # [N, K]
    bias: Array | None  # [N]


@dataclass(frozen=True, slots=True)
class MoEWeights:
    gate: Weight  # [E, D], fp32
    up: Linear  # [E, F, D] or, gated, [E, 2F, D]
    down: Linear  # [E, D, F]
    shared_up: Linear | None
    shared_down: Linear | None
    shared_gate: Weight | None  # [1, D], fp32


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attn_norm: Norm | None
    qkv: Linear  # [(H + 2G) d, D]
    q_norm: Array | None
    k_norm: Array | None
    attn_out: Linear  # [D, H d]
    ffn_norm: Norm | None
    ffn_up: Linear | None  # [F, D] or, gated, [2F, D]
    ffn_down: Linear | None  # [D, F]
    moe: MoEWeights | None

    @classmethod
    def from_tensors(cls, tensors: Tensors) -> LayerWeights:
        return cls(
            attn_norm=norm(tensors, "attn_norm"),
            qkv=linear(tensors, "attn.qkv"),
            q_norm=tensors.get("attn.q_norm.weight"),
            k_norm=tensors.get("attn.k_norm.weight"),
            attn_out=linear(tensors, "attn.out"),
            ffn_norm=norm(tensors, "ffn_norm"),
            ffn_up=optional_linear(tensors, "ffn.up"),
            ffn_down=optional_linear(tensors, "ffn.down"),
            moe=_moe(tensors),
        )


def held_bytes(*parts: object) -> int:
    """Bytes of everything in such groups of tensors, what is there twice counted once."""
    found: dict[int, int] = {}

    def visit(part: object) -> None:
        if isinstance(part, Weight):
            found[id(part.data)] = part.nbytes
        elif is_dataclass(part):
            for field in fields(part):
                visit(getattr(part, field.name))
        elif hasattr(part, "nbytes"):
            found[id(part)] = int(part.nbytes)

    for part in parts:
        visit(part)
    return sum(found.values())


def norm(tensors: Tensors, name: str) -> Norm | None:
    weight = tensors.get(f"{name}.weight")
    return None if weight is None else Norm(weight, tensors.get(f"{name}.bias"))


def linear(tensors: Tensors, name: str) -> Linear:
    weight = tensors[f"{name}.weight"]
    assert isinstance(weight, Weight)
    return Linear(weight, tensors.get(f"{name}.bias"))


def optional_linear(tensors: Tensors, name: str) -> Linear | None:
    return linear(tensors, name) if f"{name}.weight" in tensors else None


def _moe(tensors: Tensors) -> MoEWeights | None:
    if "moe.gate.weight" not in tensors:
        return None
    gate, shared_gate = tensors["moe.gate.weight"], tensors.get("moe.shared_gate.weight")
    assert isinstance(gate, Weight) and (shared_gate is None or isinstance(shared_gate, Weight))
    return MoEWeights(
        gate=gate,
        up=linear(tensors, "moe.up"),
        down=linear(tensors, "moe.down"),
        shared_up=optional_linear(tensors, "moe.shared_up"),
        shared_down=optional_linear(tensors, "moe.shared_down"),
        shared_gate=shared_gate,
    )
