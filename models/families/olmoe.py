"""OLMoE: experts in every layer, weights as the gate's softmax gives them; norm of q and k over all heads together."""

from __future__ import annotations

from layers.config import ModelConfig, MoEConfig
from models.families.family import Family, Shapes
from models.families.fields import Fields
from models.families.llama import ATTENTION, ENDS, IGNORED, PREFIXES, llama_settings
from models.families.qwen2_moe import EXPERTS
from models.families.qwen3 import QK_NORM


def config(fields: Fields, shapes: Shapes) -> ModelConfig:
    settings = llama_settings(
        fields, vocab_size=50304, hidden=2048, ffn=2048, layers=16, heads=16, positions=4096, eps=1e-5, bos=None, eos=50279
    )
    fields.only("clip_qkv", None)
    settings["qkv_bias"] = settings["out_bias"] = fields.flag("attention_bias", default=False)
    moe = MoEConfig(
        layers=tuple(range(settings["num_layers"])),
        num_experts=fields.integer("num_experts", "num_local_experts", default=64),
        top_k=fields.integer("num_experts_per_tok", default=8),
        expert_size=settings["ffn_size"],
        renormalise=fields.flag("norm_topk_prob", default=False),
    )
    return ModelConfig(family="olmoe", qk_norm="span", moe=moe, **settings)


FAMILY = Family("olmoe", config, ATTENTION | QK_NORM | EXPERTS, ENDS, PREFIXES, ignored=IGNORED)
