"""From stored tensors to a rank's: every family, every dtype, every slice."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from l1_kernels.errors import UserError
from l1_kernels.weight import BYTES, Weight, bf16_bits, decode, encode, quantize
from l2_dense_parallel.slicing import Shard, global_tensors, layer_tensors, possible_tp
from layers.config import ModelConfig
from models import loading
from models.loading import describe, held_dtype, load_globals, load_layers, load_model, open_checkpoint, rounding_activations, stream_model
from models.presets import preset
from tests.models.checkpoints import BUNDLED, CASES, FOLDERS, NAMES, case, resized, write


def numbers(tensor: Weight | np.ndarray) -> np.ndarray:
    return decode(tensor.data, tensor.dtype, tensor.scale) if isinstance(tensor, Weight) else tensor


# ---- what a rank must hold, said a second time in the words of the rule, on whole tensors ----


def by_heads(whole: np.ndarray, config: ModelConfig, rank: int, tp: int) -> np.ndarray:
    """q rows, then k, then v: [(H + 2G) d, ...]."""
    h, g, d = config.num_heads, config.num_kv_heads, config.head_dim
    heads = whole.reshape(h + 2 * g, d, *whole.shape[1:])
    q = heads[rank * h // tp : (rank + 1) * h // tp]
    first, last = (rank * g // tp, (rank + 1) * g // tp) if tp <= g else (rank * g // tp, rank * g // tp + 1)
    k, v = heads[h + first : h + last], heads[h + g + first : h + g + last]
    return np.concatenate([q, k, v]).reshape(-1, *whole.shape[1:])


def cut(whole: np.ndarray, axis: int, rank: int, tp: int) -> np.ndarray:
    n = whole.shape[axis]
    return np.take(whole, range(rank * n // tp, (rank + 1) * n // tp), axis)


def up(whole: np.ndarray, axis: int, gated: bool, rank: int, tp: int) -> np.ndarray:
    halves = np.split(whole, 2, axis) if gated else [whole]
    return np.concatenate([cut(half, axis, rank, tp) for half in halves], axis)


def vocabulary(whole: np.ndarray, rank: int, tp: int) -> np.ndarray:
    rows = -(-len(whole) // tp)
    padded = np.concatenate([whole, np.zeros((rows * tp - len(whole), *whole.shape[1:]), whole.dtype)])
    return padded[rank * rows : (rank + 1) * rows]


def expected(name: str, whole: np.ndarray, config: ModelConfig, rank: int, tp: int) -> np.ndarray | None:
    if name.startswith("attn.qkv."):
        return by_heads(whole, config, rank, tp)
    if name in ("attn.q_norm.weight", "attn.k_norm.weight") and config.qk_norm == "span":
        count = config.num_heads if name == "attn.q_norm.weight" else config.num_kv_heads
        heads = whole.reshape(count, config.head_dim)
        first = rank * count // tp
        return heads[first : max(first + 1, (rank + 1) * count // tp)].ravel()
    if name == "attn.out.weight":
        return cut(whole, 1, rank, tp)
    if name in ("ffn.up.weight", "ffn.up.bias", "moe.shared_up.weight"):
        return up(whole, 0, config.gated_ffn, rank, tp)
    if name in ("moe.up.weight", "moe.up.bias"):
        return up(whole, 1, config.gated_ffn, rank, tp)
    if name in ("ffn.down.weight", "moe.shared_down.weight"):
        return cut(whole, 1, rank, tp)
    if name == "moe.down.weight":
        return cut(whole, 2, rank, tp)
    if name in ("attn.out.bias", "ffn.down.bias", "moe.down.bias"):
        return whole if rank == 0 else None
    if name in ("embed.tokens", "head.weight", "head.bias"):
        return vocabulary(whole, rank, tp)
    return whole


def check_parts(folder) -> None:
    config, ends, layers = load_model(folder, "fp32")
    for tp in (2, 4):
        assert tp in possible_tp(config)
        for rank in range(tp):
            _, part_ends, part_layers = load_model(folder, "fp32", Shard(rank, tp))
            for whole, part in zip([ends, *layers], [part_ends, *part_layers], strict=True):
                for name, tensor in whole.items():
                    want = expected(name, numbers(tensor), config, rank, tp)
                    if want is None:
                        assert name not in part
                    else:
                        np.testing.assert_array_equal(numbers(part[name]), want, err_msg=f"{name}, rank {rank} of {tp}")
                assert part.keys() <= whole.keys()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_rank_reads_its_part(folder):
    check_parts(folder)


# A vocabulary of 1023 is padded by one row; feed-forwards of 199 and 37 do not divide. 160, 256, 176, 48, 32 and 56 are
# the cases' own sizes; 32 and 48 are other things too in some of them, so each case says what to resize.
UNEVEN = {
    "gpt2": ({160: 1023}, {"vocab_size": 1023}),
    "gptj": ({160: 1023, 256: 199}, {"vocab_size": 1023, "n_inner": 199}),
    "gpt_neox_parallel": ({160: 1023, 256: 199}, {"vocab_size": 1023, "intermediate_size": 199}),
    "bloom": ({160: 1023}, {"vocab_size": 1023}),
    "opt_embed_proj": ({160: 1023, 256: 199}, {"vocab_size": 1023, "ffn_dim": 199}),
    "llama_gqa": ({160: 1023, 176: 199}, {"vocab_size": 1023, "intermediate_size": 199}),
    "llama_gqa_tied": ({160: 1023, 176: 199}, {"vocab_size": 1023, "intermediate_size": 199}),
    "mixtral": ({160: 1023, 48: 37}, {"vocab_size": 1023, "intermediate_size": 37}),
    "qwen2_moe": ({160: 1023, 56: 37}, {"vocab_size": 1023, "shared_expert_intermediate_size": 37}),
    "olmoe": ({160: 1023, 48: 37}, {"vocab_size": 1023, "intermediate_size": 37}),
    "bert": ({160: 1023, 256: 199}, {"vocab_size": 1023, "intermediate_size": 199}),
    "distilbert": ({160: 1023, 256: 199}, {"vocab_size": 1023, "hidden_dim": 199}),
    "roberta": ({160: 1023, 256: 199}, {"vocab_size": 1023, "intermediate_size": 199}),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_every_rank_reads_its_part_of_uneven_sizes(name, tmp_path):
    sizes, settings = UNEVEN[name]
    config, tensors = case(name)
    check_parts(write(tmp_path, config | settings, resized(tensors, sizes)))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_stored_number_is_read_once(folder):
    checkpoint = open_checkpoint(folder)
    _, ends, layers = load_model(checkpoint, "fp32")
    loaded = np.sort(np.concatenate([numbers(tensor).ravel() for tensors in (ends, *layers) for tensor in tensors.values()]))
    reader = checkpoint.reader
    stored = [reader.read(name, *(slice(0, n) for n in reader.shape(name))) for name in reader.names()]
    stored = [decode(array, reader.dtype(name)).ravel() for name, array in zip(reader.names(), stored, strict=True)]
    np.testing.assert_array_equal(loaded, np.sort(np.concatenate(stored)))


# ---- where each lies, written out by hand for every kind of source ----


def test_gpt2_matrices_are_turned_and_qkv_is_in_blocks():
    _, tensors = case("gpt2")
    _, ends, layers = load_model(CASES / "gpt2")
    stored = "transformer.h.1."
    np.testing.assert_array_equal(layers[1]["attn.qkv.weight"].data, tensors[stored + "attn.c_attn.weight"].T)
    np.testing.assert_array_equal(layers[1]["attn.qkv.bias"], tensors[stored + "attn.c_attn.bias"])
    np.testing.assert_array_equal(layers[1]["ffn.down.weight"].data, tensors[stored + "mlp.c_proj.weight"].T)
    np.testing.assert_array_equal(ends["embed.positions"].data, tensors["transformer.wpe.weight"])


@pytest.mark.parametrize(
    "name, stored", [("bloom", "transformer.h.1.self_attention."), ("gpt_neox_parallel", "gpt_neox.layers.1.attention.")]
)
def test_qkv_of_one_head_after_the_other_is_sorted(name, stored):
    _, tensors = case(name)
    layer = load_model(CASES / name)[2][1]
    for part in ("weight", "bias"):
        per_head = tensors[f"{stored}query_key_value.{part}"].reshape(4, 3, 16, -1)
        want = np.concatenate([per_head[:, i].reshape(64, -1) for i in range(3)])
        got = numbers(layer[f"attn.qkv.{part}"])
        np.testing.assert_array_equal(got.reshape(192, -1), want)


def test_gate_lies_above_up_in_every_expert():
    _, tensors = case("mixtral")
    layer = load_model(CASES / "mixtral")[2][1]
    stored = "model.layers.1.block_sparse_moe."
    for e in range(8):
        gate, down, above = (tensors[f"{stored}experts.{e}.w{i}.weight"] for i in (1, 2, 3))
        np.testing.assert_array_equal(layer["moe.up.weight"].data[e], np.concatenate([gate, above]))
        np.testing.assert_array_equal(layer["moe.down.weight"].data[e], down)
    np.testing.assert_array_equal(layer["moe.gate.weight"].data, tensors[stored + "gate.weight"])


def test_conv1d_experts_are_turned():
    checkpoint = open_checkpoint(BUNDLED / "shakespeare_moe")
    layer = list(load_layers(checkpoint, "fp32"))[3]
    for e in (0, 7):
        stored = checkpoint.reader.read(f"transformer.h.3.mlp.experts.{e}.c_fc.weight", slice(0, 192), slice(0, 384))
        np.testing.assert_array_equal(layer["moe.up.weight"].data[e], decode(stored, "fp16").T)
        bias = checkpoint.reader.read(f"transformer.h.3.mlp.experts.{e}.c_proj.bias", slice(0, 192))
        np.testing.assert_array_equal(layer["moe.down.bias"][e], decode(bias, "fp16"))


@pytest.mark.parametrize("name, prefix", [("gpt2", "transformer."), ("llama_gqa", "model."), ("bert", "bert."), ("opt", "model.")])
def test_names_without_the_prefix_are_the_same_model(name, prefix, tmp_path):
    config, tensors = case(name)
    bare = write(tmp_path, config, {key.removeprefix(prefix): array for key, array in tensors.items()})
    for want, got in zip(_flat(CASES / name), _flat(bare), strict=True):
        np.testing.assert_array_equal(numbers(got), numbers(want))


def _flat(folder) -> list:
    _, ends, layers = load_model(folder, "fp32")
    return [tensors[name] for tensors in (ends, *layers) for name in sorted(tensors)]


# ---- dtypes ----


@pytest.mark.parametrize("stored, dtype", [(np.float16, "fp16"), (ml_dtypes.bfloat16, "bf16")])
def test_16_bit_checkpoints_keep_their_bits(stored, dtype, tmp_path):
    config, tensors = case("gpt2")
    tensors = {name: array.astype(stored) for name, array in tensors.items()}
    odd = np.array([0x0001, 0x8000, 0x7F81, 0x7E01, 0xFFFF], np.uint16)  # denormal, -0, NaNs with a payload
    tensors["transformer.h.0.mlp.c_fc.weight"].view(np.uint16)[3, :5] = odd
    folder = write(tmp_path, config, tensors)
    assert describe(folder).dtype == dtype
    for asked in (dtype, None):
        layer = load_model(folder, asked)[2][0]
        weight = layer["ffn.up.weight"]
        assert weight.dtype == dtype
        np.testing.assert_array_equal(weight.data, tensors["transformer.h.0.mlp.c_fc.weight"].view(np.uint16).T)
        assert layer["ffn.up.bias"].dtype == np.float32
        np.testing.assert_array_equal(layer["ffn.up.bias"], tensors["transformer.h.0.mlp.c_fc.bias"].astype(np.float32))
    wide = load_model(folder, "fp32")[2][1]["ffn.up.weight"].data
    np.testing.assert_array_equal(wide, tensors["transformer.h.1.mlp.c_fc.weight"].astype(np.float32).T)


def test_fp32_checkpoints_are_rounded_to_the_nearest():
    _, tensors = case("llama_gqa")
    want = tensors["model.layers.0.mlp.down_proj.weight"]
    for dtype, bits in (("fp16", want.astype(np.float16).view(np.uint16)), ("bf16", bf16_bits(want))):
        got = load_model(CASES / "llama_gqa", dtype)[2][0]["ffn.down.weight"]
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.data, bits)


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa", "mixtral", "gpt_neox_parallel"])
def test_int8_scales_the_rows_of_the_slice(name):
    shard = Shard(1, 2)
    _, wide_ends, wide_layers = load_model(CASES / name, "fp32", shard)
    _, ends, layers = load_model(CASES / name, "int8", shard)
    for wide, narrow in zip([wide_ends, *wide_layers], [ends, *layers], strict=True):
        for tensor, weight in narrow.items():
            if not isinstance(weight, Weight) or tensor == "moe.gate.weight":
                assert numbers(weight).dtype == np.float32
                continue
            if weight.dtype == "fp16":
                np.testing.assert_array_equal(weight.data, encode(wide[tensor].data, "fp16"))
                continue
            data, scale = quantize(wide[tensor].data)
            np.testing.assert_array_equal(weight.data, data)
            np.testing.assert_array_equal(weight.scale, scale)


@pytest.mark.parametrize(
    ("name", "table", "head"), [("gpt2", "fp16", None), ("gptj", "int8", "int8"), ("llama_gqa_tied", "fp16", None), ("bert", "fp16", None)]
)
def test_with_int8_a_table_that_gives_the_logits_is_fp16(name, table, head):
    _, ends, layers = load_model(CASES / name, "int8")
    assert ends["embed.tokens"].dtype == table
    assert ("head.weight" in ends) == (head is not None) and (head is None or ends["head.weight"].dtype == head)
    assert {weight.dtype for layer in layers for weight in layer.values() if isinstance(weight, Weight)} == {"int8"}


def test_int8_takes_at_most_0_55_of_fp16s_bytes_of_gpt_j():
    config = preset("gpt-j-6b")
    sizes = {"int8": 0, "fp16": 0}
    for slices in (global_tensors(config), *(layer_tensors(config, i) for i in range(config.num_layers))):
        for tensor, part in slices.items():
            for dtype in sizes:
                held = held_dtype(tensor, config, dtype) if part.matrix else "fp32"
                sizes[dtype] += BYTES[held] * part.size + (4 * sum(map(len, part.rows)) if held == "int8" else 0)
    assert 0.5 < sizes["int8"] / sizes["fp16"] < 0.55


def test_w8a8_marks_the_layers_int8_matrices():
    layers = load_model(CASES / "qwen2_moe", "int8")[2]
    marked = list(rounding_activations(layers))
    for layer, plain in zip(marked, layers, strict=True):
        assert layer.keys() == plain.keys()
        for tensor, weight in layer.items():
            if isinstance(weight, Weight):
                assert weight.data is plain[tensor].data and weight.act == ("int8" if weight.dtype == "int8" else None)
    assert marked[0]["moe.gate.weight"].act is None and marked[0]["moe.up.weight"].act == "int8"


def test_int8_in_blocks_is_int8_in_one(monkeypatch):
    whole = [load_model(CASES / name, "int8")[2][1] for name in ("gpt2", "llama_gqa")]
    monkeypatch.setattr(loading, "BLOCK_BYTES", 700)
    for name, want in zip(("gpt2", "llama_gqa"), whole, strict=True):
        got = load_model(CASES / name, "int8")[2][1]
        for tensor in want:
            np.testing.assert_array_equal(numbers(got[tensor]), numbers(want[tensor]))


@pytest.mark.parametrize("block", [1, 100, 1000])
def test_blocks_of_any_size_give_the_same(block, monkeypatch):
    monkeypatch.setattr(loading, "BLOCK_BYTES", block)
    for name in ("gpt2", "opt_embed_proj", "qwen2_moe"):
        check_parts(CASES / name)
        _, tensors = case(name)
        total = sum(array.size for array in tensors.values())
        assert sum(numbers(tensor).size for tensor in _flat(CASES / name)) == total


def test_the_gates_stay_fp32():
    for name, gates in (("qwen2_moe", ("moe.gate.weight", "moe.shared_gate.weight")), ("mixtral", ("moe.gate.weight",))):
        for dtype in ("fp16", "bf16", "int8"):
            layer = load_model(CASES / name, dtype)[2][0]
            assert {layer[gate].dtype for gate in gates} == {"fp32"} and layer["moe.up.weight"].dtype == dtype


def test_a_number_beyond_fp16_is_refused(tmp_path):
    config, tensors = case("gpt2")
    tensors["transformer.h.0.mlp.c_fc.weight"][5, 5] = 7e4
    folder = write(tmp_path, config, tensors)
    with pytest.raises(UserError, match=r"h\.0\.mlp\.c_fc\.weight .*--dtype bf16"):
        load_model(folder, "fp16")
    load_model(folder, "bf16")


def test_an_unknown_dtype_is_a_programming_error():
    with pytest.raises(ValueError, match="dtype"):
        load_model(CASES / "gpt2", "fp8")


# ---- one after the other, and counted ----


@pytest.mark.parametrize("name", NAMES)
def test_progress_ends_at_its_total(name):
    steps: list[tuple[int, int]] = []
    config, _, layers = stream_model(CASES / name, "fp16", Shard(1, 2), lambda done, total: steps.append((done, total)))
    assert 0 < steps[-1][0] < steps[-1][1]  # the layers are still to come
    assert len(list(layers)) == config.num_layers
    done = [step[0] for step in steps]
    assert done == sorted(done) and len({step[1] for step in steps}) == 1
    assert abs(steps[-1][0] - steps[-1][1]) <= 1
    _, tensors = case(name)
    share = steps[-1][1] / sum(array.nbytes for array in tensors.values())
    assert 0.4 < share < 0.85  # half of it and what is replicated


def test_globals_and_layers_alone_are_what_the_model_is_made_of():
    _, ends, layers = load_model(CASES / "qwen3", "bf16", Shard(0, 2))
    alone = load_globals(CASES / "qwen3", "bf16", Shard(0, 2))
    assert alone.keys() == ends.keys()
    for layer, want in zip(load_layers(CASES / "qwen3", "bf16", Shard(0, 2)), layers, strict=True):
        for name in want:
            np.testing.assert_array_equal(numbers(layer[name]), numbers(want[name]))


def test_a_stage_reads_its_layers_only():
    _, _, layers = load_model(CASES / "gpt2_inverse_layer_gelu", "fp32")
    (middle,) = load_layers(CASES / "gpt2_inverse_layer_gelu", "fp32", layers=[1])
    for name in middle:
        np.testing.assert_array_equal(numbers(middle[name]), numbers(layers[1][name]))


def test_a_broken_layer_is_refused_before_the_first_is_read(tmp_path):
    config, tensors = case("gpt2")
    del tensors["transformer.h.1.ln_1.bias"]
    with pytest.raises(UserError, match=r"h\.1\.ln_1\.bias is missing"):
        load_layers(write(tmp_path, config, tensors), "fp32", layers=[0])


def test_describe_tells_the_whole_models_sizes():
    config = describe(CASES / "qwen3")
    assert (config.family, config.num_heads, config.num_kv_heads, config.head_dim, config.dtype) == ("qwen3", 4, 2, 24, "fp32")
