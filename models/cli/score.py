"""`score`: mean negative log-likelihood and perplexity of a text, and on demand the logits behind them.

`--compare fp16` reads the weights a second time, in that dtype, and says how far the mean is from it: what int8 costs on a text. It
stands with its standard error, since the difference of two dtypes is often no larger than what the choice of the text makes of it.
"""

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
from models.cli.options import OUTPUT, EngineOptions, flag, one_of

if TYPE_CHECKING:
    import numpy as np

    from models.cli.open_model import OpenModel
    from models.scoring import Window

INPUT = "Input"
COMPARED = ("fp32", "fp16", "bf16")


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """What to score."""

    text: Annotated[str | None, flag("--text", panel=INPUT, metavar="FILE", text="one text, UTF-8")] = None
    ids: Annotated[str | None, flag("--ids", panel=INPUT, metavar="FILE.jsonl", text="token ids, [1, 2, 3] a line, each a text of its own")] = None
    compare: Annotated[
        str | None, flag("--compare", panel=OUTPUT, metavar="|".join(COMPARED), text="score with the weights in this dtype too, and say how far --dtype is from it")
    ] = None
    dump_logits: Annotated[
        str | None, flag("--dump-logits", panel=OUTPUT, metavar="OUT.npz", text="logits_0, logits_1 ... float32 [S, V], one a text")
    ] = None
    json: Annotated[bool, flag("--json", panel=OUTPUT, text="one JSON document and nothing else")] = False

    def __post_init__(self) -> None:
        one_of("--compare", self.compare, COMPARED)


def score(world: World, engine: EngineOptions, options: ScoreOptions) -> None:
    """Mean negative log-likelihood (natural logarithm) a predicted token, and perplexity, of a text."""
    if (options.text is None) == (options.ids is None):
        raise UserError("give one of --text FILE and --ids FILE.jsonl")
    refuse_what_generates(engine)
    texts = read_ids(options.ids) if options.ids is not None else [Prompt(str(options.text), text=read_text(str(options.text), "--text"))]
    from models.cli.open_model import open_model
    from models.generate import check_prompts, context_limit
    from models.scoring import windows

    opened = open_model(world, engine, quiet=options.json, seen={"score": options, "texts": texts})
    if opened is None:
        return
    if options.compare == opened.dtype:
        raise UserError(f"--compare {options.compare}: the weights are held in {opened.dtype} already; give another --dtype, such as int8")
    ids = [encode(opened, text) for text in texts]
    for text, tokens in zip(texts, ids, strict=True):
        check_prompts(opened.config, [[token] for token in tokens] or [[]], 0, [text.name] * max(1, len(tokens)))
    if all(len(tokens) < 2 for tokens in ids):
        raise UserError(f"{texts[0].name}: one token predicts nothing; give at least two")
    target = None
    with world.agreement() if opened.mesh.size == world.size else nullcontext():
        if options.dump_logits is not None and opened.speaks:
            target = WholeFile(options.dump_logits)
    with target or nullcontext():
        opened.load()
        cut = list(windows(ids, context_limit(opened.config)))
        mine = [cut[i] for i in opened.mesh.my_share(len(cut))]
        kept: dict[tuple[int, int], np.ndarray] | None = {} if options.dump_logits is not None else None
        losses, others = read(opened, mine, kept), None
        opened.say_drops()
        if options.compare is not None:
            opened.load(options.compare)
            others = read(opened, mine, None)
        parts = opened.between_groups.gather((losses, others, kept))
        if parts is not None and opened.speaks:
            if target is not None:
                target.write(lambda file: save_logits(file, [logits for _, _, logits in parts], len(texts)))
            report(options, opened.held, [losses for losses, _, _ in parts], [others for _, others, _ in parts])


def refuse_what_generates(engine: EngineOptions) -> None:
    """Flags of steps and micro-batches: a text is scored in passes that follow each other, and logits come to the host after each."""
    given = (("--schedule", engine.schedule), ("--prompt-micro-batches", engine.prompt_micro_batches), ("--token-micro-batches", engine.token_micro_batches))
    for name, value in given:
        if value is not None:
            raise UserError(f"{name} {value}: a score's passes go through the stages one by one, not in micro-batches; leave it out")
    if engine.graph:
        raise UserError("--graph: replays steps that generate, and a score has none; leave it out")


def read(opened: OpenModel, mine: list[Window], kept: dict[tuple[int, int], np.ndarray] | None) -> np.ndarray:
    """The loss of every prediction of this rank's windows."""
    from models.cli.progress import progress_bar
    from models.scoring import token_losses

    with progress_bar("scoring", opened.speaks, unit="windows") as progress:
        done = 0

        def count(_: Window) -> None:
            nonlocal done
            done += 1
            progress(done, len(mine))

        return token_losses(opened.model, mine, count, kept, opened.groups)


def encode(opened: OpenModel, text: Prompt) -> list[int]:
    """Without special tokens: a text that is scored is not a prompt."""
    if text.ids is not None:
        return text.ids
    if opened.tokenizer is None:
        raise UserError(f"--text: --model {opened.name} has no tokenizer; give token ids with --ids FILE.jsonl")
    return opened.tokenizer.encode(text.text or "")


def report(options: ScoreOptions, held: str, parts: list[np.ndarray], other_parts: list[np.ndarray]) -> None:
    """parts, other_parts: the losses of all data-parallel groups, in --dtype and, where it was given, in --compare."""
    import numpy as np

    from models.scoring import change_of

    losses = np.concatenate(parts)
    found: dict[str, Any] = {"tokens": len(losses), **of_mean(losses)}
    line = "{tokens} predicted tokens: mean NLL {mean_nll:.4f}, perplexity {perplexity:.3f}".format(**found)
    if options.compare is not None:
        others = np.concatenate(other_parts)
        change, error = (100 * share for share in change_of(losses, others))
        compared = {"dtype": options.compare, **of_mean(others), "change_percent": change, "standard_error_percent": error}
        line += f"\n{options.compare}: mean NLL {compared['mean_nll']:.4f}; {held} is {change:+.3f} % from it (standard error {error:.3f} %)"
        found["compared"] = without_infinities(compared)
    sys.stdout.write((json.dumps(without_infinities(found)) if options.json else line) + "\n")


def of_mean(losses: np.ndarray) -> dict[str, Any]:
    mean = float(losses.mean())
    return {"mean_nll": mean, "perplexity": math.exp(mean) if mean < 700 else math.inf}


def without_infinities(found: dict[str, Any]) -> dict[str, Any]:
    """Infinity is no JSON; a model that bad has no perplexity worth a number."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in found.items()}


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
