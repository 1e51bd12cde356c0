"""Settings as published become ModelConfig: both spellings, defaults of each model_type, refusals by name."""

from __future__ import annotations

import json
import math

import pytest

from l1_kernels.errors import UserError
from layers.config import ModelConfig, MoEConfig, RopeConfig
from models.families import FILES, family_of
from models.families.fields import Fields
from models.loading import describe, open_checkpoint
from tests.models.checkpoints import BUNDLED, CASES, NAMES, case, write

BERT_SHAPES = {"cls.predictions.bias": (1,), "lm_head.bias": (1,), "vocab_projector.bias": (1,)}


def read(raw: dict, shapes: dict | None = None) -> ModelConfig:
    """config.json -> ModelConfig, without weights."""
    family = family_of(raw["model_type"], "config.json")
    return family.config(Fields(raw, "config.json", family.name), shapes or {})


def refused(raw: dict, *words: str) -> None:
    with pytest.raises(UserError) as error:
        read(raw)
    message = str(error.value)
    assert "\n" not in message and "config.json" in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("name", NAMES)
def test_every_case_is_described(name):
    config = describe(CASES / name)
    raw = json.loads((CASES / name / "config.json").read_text())
    assert config.family == raw["model_type"]
    assert config.vocab_size == 160 and config.hidden_size == 64
    assert config.num_layers == (3 if "inverse" in name else 2)


# ---- what each family is, in full, with its config.json empty: the defaults of the model_type ----


def test_defaults_are_those_of_the_published_base_models():
    gpt2 = read({"model_type": "gpt2"})
    assert (gpt2.vocab_size, gpt2.hidden_size, gpt2.num_layers, gpt2.num_heads, gpt2.ffn_size) == (50257, 768, 12, 12, 3072)
    assert gpt2.activation == "gelu_new" and gpt2.tie_embeddings and gpt2.eos_ids == (50256,) and gpt2.max_positions == 1024
    assert gpt2.attention_scale == (0.125,) * 12

    neo = read({"model_type": "gpt_neo"})
    assert neo.windows == (0, 256) * 12 and neo.attention_scale == (1.0,) * 24 and not neo.qkv_bias and neo.out_bias

    gptj = read({"model_type": "gptj"})
    assert gptj.rope == RopeConfig(64, interleaved=True) and gptj.head_dim == 256 and gptj.head_bias and not gptj.tie_embeddings
    assert gptj.parallel_residual and gptj.shared_norm

    neox = read({"model_type": "gpt_neox"})
    assert neox.rope == RopeConfig(24) and neox.parallel_residual and not neox.shared_norm and neox.activation == "gelu"

    opt = read({"model_type": "opt"})
    assert opt.position_offset == 2 and opt.pre_norm and opt.final_norm and opt.embed_size == 0 and opt.activation == "relu"

    bloom = read({"model_type": "bloom"})
    assert (
        bloom.positions == "alibi" and bloom.embed_norm and bloom.ffn_size == 256 and bloom.activation == "gelu_new" and bloom.pad_id == 3
    )

    llama = read({"model_type": "llama"})
    assert llama.num_kv_heads == 32 and llama.head_dim == 128 and not llama.tie_embeddings and llama.norm_eps == 1e-6
    assert not (llama.qkv_bias or llama.out_bias or llama.ffn_bias) and llama.gated_ffn and llama.rope == RopeConfig(128)

    mistral = read({"model_type": "mistral"})
    assert mistral.windows == (4096,) * 32 and mistral.num_kv_heads == 8 and mistral.max_positions == 131072

    qwen2 = read({"model_type": "qwen2"})
    assert qwen2.qkv_bias and not qwen2.out_bias and qwen2.windows == () and qwen2.eos_ids == ()

    qwen3 = read({"model_type": "qwen3"})
    assert qwen3.qk_norm == "head" and qwen3.head_dim == 128 and not qwen3.qkv_bias

    mixtral = read({"model_type": "mixtral"})
    assert mixtral.moe == MoEConfig(tuple(range(32)), 8, 2, 14336, renormalise=True) and mixtral.rope == RopeConfig(128, 1e6)
    assert not any(mixtral.windows)

    qwen2_moe = read({"model_type": "qwen2_moe"})
    assert qwen2_moe.moe == MoEConfig(tuple(range(24)), 60, 4, 1408, shared_size=5632, shared_gated=True) and qwen2_moe.qkv_bias

    olmoe = read({"model_type": "olmoe"})
    assert olmoe.moe == MoEConfig(tuple(range(16)), 64, 8, 2048) and olmoe.qk_norm == "span" and olmoe.num_kv_heads == 16

    bert = read({"model_type": "bert"}, BERT_SHAPES)
    assert bert.token_types == 2 and bert.norm_eps == 1e-12 and bert.mlm_head == "gelu" and bert.head_bias and bert.tie_embeddings
    assert not (bert.causal or bert.pre_norm or bert.final_norm) and bert.embed_norm

    roberta = read({"model_type": "roberta"}, BERT_SHAPES)
    assert roberta.position_offset == 2 and roberta.max_positions == 510 and roberta.mlm_head == "gelu"

    distilbert = read({"model_type": "distilbert"}, BERT_SHAPES)
    assert distilbert.token_types == 0 and distilbert.num_layers == 6 and distilbert.ffn_size == 3072 and distilbert.norm_eps == 1e-12


