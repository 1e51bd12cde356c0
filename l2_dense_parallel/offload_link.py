"""What taking turns on a shared link gains: two ranks that go through the layers together, keys and values in host memory, one link for both.

    python -m l2_dense_parallel.offload_link --layers 28 --layer-ms 0.12 --copy-ms 0.1

Every second layer's cache moves, either the same ones on both ranks, or by `--offload-parity` the odd ones on one and the even ones on the other. A layer of
both ranks begins when both have done the one before and have what it needs; copies that are under way at the same time share the link. Loads are asked for as
kv_offload.py does: two before the pass, then the next but one when a layer is done. What a layer makes anew is little, and left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def seconds_of_pass(layers: int, layer: float, copy: float, moved: tuple[Sequence[int], Sequence[int]], shared: bool = True) -> float:
    """One pass of two ranks. layer: of work; copy: of one layer's cache, alone on the link; moved: the layers that each rank brings, in order."""
    waiting = [list(some) for some in moved]  # not asked for
    left: list[list[tuple[int, float]]] = [[], []]  # asked for, in order: (layer, time alone that is left)
    here: list[set[int]] = [set(), set()]
    now, done_at, current, working = 0.0, 0.0, 0, False
    for rank in (0, 1):
        left[rank] += [(index, copy) for index in waiting[rank][:2]]
        del waiting[rank][:2]
    while current < layers:
        if not working and all(current in here[rank] or current not in moved[rank] for rank in (0, 1)):
            working, done_at = True, now + layer
        active = [rank for rank in (0, 1) if left[rank]]
        speed = 1 / len(active) if active and shared else 1.0
        until = min([left[rank][0][1] / speed for rank in active] + ([done_at - now] if working else []))
        now += until
        for rank in active:
            index, rest = left[rank][0]
            left[rank][0] = index, rest - until * speed
            if left[rank][0][1] <= 1e-12:
                here[rank].add(left[rank].pop(0)[0])
        if working and done_at - now <= 1e-12:
            for rank in (0, 1):
                if current in moved[rank] and waiting[rank]:
                    left[rank].append((waiting[rank].pop(0), copy))
            current, working = current + 1, False
    return now


def gain(layers: int, layer: float, copy: float) -> tuple[float, float]:
    """(the pass's time with both ranks moving the even layers, with each moving its own)."""
    even, odd = range(0, layers, 2), range(1, layers, 2)
    return seconds_of_pass(layers, layer, copy, (even, even)), seconds_of_pass(layers, layer, copy, (even, odd))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m l2_dense_parallel.offload_link", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--layer-ms", type=float, default=0.12, help="work of a layer")
    parser.add_argument("--copy-ms", type=float, default=0.1, help="one layer's cache over the link, alone")
    given = parser.parse_args(arguments)
    if given.layers < 1 or not 0 < given.layer_ms < float("inf") or not 0 <= given.copy_ms < float("inf"):
        print("error: --layers must be at least 1, --layer-ms more than 0 and --copy-ms at least 0", file=sys.stderr)
        return 2
    together, turns = gain(given.layers, given.layer_ms, given.copy_ms)
    print(f"both at once {together:.3f} ms, in turns {turns:.3f} ms: {together / turns:.3f} x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
