"""The tokenizer inside a GGUF file: its `tokenizer.*` metadata turned into rules of the `tokenizers` package.

Two kinds of vocabulary, named by `tokenizer.ggml.model`:
  gpt2   byte-level BPE: tokens, merges, and `tokenizer.ggml.pre`, which names how text is split before merging
  llama  SentencePiece BPE: tokens with scores; the merge that makes the piece of the best score comes first
Anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from l1_kernels.errors import UserError
from models.tokenizer import Tokenizer, add_around

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type

# How text is split before merges, by tokenizer.ggml.pre. "gpt-2" is GPT-2's own pattern; "digits" has every digit alone first.
_GPT2_SPLIT = ("gpt-2", "gpt2", "jais", "mpt", "olmo", "phi-2", "gpt-neox", "default")
_DIGITS_THEN_GPT2 = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_WORDS = (  # the pattern of GPT-4's family; {digits} says how many digits may stay together
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORD_SPLITS = {"llama-bpe": "{1,3}", "llama3": "{1,3}", "llama-v3": "{1,3}", "dbrx": "{1,3}", "smaug-bpe": "{1,3}", "qwen2": "", "stablelm2": ""}
_ADDS_BOS = ("llama-bpe", "llama3", "llama-v3")  # where the file does not say


def tokenizer_from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """metadata: the file's key-value pairs as plain Python values (strings, numbers, lists). source: its path."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = list(metadata.get("tokenizer.ggml.tokens") or ())
    if not tokens:
        raise UserError(f"{source}: holds no tokenizer (tokenizer.ggml.tokens is missing); give token ids with --ids")
    if kind == "gpt2":
        backend = _byte_level_bpe(metadata, tokens, source)
    elif kind == "llama":
        backend = _sentencepiece_bpe(metadata, tokens)
    else:
        raise UserError(f"{source}: unsupported tokenizer.ggml.model {kind!r} (have gpt2, llama); give token ids with --ids")

    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    _match_whole(backend, tokens, types)
    names = {}
    for key, field in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token = metadata.get(f"tokenizer.ggml.{field}_token_id")
        if token is not None and 0 <= int(token) < len(tokens):
            names[key] = tokens[int(token)]
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or metadata.get("tokenizer.ggml.pre") in _ADDS_BOS)
    adds_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    bos, eos = (names.get("bos_token") if adds_bos else None), (names.get("eos_token") if adds_eos else None)
    if bos or eos:
        add_around(backend, bos, eos)
    ends = (metadata.get(f"tokenizer.ggml.{field}_token_id") for field in ("eos", "eot", "eom"))
    return Tokenizer(backend, source, [int(i) for i in ends if i is not None], metadata.get("tokenizer.chat_template"), names)


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str], source: str) -> Backend:
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    pre = metadata.get("tokenizer.ggml.pre", "default")
    gpt2_split = pre_tokenizers.ByteLevel(add_prefix_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", False)))
    splits: list[Any]
    if pre in _GPT2_SPLIT:
        splits = [gpt2_split]
    elif pre in _DIGITS_THEN_GPT2:
        splits = [pre_tokenizers.Digits(individual_digits=True), gpt2_split]
    elif pre in _WORD_SPLITS:
        pattern = Regex(_WORDS.format(digits=_WORD_SPLITS[pre]))
        splits = [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        known = ", ".join(sorted({*_GPT2_SPLIT, *_DIGITS_THEN_GPT2, *_WORD_SPLITS}))
        raise UserError(f"{source}: unsupported tokenizer.ggml.pre {pre!r} (have {known}); give token ids with --ids")

    vocab = {name: i for i, name in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or ()]
    known_merges = [m for m in merges if m[0] in vocab and m[1] in vocab and m[0] + m[1] in vocab]
    backend = Backend(models.BPE(vocab, known_merges, ignore_merges=pre in _ADDS_BOS))
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: list[str]) -> Backend:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    scores = metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    vocab = {name: i for i, name in enumerate(tokens)}
    unknown = tokens[int(metadata.get("tokenizer.ggml.unknown_token_id", 0))]
    backend = Backend(models.BPE(vocab, score_merges(vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True))
    space = "\u2581"
    steps: list[Any] = [normalizers.Replace(" ", space)]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(space))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def score_merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Merges that act as SentencePiece's rule does: of all neighbours that make a piece, the piece of the best score
    is made first. A piece has one merge for each way to cut it in two pieces."""
    merges = []
    for piece, i in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                merges.append((-scores[i], i, vocab[left], vocab[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _match_whole(backend: Backend, tokens: list[str], types: list[int]) -> None:
    """Control and user-defined tokens are found in the text before any splitting."""
    from tokenizers import AddedToken

    special = [name for name, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    defined = [name for name, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special if name])
    backend.add_tokens([AddedToken(name, normalized=False) for name in defined if name])
