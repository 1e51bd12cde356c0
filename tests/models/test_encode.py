"""Encoders: pooling, truncation, masks, and the two commands of models.bert."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from l1_kernels.device import open_device
from l1_kernels.errors import UserError
from l2_dense_parallel.collectives import NoCollective
from l2_dense_parallel.ranks import read_launch
from l2_dense_parallel.slicing import Shard
from l2_dense_parallel.world import World
from models.build import build_runner
from models.cli.app import application
from models.cli.encoder_inputs import texts_from
from models.encode import SentenceSettings, embed, fill_masks, likeliest, pool, sentence_settings, text_ids
from models.loading import open_checkpoint
from models.tokenizer import Tokenizer, add_around

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "conformance"
ENCODERS = ("bert", "distilbert", "roberta")


def runner_of(case):
    return build_runner(open_checkpoint(CASES / case), open_device("cpu"), "fp32", Shard(), NoCollective())


def command(*arguments):
    application(World(read_launch()), "strata-bert")(args=list(arguments), standalone_mode=False)()


@pytest.fixture
def ids_file(tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text("[5, 6, 7, 8, 9]\n[17]\n[30, 31, 7]\n")
    return path


@pytest.mark.parametrize("lengths", [(1,), (7, 1, 37), (1, 1, 199)])
def test_pooling_is_the_mean_or_the_first_token_scaled_to_length_one(lengths):
    generator = np.random.default_rng(sum(lengths))
    hidden = generator.standard_normal((sum(lengths), 37)).astype(np.float32)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    for pooling, of_text in (("mean", lambda x: x.mean(axis=0)), ("cls", lambda x: x[0])):
        expected = np.stack([of_text(hidden[rows == row].astype(np.float64)) for row in range(len(lengths))])
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        np.testing.assert_allclose(pool(hidden, rows, pooling), expected, atol=1e-7)


def test_pooling_of_zeros_and_of_an_unknown_kind():
    assert np.array_equal(pool(np.zeros((3, 5), np.float32), np.array([0, 0, 1]), "mean"), np.zeros((2, 5)))
    with pytest.raises(ValueError, match="max"):
        pool(np.zeros((1, 5), np.float32), np.zeros(1, int), "max")


@pytest.mark.parametrize("case", ENCODERS)
def test_embeddings_do_not_depend_on_the_batch(case):
    runner = runner_of(case)
    generator = np.random.default_rng(3)
    texts = [generator.integers(3, 100, n).tolist() for n in (1, 7, 3, 12, 5)]
    done = []
    together = embed(runner, texts, 2, on_batch=done.append)
    assert done == [2, 4, 5]
    alone = np.concatenate([embed(runner, [text], 1) for text in texts])
    np.testing.assert_allclose(together, alone, atol=1e-6)


@pytest.mark.parametrize("case", ["distilbert", "roberta"])  # bert's golden has token types, which the command never gives
def test_masks_get_the_golden_logits_best(case):
    """fill_masks at one id of the golden's input against the golden masked-LM logits at that place."""
    runner, golden = runner_of(case), np.load(CASES / case / "golden.npz")
    ids = golden["input_ids"][0].tolist()
    (masks,) = fill_masks(runner, [ids], mask_id=ids[4], top_k=3, batch_size=8)
    places = [i for i, token in enumerate(ids) if token == ids[4]]
    assert [mask.position for mask in masks] == places
    for mask in masks:
        row = golden["mlm_logits"][0, mask.position].astype(np.float64)
        probabilities = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        assert [i for i, _ in mask.tokens] == np.argsort(-row)[:3].tolist()
        np.testing.assert_allclose([p for _, p in mask.tokens], np.sort(probabilities)[::-1][:3], rtol=1e-3)


