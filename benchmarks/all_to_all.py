"""All-to-all of tokens and experts on the ranks given: flat, hierarchical and PCC, there and back, beside the alpha-beta model (l3_moe/exchange/cost.py).

    mpirun -n 4 python -m benchmarks.all_to_all --tp 2 [--ep 4] [--tokens 1,16,256] [--hidden 2048] [--device cpu|cuda]

Each data-parallel group has so many tokens, each of which visits two experts, evenly; the experts give their rows back as they are, so what is timed is
the exchange: split, counts, rows there, rows back, weighted sum. A time is the median of the rounds, of the slowest rank. alpha and beta are fitted to all of the
times together, so the last columns say how well messages and bytes alone explain them; more ranks than cores wait for each other's turn on a core.

"slots" is PCC with a slot a token (on GPUs a graph of 20 exchanges, so that the host is not in the time).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.record import Others, circumstances, write
from l1_kernels.errors import UserError
from l2_dense_parallel.faults import run
from l2_dense_parallel.world import World

TOP_K, ROUNDS, CALLS = 2, 15, 20
FORMS = ("flat", "hierarchical", "pcc", "slots")
PACKAGES = ("strata-inference", "numpy", "mpi4py", "cupy-cuda13x", "cupy-cuda12x", "nvidia-nccl-cu13", "nvidia-nccl-cu12")


def main(world: World) -> int:
    options = arguments()
    from l1_kernels.device import open_device, prepare

    prepare(options.device)
    world.start()
    if world.size < 2:
        raise UserError("all_to_all: one rank exchanges nothing; start two or more (mpirun -n 4)")
    from l2_dense_parallel.gpus import choose_gpus
    from l2_dense_parallel.mesh import build_mesh, choose_shape
    from l3_moe.exchange.hierarchical import node_size
    from l3_moe.exchange.open_exchange import open_exchange

    index = choose_gpus(world, asked=True, share_gpu=False)[0] if options.device == "cuda" else 0
    shape = choose_shape(world.size, options.tp, options.tp, options.experts, options.tp, 1, options.ep)
    if shape.dp == 1:
        raise UserError(f"--tp {options.tp}: all {world.size} ranks have every token, and PCC sends none; give a smaller --tp")
    mesh = build_mesh(world, shape)
    assert mesh is not None
    device = open_device(options.device, index)
    exchanges = {form: open_exchange(world, mesh, device, options.experts, form) for form in FORMS[:3]}
    group = {"hierarchical": node_size([world.hosts[member] for member in mesh.stage_members])}
    rows: list[dict[str, Any]] = []
    with Others() as others:
        for tokens in options.tokens:
            calls, counters = ways(exchanges, device, mesh, options, tokens)
            for form, call in calls.items():
                found = {form: seconds(device, call, world.exchange, form == "slots" and device.name == "cuda")}
                for counter in counters[form]:
                    counter.clear()
                call()
                sent = [sum(counter.messages.total() for counter in counters[form]), sum(counter.bytes.total() for counter in counters[form])]
                everyones = world.exchange((found[form], *sent))
                slowest, messages, size = (max(column) for column in zip(*everyones, strict=True))
                rows.append({"tokens": tokens, "form": form, "group": group.get(form, shape.tp), "us": round(1e6 * slowest, 2), "messages": messages, "bytes": size})
    if world.rank == 0:
        document = circumstances(PACKAGES)
        document["mesh"], document["device"], document["rows"] = mesh.describe(), device.description, modelled(rows)
        print(table(document["rows"], f"{world.size} ranks on {device.description}, tp {shape.tp}, dp {shape.dp}, ep {shape.ep}, es {shape.es}, hidden {options.hidden}"))
        print(write(options.out, document, [others.cores]))
    return 0


def ways(exchanges: dict[str, Any], device: Any, mesh: Any, options: argparse.Namespace, tokens: int) -> tuple[dict[str, Callable[[], Any]], dict[str, list[Any]]]:
    """The exchanges of so many tokens by form, and the counters of what each sends."""
    import numpy as np

    from l3_moe.exchange.slots import SlotExchange

    rng = np.random.default_rng(mesh.dp_rank)
    host = np.stack([rng.permutation(options.experts)[:TOP_K] for _ in range(tokens)]).astype(np.int32)
    x, experts = device.to_device(rng.standard_normal((tokens, options.hidden), np.float32)), device.to_device(host)
    share = device.to_device(np.full(host.shape, 0.5, np.float32))

    def by_rows(exchange: Any) -> Callable[[], Any]:
        def call() -> Any:
            trip = exchange.dispatch(x, host)
            return exchange.collect(trip, trip.rows, share)

        return call

    slots = SlotExchange(exchanges["pcc"].hops["across"].peers, device)
    calls = {form: by_rows(exchange) for form, exchange in exchanges.items()}
    calls["slots"] = lambda: slots.collect(slots.dispatch(x, experts, share).x)
    counters = {form: list(exchange.counters().values()) for form, exchange in exchanges.items()}
    return calls, counters | {"slots": [slots.peers.counters]}


def seconds(device: Any, call: Callable[[], Any], meet: Callable[[Any], Any], graphed: bool) -> float:
    """Of one call, the median of ROUNDS rounds that all ranks begin together."""
    if graphed:

        def step() -> Any:
            return [call() for _ in range(CALLS)][-1]

        replay, each = device.capture(step).replay, CALLS
    else:
        replay, each = call, 1
    replay()
    found = []
    for _ in range(ROUNDS):
        device.synchronize()
        meet(None)
        start = time.perf_counter()
        replay()
        device.synchronize()
        found.append((time.perf_counter() - start) / each)
    return statistics.median(found)


def modelled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With what alpha and beta, fitted to all rows, make of each row's messages and bytes."""
    from l3_moe.exchange.cost import Way, fit

    ways = [Way(row["messages"], row["bytes"]) for row in rows]
    alpha, beta = fit(ways, [1e-6 * row["us"] for row in rows])
    return [
        {**row, "model_us": round(1e6 * way.seconds(alpha, beta), 2), "alpha_us": round(1e6 * alpha, 3), "beta_ns_per_kb": round(1e12 * beta, 3)}
        for row, way in zip(rows, ways, strict=True)
    ]


def table(rows: list[dict[str, Any]], head: str) -> str:
    lines = [head, f"alpha {rows[0]['alpha_us']:.2f} us a message, beta {rows[0]['beta_ns_per_kb']:.2f} ns a 1000 bytes, fitted"]
    lines.append(f"{'tokens':>7} {'form':>13} {'messages':>9} {'bytes':>10} {'us':>10} {'model':>10} {'model/us':>9}")
    for row in rows:
        share = row["model_us"] / row["us"]
        lines.append(f"{row['tokens']:7} {row['form']:>13} {row['messages']:9} {row['bytes']:10} {row['us']:10.1f} {row['model_us']:10.1f} {share:9.2f}")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], prog="python -m benchmarks.all_to_all")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--ep", type=int, default=None, help="default: as many as divide ranks and experts")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16, 256], help="of a data-parallel group, with commas between")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", default="all_to_all", help="name of the result file in benchmarks/results")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
