"""Runs one setting over its cases and writes every observation: `python -m tests.equivalence.worker SETTING.json OUT.npz`.

A process of its own, because ranks (under mpirun) and the simulator need one; rank 0 writes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

CASES = Path(__file__).parents[1] / "conformance"


def main() -> None:
    setting_file, out = sys.argv[1:]
    fields = json.loads(Path(setting_file).read_text())

    from l2_dense_parallel.ranks import plan_threads, read_launcher

    plan_threads(read_launcher())
    from l1_kernels.device import prepare

    prepare(fields["device"])

    import numpy as np

    from tests.equivalence.run import run_setting
    from tests.equivalence.settings import Setting

    fields["cases"] = tuple(fields["cases"])
    rank, found = run_setting(Setting(**fields), CASES)
    if rank == 0:
        np.savez(out, **{f"{case}/{name}": array for case, arrays in found.items() for name, array in arrays.items()})


if __name__ == "__main__":
    main()
