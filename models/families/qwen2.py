"""Qwen2: LLaMA with biases on q, k and v, and a sliding window in the upper layers if `use_sliding_window` says so."""

from __future__ import annotations

from layers.config import ModelConfig
from models.families.family import Family, Shapes
from models.families.fields import Fields, refuse_windows
from models.families.llama import ATTENTION, ENDS, FEED_FORWARD, IGNORED, PREFIXES, llama_settings


def sliding_windows(fields: Fields, layers: int) -> tuple[int, ...]:
    """The window of each layer: by `layer_types` where the config has them, else from `max_window_layers` up."""
    if not fields.flag("use_sliding_window", default=False):
        refuse_windows(fields)
        return ()
    window = fields.optional_integer("sliding_window", default=4096)
    if window is None:
        return ()
    kinds = fields.get("layer_types")
    if kinds is None:
        whole = fields.get("max_window_layers", default=28)
        if not isinstance(whole, int):
            raise fields.error(f"max_window_layers must be a whole number, not {whole!r}")
        return tuple(window if layer >= whole else 0 for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise fields.error(f"layer_types must give 'sliding_attention' or 'full_attention' for each of {layers} layers")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def config(fields: Fields, shapes: Shapes) -> ModelConfig:
    settings = llama_settings(fields, vocab_size=151936, ffn=22016, kv_heads=32, positions=32768, bos=None, eos=None)
    settings["qkv_bias"] = True
    return ModelConfig(family="qwen2", windows=sliding_windows(fields, settings["num_layers"]), **settings)


FAMILY = Family("qwen2", config, ATTENTION | FEED_FORWARD, ENDS, PREFIXES, ignored=IGNORED)
