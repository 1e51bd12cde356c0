"""DistilBERT: BERT with half the layers and no token types."""

from __future__ import annotations

from layers.config import ModelConfig
from models.families.bert import masked_lm
from models.families.family import Family, Shapes
from models.families.fields import Fields, special_tokens
from models.families.sources import Stored


def config(fields: Fields, shapes: Shapes) -> ModelConfig:
    hidden = fields.integer("dim", "hidden_size", default=768)
    heads = fields.integer("n_heads", "num_attention_heads", default=12)
    if hidden % heads:
        raise fields.error(f"dim {hidden} does not divide into n_heads {heads}")
    activation = fields.activation("activation", "gelu")
    settings = {
        "vocab_size": fields.integer("vocab_size", default=30522),
        "hidden_size": hidden,
        "num_layers": fields.integer("n_layers", "num_hidden_layers", default=6),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn_size": fields.integer("hidden_dim", default=3072),
        "max_positions": fields.integer("max_position_embeddings", default=512),
        "causal": False,
        "norm_eps": 1e-12,
        "pre_norm": False,
        "final_norm": False,
        "embed_norm": True,
        "activation": activation,
        "tie_embeddings": fields.flag("tie_word_embeddings", default=True),
        **special_tokens(fields, pad=0),
    }
    return ModelConfig(family="distilbert", **masked_lm(settings, "vocab_projector.bias" in shapes, activation))


LAYER = {
    "attn.qkv": Stored(*(f"transformer.layer.{{i}}.attention.{part}_lin" for part in "qkv")),
    "attn.out": Stored("transformer.layer.{i}.attention.out_lin"),
    "attn_norm": Stored("transformer.layer.{i}.sa_layer_norm"),
    "ffn.up": Stored("transformer.layer.{i}.ffn.lin1"),
    "ffn.down": Stored("transformer.layer.{i}.ffn.lin2"),
    "ffn_norm": Stored("transformer.layer.{i}.output_layer_norm"),
}
ENDS = {
    "embed.tokens": Stored("embeddings.word_embeddings.weight"),
    "embed.positions": Stored("embeddings.position_embeddings.weight"),
    "embed.norm": Stored("embeddings.LayerNorm"),
    "mlm.dense": Stored("vocab_transform"),
    "mlm.norm": Stored("vocab_layer_norm"),
    "head": Stored("vocab_projector"),
}
IGNORED = (r"embeddings\.position_ids",)

FAMILY = Family("distilbert", config, LAYER, ENDS, ("distilbert.",), ignored=IGNORED)
