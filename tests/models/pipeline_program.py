"""Ranks of test_pipeline.py: `mpirun -n 4 python -m tests.models.pipeline_program CASES.json`. Rank 0 prints each case's tokens as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from l2_dense_parallel.faults import run
from l2_dense_parallel.world import World


class HostLink:
    """A link (nccl_pipe.py) between host devices, whose streams do everything at once: what hosts do when they run ahead, over a real MPI."""

    def __init__(self, communicator: Any, peer: int) -> None:
        self.communicator, self.peer = communicator, peer
        self.sent: list[Any] = []

    def send(self, x: Any, stream: Any) -> None:
        self.sent.append((self.communicator.Isend(x, dest=self.peer), x))

    def receive(self, out: Any, stream: Any) -> None:
        self.communicator.Recv(out, source=self.peer)

    def check(self) -> None:
        while self.sent:
            self.sent.pop()[0].Wait()


def main(world: World) -> int:
    cases = json.loads(Path(sys.argv[1]).read_text())
    from l1_kernels.device import open_device, prepare

    name = cases.get("device", "cpu")
    prepare(name)
    from l2_dense_parallel.mesh import MeshShape, build_mesh
    from l2_dense_parallel.open_collective import open_collective
    from l2_dense_parallel.pipeline.nccl_pipe import NCCLPipe
    from l2_dense_parallel.pipeline.open_pipe import open_pipe
    from l2_dense_parallel.pipeline.stages import make_stages
    from l2_dense_parallel.slicing import Shard
    from models.build import build_runner
    from models.find import find_model
    from models.generate import GenerateOptions
    from models.loading import open_checkpoint
    from models.pipeline import Plan, generate_pipelined
    from models.sampling import Sampling

    world.start()
    mesh = build_mesh(world, MeshShape(tp=cases["tp"], pp=cases["pp"]))
    assert mesh is not None
    device = open_device(name, world.launch.local_rank if name == "cuda" else 0)
    pipe = open_pipe(world, mesh, device)
    if cases.get("direct"):
        assert world.watchdog is not None
        communicator = mesh.communicators["pp"]
        links = communicator.Dup()  # of all stages together
        before, after = (HostLink(links, mesh.pp_rank + step) if 0 <= mesh.pp_rank + step < mesh.pp else None for step in (-1, 1))
        pipe = NCCLPipe(communicator, world.watchdog, mesh.members["pp"], device, before, after, ahead_bytes=9000)
    assert pipe is not None and pipe.stage == mesh.pp_rank
    checkpoint = open_checkpoint(find_model("shakespeare"))
    stage = make_stages(checkpoint.config, mesh.pp)[mesh.pp_rank]
    collective = open_collective(world, mesh, "tp", name)
    runner = build_runner(checkpoint, device, "fp32", Shard(mesh.tp_rank, mesh.tp), collective, stage=stage, kv=cases["kv"])
    assert runner.step_problem() is None or not cases["graphs"]
    found = []
    for case in cases["cases"]:
        options = GenerateOptions(
            case["new_tokens"], Sampling(**case.get("sampling", {})), eos_ids=tuple(case.get("eos_ids", ())), batch_size=case["batch_size"]
        )
        results = generate_pipelined(runner, pipe, case["prompts"], options, Plan(*case["plan"]), graphs=cases["graphs"])
        assert mesh.pp_rank == 0 or not results
        found.append([[r.token_ids, r.finish_reason, len(r.token_times)] for r in results])
    if mesh.rank == 0:
        print(json.dumps({"found": found, "bytes": dict(pipe.counters.bytes)}))
    return 0


if __name__ == "__main__":
    run(main)
