"""Mistral: LLaMA whose layers see only the last `sliding_window` tokens."""

from __future__ import annotations

from layers.config import ModelConfig
from models.families.family import Family, Shapes
from models.families.fields import Fields
from models.families.llama import ATTENTION, ENDS, FEED_FORWARD, IGNORED, PREFIXES, llama_settings


def config(fields: Fields, shapes: Shapes) -> ModelConfig:
    settings = llama_settings(fields, ffn=14336, kv_heads=8, positions=131072)
    window = fields.optional_integer("sliding_window", default=4096)  # left out is 4096, null is none
    fields.only("layer_types", None)
    return ModelConfig(family="mistral", windows=(window or 0,) * settings["num_layers"], **settings)


FAMILY = Family("mistral", config, ATTENTION | FEED_FORWARD, ENDS, PREFIXES, ignored=IGNORED)
