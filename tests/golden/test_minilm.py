"""all-MiniLM-L6-v2, a sentence encoder, against values of another implementation."""

import json

import numpy as np
import pytest

from layers.batch import Batch
from models.encode import embed, text_ids
from tests.golden.opened import command, golden, installed, opened

pytestmark = installed("minilm")
GOLDEN = golden("conformance/minilm_golden.json")
SENTENCES = GOLDEN["sentences"]


def test_sentences_become_the_same_ids():
    _, tokenizer = opened("minilm")
    for sentence, ids in zip(SENTENCES, GOLDEN["input_ids"], strict=True):
        assert text_ids(tokenizer, sentence, 256) == (ids, False)


def test_last_hidden_states():
    runner, _ = opened("minilm")
    batch = Batch.encode(GOLDEN["input_ids"])
    hidden = runner.device.to_host(runner.hidden(batch, runner.new_cache(len(SENTENCES), 32)))
    first = hidden[batch.positions == 0]
    assert np.abs(first[:, :8] - GOLDEN["last_hidden_state_first_token_first_8"]).max() <= 1e-5


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_embeddings(batch_size):
    runner, _ = opened("minilm")
    vectors = embed(runner, GOLDEN["input_ids"], batch_size)
    assert np.abs(vectors - GOLDEN["embeddings"]).max() <= 1e-5
    assert np.abs(vectors @ vectors.T - GOLDEN["cosine_similarity"]).max() <= 1e-5


def test_the_command_gives_them_as_json(capsys):
    texts = [word for sentence in SENTENCES for word in ("--text", sentence)]
    command("strata-bert", "embed", *texts, "--device", "cpu", "--json")
    found = json.loads(capsys.readouterr().out)
    assert np.abs(np.array(found.pop("embeddings")) - GOLDEN["embeddings"]).max() <= 1e-5
    assert found == {"model": "minilm", "device": "cpu", "dtype": "fp32"}
