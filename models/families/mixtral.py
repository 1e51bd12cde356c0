"""Mixtral: Mistral with eight experts in every layer, two a token, their weights renormalised over the two."""

from __future__ import annotations

from layers.config import ModelConfig, MoEConfig
from models.families.family import Family, Shapes
from models.families.fields import Fields
from models.families.llama import ATTENTION, ENDS, IGNORED, PREFIXES, llama_settings
from models.families.sources import Stored


def config(fields: Fields, shapes: Shapes) -> ModelConfig:
    settings = llama_settings(fields, ffn=14336, kv_heads=8, positions=131072, eps=1e-5, theta=1e6)
    window = fields.optional_integer("sliding_window")
    moe = MoEConfig(
        layers=tuple(range(settings["num_layers"])),
        num_experts=fields.integer("num_local_experts", "num_experts", default=8),
        top_k=fields.integer("num_experts_per_tok", default=2),
        expert_size=settings["ffn_size"],
        renormalise=True,
    )
    return ModelConfig(family="mixtral", windows=(window or 0,) * settings["num_layers"], moe=moe, **settings)


MOE = {
    "moe.gate": Stored("layers.{i}.block_sparse_moe.gate"),
    "moe.up": Stored("layers.{i}.block_sparse_moe.experts.{e}.w1", "layers.{i}.block_sparse_moe.experts.{e}.w3"),
    "moe.down": Stored("layers.{i}.block_sparse_moe.experts.{e}.w2"),
}

FAMILY = Family("mixtral", config, ATTENTION | MOE, ENDS, PREFIXES, ignored=IGNORED)
