"""GPT-2: learned positions, pre-norm, fused qkv; matrices stored [in, out] (Conv1D); head tied to the embedding."""

from __future__ import annotations

from typing import Any

from layers.config import ModelConfig
from models.families.family import Family, Shapes
from models.families.fields import Fields, special_tokens
from models.families.sources import Fused, Stored


def gpt2_settings(fields: Fields) -> dict[str, Any]:
    """What GPT-2 and its mixture-of-experts variant share."""
    hidden = fields.integer("n_embd", "hidden_size", default=768)
    heads = fields.integer("n_head", "num_attention_heads", default=12)
    layers = fields.integer("n_layer", "num_hidden_layers", default=12)
    if hidden % heads:
        raise fields.error(f"n_embd {hidden} does not divide into n_head {heads} heads")
    scale = (hidden // heads) ** -0.5 if fields.flag("scale_attn_weights", default=True) else 1.0
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx", default=False)
    return {
        "vocab_size": fields.integer("vocab_size", default=50257),
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn_size": fields.optional_integer("n_inner") or 4 * hidden,
        "max_positions": fields.integer("n_positions", "max_position_embeddings", default=1024),
        "norm_eps": fields.number("layer_norm_epsilon", default=1e-5),
        "attention_scale": tuple(scale / (i + 1 if by_layer else 1) for i in range(layers)),
        "activation": fields.activation("activation_function", "gelu_new"),
        "tie_embeddings": fields.flag("tie_word_embeddings", default=True),
        **special_tokens(fields, bos=50256, eos=50256),
    }


def config(fields: Fields, shapes: Shapes) -> ModelConfig:
    return ModelConfig(family="gpt2", **gpt2_settings(fields))


LAYER = {
    "attn_norm": Stored("h.{i}.ln_1"),
    "attn.qkv": Fused("h.{i}.attn.c_attn", transposed=True),
    "attn.out": Stored("h.{i}.attn.c_proj", transposed=True),
    "ffn_norm": Stored("h.{i}.ln_2"),
    "ffn.up": Stored("h.{i}.mlp.c_fc", transposed=True),
    "ffn.down": Stored("h.{i}.mlp.c_proj", transposed=True),
}
ENDS = {
    "embed.tokens": Stored("wte.weight"),
    "embed.positions": Stored("wpe.weight"),
    "final_norm": Stored("ln_f"),
    "head": Stored("lm_head"),
}
IGNORED = (r"h\.\d+\.attn\.(bias|masked_bias)",)

FAMILY = Family("gpt2", config, LAYER, ENDS, prefixes=("transformer.",), ignored=IGNORED)