def test_masks_of_several_texts_and_passes():
    runner = runner_of("distilbert")
    texts = [[7, 5, 7], [5, 6], [9, 7], [7]]
    found = fill_masks(runner, texts, mask_id=7, top_k=2, batch_size=2)
    assert [[mask.position for mask in masks] for masks in found] == [[0, 2], [], [1], [0]]
    for text, masks in zip(texts, found, strict=True):
        (alone,) = fill_masks(runner, [text], 7, 2, 1)
        for mask, same in zip(masks, alone, strict=True):
            assert [i for i, _ in mask.tokens] == [i for i, _ in same.tokens]


def test_likeliest_breaks_ties_by_the_lower_id():
    assert [i for i, _ in likeliest(np.array([1, 3, 3, 2], np.float32), 3)] == [1, 2, 3]
    assert sum(p for _, p in likeliest(np.array([1e4, -1e4, 0], np.float32), 99)) == pytest.approx(1)


def word_tokenizer():
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    names = ["[CLS]", "[SEP]", "[UNK]", "a", "b"]
    backend = Backend(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    add_around(backend, "[CLS]", "[SEP]")
    return Tokenizer(backend, "test")


def test_a_long_text_loses_its_end_and_keeps_its_special_tokens():
    tokenizer = word_tokenizer()
    assert text_ids(tokenizer, "a b a", 5) == ([0, 3, 4, 3, 1], False)
    assert text_ids(tokenizer, "a b a b", 5) == ([0, 3, 4, 3, 1], True)
    assert text_ids(tokenizer, "", 5) == ([0, 1], False)
    assert text_ids(tokenizer, "a b a b", 99) == ([0, 3, 4, 3, 4, 1], False)  # the limit before has left no trace


def test_settings_of_sentence_transformers(tmp_path):
    assert sentence_settings(tmp_path) == SentenceSettings(None, "mean")
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    pooling = tmp_path / "1_Pooling" / "config.json"
    pooling.write_text('{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false, "word_embedding_dimension": 8}')
    assert sentence_settings(tmp_path) == SentenceSettings(256, "cls")
    pooling.write_text('{"pooling_mode_max_tokens": true, "pooling_mode_mean_tokens": true}')
    assert sentence_settings(tmp_path).pooling == "pooling_mode_max_tokens+mean"
    pooling.write_text("{")
    with pytest.raises(UserError, match="1_Pooling"):
        sentence_settings(tmp_path)


def test_texts_of_a_file_keep_their_lines(tmp_path):
    path = tmp_path / "texts"
    path.write_bytes("\ufefffirst\r\n\nthird\n".encode())
    assert [text.text for text in texts_from(None, str(path), None)] == ["first", "", "third"]
    assert texts_from(None, str(path), None)[2].name == f"{path} line 3"


def test_embed_command(ids_file, capsys):
    command("embed", "--model", str(CASES / "bert"), "--ids", str(ids_file), "--device", "cpu", "--json")
    found = json.loads(capsys.readouterr().out)
    assert (found["device"], found["dtype"]) == ("cpu", "fp32")
    expected = embed(runner_of("bert"), [[5, 6, 7, 8, 9], [17], [30, 31, 7]], 8)
    np.testing.assert_allclose(np.array(found["embeddings"]), expected, atol=1e-6)
    command("embed", "--model", str(CASES / "bert"), "--ids", str(ids_file), "--device", "cpu")
    first, title, *rows = capsys.readouterr().out.splitlines()
    assert " on cpu " in first and title == "cosine similarity"
    assert rows[0].split()[:2] == ["1.000", f"{expected[0] @ expected[1]:.3f}"] and len(rows) == 3


def test_fill_mask_command(tmp_path, capsys):
    path = tmp_path / "ids.jsonl"
    path.write_text("[5, 7, 7]\n[7]\n")
    command("fill-mask", "--model", str(CASES / "bert"), "--ids", str(path), "--mask-id", "7", "--top-k", "2", "--device", "cpu", "--json")
    found = json.loads(capsys.readouterr().out)["results"]
    assert [entry["input_ids"] for entry in found] == [[5, 7, 7], [7]]
    assert [[mask["position"] for mask in entry["masks"]] for entry in found] == [[1, 2], [0]]
    assert all(len(mask["tokens"]) == 2 for entry in found for mask in entry["masks"])
    command("fill-mask", "--model", str(CASES / "bert"), "--ids", str(path), "--mask-id", "7", "--top-k", "1", "--device", "cpu")
    best = found[0]["masks"][0]["tokens"][0]
    assert f"{best['probability']:6.4f}  {best['id']}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["embed"], "one of --text, --texts and --ids"),
        (["embed", "--text", "a", "--texts", "b"], "--text and --texts: give one of them only"),
        (["embed", "--text", "a", "--model", "shakespeare"], "no encoder; see python -m models.gpt"),
        (["embed", "--text", "a", "--model", str(CASES / "bert")], "has no tokenizer; give token ids with --ids"),
        (["embed", "--text", "a", "--pooling", "max"], "--pooling max: have mean, cls"),
        (["embed", "--text", "a", "--batch-size", "0"], "--batch-size must be at least 1"),
        (["embed", "--ids", "LONG", "--model", str(CASES / "bert")], "more than the model's"),
        (["embed", "--ids", "OUTSIDE", "--model", str(CASES / "bert")], "outside the vocabulary"),
        (["fill-mask", "--ids", "LONG", "--model", str(CASES / "bert")], "--mask-id"),
        (["fill-mask", "--ids", "OUTSIDE", "--model", str(CASES / "bert"), "--mask-id", "9999"], "--mask-id 9999 is outside"),
        (["fill-mask", "--ids", "SHORT", "--model", str(CASES / "bert"), "--mask-id", "9"], "holds no mask"),
    ],
)
def test_wrong_use_is_one_line(arguments, message, tmp_path):
    for name, ids in (("LONG", [5] * 1000), ("OUTSIDE", [5, 100000]), ("SHORT", [5, 6])):
        (tmp_path / name).write_text(json.dumps(ids))
    given = [str(tmp_path / word) if word.isupper() else word for word in arguments]
    with pytest.raises(UserError) as error:
        command(*given, "--device", "cpu")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_bare_encoder_fills_no_masks(tmp_path):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(CASES / "bert" / "model.safetensors")
    save_file({name: x for name, x in tensors.items() if not name.startswith("cls.")}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((CASES / "bert" / "config.json").read_bytes())
    (tmp_path / "ids").write_text("[5, 6]")
    with pytest.raises(UserError, match="holds no masked-LM head"):
        command("fill-mask", "--model", str(tmp_path), "--ids", str(tmp_path / "ids"), "--mask-id", "5", "--device", "cpu")


@pytest.mark.mpi
@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_give_the_same_embeddings(tp, ids_file):
    from tests.l2_dense_parallel.launch import environment, mpirun, start

    arguments = ["--model", str(CASES / "bert"), "--ids", str(ids_file), "--device", "cpu", "--tp", str(tp), "--json"]
    done = start([*mpirun(), "-n", "2", sys.executable, "-m", "models.bert", "embed", *arguments], environment(), 120)
    assert done.status == 0, done.err
    expected = embed(runner_of("bert"), [[5, 6, 7, 8, 9], [17], [30, 31, 7]], 8)
    np.testing.assert_allclose(np.array(json.loads(done.out)["embeddings"]), expected, atol=1e-6)


@pytest.mark.slow
def test_the_simulator_gives_the_same_embedding(tmp_path):
    """In a process of its own: the simulator must be chosen before numba is imported."""
    (tmp_path / "ids").write_text("[5, 6, 7]")
    command_line = ["embed", "--model", str(CASES / "bert"), "--ids", str(tmp_path / "ids"), "--device", "sim", "--json"]
    done = subprocess.run([sys.executable, "-m", "models.bert", *command_line], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.array(json.loads(done.stdout)["embeddings"]), embed(runner_of("bert"), [[5, 6, 7]], 1), atol=1e-5)
