"""What benchmarks/all_reduce.py prints of times that are given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.all_reduce import chosen, shape_of, table
from l2_dense_parallel.peer_trial import SIZES

ROWS = [
    {"bytes": 4096, "nccl_us": 7.0, "one_shot_us": 5.0, "nccl_add_us": 9.0, "one_shot_add_us": 5.25, "nccl_norm_us": 11.0, "one_shot_norm_us": 5.5},
    {"bytes": 262144, "nccl_us": 12.0, "one_shot_us": 13.5, "nccl_add_us": 14.0, "one_shot_add_us": 13.75, "nccl_norm_us": 16.0, "one_shot_norm_us": 14.0},
]


def test_the_table() -> None:
    assert table(ROWS, "GPU", 2).splitlines() == [
        "2 x GPU, us a call",
        "   bytes          NCCL      one-shot     NCCL, add  one-shot add    NCCL, norm one-shot norm",
        "    4096          7.00          5.00          9.00          5.25         11.00          5.50",
        "  262144         12.00         13.50         14.00         13.75         16.00         14.00",
    ]
    assert chosen(ROWS) == 4096


def test_sizes_are_whole_tokens() -> None:
    assert [shape_of(size) for size in SIZES] == [(1, 1024), (1, 2048), (1, 4096), (2, 4096), (4, 4096), (8, 4096), (16, 4096)]


def test_it_wants_ranks() -> None:
    """Before it looks for a GPU."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.all_reduce"], capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert done.returncode == 2 and done.stderr == "error: all_reduce: one rank sums nothing; start two or more (mpirun -n 2)\n"
