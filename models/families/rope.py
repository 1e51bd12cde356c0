"""Rotary settings from config.json, in the spelling of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters)."""

from __future__ import annotations

import math
from typing import Any

from layers.config import RopeConfig
from models.families.fields import Fields

COMMON = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
KNOWN = {  # the keys of each kind; `type` is the old spelling of `rope_type`
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim",
    },
}  # fmt: skip


def rope_settings(fields: Fields, head_dim: int, trained: int, theta: float = 10000.0, portion: float = 1.0) -> tuple[RopeConfig, int]:
    """RopeConfig and the positions that the model reaches with it.

    trained         max_position_embeddings
    theta, portion  the model_type's defaults: base, and the part of each head that turns
    """
    settings = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(settings, dict):
        raise fields.error(f"rope_scaling must be an object, not {settings!r}")
    own = Fields(settings, f"{fields.where}: rope_scaling", fields.family)
    kind = own.get("rope_type", "type", default="default")
    if kind not in KNOWN:
        raise fields.error(f"rope_scaling of type {kind!r} is not supported (have {', '.join(KNOWN)})")
    unknown = sorted(set(settings) - KNOWN[kind] - COMMON)
    if unknown:
        raise fields.error(f"rope_scaling of type {kind!r}: {unknown[0]} is not supported")
    theta = own.number("rope_theta", default=fields.number("rope_theta", "rotary_emb_base", default=theta))
    portion = own.number("partial_rotary_factor", default=fields.number("partial_rotary_factor", "rotary_pct", default=portion))
    dim = int(head_dim * portion)
    if kind == "default":
        return RopeConfig(dim, theta), trained
    rope = RopeConfig(dim, theta, kind=kind, **_stretch(own, kind, trained))
    reach = trained if kind in ("linear", "dynamic") else rope.original_positions
    return rope, max(trained, int(reach * rope.factor))


def _stretch(own: Fields, kind: str, trained: int) -> dict[str, Any]:
    original = own.optional_integer("original_max_position_embeddings") or trained
    if kind == "yarn" and own.get("factor") is None:
        factor = trained / original
    else:
        factor = own.number("factor", default=math.nan)
    if not factor >= 1:
        raise own.error("factor must be a number of at least 1")
    if kind == "linear":
        return {"factor": factor}
    if kind == "dynamic":
        if original != trained:
            raise own.error("original_max_position_embeddings other than max_position_embeddings is not supported for 'dynamic'")
        return {"factor": factor, "original_positions": trained}
    if kind == "llama3":
        low, high = own.number("low_freq_factor", default=1.0), own.number("high_freq_factor", default=4.0)
        if not low < high:
            raise own.error("low_freq_factor must be below high_freq_factor")
        return {"factor": factor, "original_positions": original, "low_freq_factor": low, "high_freq_factor": high}
    return {
        "factor": factor,
        "original_positions": original,
        "attention_factor": _yarn_attention_factor(own, factor),
        "beta_fast": own.number("beta_fast", default=32.0) if own.get("beta_fast") is not None else 32.0,
        "beta_slow": own.number("beta_slow", default=1.0) if own.get("beta_slow") is not None else 1.0,
        "truncate": own.flag("truncate", default=True),
    }


def _yarn_attention_factor(own: Fields, factor: float) -> float:
    """What cos and sin are multiplied by (YaRN, arXiv 2309.00071, section 3.4: sqrt(1/t) = 0.1 ln(s) + 1)."""
    if own.get("attention_factor") is not None:
        return own.number("attention_factor", default=1.0)

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    above, below = own.get("mscale"), own.get("mscale_all_dim")
    if above and below:
        return magnitude(own.number("mscale", default=1.0)) / magnitude(own.number("mscale_all_dim", default=1.0))
    return magnitude(1.0)
