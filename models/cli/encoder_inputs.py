"""The flags and the inputs that both commands of `models.bert` share."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from l1_kernels.errors import UserError
from models.cli.inputs import Prompt, read_ids, read_text
from models.cli.options import MODEL, EngineOptions, flag

if TYPE_CHECKING:
    from models.cli.open_model import OpenModel


@dataclass(frozen=True, slots=True)
class EncoderOptions(EngineOptions):
    """EngineOptions with an encoder for a default."""

    model: Annotated[
        str, flag("--model", "-m", panel=MODEL, metavar="NAME|DIR", text="a packaged name or a Hugging Face folder of an encoder")
    ] = "minilm"


def texts_from(texts: list[str] | None, texts_file: str | None, ids_file: str | None) -> list[Prompt]:
    """The texts of exactly one of --text, --texts, --ids."""
    given = [name for name, value in (("--text", texts), ("--texts", texts_file), ("--ids", ids_file)) if value not in (None, [])]
    if not given:
        raise UserError("give texts with one of --text, --texts and --ids")
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)}: give one of them only")
    if ids_file is not None:
        return read_ids(ids_file)
    if texts_file is not None:
        lines = read_text(texts_file, "--texts").removeprefix("\ufeff").removesuffix("\n").split("\n")
        return [Prompt(f"{texts_file} line {number}", text=line.removesuffix("\r")) for number, line in enumerate(lines, start=1)]
    assert texts is not None
    return [Prompt("--text" if len(texts) == 1 else f"--text {i + 1}", text=text) for i, text in enumerate(texts)]


def encode_texts(opened: OpenModel, texts: list[Prompt], limit: int) -> list[list[int]]:
    """Ids with special tokens, texts longer than `limit` tokens cut with one line that says so. Ids are taken as given:
    nothing is added, and too many are refused."""
    from models.encode import text_ids
    from models.generate import check_prompts

    found, cut = [], []
    for text in texts:
        ids = text.ids
        if ids is None:
            if opened.tokenizer is None:
                raise UserError(f"{text.name}: --model {opened.name} has no tokenizer; give token ids with --ids FILE.jsonl")
            try:
                ids, is_cut = text_ids(opened.tokenizer, text.text or "", limit)
            except UserError as error:
                raise UserError(f"{text.name}: {error}") from None
            cut += [text.name] if is_cut else []
        found.append(ids)
    check_prompts(opened.config, found, 0, [text.name for text in texts])
    if cut and opened.speaks:
        others = f" and {len(cut) - 1} more" if len(cut) > 1 else ""
        print(f"warning: {cut[0]}{others} cut to the {limit} tokens that {opened.name} reads of a text", file=sys.stderr, flush=True)
    return found
