"""The commands by name. Each lives in a file of its own, which imports what it needs when it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from l2_dense_parallel.world import World
from models.cli.bench import BenchOptions, bench
from models.cli.embed import EmbedOptions, embed
from models.cli.encoder_inputs import EncoderOptions
from models.cli.env import env
from models.cli.fill_mask import FillMaskOptions, fill_mask
from models.cli.options import EngineOptions
from models.cli.parameters import takes
from models.cli.run import RunOptions, run
from models.cli.score import ScoreOptions, score

# Console script -> its help, and its commands: name, function, groups of flags.
PROGRAMS: dict[str, tuple[str, list[tuple[Any, ...]]]] = {
    "strata": (
        "Run GPT models: DeepSpeed-Inference in readable Python.",
        [
            ("run", run, EngineOptions, RunOptions),
            ("score", score, EngineOptions, ScoreOptions),
            ("bench", bench, EngineOptions, BenchOptions),
            ("env", env),
        ],
    ),
    "strata-bert": (
        "Run encoders (BERT, DistilBERT, RoBERTa): sentence embeddings and masked words.",
        [
            ("embed", embed, EncoderOptions, EmbedOptions),
            ("fill-mask", fill_mask, EncoderOptions, FillMaskOptions),
        ],
    ),
}


def application(world: World, program: str = "strata") -> Callable[..., Any]:
    """The Typer application of a console script; its commands run on the ranks of `world`."""
    text, commands = PROGRAMS[program]
    app = typer.Typer(name=program, help=text, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")

    def add(name: str, command: Callable[..., None], *groups: type) -> None:
        app.command(name, help=command.__doc__)(takes(lambda *options: command(world, *options), *groups))

    for name, command, *groups in commands:
        add(name, command, *groups)
    return app