def test_a_bare_encoder_has_no_masked_lm_head():
    for model_type in ("bert", "roberta", "distilbert"):
        config = read({"model_type": model_type, "tie_word_embeddings": False})
        assert config.mlm_head == "none" and not config.head_bias and config.tie_embeddings


# ---- options that change the model ----


def test_gpt2_scales():
    assert read({"model_type": "gpt2", "n_layer": 2, "scale_attn_by_inverse_layer_idx": True}).attention_scale == (0.125, 0.0625)
    assert read({"model_type": "gpt2", "n_layer": 2, "scale_attn_weights": False}).attention_scale == (1.0, 1.0)


def test_gpt2_in_the_general_spelling():
    raw = {"model_type": "gpt2", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 32}
    config = read(raw)
    assert (config.hidden_size, config.num_heads, config.num_layers, config.max_positions) == (64, 4, 2, 32)


def test_opt_350m_is_post_norm_with_projections():
    config = read(
        {"model_type": "opt", "hidden_size": 1024, "num_attention_heads": 16, "word_embed_proj_dim": 512, "do_layer_norm_before": False}
    )
    assert not config.pre_norm and not config.final_norm and config.embed_size == 512


def test_windows():
    assert read({"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": None}).windows == (0, 0)
    qwen = {"model_type": "qwen2", "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    assert read(qwen).windows == (0, 8, 8)
    assert read(qwen | {"use_sliding_window": False}).windows == ()
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    for model_type in ("qwen2", "qwen3", "qwen2_moe"):
        assert read(qwen | {"model_type": model_type, "layer_types": kinds}).windows == (8, 0, 8)
    neo = {"model_type": "gpt_neo", "num_layers": 3, "window_size": 5, "attention_types": [[["local"], 1], [["global", "local"], 1]]}
    assert read(neo).windows == (5, 0, 5)


def test_sparse_layers():
    raw = {"model_type": "qwen2_moe", "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    config = read(raw)
    assert config.moe is not None and config.moe.layers == (1, 5)
    assert read({"model_type": "qwen2_moe", "norm_topk_prob": True}).moe.renormalise
    moe = describe(BUNDLED / "shakespeare_moe").moe
    assert moe == MoEConfig((1, 3), 8, 1, 384)


def test_biases():
    llama = read({"model_type": "llama", "attention_bias": True})
    assert llama.qkv_bias and llama.out_bias and not llama.ffn_bias
    assert read({"model_type": "llama", "mlp_bias": True}).ffn_bias
    opt = read({"model_type": "opt", "enable_bias": False})
    assert not (opt.qkv_bias or opt.out_bias or opt.ffn_bias)


# ---- rotary positions, in both spellings ----

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    "scaling, want, reach",
    [
        ({"factor": 2.0}, RopeConfig(16, kind="linear", factor=2.0), 128),
        ({"factor": 2.0}, RopeConfig(16, kind="dynamic", factor=2.0, original_positions=64), 128),
        (
            {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0, "original_max_position_embeddings": 4},
            RopeConfig(16, kind="llama3", factor=8.0, original_positions=4, low_freq_factor=1.0, high_freq_factor=3.0),
            64,
        ),
        (
            {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": None, "truncate": False},
            RopeConfig(16, kind="yarn", factor=4.0, original_positions=32, attention_factor=0.1 * math.log(4) + 1, truncate=False),
            128,
        ),
        (
            {"original_max_position_embeddings": 16, "attention_factor": 1.5, "beta_slow": 2},
            RopeConfig(16, kind="yarn", factor=4.0, original_positions=16, attention_factor=1.5, beta_slow=2.0),
            64,
        ),
        (
            {"factor": 4.0, "mscale": 2.0, "mscale_all_dim": 1.0},
            RopeConfig(
                16, kind="yarn", factor=4.0, original_positions=64, attention_factor=(0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)
            ),
            256,
        ),
    ],
)
def test_rope_scaling(scaling, want, reach):
    for spelling in (
        {"rope_theta": 500.0, "rope_scaling": scaling | {"type": want.kind}},
        {"rope_theta": 500.0, "rope_scaling": scaling | {"rope_type": want.kind}},
        {"rope_parameters": scaling | {"rope_type": want.kind, "rope_theta": 500.0}},
    ):
        config = read(LLAMA | spelling)
        assert config.rope is not None and config.rope.theta == 500.0
        got = {field: getattr(config.rope, field) for field in want.__slots__ if field != "theta"}
        assert got == pytest.approx({field: getattr(want, field) for field in want.__slots__ if field != "theta"})
        assert config.max_positions == reach


def test_partial_rotary_in_both_spellings():
    raw = {"model_type": "gpt_neox", "hidden_size": 64, "num_attention_heads": 4}
    old = read(raw | {"rotary_pct": 0.5, "rotary_emb_base": 300})
    new = read(raw | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 300}})
    assert old.rope == new.rope == RopeConfig(8, 300.0)


