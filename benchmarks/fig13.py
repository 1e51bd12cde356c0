"""Fig 13: how soon all prompts have their first token, by the hybrid schedule against as many micro-batches of prompts as stages.

    mpirun -n 2 python -m benchmarks.fig13 [--model gpt-j-6b] [--batches 24] [--check]

The paper's is the latency of 175B's prompts at batch 24; here the same comparison on what there is. A few tokens follow the prompts, as they do in a real run.
It is fig8's program with two plans; bars: fig8's.
"""

from __future__ import annotations

import argparse

from benchmarks.fig8 import compare
from benchmarks.pipeline_run import common_arguments, numbers
from l2_dense_parallel.faults import run
from l2_dense_parallel.world import World


def main(world: World) -> int:
    return compare(world, arguments())


def arguments() -> argparse.Namespace:
    parser = common_arguments("fig13", (__doc__ or "").split("\n")[0], "fig13")
    parser.add_argument("--batches", type=numbers, default=[8, 24])
    parser.set_defaults(new=8, plans=["equal", "hybrid"])
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
