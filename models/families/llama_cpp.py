"""Models in GGUF files, as llama.cpp's converter writes them: its names of settings and tensors.

The settings are put back into config.json's words, so that each architecture is read by the family it is. The converter
reorders the rows of LLaMA's q and k so that rotary partners lie side by side; `RotaryPairs` undoes that. Qwen is stored
as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from l1_kernels.errors import UserError
from l1_kernels.weight import decode
from layers.config import RopeConfig
from layers.rotary import frequencies, inverse_frequencies
from models.checkpoint.reader import Reader
from models.families import llama, mixtral, qwen2, qwen3
from models.families.family import Family
from models.families.fields import Fields
from models.families.sources import RotaryPairs, Stored

# `llama.<key>` -> config.json's word. A key that is in neither of these is refused.
SETTINGS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
CHECKED = {"vocab_size", "attention.value_length", "rope.dimension_count"}  # told twice: must agree
ROPE_SCALING = {"type": "rope_type", "factor": "factor", "original_context_length": "original_max_position_embeddings"}
HARMLESS = {"rope.scaling.finetuned"}
LLAMA3_TRAINED = 8192  # the context that LLaMA 3.x was trained to before it was stretched


def gguf_family(reader: Reader) -> tuple[Family, Fields]:
    """Family and settings of a GGUF file. UserError for an architecture or a setting that is not supported."""
    where = str(reader.path)
    architecture = reader.metadata["general.architecture"]
    if architecture not in FAMILIES:
        raise UserError(f"{where}: GGUF architecture {architecture!r} is not supported (have {', '.join(FAMILIES)})")
    own = {key.removeprefix(architecture + "."): value for key, value in reader.metadata.items() if key.startswith(architecture + ".")}
    family = MIXTRAL if architecture == "llama" and own.get("expert_count") else FAMILIES[architecture]
    return family, Fields(_translate(reader, own, where, architecture), where, family.name)


def _translate(reader: Reader, own: Mapping[str, Any], where: str, architecture: str) -> dict[str, Any]:
    names = set(reader.names())
    if "token_embd.weight" not in names:
        raise UserError(f"{where}: tensor token_embd.weight is missing")
    raw = {SETTINGS[key]: value for key, value in own.items() if key in SETTINGS}
    scaling = {
        key.removeprefix("rope.scaling."): value for key, value in own.items() if key.startswith("rope.scaling.") and key not in HARMLESS
    }
    for key in own:
        if key not in SETTINGS and key not in CHECKED and key not in HARMLESS and key.removeprefix("rope.scaling.") not in ROPE_SCALING:
            raise UserError(f"{where}: {architecture}.{key} is not supported")
    raw["vocab_size"] = reader.shape("token_embd.weight")[0]
    raw["tie_word_embeddings"] = "output.weight" not in names
    raw["attention_bias"] = "blk.0.attn_q.bias" in names
    raw["mlp_bias"] = "blk.0.ffn_up.bias" in names
    raw["sliding_window"] = None
    if scaling and scaling.get("type") != "none":
        raw["rope_scaling"] = {ROPE_SCALING[key]: value for key, value in scaling.items()}
    if "rope_freqs.weight" in names:
        raw["rope_scaling"] = _llama3_scaling(reader, raw, where)
    _check_repeated(own, raw, where, architecture)
    raw |= {
        "bos_token_id": reader.metadata.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": reader.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    ends = [reader.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
    return raw | {"eos_token_id": sorted({end for end in ends if end is not None})}


def _check_repeated(own: Mapping[str, Any], raw: Mapping[str, Any], where: str, architecture: str) -> None:
    hidden, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads <= 0:
        raise UserError(f"{where}: {architecture}.embedding_length and .attention.head_count must be one number each")
    head_dim = raw.get("head_dim", hidden // heads)
    for key, value in (("vocab_size", raw["vocab_size"]), ("attention.value_length", head_dim), ("rope.dimension_count", head_dim)):
        if own.get(key, value) != value:
            raise UserError(f"{where}: {architecture}.{key}={own[key]!r} is not supported (expected {value})")


def _llama3_scaling(reader: Reader, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """LLaMA 3.x files hold the factor of each frequency in place of the four numbers it came from. Those are taken from
    the factors, and refused unless they give every one of them."""
    name = "rope_freqs.weight"
    factors = decode(reader.read(name, slice(0, reader.shape(name)[0])), reader.dtype(name)).astype(np.float64)
    dim, theta = 2 * len(factors), float(raw.get("rope_theta", 10000.0))
    rope = RopeConfig(dim, theta, kind="llama3", factor=float(factors.max()), original_positions=LLAMA3_TRAINED)
    if not np.allclose(inverse_frequencies(dim, theta) / frequencies(rope), factors, rtol=1e-4):
        raise UserError(f"{where}: tensor {name} holds frequency factors that are not LLaMA 3's")
    return {"rope_type": "llama3", "factor": rope.factor, "original_max_position_embeddings": LLAMA3_TRAINED}


QKV = ("blk.{i}.attn_q", "blk.{i}.attn_k", "blk.{i}.attn_v")
ATTENTION = {
    "attn_norm": Stored("blk.{i}.attn_norm"),
    "attn.out": Stored("blk.{i}.attn_output"),
    "ffn_norm": Stored("blk.{i}.ffn_norm"),
}
FEED_FORWARD = {"ffn.up": Stored("blk.{i}.ffn_gate", "blk.{i}.ffn_up"), "ffn.down": Stored("blk.{i}.ffn_down")}
QK_NORM = {"attn.q_norm": Stored("blk.{i}.attn_q_norm"), "attn.k_norm": Stored("blk.{i}.attn_k_norm")}
EXPERTS = {
    "moe.gate": Stored("blk.{i}.ffn_gate_inp"),
    "moe.up": Stored("blk.{i}.ffn_gate_exps", "blk.{i}.ffn_up_exps"),
    "moe.down": Stored("blk.{i}.ffn_down_exps"),
}
ENDS = {"embed.tokens": Stored("token_embd.weight"), "final_norm": Stored("output_norm"), "head": Stored("output")}
LLAMA_ATTENTION = ATTENTION | {"attn.qkv": RotaryPairs(*QKV)}
QWEN_ATTENTION = ATTENTION | {"attn.qkv": Stored(*QKV)}

FAMILIES = {
    "llama": Family("llama", llama.config, LLAMA_ATTENTION | FEED_FORWARD, ENDS, ignored=(r"rope_freqs\.weight",)),
    "qwen2": Family("qwen2", qwen2.config, QWEN_ATTENTION | FEED_FORWARD, ENDS),
    "qwen3": Family("qwen3", qwen3.config, QWEN_ATTENTION | QK_NORM | FEED_FORWARD, ENDS),
}
MIXTRAL = Family("mixtral", mixtral.config, LLAMA_ATTENTION | EXPERTS, ENDS)
