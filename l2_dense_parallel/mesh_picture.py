"""The mesh for people: a line a stage and data-parallel group, the ranks of a tensor-parallel group in brackets.

    stage 0  layers  0-13   [0 1] [2 3]    on a
    stage 1  layers 14-27   [4 5] [6 7]    on b
"""

from __future__ import annotations

from collections.abc import Sequence

from l2_dense_parallel.mesh import MeshShape


def draw_mesh(shape: MeshShape, order: Sequence[int], hosts: Sequence[str], layers: Sequence[range]) -> str:
    """order: the world ranks in mesh order (mesh.placement); hosts: each world rank's machine; layers: each stage's."""
    digits = len(str(max(order)))
    last = len(str(max(stage.stop - 1 for stage in layers)))
    lines = []
    for stage in range(shape.pp):
        ranks = list(order[stage * shape.dp * shape.tp : (stage + 1) * shape.dp * shape.tp])
        groups = [ranks[i : i + shape.tp] for i in range(0, len(ranks), shape.tp)]
        row = " ".join("[" + " ".join(f"{rank:{digits}}" for rank in group) + "]" for group in groups)
        machines = list(dict.fromkeys(hosts[rank] for rank in ranks))
        where = f"    on {', '.join(machines)}" if any(machines) else ""
        held = layers[stage]
        lines.append(f"stage {stage}  layers {held.start:{last}}-{held.stop - 1:<{last}}   {row}{where}")
    return "\n".join(lines)
