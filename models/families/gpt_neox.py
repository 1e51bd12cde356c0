"""GPT-NeoX and Pythia: rotary positions on part of each head, qkv fused head by head, parallel residual or not."""

from __future__ import annotations

from layers.config import ModelConfig
from models.families.family import Family, Shapes
from models.families.fields import Fields, special_tokens
from models.families.rope import rope_settings
from models.families.sources import PerHead, Stored


def config(fields: Fields, shapes: Shapes) -> ModelConfig:
    hidden = fields.integer("hidden_size", default=6144)
    heads = fields.integer("num_attention_heads", default=64)
    if hidden % heads:
        raise fields.error(f"hidden_size {hidden} does not divide into num_attention_heads {heads}")
    trained = fields.integer("max_position_embeddings", default=2048)
    rope, reach = rope_settings(fields, hidden // heads, trained, portion=0.25)
    bias = fields.flag("attention_bias", default=True)
    return ModelConfig(
        family="gpt_neox",
        vocab_size=fields.integer("vocab_size", default=50432),
        hidden_size=hidden,
        num_layers=fields.integer("num_hidden_layers", default=44),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_size=fields.integer("intermediate_size", default=24576),
        max_positions=reach,
        norm_eps=fields.number("layer_norm_eps", default=1e-5),
        parallel_residual=fields.flag("use_parallel_residual", default=True),
        positions="rotary",
        rope=rope,
        activation=fields.activation("hidden_act", "gelu"),
        qkv_bias=bias,
        out_bias=bias,
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        **special_tokens(fields, bos=0, eos=2),
    )


LAYER = {
    "attn_norm": Stored("layers.{i}.input_layernorm"),
    "attn.qkv": PerHead("layers.{i}.attention.query_key_value"),
    "attn.out": Stored("layers.{i}.attention.dense"),
    "ffn_norm": Stored("layers.{i}.post_attention_layernorm"),
    "ffn.up": Stored("layers.{i}.mlp.dense_h_to_4h"),
    "ffn.down": Stored("layers.{i}.mlp.dense_4h_to_h"),
}
ENDS = {
    "embed.tokens": Stored("embed_in.weight"),
    "final_norm": Stored("final_layer_norm"),
    "head": Stored("embed_out"),
}
IGNORED = (r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)", r"rotary_emb\.inv_freq")

FAMILY = Family("gpt_neox", config, LAYER, ENDS, prefixes=("gpt_neox.",), ignored=IGNORED)
