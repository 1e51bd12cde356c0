"""`embed`: texts to vectors of length 1, as one JSON document or as a table of how alike they are."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from l1_kernels.errors import UserError
from l2_dense_parallel.world import World
from models.cli.encoder_inputs import EncoderOptions, encode_texts, texts_from
from models.cli.inputs import Prompt
from models.cli.options import OUTPUT, at_least_one, flag, one_of
from models.cli.output import json_line

if TYPE_CHECKING:
    import numpy as np

    from models.cli.open_model import OpenModel

INPUT = "Input"
TABLE = 12  # texts that fit a table of similarities


@dataclass(frozen=True, slots=True)
class EmbedOptions:
    """What to embed, and how."""

    text: Annotated[list[str] | None, flag("--text", "-t", panel=INPUT, metavar="TEXT", text="a text; may be repeated")] = None
    texts: Annotated[str | None, flag("--texts", panel=INPUT, metavar="FILE", text="a text a line, UTF-8")] = None
    ids: Annotated[str | None, flag("--ids", panel=INPUT, metavar="FILE.jsonl", text="token ids, special ones too, a list a line")] = None
    pooling: Annotated[
        str | None, flag("--pooling", panel=OUTPUT, metavar="mean|cls", text="of all tokens, or the first (default: the checkpoint's, else mean)")
    ] = None
    batch_size: Annotated[int, flag("--batch-size", panel="Speed", metavar="N", text="texts in a pass")] = 32
    json: Annotated[bool, flag("--json", panel=OUTPUT, text="one JSON document and nothing else")] = False

    def __post_init__(self) -> None:
        one_of("--pooling", self.pooling, ("mean", "cls"))  # POOLINGS, without importing NumPy
        at_least_one("--batch-size", self.batch_size)


def embed(world: World, engine: EncoderOptions, options: EmbedOptions) -> None:
    """Sentence embeddings: vectors of length 1, whose products are cosine similarities."""
    texts = texts_from(options.text, options.texts, options.ids)
    import numpy as np

    from models.cli.open_model import open_model
    from models.cli.progress import progress_bar
    from models.encode import POOLINGS, pass_size, sentence_settings
    from models.encode import embed as embed_ids

    opened = open_model(world, engine, quiet=options.json, seen={"embed": options, "the texts": texts}, encoder=True)
    if opened is None:
        return
    settings = sentence_settings(opened.checkpoint.path)
    pooling = options.pooling or settings.pooling
    if pooling not in POOLINGS:
        raise UserError(f"--model {opened.name}: its 1_Pooling/config.json asks for {pooling}; choose {' or '.join(POOLINGS)} with --pooling")
    limit = min(opened.config.max_positions, settings.max_tokens or opened.config.max_positions)
    ids = encode_texts(opened, texts, limit)
    opened.load()

    mine = opened.mesh.my_share(len(ids))
    share = [ids[i] for i in mine]
    graphs = opened.encode_graphs(*pass_size(share, options.batch_size))
    with progress_bar("embedding", opened.speaks, unit="texts") as progress:
        vectors = embed_ids(opened.runner, share, options.batch_size, pooling, lambda done: progress(done, len(mine)), graphs)
    if engine.check_nan and not np.isfinite(vectors).all():
        first = mine[int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])]
        raise UserError(f"--check-nan: the embedding of {texts[first].name} is not all finite: try --dtype fp32 (or bf16)")
    parts = opened.between_groups.gather((list(mine), vectors))
    if parts is None or not opened.speaks:
        return
    whole = np.empty((len(ids), opened.config.hidden_size), np.float32)
    for places, part in parts:
        whole[places] = part
    if options.json:
        sys.stdout.write(json_line(document(opened, whole)))
    else:
        show(texts, whole)


def document(opened: OpenModel, vectors: np.ndarray) -> dict[str, object]:
    """What `embed --json` prints; other tools depend on its keys."""
    shown = [[float(f"{value:.9g}") for value in vector] for vector in vectors]  # 9 digits hold a float32
    return {"model": opened.name, "device": opened.device.name, "dtype": opened.dtype, "embeddings": shown}


def show(texts: list[Prompt], vectors: np.ndarray) -> None:
    """Cosine similarities of a few texts; of one, or of many, each vector's first values."""
    if not 1 < len(texts) <= TABLE:
        for text, vector in zip(texts, vectors, strict=True):
            values = " ".join(f"{value:8.4f}" for value in vector[:8])
            sys.stdout.write(f"{values} ...  [{len(vector)}]  {named(text)}\n")
        return
    sys.stdout.write("cosine similarity\n")
    for text, row in zip(texts, vectors @ vectors.T, strict=True):
        sys.stdout.write(" ".join(f"{value:6.3f}" for value in row) + f"  {named(text)}\n")


def named(text: Prompt) -> str:
    words = text.name if text.text is None else " ".join(text.text.split())
    return words if len(words) <= 60 else words[:57] + "..."
