"""BLOOM: ALiBi in place of position embeddings, a norm after the token embedding, qkv fused head by head."""

from __future__ import annotations

from layers.config import ModelConfig
from models.families.family import Family, Shapes
from models.families.fields import Fields, special_tokens
from models.families.sources import PerHead, Stored


def config(fields: Fields, shapes: Shapes) -> ModelConfig:
    hidden = fields.integer("hidden_size", "n_embed", default=64)
    heads = fields.integer("n_head", "num_attention_heads", default=8)
    if hidden % heads:
        raise fields.error(f"hidden_size {hidden} does not divide into n_head {heads} heads")
    fields.only("apply_residual_connection_post_layernorm", False)
    fields.only("n_inner", None, 4 * hidden)
    return ModelConfig(
        family="bloom",
        vocab_size=fields.integer("vocab_size", default=250880),
        hidden_size=hidden,
        num_layers=fields.integer("n_layer", "num_hidden_layers", default=2),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_size=4 * hidden,
        max_positions=fields.integer("seq_length", default=2048),  # what it was trained to; ALiBi itself has no end
        norm_eps=fields.number("layer_norm_epsilon", default=1e-5),
        embed_norm=True,
        positions="alibi",
        activation="gelu_new",
        tie_embeddings=fields.flag("tie_word_embeddings", default=True),
        **special_tokens(fields, bos=1, eos=2, pad=3),
    )


LAYER = {
    "attn_norm": Stored("h.{i}.input_layernorm"),
    "attn.qkv": PerHead("h.{i}.self_attention.query_key_value"),
    "attn.out": Stored("h.{i}.self_attention.dense"),
    "ffn_norm": Stored("h.{i}.post_attention_layernorm"),
    "ffn.up": Stored("h.{i}.mlp.dense_h_to_4h"),
    "ffn.down": Stored("h.{i}.mlp.dense_4h_to_h"),
}
ENDS = {
    "embed.tokens": Stored("word_embeddings.weight"),
    "embed.norm": Stored("word_embeddings_layernorm"),
    "final_norm": Stored("ln_f"),
    "head": Stored("lm_head"),
}

FAMILY = Family("bloom", config, LAYER, ENDS, prefixes=("transformer.",))
