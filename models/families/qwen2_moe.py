"""Qwen2-MoE: Qwen2 with experts in some layers (`decoder_sparse_step`, `mlp_only_layers`), and in those a further expert
that every token visits, scaled by a sigmoid gate."""

from __future__ import annotations

from layers.config import ModelConfig, MoEConfig
from models.families.family import Family, Shapes
from models.families.fields import Fields
from models.families.llama import ATTENTION, ENDS, FEED_FORWARD, IGNORED, PREFIXES, llama_settings
from models.families.qwen2 import sliding_windows
from models.families.sources import Stored


def config(fields: Fields, shapes: Shapes) -> ModelConfig:
    settings = llama_settings(
        fields, vocab_size=151936, hidden=2048, ffn=5632, layers=24, heads=16, kv_heads=16, positions=32768, bos=None, eos=None
    )
    settings["qkv_bias"] = fields.flag("qkv_bias", default=True)
    if fields.get("layer_types") is None:  # releases disagree on which layers slide
        fields.only("use_sliding_window", False)
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.integers("mlp_only_layers")
    moe = MoEConfig(
        layers=tuple(i for i in range(settings["num_layers"]) if i not in dense and (i + 1) % step == 0),
        num_experts=fields.integer("num_experts", default=60),
        top_k=fields.integer("num_experts_per_tok", default=4),
        expert_size=fields.integer("moe_intermediate_size", default=1408),
        renormalise=fields.flag("norm_topk_prob", default=False),
        shared_size=fields.integer("shared_expert_intermediate_size", default=5632),
        shared_gated=True,
    )
    return ModelConfig(family="qwen2_moe", moe=moe, windows=sliding_windows(fields, settings["num_layers"]), **settings)


EXPERTS = {
    "moe.gate": Stored("layers.{i}.mlp.gate"),
    "moe.up": Stored("layers.{i}.mlp.experts.{e}.gate_proj", "layers.{i}.mlp.experts.{e}.up_proj"),
    "moe.down": Stored("layers.{i}.mlp.experts.{e}.down_proj"),
}
SHARED = {
    "moe.shared_up": Stored("layers.{i}.mlp.shared_expert.gate_proj", "layers.{i}.mlp.shared_expert.up_proj"),
    "moe.shared_down": Stored("layers.{i}.mlp.shared_expert.down_proj"),
    "moe.shared_gate": Stored("layers.{i}.mlp.shared_expert_gate"),
}

FAMILY = Family("qwen2_moe", config, ATTENTION | FEED_FORWARD | EXPERTS | SHARED, ENDS, PREFIXES, ignored=IGNORED)
