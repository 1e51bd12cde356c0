"""Text to token ids and back, from a Hugging Face folder (tokenizer.json) or a GGUF file's metadata.

The rules of a vocabulary are run by the `tokenizers` package; what is added here is what generation needs beside them:
the bytes of one token (so that text can be streamed), the ids that end a text, and the chat template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from l1_kernels.errors import UserError
from models.checkpoint.reader import first_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


class Tokenizer:
    """One vocabulary.

    source         the file it came from, for messages
    eos_ids        ids that a GGUF file's vocabulary says end a text
    chat_template  Jinja source, or None
    special_names  {"bos_token": text, "eos_token": text ...}, what chat templates may ask for
    """

    def __init__(
        self, backend: Backend, source: str, eos_ids: Sequence[int] = (),
        chat_template: str | None = None, special_names: dict[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.source = source
        self.eos_ids = tuple(eos_ids)
        self.chat_template = chat_template
        self.special_names = special_names or {}
        self.vocab_size: int = backend.get_vocab_size()
        decoder = _decoder_parts(backend)
        self._bytes_of = _token_bytes_rule(decoder, source)
        self._strips_first_space = "Strip" in decoder or "Metaspace" in decoder  # SentencePiece put it there

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        """Ids of `text`. special_tokens: with what the model's own files put around a text (a BOS, [CLS] and [SEP]);
        special tokens that stand in the text itself are matched in both cases."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"the text is not valid UTF-8 (character {error.start + 1} is a lone surrogate)") from None
        return self.backend.encode(text, add_special_tokens=special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The whole text of `ids`, special tokens shown. Bytes that are no UTF-8 become U+FFFD."""
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._strips_first_space else text

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token adds to a text; none for an id outside the vocabulary (padding rows of a model)."""
        name = self.backend.id_to_token(token)
        return b"" if name is None else self._bytes_of(name)

    def token_id(self, name: str) -> int | None:
        return self.backend.token_to_id(name)


def tokenizer_of(path: Path) -> Tokenizer | None:
    """The tokenizer of a model as `models.find` gives it: a folder, or a GGUF file that holds its own. None where a
    folder has none."""
    if path.is_dir():
        return load_tokenizer(path)
    from models.checkpoint.gguf import read_gguf_metadata
    from models.tokenizer_gguf import tokenizer_from_gguf

    return tokenizer_from_gguf(read_gguf_metadata(path), str(path))


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a model's folder; None where the folder has none (its model runs with --ids).

    Reads tokenizer.json, or the older pair vocab.json and merges.txt (GPT-2's byte-level BPE), and beside it
    tokenizer_config.json and chat_template.jinja where they are. Raises UserError for a broken
    file, and for a vocabulary that only tokenizer.model (SentencePiece) holds.
    """
    from tokenizers import Tokenizer as Backend

    settings = _read_json(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").exists():
        source = folder / "tokenizer.json"
        first_bytes(source, 1)  # refuses a Git-LFS pointer
        try:
            backend = Backend.from_file(str(source))
        except Exception as error:  # noqa: BLE001 (what the package raises)
            raise UserError(f"{source}: not a readable tokenizer.json ({_one_line(error)})") from None
    elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        source = folder / "vocab.json"
        backend = _from_vocab_and_merges(folder, settings)
    elif (folder / "tokenizer.model").exists():
        raise UserError(f"{folder / 'tokenizer.model'}: a bare SentencePiece model is not supported; put the tokenizer.json beside it")
    else:
        return None

    backend.no_truncation()
    backend.no_padding()
    names = {key: name for key in ("bos_token", "eos_token", "unk_token", "pad_token") if (name := _token_name(settings.get(key)))}
    return Tokenizer(backend, str(source), (), _chat_template(folder, settings), names)


def _from_vocab_and_merges(folder: Path, settings: dict[str, Any]) -> Backend:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    try:
        backend = Backend(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    except Exception as error:  # noqa: BLE001
        raise UserError(f"{folder / 'vocab.json'}: not a readable vocabulary ({_one_line(error)})") from None
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space", False)))
    backend.decoder = decoders.ByteLevel()
    keys = ("bos_token", "eos_token", "unk_token", "pad_token")
    names = [name for key in keys if (name := _token_name(settings.get(key)))] or ["<|endoftext|>"]
    backend.add_special_tokens([name for name in names if backend.token_to_id(name) is not None])
    if settings.get("add_bos_token") and (bos := _token_name(settings.get("bos_token"))):
        add_around(backend, bos, None)
    return backend


def add_around(backend: Backend, bos: str | None, eos: str | None) -> None:
    """Have `backend` put these tokens around a text that is encoded with special tokens."""
    from tokenizers import processors

    names = [name for name in (bos, eos) if name]
    template = " ".join(part for part in (bos, "$A", eos) if part)
    backend.post_processor = processors.TemplateProcessing(
        single=template, pair=None, special_tokens=[(name, backend.token_to_id(name)) for name in names]
    )


# ---------------------------------------------------------------------------------------------- bytes of one token


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's one visible character for each byte: itself where it prints, else the next character from U+0100."""
    printing = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printing)]
    return {chr(b): b for b in printing} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = byte_level_alphabet()


def _byte_level_bytes(name: str) -> bytes:
    try:
        return bytes(_BYTE_OF[c] for c in name)
    except KeyError:  # an added token with characters outside the alphabet stands for itself
        return name.encode()


def _sentencepiece_bytes(name: str) -> bytes:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return bytes([int(name[3:5], 16)])
        except ValueError:
            pass
    return name.replace("\u2581", " ").encode()


def _unsupported_bytes(kind: str, source: str) -> Callable[[str], bytes]:
    def refuse(name: str) -> bytes:
        raise UserError(f"{source}: cannot stream text through a decoder of type {kind} (have ByteLevel and SentencePiece's)")

    return refuse


def _decoder_parts(backend: Backend) -> set[str]:
    """The types of the decoder's steps, {} where there is none."""
    if backend.decoder is None:
        return set()
    decoder = json.loads(backend.decoder.__getstate__())
    return {part["type"] for part in decoder.get("decoders", [decoder])}


def _token_bytes_rule(kinds: set[str], source: str) -> Callable[[str], bytes]:
    """How a token's name turns to bytes. A rule that is not known is refused when text is asked for, not before: encoders
    (WordPiece) only encode."""
    if kinds == {"ByteLevel"}:
        return _byte_level_bytes
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return _sentencepiece_bytes
    return _unsupported_bytes("+".join(sorted(kinds)) or "none", source)


# ---------------------------------------------------------------------------------------------- small files beside it


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable JSON ({_one_line(error)})") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected a JSON object")
    return found


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja, or tokenizer_config.json's: one template, or a list of named ones."""
    if (folder / "chat_template.jinja").exists():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_name(entry: Any) -> str | None:
    """tokenizer_config.json gives a special token as text or as {"content": text}."""
    name = entry.get("content") if isinstance(entry, dict) else entry
    return name if isinstance(name, str) else None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
