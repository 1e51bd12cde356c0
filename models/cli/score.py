"""`score`: mean negative log-likelihood and perplexity of a text, and on demand the logits behind them."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

from l1_kernels.errors import UserError
from l2_dense_parallel.world import World
from models.cli.inputs import Prompt, read_ids, read_text
from models.cli.options import OUTPUT, EngineOptions, flag

if TYPE_CHECKING:
    import numpy as np

    from models.cli.open_model import OpenModel

INPUT = "Input"


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """What to score."""

    text: Annotated[str | None, flag("--text", panel=INPUT, metavar="FILE", text="one text, UTF-8")] = None
    ids: Annotated[str | None, flag("--ids", panel=INPUT, metavar="FILE.jsonl", text="token ids, [1, 2, 3] a line, each a text of its own")] = None
    dump_logits: Annotated[
        str | None, flag("--dump-logits", panel=OUTPUT, metavar="OUT.npz", text="logits_0, logits_1 ... float32 [S, V], one a text")
    ] = None
    json: Annotated[bool, flag("--json", panel=OUTPUT, text="one JSON document and nothing else")] = False


def score(world: World, engine: EngineOptions, options: ScoreOptions) -> None:
    """Mean negative log-likelihood (natural logarithm) a predicted token, and perplexity, of a text."""
    if (options.text is None) == (options.ids is None):
        raise UserError("give one of --text FILE and --ids FILE.jsonl")
    texts = read_ids(options.ids) if options.ids is not None else [Prompt(str(options.text), text=read_text(str(options.text), "--text"))]
    from models.cli.open_model import open_model
    from models.cli.progress import progress_bar
    from models.generate import check_prompts, context_limit
    from models.scoring import Window, windows
    from models.scoring import score as score_windows

    opened = open_model(world, engine, quiet=options.json, seen={"score": options, "texts": texts})
    if opened is None:
        return
    ids = [encode(opened, text) for text in texts]
    for text, tokens in zip(texts, ids, strict=True):
        check_prompts(opened.config, [[token] for token in tokens] or [[]], 0, [text.name] * max(1, len(tokens)))
    if all(len(tokens) < 2 for tokens in ids):
        raise UserError(f"{texts[0].name}: one token predicts nothing; give at least two")
    target = None
    if options.dump_logits is not None and opened.speaks:
        target = WholeFile(options.dump_logits)
    with target or nullcontext():
        opened.load()
        cut = list(windows(ids, context_limit(opened.config)))
        mine = [cut[i] for i in opened.mesh.my_share(len(cut))]
        kept: dict[tuple[int, int], np.ndarray] | None = {} if options.dump_logits is not None else None
        with progress_bar("scoring", world.rank == 0, unit="windows") as progress:
            done = 0

            def count(_: Window) -> None:
                nonlocal done
                done += 1
                progress(done, len(mine))

            total, predictions = score_windows(opened.runner, mine, count, kept)
        parts = opened.between_groups.gather((total, predictions, kept))
        if parts is not None and opened.speaks:
            if target is not None:
                target.write(lambda file: save_logits(file, [logits for _, _, logits in parts], len(texts)))
            report(options.json, sum(total for total, _, _ in parts), sum(count for _, count, _ in parts))


def encode(opened: OpenModel, text: Prompt) -> list[int]:
    """Without special tokens: a text that is scored is not a prompt."""
    if text.ids is not None:
        return text.ids
    if opened.tokenizer is None:
        raise UserError(f"--text: --model {opened.name} has no tokenizer; give token ids with --ids FILE.jsonl")
    return opened.tokenizer.encode(text.text or "")


def report(as_json: bool, total: float, predictions: int) -> None:
    mean = total / predictions
    perplexity = math.exp(mean) if mean < 700 else math.inf
    if as_json:
        # Infinity is no JSON; a model that bad has no perplexity worth a number.
        found = {"tokens": predictions, "mean_nll": mean if math.isfinite(mean) else None, "perplexity": perplexity if math.isfinite(perplexity) else None}
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        sys.stdout.write(f"{predictions} predicted tokens: mean NLL {mean:.4f}, perplexity {perplexity:.3f}\n")


def save_logits(file: BinaryIO, parts: list[dict[tuple[int, int], np.ndarray]], num_texts: int) -> None:
    """Windows of all data-parallel groups -> logits_0, logits_1, ... [S, V], one a text."""
    import numpy as np

    by_place = {place: logits for part in parts for place, logits in part.items()}
    arrays: dict[str, Any] = {}
    for text in range(num_texts):
        of_text = [by_place[place] for place in sorted(by_place) if place[0] == text]
        arrays[f"logits_{text}"] = np.concatenate(of_text)
    np.savez(file, **arrays)


class WholeFile:
    """A file that is there only when it is complete: written beside its place under another name, then renamed."""

    def __init__(self, name: str) -> None:
        """Raises UserError where it cannot be written, before any work is done."""
        self.path = path = Path(name).resolve()  # of a link, what it points to is replaced
        if path.is_dir():
            raise UserError(f"--dump-logits {name}: is a folder; give a file")
        if path.exists() and not path.is_file():  # renaming onto a device or a pipe would put a file in its place
            raise UserError(f"--dump-logits {name}: is no regular file; give a file")
        try:
            handle, self._temporary = tempfile.mkstemp(prefix=path.name + ".", suffix=".part", dir=path.parent)
            self._file = os.fdopen(handle, "wb")
        except OSError as error:
            raise UserError(f"--dump-logits {name}: cannot be written ({error.strerror})") from None

    def write(self, save: Callable[[BinaryIO], None]) -> None:
        try:
            save(self._file)
            self._file.flush()
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(self._temporary, 0o666 & ~mask)  # mkstemp makes private files
            os.replace(self._temporary, self.path)
        except OSError as error:
            raise UserError(f"--dump-logits {self.path}: cannot be written ({error.strerror})") from None

    def __enter__(self) -> WholeFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        with suppress(FileNotFoundError):
            os.unlink(self._temporary)
