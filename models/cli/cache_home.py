"""`--kv` and `--gpu-memory` of a run: what was asked for, what fits, and what is said about it (models/kv_home.py has the reasons)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from l1_kernels.errors import UserError
from models.cli.open_model import OpenModel
from models.generate import GenerateOptions, cache_size
from models.kv_home import Home, Need, Speed, fits, row_bytes, slowest, weigh, work_bytes, worst
from models.speeds import bytes_read, link_speed, read_bandwidth

T = TypeVar("T")


def settle(opened: OpenModel, prompts: Sequence[Sequence[int]], options: GenerateOptions, kv: str) -> GenerateOptions:
    """Tells the runner where its caches live, and gives the options with as many sequences side by side as there is room for. All ranks of a model call it
    together, after `load` and before caches are made. UserError, on all of them, where there is no room."""
    if not prompts or kv == "cpu":
        return options
    rows, context = cache_size(prompts, options)
    need = agreed(opened, need_of(opened, rows, context, max(map(len, prompts))), worst)
    if fits(rows, need):
        return options
    if kv == "gpu":
        raise UserError(
            f"--kv gpu: the keys and values of {rows} sequences of {context} tokens are {rows * need.row / 2**20:.3g} MiB, and {max(0, need.free) / 2**20:.3g} MiB are free; "
            f"{f'use --batch-size {need.free // need.row}, or' if need.free >= need.row else 'use'} --kv auto"
        )
    speed = Speed(read_bandwidth(opened.device), link_speed(opened.device))
    home = weigh(rows, need, agreed(opened, speed, slowest))
    opened.runner.kv = home.kv
    if opened.speaks:
        print(line(home, rows, need), file=sys.stderr, flush=True)
    return replace(options, batch_size=home.rows)


def need_of(opened: OpenModel, rows: int, context: int, prompt: int) -> Need:
    runner = opened.runner
    row, in_buffers = row_bytes(runner.config, len(runner.blocks), runner.heads.kv_count, context, runner.kv_dtype)
    free = opened.device.memory()[0]
    if opened.memory is not None:
        free = min(free, opened.memory - runner.held_bytes())
    return Need(free - work_bytes(runner.config, rows * prompt, rows), row, in_buffers, bytes_read(runner, rows))


def agreed(opened: OpenModel, mine: T, worst: Callable[[Sequence[T]], T]) -> T:
    """The ranks of a model, which go through a run together, take the worst of all of them for a measure."""
    for group in (opened.collective, opened.between_stages):
        everyone = group.gather(mine)
        mine = group.broadcast(None if everyone is None else worst(everyone))
    return mine


def line(home: Home, rows: int, need: Need) -> str:
    room = f"{rows * need.row / 2**20:.3g} MiB of keys and values, room for {max(0, need.free) / 2**20:.3g}"
    if home.kv == "gpu":
        return f"{room}: {home.rows} of {rows} sequences side by side"
    return f"{room}: they live in host memory, {home.rows} of {rows} sequences side by side"
