"""OPT: GPT-2's shape with separate q, k, v and relu; position table with two unused rows; the 350M one is post-norm and
has a token embedding narrower than the model, with a projection on either side."""

from __future__ import annotations

from layers.config import ModelConfig
from models.families.family import Family, Shapes
from models.families.fields import Fields, special_tokens
from models.families.sources import Stored


def config(fields: Fields, shapes: Shapes) -> ModelConfig:
    hidden = fields.integer("hidden_size", "d_model", default=768)
    heads = fields.integer("num_attention_heads", default=12)
    if hidden % heads:
        raise fields.error(f"hidden_size {hidden} does not divide into num_attention_heads {heads}")
    fields.only("layer_norm_elementwise_affine", True)
    width = fields.optional_integer("word_embed_proj_dim") or hidden
    pre_norm = fields.flag("do_layer_norm_before", default=True)
    bias = fields.flag("enable_bias", default=True)
    return ModelConfig(
        family="opt",
        vocab_size=fields.integer("vocab_size", default=50272),
        hidden_size=hidden,
        num_layers=fields.integer("num_hidden_layers", default=12),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_size=fields.integer("ffn_dim", default=3072),
        max_positions=fields.integer("max_position_embeddings", default=2048),
        pre_norm=pre_norm,
        final_norm=pre_norm and not fields.flag("_remove_final_layer_norm", default=False),
        embed_size=0 if width == hidden else width,
        position_offset=2,
        activation=fields.activation("activation_function", "relu"),
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=bias,
        tie_embeddings=fields.flag("tie_word_embeddings", default=True),
        **special_tokens(fields, bos=2, eos=2, pad=1),
    )


LAYER = {
    "attn_norm": Stored("layers.{i}.self_attn_layer_norm"),
    "attn.qkv": Stored("layers.{i}.self_attn.q_proj", "layers.{i}.self_attn.k_proj", "layers.{i}.self_attn.v_proj"),
    "attn.out": Stored("layers.{i}.self_attn.out_proj"),
    "ffn_norm": Stored("layers.{i}.final_layer_norm"),
    "ffn.up": Stored("layers.{i}.fc1"),
    "ffn.down": Stored("layers.{i}.fc2"),
}
ENDS = {
    "embed.tokens": Stored("embed_tokens.weight"),
    "embed.positions": Stored("embed_positions.weight"),
    "embed.project_in": Stored("project_in"),
    "embed.project_out": Stored("project_out"),
    "final_norm": Stored("final_layer_norm"),
    "head": Stored("lm_head"),
}

FAMILY = Family("opt", config, LAYER, ENDS, prefixes=("model.decoder.", "decoder."))
