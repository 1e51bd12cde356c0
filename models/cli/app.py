"""The commands by name. Each lives in a file of its own, which imports what it needs when it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from l2_dense_parallel.world import World
from models.cli.bench import BenchOptions, bench
from models.cli.env import env
from models.cli.options import EngineOptions
from models.cli.parameters import takes
from models.cli.run import RunOptions, run
from models.cli.score import ScoreOptions, score


def application(world: World) -> Callable[..., Any]:
    """The Typer application; its commands run on the ranks of `world`."""
    app = typer.Typer(
        name="strata", help="Run GPT models: DeepSpeed-Inference in readable Python.", add_completion=False,
        pretty_exceptions_enable=False, rich_markup_mode="rich",
    )  # fmt: skip

    def add(name: str, command: Callable[..., None], *groups: type) -> None:
        app.command(name, help=command.__doc__)(takes(lambda *options: command(world, *options), *groups))

    add("run", run, EngineOptions, RunOptions)
    add("score", score, EngineOptions, ScoreOptions)
    add("bench", bench, EngineOptions, BenchOptions)
    add("env", env)
    return app
