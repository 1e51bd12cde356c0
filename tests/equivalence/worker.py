"""Runs one setting on several ranks: `mpirun -n 2 python -m tests.equivalence.worker SETTING.json`. Rank 0 judges.

Prints one JSON line with the verdict. Ranks need processes of their own; on one rank the test runs in pytest's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from l2_dense_parallel.faults import run
from l2_dense_parallel.world import World


def main(world: World) -> int:
    fields = json.loads(Path(sys.argv[1]).read_text())
    from l1_kernels.device import open_device, prepare

    prepare(fields["device"])
    from l2_dense_parallel.mesh import MeshShape, build_mesh
    from l2_dense_parallel.open_collective import open_collective
    from l2_dense_parallel.pipeline.open_pipe import open_pipe
    from tests.equivalence.exchanges import Exchanges
    from tests.equivalence.run import check_setting
    from tests.equivalence.settings import Setting

    setting = Setting(**(fields | {"cases": tuple(fields["cases"])}))
    world.start()
    experts = (setting.ep, setting.tp * setting.dp // setting.ep) if setting.ep else (1, 1)
    mesh = build_mesh(world, MeshShape(setting.tp, setting.pp, setting.dp, *experts))
    assert mesh is not None
    device = open_device(setting.device, world.launch.local_rank if setting.device == "cuda" else 0, setting.fused, setting.gemm, setting.overlap)
    collective = open_collective(world, mesh, "tp", setting.device, kernels=device.kernels, all_reduce=setting.all_reduce)
    exchanges = Exchanges(world, mesh, device, setting.all_to_all, setting.graph)
    collective = exchanges.watch(collective)
    verdict = check_setting(
        setting, device, mesh.shard, collective, judging=mesh.rank == 0, pipe=open_pipe(world, mesh, device), exchanges=exchanges
    )  # fmt: skip
    if mesh.rank == 0:
        print(json.dumps(verdict.to_json()))
    return 0


if __name__ == "__main__":
    run(main)