@pytest.mark.parametrize(
    "scaling, words",
    [
        ({"rope_type": "longrope", "factor": 2.0}, ["longrope"]),
        ({"type": "su"}, ["su"]),
        ({"rope_type": "linear"}, ["factor"]),
        ({"rope_type": "linear", "factor": "2"}, ["factor", "'2'"]),
        ({"rope_type": "linear", "factor": 0.5}, ["factor"]),
        ({"rope_type": "yarn", "factor": 2.0, "some_new_knob": 1}, ["some_new_knob"]),
        ({"rope_type": "default", "mrope_section": [1]}, ["mrope_section"]),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, ["low_freq_factor"]),
        ({"full_attention": {"rope_type": "default"}}, ["full_attention"]),
        (7, ["rope_scaling"]),
    ],
)
def test_rope_scaling_that_is_not_supported_is_refused(scaling, words):
    refused(LLAMA | {"rope_scaling": scaling}, *words)


# ---- refused by name ----


@pytest.mark.parametrize(
    "raw, words",
    [
        ({"model_type": "gpt2", "activation_function": "quick_gelu"}, ["activation_function", "quick_gelu"]),
        ({"model_type": "llama", "hidden_act": "mish"}, ["hidden_act", "mish"]),
        ({"model_type": "bloom", "apply_residual_connection_post_layernorm": True}, ["apply_residual_connection_post_layernorm"]),
        ({"model_type": "bloom", "n_inner": 7}, ["n_inner"]),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, ["clip_qkv", "8.0"]),
        ({"model_type": "opt", "layer_norm_elementwise_affine": False}, ["layer_norm_elementwise_affine"]),
        ({"model_type": "bert", "is_decoder": True}, ["is_decoder"]),
        ({"model_type": "bert", "position_embedding_type": "relative_key"}, ["position_embedding_type", "relative_key"]),
        ({"model_type": "roberta", "pad_token_id": None}, ["pad_token_id"]),
        ({"model_type": "mistral", "layer_types": ["full_attention"]}, ["layer_types"]),
        ({"model_type": "qwen2_moe", "use_sliding_window": True}, ["use_sliding_window"]),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["chunked_attention"] * 32}, ["layer_types"]),
        ({"model_type": "qwen2", "layer_types": ["linear_attention"] * 32}, ["layer_types", "linear_attention"]),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 32}, ["layer_types"]),  # with use_sliding_window off
        ({"model_type": "llama", "layer_types": ["sliding_attention"] * 32}, ["layer_types"]),
        ({"model_type": "gpt_neo", "num_layers": 3}, ["attention_types", "num_layers"]),
        ({"model_type": "gpt_neo", "attention_types": [[["sparse"], 24]]}, ["attention_types"]),
        ({"model_type": "gpt_moe"}, ["moe"]),
        ({"model_type": "gpt_moe", "moe": {"layers": [1], "num_experts": 4, "residual": True}}, ["residual"]),
        ({"model_type": "gpt_moe", "moe": {"layers": [1], "num_experts": 4, "capacity_factor": 1.25}}, ["capacity_factor"]),
        ({"model_type": "gpt_moe", "moe": {"layers": [99], "num_experts": 4}}, ["layers", "99"]),
        ({"model_type": "gpt_moe", "moe": {"layers": [1], "num_experts": 4, "noisy_gate": 1}}, ["noisy_gate"]),
        ({"model_type": "gpt2", "n_embd": "768"}, ["n_embd", "'768'"]),
        ({"model_type": "gpt2", "n_layer": 0}, ["n_layer"]),
        ({"model_type": "gpt2", "n_embd": 70}, ["n_embd 70"]),
        ({"model_type": "gpt2", "tie_word_embeddings": "yes"}, ["tie_word_embeddings"]),
        ({"model_type": "llama", "vocab_size": None}, ["vocab_size"]),
        ({"model_type": "gpt2", "eos_token_id": "x"}, ["eos_token_id"]),
        ({"model_type": "t5"}, ["t5", "gpt2", "llama"]),
        ({"model_type": ["gpt2"]}, ["model_type"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(raw, words):
    refused(raw, *words)


@pytest.mark.parametrize(
    "name, value",
    [
        ("add_cross_attention", True),
        ("is_encoder_decoder", True),
        ("pruned_heads", {"0": [1]}),
        ("quantization_config", {"quant_method": "gptq"}),
        ("attn_logit_softcapping", 50.0),
        ("logit_scale", 0.0625),
        ("use_qk_norm", True),
    ],
)
def test_options_of_no_family_are_refused(name, value, tmp_path):
    config, tensors = case("gpt2")
    with pytest.raises(UserError, match=name):
        open_checkpoint(write(tmp_path, config | {name: value}, tensors))


def test_options_of_no_family_that_change_nothing_are_taken(tmp_path):
    config, tensors = case("gpt2")
    neutral = {"attn_logit_softcapping": None, "logit_scale": 1.0, "use_qk_norm": False, "embedding_multiplier": 1}
    assert open_checkpoint(write(tmp_path / "with", config | neutral, tensors)).config == open_checkpoint(write(tmp_path / "without", config, tensors)).config


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("num_key_value_heads", 3, "4 heads do not divide into 3 KV heads"),
        ("rope_theta", -1.0, "the rotary base must be positive, got -1.0"),
        ("rms_norm_eps", -1.0, "epsilon must not be negative, got -1.0"),
    ],
)
def test_what_the_model_description_refuses_names_the_file(name, value, words, tmp_path):
    config, tensors = case("llama_gqa")
    with pytest.raises(UserError, match=r"config\.json: .*" + words):
        open_checkpoint(write(tmp_path, config | {name: value}, tensors))



def test_several_end_tokens_and_those_of_generation_config(tmp_path):
    assert read(LLAMA | {"eos_token_id": [2, 7]}).eos_ids == (2, 7)
    assert read(LLAMA | {"eos_token_id": None, "pad_token_id": -1}).pad_id is None
    config, tensors = case("gpt2")
    folder = write(tmp_path, config, tensors)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    assert describe(folder).eos_ids == (2, 9)


def test_every_family_file_says_its_own_name():
    for model_type in FILES:
        assert family_of(model_type, "config.json").name == model_type
