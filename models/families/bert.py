"""BERT: an encoder, post-norm, with learned positions, token types and a norm after the embeddings.

A checkpoint with the masked-LM head (BertForMaskedLM, BertForPreTraining) gets it; a bare encoder (sentence embeddings)
has none.
"""

from __future__ import annotations

from typing import Any

from layers.config import ModelConfig
from models.families.family import Family, Shapes
from models.families.fields import Fields, special_tokens
from models.families.sources import Stored


def bert_settings(fields: Fields, vocab_size: int, bos: int | None, eos: int | None, pad: int) -> dict[str, Any]:
    """What BERT and RoBERTa share; the arguments are the defaults of the model_type."""
    hidden = fields.integer("hidden_size", default=768)
    heads = fields.integer("num_attention_heads", default=12)
    if hidden % heads:
        raise fields.error(f"hidden_size {hidden} does not divide into num_attention_heads {heads}")
    fields.only("is_decoder", False)
    fields.only("position_embedding_type", "absolute", None)
    return {
        "vocab_size": fields.integer("vocab_size", default=vocab_size),
        "hidden_size": hidden,
        "num_layers": fields.integer("num_hidden_layers", default=12),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn_size": fields.integer("intermediate_size", default=3072),
        "max_positions": fields.integer("max_position_embeddings", default=512),
        "causal": False,
        "norm_eps": fields.number("layer_norm_eps", default=1e-12),
        "pre_norm": False,
        "final_norm": False,
        "embed_norm": True,
        "token_types": fields.integer("type_vocab_size", default=2),
        "activation": fields.activation("hidden_act", "gelu"),
        "tie_embeddings": fields.flag("tie_word_embeddings", default=True),
        **special_tokens(fields, bos=bos, eos=eos, pad=pad),
    }


def masked_lm(settings: dict[str, Any], has_head: bool, activation: str) -> dict[str, Any]:
    """With the head's settings; without a head there is nothing that could be untied."""
    if not has_head:
        return settings | {"tie_embeddings": True}
    return settings | {"mlm_head": activation, "head_bias": True}


def config(fields: Fields, shapes: Shapes) -> ModelConfig:
    settings = bert_settings(fields, vocab_size=30522, bos=None, eos=None, pad=0)
    return ModelConfig(family="bert", **masked_lm(settings, "cls.predictions.bias" in shapes, settings["activation"]))


LAYER = {
    "attn.qkv": Stored(*(f"encoder.layer.{{i}}.attention.self.{part}" for part in ("query", "key", "value"))),
    "attn.out": Stored("encoder.layer.{i}.attention.output.dense"),
    "attn_norm": Stored("encoder.layer.{i}.attention.output.LayerNorm"),
    "ffn.up": Stored("encoder.layer.{i}.intermediate.dense"),
    "ffn.down": Stored("encoder.layer.{i}.output.dense"),
    "ffn_norm": Stored("encoder.layer.{i}.output.LayerNorm"),
}
EMBEDDINGS = {
    "embed.tokens": Stored("embeddings.word_embeddings.weight"),
    "embed.positions": Stored("embeddings.position_embeddings.weight"),
    "embed.types": Stored("embeddings.token_type_embeddings.weight"),
    "embed.norm": Stored("embeddings.LayerNorm"),
}
MASKED_LM = {
    "mlm.dense": Stored("cls.predictions.transform.dense"),
    "mlm.norm": Stored("cls.predictions.transform.LayerNorm"),
    "head": Stored("cls.predictions.decoder"),
    "head.bias": Stored("cls.predictions.bias"),
}
RENAMES = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))  # the first BERT releases
IGNORED = (
    r"embeddings\.(position_ids|token_type_ids)",
    r"pooler\..*",
    r"cls\.seq_relationship\..*",
    r"cls\.predictions\.decoder\.bias",  # the same as cls.predictions.bias
)

FAMILY = Family("bert", config, LAYER, EMBEDDINGS | MASKED_LM, ("bert.",), RENAMES, IGNORED)
