"""The programs that the tests of this folder start under mpirun: `program.py NAME [ARGUMENT ...]`.

Run as a file, not collected. Each prints what the test then checks.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from l1_kernels.errors import UserError
from l2_dense_parallel import faults, watchdog
from l2_dense_parallel.world import World


def say(*words: object) -> None:
    print(*words, flush=True)


# -- what must work ------------------------------------------------------------------------------------------------


def sums(world: World) -> None:
    """Every collective against its definition; the same bits on every rank."""
    import numpy as np

    from l2_dense_parallel.mesh import MeshShape, build_mesh
    from l2_dense_parallel.open_collective import open_collective

    mesh = build_mesh(world.start(), MeshShape(tp=world.size))
    assert mesh is not None
    collective = open_collective(world, mesh, "tp")
    assert (collective.rank, collective.size) == (world.rank, world.size) == (mesh.tp_rank, mesh.tp)
    rng = np.random.default_rng(5)  # the same on every rank: each knows what the others hold
    for size in (1, 7, 37, 199, 2048, 100_003):
        parts = rng.standard_normal((world.size, size)).astype(np.float32)
        x = parts[world.rank].copy()
        assert collective.all_reduce(x) is x
        exact = parts.astype(np.float64).sum(axis=0)
        assert np.abs(x - exact).max() <= 1e-6 * np.abs(parts).sum(axis=0).max()
        assert len(set(world.exchange(x.tobytes()))) == 1, f"all_reduce of {size} differs between ranks"
    for n, m in ((1, 1), (1, 199), (7, 37), (3, 1)):
        parts = rng.standard_normal((world.size, n, m)).astype(np.float32)
        gathered = collective.all_gather(parts[world.rank].copy())
        assert gathered.shape == (n, world.size * m) and gathered.dtype == np.float32
        assert np.array_equal(gathered, np.concatenate(list(parts), axis=1))
    assert collective.broadcast({"ids": [1, 2], "rank": world.rank}) == {"ids": [1, 2], "rank": 0}
    assert collective.gather(world.rank * 10) == ([r * 10 for r in range(world.size)] if world.rank == 0 else None)
    collective.barrier()
    assert collective.counters.messages["all_reduce"] == 6
    assert collective.counters.bytes["all_reduce"] == 4 * (1 + 7 + 37 + 199 + 2048 + 100_003)
    for bad in (np.zeros(4, np.float64), np.zeros((4, 4), np.float32)[:, ::2]):
        try:
            collective.all_reduce(bad)
        except ValueError:
            continue
        raise AssertionError("a bad array was taken")
    say("sums right on rank", world.rank)


def staged(world: World) -> None:
    """What --share-gpu does, with host arrays that have CuPy's get and set."""
    import numpy as np

    from l2_dense_parallel.mesh import MeshShape, build_mesh
    from l2_dense_parallel.mpi_collective import StagedCollective

    class DeviceArray(np.ndarray):
        def get(self) -> np.ndarray:
            return np.array(self, copy=True)

        def set(self, values: np.ndarray) -> None:
            assert values.flags.c_contiguous
            self[...] = values

    mesh = build_mesh(world.start(), MeshShape(tp=world.size))
    assert mesh is not None and world.watchdog is not None
    collective = StagedCollective(mesh.communicators["tp"], world.watchdog, "tp", mesh.members["tp"])
    x = DeviceArray((3, 5), np.float32)
    x[...] = world.rank + 1
    collective.all_reduce(x)
    assert (np.asarray(x) == sum(range(1, world.size + 1))).all()
    y = DeviceArray((2, 3), np.float32)
    y[...] = world.rank
    gathered = collective.all_gather(y)
    assert isinstance(gathered, DeviceArray)
    assert np.array_equal(np.asarray(gathered), np.repeat([np.arange(world.size)], 2, axis=0).repeat(3, axis=1))
    say("staged right on rank", world.rank)


