"""RoBERTa: BERT's encoder; its positions start at pad_token_id + 1, and its masked-LM head has other names."""

from __future__ import annotations

from layers.config import ModelConfig
from models.families.bert import EMBEDDINGS, LAYER, RENAMES, bert_settings, masked_lm
from models.families.family import Family, Shapes
from models.families.fields import Fields
from models.families.sources import Stored


def config(fields: Fields, shapes: Shapes) -> ModelConfig:
    settings = bert_settings(fields, vocab_size=50265, bos=0, eos=2, pad=1)
    if settings["pad_id"] is None:
        raise fields.error("pad_token_id is missing, and positions are counted from it")
    settings["position_offset"] = settings["pad_id"] + 1
    settings["max_positions"] -= settings["position_offset"]  # the table's first rows are never looked up
    return ModelConfig(family="roberta", **masked_lm(settings, "lm_head.bias" in shapes, "gelu"))


MASKED_LM = {
    "mlm.dense": Stored("lm_head.dense"),
    "mlm.norm": Stored("lm_head.layer_norm"),
    "head": Stored("lm_head.decoder"),
    "head.bias": Stored("lm_head.bias"),
}
IGNORED = (r"embeddings\.(position_ids|token_type_ids)", r"pooler\..*", r"lm_head\.decoder\.bias")

FAMILY = Family("roberta", config, LAYER, EMBEDDINGS | MASKED_LM, ("roberta.",), RENAMES, IGNORED)
