"""Qwen3: Qwen2 without biases and with an RMS norm of each query and key head before they are rotated."""

from __future__ import annotations

from layers.config import ModelConfig
from models.families.family import Family, Shapes
from models.families.fields import Fields
from models.families.llama import ATTENTION, ENDS, FEED_FORWARD, IGNORED, PREFIXES, llama_settings
from models.families.qwen2 import sliding_windows
from models.families.sources import Stored


def config(fields: Fields, shapes: Shapes) -> ModelConfig:
    settings = llama_settings(fields, vocab_size=151936, ffn=22016, kv_heads=32, head_dim=128, positions=32768, bos=None, eos=None)
    settings["qkv_bias"] = settings["out_bias"] = fields.flag("attention_bias", default=False)
    return ModelConfig(family="qwen3", qk_norm="head", windows=sliding_windows(fields, settings["num_layers"]), **settings)


QK_NORM = {
    "attn.q_norm": Stored("layers.{i}.self_attn.q_norm"),
    "attn.k_norm": Stored("layers.{i}.self_attn.k_norm"),
}

FAMILY = Family("qwen3", config, ATTENTION | QK_NORM | FEED_FORWARD, ENDS, PREFIXES, ignored=IGNORED)