def meshes(world: World) -> None:
    """dp = 2: sums stay within a tp group, results come to rank 0, a rank that stands aside waits quietly."""
    import numpy as np

    from l2_dense_parallel.mesh import MeshShape, build_mesh
    from l2_dense_parallel.open_collective import open_collective

    world.start()
    assert len(world.hosts) == world.size
    mesh = build_mesh(world, MeshShape(tp=2, dp=2))
    assert mesh is not None and (mesh.dp_rank, mesh.tp_rank) == divmod(world.rank, 2)
    tp, dp = open_collective(world, mesh, "tp"), open_collective(world, mesh, "dp")
    x = np.full(3, float(world.rank), np.float32)
    assert tp.all_reduce(x)[0] == (1.0, 5.0)[mesh.dp_rank]
    shares = dp.gather([f"p{i}" for i in mesh.my_share(5)])
    if world.rank == 0:
        assert shares == [["p0", "p2", "p4"], ["p1", "p3"]]
    else:
        assert mesh.dp_rank or world.rank == 1
    small = build_mesh(world, MeshShape(tp=2), taking_part=[0, 2])
    assert (small is not None) == (world.rank in (0, 2))
    if small is not None:
        y = np.full(1, float(world.rank), np.float32)
        assert open_collective(world, small, "tp").all_reduce(y)[0] == 2.0
        assert small.members["tp"] == (0, 2)
    say("mesh right on rank", world.rank)


def uneven(world: World, seconds: str) -> None:
    """Slow is no fault: rank 0 works on while the others wait for it in a collective, and then at the end."""
    world.start()
    if world.rank == 0:
        time.sleep(float(seconds))
    world.exchange(None)
    if world.rank == 0:
        time.sleep(3.0)
    say("done on rank", world.rank)


def threads(world: World) -> None:
    say("threads", os.environ["OMP_NUM_THREADS"], os.environ["NUMBA_NUM_THREADS"], "numpy" in sys.modules, "mpi4py" in sys.modules)


# -- what must fail well ----------------------------------------------------------------------------------------------


def usage(world: World) -> None:
    import typer

    application = typer.Typer()

    @application.command()
    def command(number: int = 1) -> None:
        raise AssertionError("not reached")

    application(args=["--number", "many"], standalone_mode=False)


def fail(world: World, how: str, who: str) -> None:
    """Rank `who` ("all": every rank) fails in way `how`, while the rest wait for it in an all-reduce."""
    import numpy as np

    from l2_dense_parallel.mesh import MeshShape, build_mesh
    from l2_dense_parallel.open_collective import open_collective

    mesh = build_mesh(world.start(), MeshShape(tp=world.size))
    assert mesh is not None
    collective = open_collective(world, mesh, "tp")
    collective.barrier()
    if who in ("all", str(world.rank)):
        _FAULTS[how](world, collective)
    collective.all_reduce(np.ones(2048, np.float32))
    collective.all_reduce(np.ones(2048, np.float32))
    say("survived on rank", world.rank)


def _user(world: World, collective: object) -> None:
    raise UserError("--tp 3 does not divide\nthe model's 4 heads")


def _each(world: World, collective: object) -> None:
    raise UserError(f"file {world.rank} is missing")


def _exception(world: World, collective: object) -> None:
    raise ZeroDivisionError("a fault of ours")


def _text(world: World, collective: object) -> None:
    sys.exit("a last word")


