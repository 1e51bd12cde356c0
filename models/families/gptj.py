"""GPT-J: rotary positions on interleaved pairs, attention and feed-forward side by side after one norm, head with bias."""

from __future__ import annotations

from layers.config import ModelConfig, RopeConfig
from models.families.family import Family, Shapes
from models.families.fields import Fields, special_tokens
from models.families.sources import Stored


def config(fields: Fields, shapes: Shapes) -> ModelConfig:
    hidden = fields.integer("n_embd", "hidden_size", default=4096)
    heads = fields.integer("n_head", "num_attention_heads", default=16)
    if hidden % heads:
        raise fields.error(f"n_embd {hidden} does not divide into n_head {heads} heads")
    return ModelConfig(
        family="gptj",
        vocab_size=fields.integer("vocab_size", default=50400),
        hidden_size=hidden,
        num_layers=fields.integer("n_layer", "num_hidden_layers", default=28),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_size=fields.optional_integer("n_inner") or 4 * hidden,
        max_positions=fields.integer("n_positions", "max_position_embeddings", default=2048),
        norm_eps=fields.number("layer_norm_epsilon", default=1e-5),
        parallel_residual=True,
        shared_norm=True,
        positions="rotary",
        rope=RopeConfig(fields.integer("rotary_dim", default=64), interleaved=True),
        activation=fields.activation("activation_function", "gelu_new"),
        qkv_bias=False,
        out_bias=False,
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        head_bias=True,
        **special_tokens(fields, bos=50256, eos=50256),
    )


LAYER = {
    "attn_norm": Stored("h.{i}.ln_1"),
    "attn.qkv": Stored("h.{i}.attn.q_proj", "h.{i}.attn.k_proj", "h.{i}.attn.v_proj"),
    "attn.out": Stored("h.{i}.attn.out_proj"),
    "ffn.up": Stored("h.{i}.mlp.fc_in"),
    "ffn.down": Stored("h.{i}.mlp.fc_out"),
}
ENDS = {
    "embed.tokens": Stored("wte.weight"),
    "final_norm": Stored("ln_f"),
    "head": Stored("lm_head"),
}
IGNORED = (r"h\.\d+\.attn\.(bias|masked_bias|embed_positions)",)

FAMILY = Family("gptj", config, LAYER, ENDS, prefixes=("transformer.",), ignored=IGNORED)
