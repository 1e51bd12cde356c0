"""Stages that sleep for given times: `mpirun -n 4 python -m tests.models.sleeping CASES.json`. Rank 0 prints, for each case, every stage's bars.

On a machine with fewer cores than stages real stages prove nothing about idle time, since an idle one lends its core away. Sleep needs no core.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from l1_kernels.device import HostDevice
from l2_dense_parallel.collectives import NoCollective
from l2_dense_parallel.faults import run
from l2_dense_parallel.world import World

SIZE, VOCABULARY = 64, 16


class SleepingRunner:
    """What models/pipeline.py asks of a runner; it sleeps for `prompt` s a prompt, and `token` s a pass of tokens."""

    def __init__(self, prompt: float, token: float) -> None:
        self.prompt, self.token = prompt, token
        self.config = SimpleNamespace(rope=None, max_positions=4096, vocab_size=VOCABULARY, hidden_size=SIZE)
        self.device = HostDevice("sleep", Any)  # type: ignore[arg-type]
        self.collective = NoCollective()

    def new_cache(self, num_rows: int, context: int, rows_at_once: int) -> None:
        return None

    def stage_pass(self, batch: Any, cache: Any, x: np.ndarray | None) -> np.ndarray:
        prompts = len(batch.outputs) if len(batch.tokens) > len(batch.outputs) else 0
        time.sleep(self.prompt * prompts if prompts else self.token)
        return np.zeros((len(batch.tokens), SIZE), np.float32) if x is None else x

    def logits(self, batch: Any, x: np.ndarray) -> np.ndarray:
        return np.zeros((len(batch.outputs), VOCABULARY), np.float32)


def main(world: World) -> int:
    cases = json.loads(Path(sys.argv[1]).read_text())
    from l2_dense_parallel.mesh import MeshShape, build_mesh
    from l2_dense_parallel.pipeline.open_pipe import open_pipe
    from l2_dense_parallel.pipeline.simulate import Bar
    from models.generate import GenerateOptions
    from models.pipeline import Plan, generate_pipelined

    world.start()
    mesh = build_mesh(world, MeshShape(pp=world.size))
    assert mesh is not None
    pipe = open_pipe(world, mesh)
    assert pipe is not None
    runner: Any = SleepingRunner(cases["prompt"], cases["token"])
    for case in cases["cases"]:
        bars: list[Bar] = []
        world.exchange(None)
        prompts = [[1, 2]] * case["sequences"]
        generate_pipelined(runner, pipe, prompts, GenerateOptions(cases["new_tokens"], batch_size=64), Plan(*case["plan"]), bars=bars)
        everyone = world.exchange([(b.stage, b.work.number, b.work.part, b.sequences, b.start, b.end) for b in bars])
        if mesh.rank == 0:
            print(json.dumps([bar for some in everyone for bar in some]), flush=True)
    return 0


if __name__ == "__main__":
    run(main)