def _thread(world: World, collective: object) -> None:
    threading.Thread(target=lambda: 1 // 0, name="loader").start()
    time.sleep(60.0)


_FAULTS: dict[str, Callable] = {
    "user": _user,
    "each": _each,
    "exception": _exception,
    "text": _text,
    "thread": _thread,
    "exit0": lambda world, collective: sys.exit(0),
    "exit3": lambda world, collective: sys.exit(3),
    "kill": lambda world, collective: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda world, collective: os.kill(os.getpid(), signal.SIGSTOP),
    "interrupt": lambda world, collective: os.kill(os.getpid(), signal.SIGINT),
    "barrier": lambda world, collective: collective.barrier(),
}


def generate(world: World, phase: str, how: str, who: str, silence: str, *arguments: str) -> None:
    """`python -m models.gpt ARGUMENTS`, where rank `who` fails in way `how` as it takes its weights ("loading"), begins its first
    pass ("prefill"), its third ("decode"), or as it leaves ("end"). silence: the watchdog's, "" as it is."""
    from models.gpt import command_line

    watchdog.SILENCE = float(silence or watchdog.SILENCE)
    if phase != "end":
        from l1_kernels.device import prepare

        prepare("cpu")
        from l4_offload.resident import ResidentWeights
        from models.runner import Runner

        owner, name, count = (ResidentWeights, "load", 1) if phase == "loading" else (Runner, "layers", {"prefill": 1, "decode": 3}[phase])
        real, calls = getattr(owner, name), 0

        def failing(*given: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == count and str(world.rank) == who:
                _FAULTS[how](world, None)
            return real(*given, **named)

        setattr(owner, name, failing)
    command_line(world, list(arguments))
    if phase == "end" and str(world.rank) == who:
        _FAULTS[how](world, None)


def leave(world: World, who: str) -> None:
    """Rank `who` returns from main as if all were done."""
    world.start()
    if str(world.rank) != who:
        world.exchange(None)


def early(world: World, who: str) -> None:
    """A fault on one rank before MPI has started."""
    if str(world.rank) == who:
        raise ZeroDivisionError("before MPI")
    world.start()
    world.exchange(None)


def agreed(world: World, who: str) -> None:
    world.start()
    with world.agreement():
        if str(world.rank) == who:
            raise UserError("weights.bin is truncated")
    raise AssertionError("not reached")


def arguments(world: World, name: str) -> None:
    world.start()
    seen = {"--max-new-tokens": 16, "model": "a" * 64, "prompts": ["To be"]}
    world.check_same_arguments(**seen)
    say("same on rank", world.rank)
    if world.rank == 1:
        seen[name] = 17 if name.startswith("--") else "b" * 64
    world.check_same_arguments(**seen)
    raise AssertionError("not reached")


def no_mpi4py(world: World) -> None:
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    world.start()
    say("one rank needs no MPI")


def pipe(world: World) -> None:
    for i in range(100_000):
        print(i)


# -- on GPUs ------------------------------------------------------------------------------------------------------------


def gpu_sums(world: World, how: str) -> None:
    """NCCL (or host-staged) collectives against their definition, on CuPy arrays and inside a CUDA graph."""
    import cupy
    import numpy as np

    from l2_dense_parallel.gpus import choose_gpus
    from l2_dense_parallel.mesh import MeshShape, build_mesh
    from l2_dense_parallel.open_collective import open_collective

    index, taking_part, line = choose_gpus(world.start(), asked=True, share_gpu=how == "share")
    assert taking_part == list(range(world.size)) and line == ""
    cupy.cuda.Device(index).use()
    mesh = build_mesh(world, MeshShape(tp=world.size))
    assert mesh is not None
    collective = open_collective(world, mesh, "tp", "cuda", share_gpu=how == "share")
    rng = np.random.default_rng(5)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for size in (1, 7, 199, 2048, 1_000_003):
            parts = rng.standard_normal((world.size, size)).astype(np.float32)
            x = cupy.asarray(parts[world.rank])
            assert collective.all_reduce(x) is x
            assert np.abs(x.get() - parts.astype(np.float64).sum(axis=0)).max() <= 1e-6 * np.abs(parts).sum(axis=0).max()
            assert len(set(world.exchange(x.get().tobytes()))) == 1
        for n, m in ((1, 199), (7, 37)):
            parts = rng.standard_normal((world.size, n, m)).astype(np.float32)
            gathered = collective.all_gather(cupy.asarray(parts[world.rank]))
            assert isinstance(gathered, cupy.ndarray) and gathered.flags.c_contiguous
            assert np.array_equal(gathered.get(), np.concatenate(list(parts), axis=1))
        assert collective.broadcast(world.rank) == 0
        collective.barrier()
        if how == "nccl":
            y = cupy.ones(2048, cupy.float32)
            stream.synchronize()
            stream.begin_capture()
            collective.all_reduce(y)
            graph = stream.end_capture()
            y.fill(1.0)
            for _ in range(3):
                graph.launch(stream)
            collective.synchronize()  # type: ignore[attr-defined]
            assert (y.get() == float(world.size**3)).all()
    say("right on GPU", index)


def _on_gpus(world: World, how: str) -> tuple[Any, Any]:
    """(device, collective), its all-reduce by `how`."""
    from l1_kernels.device import open_device
    from l2_dense_parallel.gpus import choose_gpus
    from l2_dense_parallel.mesh import MeshShape, build_mesh
    from l2_dense_parallel.open_collective import open_collective

    index, _, _ = choose_gpus(world.start(), asked=True, share_gpu=False)
    device = open_device("cuda", index)
    mesh = build_mesh(world, MeshShape(tp=world.size))
    assert mesh is not None
    return device, open_collective(world, mesh, "tp", "cuda", kernels=device.kernels, all_reduce=how)


def gpu_small_sums(world: World, how: str) -> None:
    """Sums over peer memory below the crossover and by NCCL beyond it, with and without a residual: right, and the same bits on all ranks."""
    import cupy
    import numpy as np

    device, collective = _on_gpus(world, how)
    limit = collective.one_shot_bytes
    assert len(set(world.exchange((limit, tuple(collective.timings))))) == 1, "the ranks disagree on the crossover"
    if how == "one-shot":
        assert limit == 256 << 10
    else:
        assert limit == max((timing.bytes for timing in collective.timings if timing.one_shot_us <= timing.nccl_us), default=0)
    rng = np.random.default_rng(5)  # the same on every rank: each knows what the others hold
    around = [limit // 4 + more for more in (-1, 0, 1)] if limit else []
    small, bytes_small = 0, 0
    for size in (1, 7, 37, 199, 2048, 4096 + 3, 65_535, 65_536, 65_537, 1_000_003, *around):
        parts = rng.standard_normal((world.size, size)).astype(np.float32)
        before = rng.standard_normal(size).astype(np.float32)
        exact, bound = parts.astype(np.float64).sum(axis=0), 1e-6 * np.abs(parts).sum(axis=0).max()
        x = cupy.asarray(parts[world.rank])
        assert collective.all_reduce(x) is x
        total = x.get()
        assert np.abs(total - exact).max() <= bound, f"all_reduce of {size} is wrong"
        part, residual = cupy.asarray(parts[world.rank]), cupy.asarray(before)
        given = collective.reduce_add(part, residual)
        assert (given is residual) == (4 * size <= limit) and (given is None) == (4 * size > limit)
        if given is not None:
            small, bytes_small = small + 1, bytes_small + 4 * size
            np.testing.assert_array_equal(residual.get(), before + total)
        np.testing.assert_array_equal(part.get(), parts[world.rank])
        assert len(set(world.exchange((total.tobytes(), residual.get().tobytes())))) == 1, f"a sum of {size} differs between ranks"
    assert (collective.counters.messages["reduce_add"], collective.counters.bytes["reduce_add"]) == (small, bytes_small)
    assert collective.counters.messages["all_reduce"] == 10 + len(around)
    misaligned = cupy.asarray(np.arange(2, dtype=np.float32).repeat(50))[1 + world.rank :][:97]  # by 4 bytes on one rank, by 8 on the other
    misaligned[:] = world.rank + 1
    assert (collective.all_reduce(misaligned).get() == world.size * (world.size + 1) // 2).all()
    for bad in (cupy.zeros(4, np.float64), cupy.zeros((4, 4), np.float32)[:, ::2]):
        try:
            collective.all_reduce(bad)
        except ValueError:
            continue
        raise AssertionError("a bad array was taken")
    say("small sums right on GPU", device.index, collective.note)


def gpu_graph_sums(world: World, how: str) -> None:
    """Two thousand sums of changing numbers in a replayed graph, between NCCL's all_gathers and kernels that overlap with them."""
    import numpy as np

    device, collective = _on_gpus(world, how)
    sizes = (16, 1600, 4096, 5003, 16_384, 65_536, 100_000)
    rng = np.random.default_rng(8)
    sources = [device.zeros((4, size)) for size in sizes]
    residuals = [device.zeros(size) for size in sizes]
    row = device.to_device(np.full((1, 3), world.rank, np.float32))

    def step() -> list[Any]:
        found = []
        for source, residual in zip(sources, residuals, strict=True):
            for turn in range(4):
                part = device.kernels.add(device.zeros(source[turn].shape), source[turn])
                if turn % 2 or collective.reduce_add(part, residual) is None:
                    device.kernels.add(residual, collective.all_reduce(part))
            found.append(device.kernels.add(device.zeros(residual.shape), residual))
        return [*found, collective.all_gather(row)]

    graph = device.capture(step)
    for replay in range(72):  # of 28 sums
        parts = [rng.integers(-1000, 1000, (world.size, 4, size)).astype(np.float32) for size in sizes]  # whole: sums are exact
        for source, residual, part in zip(sources, residuals, parts, strict=True):
            source.set(part[world.rank])
            residual.fill(replay)
        *found, gathered = graph.replay()
        collective.synchronize()
        for size, got, part in zip(sizes, found, parts, strict=True):
            np.testing.assert_array_equal(got.get(), replay + part.sum(axis=(0, 1)), err_msg=f"replay {replay}, size {size}")
        assert np.array_equal(gathered.get()[0], np.arange(world.size).repeat(3))
    say("graph sums right on GPU", device.index)


def gpu_norm_sums(world: World) -> None:
    """A sum with its residual and the norm after it, in replayed graphs: the bits of the three launches by themselves."""
    import numpy as np

    from l1_kernels.regions import NormArgs
    from l1_kernels.sbi_gemm.launch import norm_rows

    device, collective = _on_gpus(world, "one-shot")
    rng = np.random.default_rng(9)
    for shape, kind, dtype in (((1, 4096), "rmsnorm", "bf16"), ((16, 1600), "layernorm", "fp16"), ((5, 8), "layernorm", "bf16"), ((8, 8192), "rmsnorm", "fp16")):
        gain, shift = (device.to_device(rng.standard_normal(shape[1]).astype(np.float32)) for _ in range(2))
        norm = NormArgs(kind, gain, shift if kind == "layernorm" else None, 1e-5)
        source, residual = device.zeros(shape), device.zeros(shape)

        def step(source: Any = source, residual: Any = residual, norm: Any = norm, dtype: str = dtype) -> list[Any]:
            found = []
            for _ in range(10):
                together, apart = device.kernels.add(device.zeros(source.shape), residual), device.kernels.add(device.zeros(source.shape), residual)
                rows = collective.reduce_add_norm(source, together, norm, dtype)
                assert rows is not None
                device.kernels.add(apart, collective.all_reduce(device.kernels.add(device.zeros(source.shape), source)))
                found += [together, apart, rows, norm_rows(device.kernels, apart, norm.kind, norm.weight, norm.bias, norm.eps, dtype)]
                device.kernels.add(residual, together)
            return found

        graph = device.capture(step)
        for _ in range(20):
            parts, before = rng.standard_normal((world.size, *shape)).astype(np.float32), rng.standard_normal(shape).astype(np.float32)
            source.set(parts[world.rank])
            residual.set(before)
            found = graph.replay()
            collective.synchronize()
            host = [array.get() for array in found]
            exact = before + parts.astype(np.float64).sum(axis=0)
            assert np.abs(host[0] - exact).max() <= 1e-6 * (np.abs(parts).sum(axis=0) + np.abs(before)).max()
            for together, apart, rows, wanted in zip(host[::4], host[1::4], host[2::4], host[3::4], strict=True):
                np.testing.assert_array_equal(together, apart)
                np.testing.assert_array_equal(rows, wanted)
            assert len(set(world.exchange(b"".join(array.tobytes() for array in host)))) == 1, "ranks have other bits"
    wide, long = device.zeros((1, 8200)), device.zeros((17, 8))
    for x in (wide, long, device.zeros((16, 8192))):  # too wide, too many, beyond the crossover
        assert collective.reduce_add_norm(x, x, norm, "fp16") is None
    say("norms right on GPU", device.index)


def gpu_refuses_a_wrong_sum(world: World) -> None:
    """The trial at the start finds it, on whichever rank it is."""
    from l1_kernels.peer_reduce.launch import PeerReduce

    real = PeerReduce.all_reduce

    def wrong(self: Any, x: Any) -> Any:
        real(self, x)
        if self.rank == 1:
            x[-1] += 1
        return x

    PeerReduce.all_reduce = wrong  # type: ignore[method-assign]
    _on_gpus(world, "auto")
    raise AssertionError("not reached")


def gpu_leave(world: World, how: str) -> None:
    import cupy

    _, collective = _on_gpus(world, how)
    x = cupy.ones(2048, cupy.float32)
    collective.all_reduce(x)
    collective.synchronize()
    if world.rank == 1:
        return
    collective.all_reduce(x)
    collective.synchronize()
    say("survived")


def gpu_refused(world: World) -> None:
    from l2_dense_parallel.gpus import choose_gpus

    choose_gpus(world.start(), asked=True, share_gpu=False)
    raise AssertionError("not reached")


PROGRAMS: dict[str, Callable] = {
    function.__name__: function
    for function in (
        *(sums, staged, meshes, uneven, threads),
        *(usage, fail, generate, leave, early, agreed, arguments, no_mpi4py, pipe),
        *(gpu_sums, gpu_small_sums, gpu_graph_sums, gpu_norm_sums, gpu_refuses_a_wrong_sum, gpu_leave, gpu_refused),
    )
}

if __name__ == "__main__":
    faults.run(lambda world: PROGRAMS[sys.argv[1]](world, *sys.argv[2:]))
