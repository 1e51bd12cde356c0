"""Hugging Face folders: shards, and everything that can be wrong with one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from l1_kernels.errors import UserError
from l2_dense_parallel.slicing import Shard
from models.checkpoint import huggingface
from models.loading import load_model, open_checkpoint
from tests.models.checkpoints import CASES, Arrays, case, write, write_shards
from tests.models.test_loading import numbers

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def refused(path: Path, *words: str) -> None:
    with pytest.raises(UserError) as error:
        load_model(path, "fp32")
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def gpt2(folder: Path, change=None, settings: dict | None = None) -> Path:
    config, tensors = case("gpt2")
    if change is not None:
        change(tensors)
    return write(folder, config | (settings or {}), tensors)


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa", "mixtral"])
@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2)])
def test_shards_with_an_index_are_the_same_model(name, shard, tmp_path):
    folder = write_shards(tmp_path, *case(name), count=3)
    _, want_ends, want_layers = load_model(CASES / name, "fp32", shard)
    _, ends, layers = load_model(folder, "fp32", shard)
    for want, got in zip([want_ends, *want_layers], [ends, *layers], strict=True):
        assert want.keys() == got.keys()
        for tensor in want:
            np.testing.assert_array_equal(numbers(got[tensor]), numbers(want[tensor]))


def test_reading_goes_on_after_the_mapping_is_renewed(monkeypatch):
    _, want, _ = load_model(CASES / "gpt2", "fp32")
    monkeypatch.setattr(huggingface, "REMAP_BYTES", 1)
    _, got, _ = load_model(CASES / "gpt2", "fp32")
    np.testing.assert_array_equal(got["embed.tokens"].data, want["embed.tokens"].data)


def test_a_single_file_of_another_name_is_found(tmp_path):
    folder = gpt2(tmp_path)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    load_model(folder, "fp32")
    (folder / "other.safetensors").write_bytes((folder / "weights.safetensors").read_bytes())
    refused(folder, "2 safetensors files", "index")


# ---- files ----


def test_no_such_folder(tmp_path):
    refused(tmp_path / "nowhere", "nowhere", "no such file")


def test_no_config(tmp_path):
    folder = gpt2(tmp_path)
    (folder / "config.json").unlink()
    refused(folder, "config.json")


@pytest.mark.parametrize("content, word", [("{", "not valid JSON"), ("[1]", "JSON object"), ("{}", "model_type"), ("\xff\xfe", "JSON")])
def test_broken_config(content, word, tmp_path):
    folder = gpt2(tmp_path)
    (folder / "config.json").write_text(content, encoding="latin-1")
    refused(folder, "config.json", word)


def test_no_weights(tmp_path):
    folder = gpt2(tmp_path)
    (folder / "model.safetensors").unlink()
    refused(folder, "no model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    refused(folder, ".bin", "convert", "safetensors")


@pytest.mark.parametrize("left", [0, 4, 200, -1, -5000])
def test_truncated_weights(left, tmp_path):
    folder = gpt2(tmp_path)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:left])
    refused(folder, "model.safetensors", "truncated")


def test_git_lfs_pointers(tmp_path):
    folder = gpt2(tmp_path)
    (folder / "model.safetensors").write_bytes(POINTER)
    refused(folder, "model.safetensors", "Git-LFS pointer", "git lfs pull")
    (folder / "config.json").write_bytes(POINTER)
    refused(folder, "config.json", "Git-LFS pointer")


def test_a_dangling_link_is_named(tmp_path):
    folder = gpt2(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(tmp_path / "gone")
    refused(folder, "model.safetensors", "cannot be read")


def test_a_shard_that_is_not_there(tmp_path):
    folder = write_shards(tmp_path, *case("gpt2"), count=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder, "model-00002-of-00003.safetensors", "missing", "index.json")


def test_a_tensor_that_its_shard_does_not_hold(tmp_path):
    folder = write_shards(tmp_path, *case("gpt2"), count=2)
    index = folder / "model.safetensors.index.json"
    home = json.loads(index.read_text())["weight_map"]
    save_file({name: array for name, array in case("gpt2")[1].items() if home[name].startswith("model-00001") and "wpe" not in name},
              folder / "model-00001-of-00002.safetensors")  # fmt: skip
    save_file({name: array for name, array in case("gpt2")[1].items() if home[name].startswith("model-00002") and "wpe" not in name},
              folder / "model-00002-of-00002.safetensors")  # fmt: skip
    refused(folder, "transformer.wpe.weight", "missing", home["transformer.wpe.weight"])


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "nonsense"])
def test_a_broken_index(content, tmp_path):
    folder = write_shards(tmp_path, *case("gpt2"), count=2)
    (folder / "model.safetensors.index.json").write_text(content)
    refused(folder, "model.safetensors.index.json")


def test_a_weights_file_or_a_store_in_place_of_a_folder(tmp_path):
    folder = gpt2(tmp_path)
    refused(folder / "model.safetensors", "folder", "config.json")
    (folder / "model.h5").write_bytes(b"")
    refused(folder / "model.h5", ".h5", "not supported yet")
    refused(folder / "config.json", "not a GGUF file")


# ---- tensors ----


def drop(name: str):
    def change(tensors: Arrays) -> None:
        del tensors[name]

    return change


def put(name: str, array: np.ndarray):
    def change(tensors: Arrays) -> None:
        tensors[name] = array

    return change


ATTN = "transformer.h.1.attn.c_attn.weight"


def test_a_missing_tensor(tmp_path):
    refused(gpt2(tmp_path, drop(ATTN)), "h.1.attn.c_attn.weight", "missing")


@pytest.mark.parametrize("shape", [(192, 64), (64, 191), (64 * 192,), (1, 64, 192)])
def test_a_tensor_of_the_wrong_shape(shape, tmp_path):
    refused(gpt2(tmp_path, put(ATTN, np.zeros(shape, np.float32))), ATTN, str(list(shape)), "[64, 192]", "model.safetensors")


@pytest.mark.parametrize("dtype, label", [(np.int8, "I8"), (np.float64, "F64"), (np.int64, "I64")])
def test_a_tensor_of_an_unexpected_dtype(dtype, label, tmp_path):
    refused(gpt2(tmp_path, put(ATTN, np.zeros((64, 192), dtype))), ATTN, label, "model.safetensors")


def test_a_tensor_too_many(tmp_path):
    refused(gpt2(tmp_path, put("transformer.h.0.attn.lora_A.weight", np.zeros((1, 1), np.float32))), "h.0.attn.lora_A.weight", "gpt2")
    refused(gpt2(tmp_path, put("score.weight", np.zeros((2, 64), np.float32))), "score.weight")


def test_a_layer_too_many_or_too_few(tmp_path):
    refused(gpt2(tmp_path, settings={"n_layer": 1}), "h.1.")
    refused(gpt2(tmp_path, settings={"n_layer": 3}), "h.2.", "missing")


@pytest.mark.parametrize(
    "name, extra",
    [
        ("gpt2", {"transformer.h.0.attn.bias": (1, 1, 64, 64), "transformer.h.1.attn.masked_bias": (), "lm_head.weight": (160, 64)}),
        ("gpt_neo", {"transformer.h.0.attn.attention.bias": (1, 1, 64, 64)}),
        ("gptj", {"transformer.h.0.attn.masked_bias": ()}),
        (
            "gpt_neox_parallel",
            {"gpt_neox.layers.0.attention.rotary_emb.inv_freq": (2,), "gpt_neox.layers.1.attention.bias": (1, 1, 64, 64)},
        ),
        ("llama_gqa", {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}),
        ("qwen2", {"lm_head.weight": (160, 64)}),
        ("bert", {"bert.pooler.dense.weight": (64, 64), "cls.seq_relationship.bias": (2,), "cls.predictions.decoder.weight": (160, 64)}),
        ("roberta", {"lm_head.decoder.weight": (160, 64), "lm_head.decoder.bias": (160,)}),
        ("distilbert", {"vocab_projector.weight": (160, 64)}),
        ("opt", {"lm_head.weight": (160, 64)}),
    ],
)
def test_buffers_and_copies_of_the_tied_head_are_passed_over(name, extra, tmp_path):
    config, tensors = case(name)
    folder = write(tmp_path, config, tensors | {key: np.zeros(shape, np.float32) for key, shape in extra.items()})
    want, got = load_model(CASES / name, "fp32")[1], load_model(folder, "fp32")[1]
    assert want.keys() == got.keys()
    for tensor in want:
        np.testing.assert_array_equal(numbers(got[tensor]), numbers(want[tensor]))


def test_integer_buffers_are_passed_over(tmp_path):
    config, tensors = case("bert")
    folder = write(tmp_path, config, tensors | {"bert.embeddings.position_ids": np.arange(64)[None]})
    assert open_checkpoint(folder).plan().layers


def test_the_first_bert_releases_named_their_norms_otherwise(tmp_path):
    config, tensors = case("bert")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensors[name] for name in tensors
    }
    assert old.keys() != tensors.keys()
    want, got = load_model(CASES / "bert", "fp32"), load_model(write(tmp_path, config, old), "fp32")
    np.testing.assert_array_equal(got[2][1]["ffn_norm.bias"], want[2][1]["ffn_norm.bias"])
    np.testing.assert_array_equal(got[1]["embed.norm.weight"], want[1]["embed.norm.weight"])


def test_a_bare_encoder_loads(tmp_path):
    config, tensors = case("bert")
    bare = {name.removeprefix("bert."): array for name, array in tensors.items() if not name.startswith("cls.")}
    model, ends, _ = load_model(write(tmp_path, config | {"architectures": ["BertModel"]}, bare), "fp32")
    assert model.mlm_head == "none" and not any(name.startswith(("mlm", "head")) for name in ends)
