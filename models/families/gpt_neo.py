"""GPT-Neo: GPT-2 with plain matrices, global and local attention in turn, and scores that are not divided by sqrt(d)."""

from __future__ import annotations

from layers.config import ModelConfig
from models.families.family import Family, Shapes
from models.families.fields import Fields, special_tokens
from models.families.sources import Stored


def config(fields: Fields, shapes: Shapes) -> ModelConfig:
    hidden = fields.integer("hidden_size", default=2048)
    heads = fields.integer("num_heads", "num_attention_heads", default=16)
    layers = fields.integer("num_layers", "num_hidden_layers", default=24)
    window = fields.integer("window_size", default=256)
    if hidden % heads:
        raise fields.error(f"hidden_size {hidden} does not divide into num_heads {heads}")
    return ModelConfig(
        family="gpt_neo",
        vocab_size=fields.integer("vocab_size", default=50257),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_size=fields.optional_integer("intermediate_size") or 4 * hidden,
        max_positions=fields.integer("max_position_embeddings", default=2048),
        norm_eps=fields.number("layer_norm_epsilon", default=1e-5),
        attention_scale=(1.0,) * layers,
        windows=tuple(window if kind == "local" else 0 for kind in _attention_kinds(fields, layers)),
        activation=fields.activation("activation_function", "gelu_new"),
        qkv_bias=False,
        tie_embeddings=fields.flag("tie_word_embeddings", default=True),
        **special_tokens(fields, bos=50256, eos=50256),
    )


def _attention_kinds(fields: Fields, layers: int) -> list[str]:
    """attention_types [[["global", "local"], 12]] -> global, local, global, ...: one a layer."""
    groups = fields.get("attention_types", default=[[["global", "local"], 12]])
    try:
        kinds = [kind for pattern, times in groups for _ in range(times) for kind in pattern]
    except (TypeError, ValueError):
        raise fields.error(f"attention_types {groups!r} is not a list of [kinds, times]") from None
    if len(kinds) != layers or not set(kinds) <= {"global", "local"}:
        raise fields.error(f"attention_types {groups!r} must give 'global' or 'local' for each of num_layers {layers}")
    return kinds


LAYER = {
    "attn_norm": Stored("h.{i}.ln_1"),
    "attn.qkv": Stored("h.{i}.attn.attention.q_proj", "h.{i}.attn.attention.k_proj", "h.{i}.attn.attention.v_proj"),
    "attn.out": Stored("h.{i}.attn.attention.out_proj"),
    "ffn_norm": Stored("h.{i}.ln_2"),
    "ffn.up": Stored("h.{i}.mlp.c_fc"),
    "ffn.down": Stored("h.{i}.mlp.c_proj"),
}
ENDS = {
    "embed.tokens": Stored("wte.weight"),
    "embed.positions": Stored("wpe.weight"),
    "final_norm": Stored("ln_f"),
    "head": Stored("lm_head"),
}
IGNORED = (r"h\.\d+\.attn\.attention\.(bias|masked_bias)",)

FAMILY = Family("gpt_neo", config, LAYER, ENDS, prefixes=("transformer.",), ignored=IGNORED)
