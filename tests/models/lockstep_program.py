"""Data-parallel groups whose steps are replays, sharing experts by a slot a token: `mpirun -n 3 python -m tests.models.lockstep_program NEW EP BATCH`.

On the host a graph repeats its calls, so this is the loop of a GPU run without the GPU. Rank 0 prints the tokens of the golden prompts, dealt out to the groups,
and how many steps were replayed.
"""

from __future__ import annotations

import json
import sys

from l2_dense_parallel.faults import run
from l2_dense_parallel.world import World


def main(world: World) -> int:
    new, ep, batch = map(int, sys.argv[1:])
    from l1_kernels.device import prepare

    prepare("cpu")
    from l1_kernels.device import open_device
    from l2_dense_parallel.mesh import MeshShape, build_mesh
    from l2_dense_parallel.open_collective import open_collective
    from l3_moe.exchange.open_exchange import open_exchange
    from l3_moe.experts import LoopExperts
    from models.build import build_runner
    from models.decode_graph import Decoder
    from models.find import find_model
    from models.generate import GenerateOptions, cache_size, generate
    from models.groups import groups_of
    from models.loading import open_checkpoint
    from tests.golden.opened import golden

    class Counting(Decoder):
        replayed = 0

        def launch(self) -> int:
            self.replayed += 1
            return super().launch()

    LoopExperts.on_device = lambda *_: True  # type: ignore[method-assign,assignment]  # a host's "graph" may count rows
    world.start()
    mesh = build_mesh(world, MeshShape(1, 1, world.size, ep, world.size // ep))
    assert mesh is not None
    checkpoint, device = open_checkpoint(find_model("shakespeare_moe")), open_device("cpu")
    moe = checkpoint.config.moe
    assert moe is not None
    exchange = open_exchange(world, mesh, device, moe.num_experts)
    runner = build_runner(checkpoint, device, "fp32", mesh.shard, open_collective(world, mesh, "tp"), exchange=exchange)
    prompts = [prompt["ids"] for prompt in golden("golden/shakespeare_moe/golden.json")["prompts"]]
    groups = groups_of(runner, open_collective(world, mesh, "dp"))
    mine, options = mesh.my_share(len(prompts)), GenerateOptions(new, batch_size=batch)
    my_prompts = [prompts[i] for i in mine]
    decoder = Counting(runner, runner.new_cache(*groups.agree(cache_size(my_prompts, options))), groups=groups)
    with groups.equal():
        assert runner.graph_problem() is None
    assert runner.graph_problem() is not None  # prompts have different lengths
    results = generate(runner, my_prompts, options, indices=list(mine), decoder=decoder, groups=groups)
    everyones = world.exchange(([(result.index, result.token_ids) for result in results], decoder.replayed))
    if world.rank == 0:
        assert len({replayed for _, replayed in everyones}) == 1  # all or none
        tokens = [ids for _, ids in sorted(pair for found, _ in everyones for pair in found)]
        print(json.dumps({"tokens": tokens, "replayed": everyones[0][1]}))
    return 0


if __name__ == "__main__":
    run(main)
