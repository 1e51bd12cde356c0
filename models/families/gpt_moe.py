"""GPT-2 with mixture-of-experts feed-forwards in some layers: the architecture of the paper's sparse models (Section V).

`moe` in config.json lists the layers; in them mlp.gate.wg is the gate and mlp.experts.<e> are the experts, Conv1D like
the rest. The gate's probability over all experts scales what the chosen ones give, not renormalised.
"""

from __future__ import annotations

from layers.config import ModelConfig, MoEConfig
from models.families.family import Family, Shapes
from models.families.fields import Fields
from models.families.gpt2 import ENDS, IGNORED, LAYER, gpt2_settings
from models.families.sources import Stored

KNOWN = {"layers", "num_experts", "top_k", "expert_inner", "gate_weight", "capacity_factor", "residual"}  # gate_weight is a remark


def config(fields: Fields, shapes: Shapes) -> ModelConfig:
    settings = fields.get("moe")
    if not isinstance(settings, dict):
        raise fields.error("moe must be an object that lists the sparse layers")
    own = Fields(settings, f"{fields.where}: moe", fields.family)
    if unknown := sorted(set(settings) - KNOWN):
        raise own.error(f"{unknown[0]} is not supported")
    own.only("capacity_factor", None)
    own.only("residual", False)
    dense = gpt2_settings(fields)
    layers = own.integers("layers")
    if not layers or not set(layers) <= set(range(dense["num_layers"])):
        raise own.error(f"layers {list(layers)} must name layers of 0..{dense['num_layers'] - 1}")
    moe = MoEConfig(
        layers=layers,
        num_experts=own.integer("num_experts"),
        top_k=own.integer("top_k", default=1),
        expert_size=own.integer("expert_inner", default=dense["ffn_size"]),
    )
    return ModelConfig(family="gpt_moe", moe=moe, **dense)


MOE = {
    "moe.gate": Stored("h.{i}.mlp.gate.wg"),
    "moe.up": Stored("h.{i}.mlp.experts.{e}.c_fc", transposed=True),
    "moe.down": Stored("h.{i}.mlp.experts.{e}.c_proj", transposed=True),
}

FAMILY = Family("gpt_moe", config, LAYER | MOE, ENDS, prefixes=("transformer.",), ignored=IGNORED)
