"""`fill-mask`: the likeliest tokens for every mask of a text, from an encoder with a masked-LM head."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from l1_kernels.errors import UserError
from l2_dense_parallel.world import World
from models.cli.encoder_inputs import EncoderOptions, encode_texts, texts_from
from models.cli.inputs import Prompt
from models.cli.options import OUTPUT, at_least_one, flag
from models.cli.output import json_line

if TYPE_CHECKING:
    from models.cli.open_model import OpenModel
    from models.encode import Mask

INPUT = "Input"
MASKS = ("[MASK]", "<mask>")  # BERT's and DistilBERT's; RoBERTa's


@dataclass(frozen=True, slots=True)
class FillMaskOptions:
    """Texts with masks, and how many tokens to show for each."""

    text: Annotated[list[str] | None, flag("--text", "-t", panel=INPUT, metavar="TEXT", text="with a [MASK] or <mask>; repeatable")] = None
    texts: Annotated[str | None, flag("--texts", panel=INPUT, metavar="FILE", text="a text a line, UTF-8")] = None
    ids: Annotated[str | None, flag("--ids", panel=INPUT, metavar="FILE.jsonl", text="token ids, special ones too, a list a line")] = None
    mask_id: Annotated[int | None, flag("--mask-id", panel=INPUT, metavar="N", text="id of the mask, where there is no tokenizer")] = None
    top_k: Annotated[int, flag("--top-k", "-k", panel=OUTPUT, metavar="N", text="tokens for each mask")] = 5
    batch_size: Annotated[int, flag("--batch-size", panel="Speed", metavar="N", text="texts in a pass")] = 32
    json: Annotated[bool, flag("--json", panel=OUTPUT, text="one JSON document and nothing else")] = False

    def __post_init__(self) -> None:
        at_least_one("--top-k", self.top_k)
        at_least_one("--batch-size", self.batch_size)


def fill_mask(world: World, engine: EncoderOptions, options: FillMaskOptions) -> None:
    """The likeliest tokens for every [MASK] (or <mask>) of a text."""
    texts = texts_from(options.text, options.texts, options.ids)
    import math

    from models.cli.open_model import open_model
    from models.encode import fill_masks, pass_size

    opened = open_model(world, engine, quiet=options.json, seen={"fill-mask": options, "the texts": texts}, encoder=True)
    if opened is None:
        return
    if opened.config.mlm_head == "none":
        raise UserError(f"--model {opened.name}: holds no masked-LM head; give the folder of one that does with --model DIR")
    mask_id, name = mask_of(opened, options.mask_id)
    ids = encode_texts(opened, texts, opened.config.max_positions)
    for text, tokens in zip(texts, ids, strict=True):
        if mask_id not in tokens:
            raise UserError(f"{text.name}: holds no mask (this model's is {name}), or none in the part that is read")
    opened.load()

    mine = opened.mesh.my_share(len(ids))
    share = [ids[i] for i in mine]
    masks = fill_masks(opened.runner, share, mask_id, options.top_k, options.batch_size, opened.encode_graphs(*pass_size(share, options.batch_size)))
    if engine.check_nan and not all(math.isfinite(p) for of_text in masks for mask in of_text for _, p in mask.tokens):
        raise UserError("--check-nan: probabilities are not all finite: try --dtype fp32 (or bf16)")
    parts = opened.between_groups.gather(list(zip(mine, masks, strict=True)))
    if parts is None or not opened.speaks:
        return
    found = dict(pair for part in parts for pair in part)
    results = [result(opened, text, ids[i], found[i]) for i, text in enumerate(texts)]
    if options.json:
        document = {"model": opened.name, "device": opened.device.name, "dtype": opened.dtype, "results": results}
        sys.stdout.write(json_line(document))
    else:
        show(texts, results)


def mask_of(opened: OpenModel, given: int | None) -> tuple[int, str]:
    """The mask's id and what to call it."""
    if given is not None:
        if not 0 <= given < opened.config.vocab_size:
            raise UserError(f"--mask-id {given} is outside the vocabulary of {opened.config.vocab_size}")
        return given, f"id {given}"
    if opened.tokenizer is None:
        raise UserError(f"--model {opened.name} has no tokenizer; give the mask's id with --mask-id N, and token ids with --ids FILE.jsonl")
    for name in MASKS:
        found = opened.tokenizer.token_id(name)
        if found is not None:
            return found, name
    raise UserError(f"{opened.tokenizer.source}: has neither {' nor '.join(MASKS)}; give the mask's id with --mask-id N")


def result(opened: OpenModel, text: Prompt, ids: list[int], masks: list[Mask]) -> dict[str, Any]:
    """One entry of `results`; token: its text, None without a tokenizer."""

    def token(number: int) -> str | None:
        return None if opened.tokenizer is None else opened.tokenizer.backend.decode([number], skip_special_tokens=False)

    shown = [{"position": m.position, "tokens": [{"id": i, "token": token(i), "probability": p} for i, p in m.tokens]} for m in masks]
    return {"text": text.text, "input_ids": ids, "masks": shown}


def show(texts: list[Prompt], results: list[dict[str, Any]]) -> None:
    for text, entry in zip(texts, results, strict=True):
        for number, mask in enumerate(entry["masks"], start=1):
            sys.stdout.write(f"{text.name if text.text is None else text.text}\nmask {number}, token {mask['position'] + 1}\n")
            for token in mask["tokens"]:
                sys.stdout.write(f"  {token['probability']:6.4f}  {token['id'] if token['token'] is None else token['token']}\n")
