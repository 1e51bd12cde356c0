"""Which rank takes which GPU: one rank a GPU, and ranks beyond that stand aside (design, section 4)."""

from __future__ import annotations

from collections.abc import Sequence

from l1_kernels.errors import UserError
from l2_dense_parallel.world import World, name_ranks


def visible_gpus() -> list[str]:
    """An identity (UUID) for each GPU that this process sees, in CUDA's order; [] where there is none or no CuPy.
    Makes no CUDA context."""
    try:
        from cupy.cuda import runtime
    except ImportError:
        return []
    try:
        count = runtime.getDeviceCount()
        return [str(runtime.getDeviceProperties(i).get("uuid") or runtime.deviceGetPCIBusId(i)) for i in range(count)]
    except runtime.CUDARuntimeError:
        return []


def assign(hosts: Sequence[str], seen: Sequence[Sequence[str]]) -> list[int | None]:
    """For each rank the index, among the GPUs that it sees, of the first that no rank of its machine has taken; None if
    none is left. Right where every rank sees all GPUs and where the launcher showed each its own."""
    taken: set[tuple[str, str]] = set()
    result: list[int | None] = []
    for host, gpus in zip(hosts, seen, strict=True):
        free = [index for index, gpu in enumerate(gpus) if (host, gpu) not in taken]
        result.append(free[0] if free else None)
        if free:
            taken.add((host, gpus[free[0]]))
    return result


def choose_gpus(world: World, asked: bool, share_gpu: bool) -> tuple[int, list[int], str]:
    """All ranks call it together -> (this rank's GPU index, the world ranks that take part, a line to print or "").

    asked: the user named a mesh (--tp, --pp or --ep), so no rank may stand aside: more ranks than GPUs is a UserError.
    share_gpu: ranks take GPUs in turn, several to a GPU."""
    seen = world.exchange(visible_gpus())
    return assign_or_refuse(world.rank, world.hosts, seen, asked, share_gpu)


def assign_or_refuse(
    rank: int, hosts: Sequence[str], seen: Sequence[Sequence[str]], asked: bool, share_gpu: bool
) -> tuple[int, list[int], str]:
    """The rule of `choose_gpus`, on what all ranks see."""
    blind = [r for r, gpus in enumerate(seen) if not gpus]
    if blind:
        who = "" if len(blind) == len(seen) else f" on {name_ranks(blind)}"
        raise UserError(f"--device cuda: there is no usable GPU{who}; use --device cpu")
    everyone = list(range(len(hosts)))
    if share_gpu:
        local = sum(1 for host in hosts[:rank] if host == hosts[rank])
        return local % len(seen[rank]), everyone, ""
    indices = assign(hosts, seen)
    taking_part = [r for r in everyone if indices[r] is not None]
    aside = len(everyone) - len(taking_part)
    if aside and asked:
        raise UserError(
            f"{len(everyone)} ranks but {len(taking_part)} GPU{'s' if len(taking_part) > 1 else ''}: start as many ranks as GPUs "
            f"(mpirun -n {len(taking_part)}), or let ranks share one with --share-gpu"
        )
    line = f"{aside} of {len(everyone)} ranks stand aside: one rank a GPU, {len(taking_part)} here" if aside else ""
    mine = indices[rank]
    return (-1 if mine is None else mine), taking_part, line
