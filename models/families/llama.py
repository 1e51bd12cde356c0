"""LLaMA: RMSNorm, rotary positions, grouped-query heads, SiLU-gated feed-forward; and what its descendants share."""

from __future__ import annotations

from typing import Any

from layers.config import ModelConfig
from models.families.family import Family, Shapes
from models.families.fields import Fields, refuse_windows, special_tokens
from models.families.rope import rope_settings
from models.families.sources import Stored


def llama_settings(
    fields: Fields, *, vocab_size: int = 32000, hidden: int = 4096, ffn: int = 11008, layers: int = 32, heads: int = 32, kv_heads: int | None = None,
    head_dim: int | None = None, positions: int = 2048, eps: float = 1e-6, theta: float = 10000.0, bos: int | None = 1, eos: int | None = 2,
) -> dict[str, Any]:  # fmt: skip
    """ModelConfig fields of a model built like LLaMA; the arguments are the defaults of its model_type."""
    hidden = fields.integer("hidden_size", default=hidden)
    heads = fields.integer("num_attention_heads", default=heads)
    head_dim = fields.optional_integer("head_dim", default=head_dim)
    if head_dim is None:
        if hidden % heads:
            raise fields.error(f"hidden_size {hidden} does not divide into num_attention_heads {heads}")
        head_dim = hidden // heads
    trained = fields.integer("max_position_embeddings", default=positions)
    rope, reach = rope_settings(fields, head_dim, trained, theta)
    return {
        "vocab_size": fields.integer("vocab_size", default=vocab_size),
        "hidden_size": hidden,
        "num_layers": fields.integer("num_hidden_layers", default=layers),
        "num_heads": heads,
        "num_kv_heads": fields.optional_integer("num_key_value_heads", default=kv_heads) or heads,
        "head_dim": head_dim,
        "ffn_size": fields.integer("intermediate_size", default=ffn),
        "max_positions": reach,
        "norm": "rmsnorm",
        "norm_eps": fields.number("rms_norm_eps", default=eps),
        "positions": "rotary",
        "rope": rope,
        "activation": fields.activation("hidden_act", "silu"),
        "gated_ffn": True,
        "qkv_bias": False,
        "out_bias": False,
        "ffn_bias": False,
        "tie_embeddings": fields.flag("tie_word_embeddings", default=False),
        **special_tokens(fields, bos=bos, eos=eos),
    }


def config(fields: Fields, shapes: Shapes) -> ModelConfig:
    refuse_windows(fields)
    settings = llama_settings(fields)
    settings["qkv_bias"] = settings["out_bias"] = fields.flag("attention_bias", default=False)
    settings["ffn_bias"] = fields.flag("mlp_bias", default=False)
    return ModelConfig(family="llama", **settings)


ATTENTION = {
    "attn_norm": Stored("layers.{i}.input_layernorm"),
    "attn.qkv": Stored("layers.{i}.self_attn.q_proj", "layers.{i}.self_attn.k_proj", "layers.{i}.self_attn.v_proj"),
    "attn.out": Stored("layers.{i}.self_attn.o_proj"),
    "ffn_norm": Stored("layers.{i}.post_attention_layernorm"),
}
FEED_FORWARD = {
    "ffn.up": Stored("layers.{i}.mlp.gate_proj", "layers.{i}.mlp.up_proj"),
    "ffn.down": Stored("layers.{i}.mlp.down_proj"),
}
ENDS = {
    "embed.tokens": Stored("embed_tokens.weight"),
    "final_norm": Stored("norm"),
    "head": Stored("lm_head"),
}
PREFIXES = ("model.",)
IGNORED = (r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"rotary_emb\.inv_freq")

FAMILY = Family("llama", config, ATTENTION | FEED_FORWARD, ENDS, PREFIXES, ignored=IGNORED)
