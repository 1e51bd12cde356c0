"""GPUs that are as late as they may be: streams, events, a pool that gives freed memory to the next who asks, graphs, and links between neighbours.

Hosts are threads; all their GPUs are one thread, which takes a random stream that can go on and does the next thing in it. So whatever order the
streams' rules allow comes about sooner or later, and what is not ordered goes wrong: memory that was freed too early is another's by then, and holds his numbers.
Where no stream can go on although there is work, and no host does anything either, `Machine.stuck` is set, and every host that waits raises.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

PATIENCE = 20.0  # s without a step before hosts give up


class Stuck(Exception):
    """Somebody waits for ever."""


class Machine:
    """All GPUs. `links[s]`: what goes from stage s to s + 1; `sent`, `received`: sizes in the order in which each end's stream came to them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.streams: list[FakeStream] = []
        self.lock = threading.Condition()
        self.stopped = False
        self.stuck = False
        self.sent: dict[int, list[int]] = defaultdict(list)
        self.received: dict[int, list[int]] = defaultdict(list)
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Machine:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.stopped = True
            self.lock.notify_all()
        self.thread.join()

    def _run(self) -> None:
        moved = time.monotonic()
        while True:
            with self.lock:
                if self.stopped:
                    return
                able = [stream for stream in self.streams if stream.work and stream.work[0].able()]
                if able:
                    stream = self.random.choice(able)
                    try:
                        stream.work.popleft().do()
                    except Exception:  # a kernel's fault: hosts see it where they wait
                        self.stuck = True
                        self.lock.notify_all()
                        return
                    moved = time.monotonic()
                    self.lock.notify_all()
                    continue
                if any(stream.work for stream in self.streams) and time.monotonic() - moved > PATIENCE:
                    self.stuck = True
                    self.lock.notify_all()
                self.lock.wait(0.05)

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.lock:
            while not condition():
                if self.stuck or self.stopped:
                    raise Stuck
                self.lock.wait(0.2)


class Task:
    def __init__(self, do: Callable[[], None], able: Callable[[], bool] = lambda: True) -> None:
        self.do, self.able = do, able


class FakeEvent:
    """recorded: how often it was enqueued; passed: the last of these that the device has come to."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.recorded, self.passed, self.device = machine, 0, 0, None

    def record(self, stream: FakeStream | None = None) -> None:
        assert stream is not None
        stream.record(self)

    def synchronize(self) -> None:
        now = self.recorded
        self.machine.wait(lambda: self.passed >= now)

    @property
    def done(self) -> bool:
        with self.machine.lock:
            if self.machine.stuck:
                raise Stuck
            return self.passed >= self.recorded


class FakeStream:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.work: deque[Task] = deque()
        with machine.lock:
            machine.streams.append(self)

    def put(self, task: Task) -> None:
        with self.machine.lock:
            self.work.append(task)
            self.machine.lock.notify_all()

    def record(self, event: FakeEvent) -> None:
        event.recorded += 1
        now = event.recorded

        def reached() -> None:
            event.passed = max(event.passed, now)

        self.put(Task(reached))

    def wait_event(self, event: FakeEvent) -> None:
        now = event.recorded  # what was recorded by now, not what will be
        self.put(Task(lambda: None, lambda: event.passed >= now))


class DeviceArray(np.ndarray):
    """Whole arrays of a device's memory. `a[...] = b` and `fill` are enqueued, as CuPy's are; the host must not read it."""

    memory: Any
    gpu: Any

    def __array_finalize__(self, base: Any) -> None:
        self.memory, self.gpu = getattr(base, "memory", None), getattr(base, "gpu", None)

    def __setitem__(self, key: Any, value: Any) -> None:
        assert key is Ellipsis
        self.gpu.enqueue_copy(self, value)

    def fill(self, value: Any) -> None:
        to = raw(self)
        self.gpu.launch(lambda: to.fill(value))


def raw(array: np.ndarray) -> np.ndarray:
    """Its memory, and no hold on it: what a kernel gets."""
    if not isinstance(array, DeviceArray):
        return array
    return np.frombuffer(array.memory, array.dtype, array.size).reshape(array.shape)


class FakeDevice:
    """One GPU as l1_kernels.device has it, of one host thread."""

    name = "cuda"

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.main = FakeStream(machine)
        self.pool: dict[int, list[bytearray]] = defaultdict(list)
        self.recording: list[Callable[[], None]] | None = None
        self.xp = SimpleNamespace(
            array=self.clone, ascontiguousarray=lambda x: x, argmax=self._reduced(np.argmax, np.int64), max=self._reduced(np.max, np.float32),
            isfinite=self._isfinite,
            where=self._where,
        )  # fmt: skip

    def _reduced(self, function: Any, dtype: Any) -> Any:
        def call(x: DeviceArray, axis: int) -> DeviceArray:
            source = raw(x)
            return self.made(x.shape[:1], dtype, lambda to: np.copyto(to, function(source, axis=axis)))

        return call

    def _isfinite(self, x: DeviceArray) -> DeviceArray:
        source = raw(x)
        return self.made(x.shape, np.bool_, lambda to: np.isfinite(source, out=to))

    def _where(self, condition: DeviceArray, x: DeviceArray, other: int) -> DeviceArray:
        chosen, source = raw(condition), raw(x)
        return self.made(x.shape, x.dtype, lambda to: np.copyto(to, np.where(chosen, source, other)))

    def launch(self, kernel: Callable[[], None], stream: FakeStream | None = None) -> None:
        if self.recording is not None:
            self.recording.append(kernel)
        else:
            (stream or self.main).put(Task(kernel))

    def made(self, shape: Any, dtype: Any, write: Callable[[np.ndarray], Any]) -> DeviceArray:
        out = self.empty(shape, dtype)
        to = raw(out)
        self.launch(lambda: write(to))
        return out

    def empty(self, shape: Any, dtype: Any = np.float32) -> DeviceArray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        free = self.pool[size]
        memory = free.pop() if free and self.recording is None else bytearray(b"\x7f" * size)
        array = np.frombuffer(memory, dtype, int(np.prod(shape))).reshape(shape).view(DeviceArray)
        array.memory, array.gpu = memory, self
        if self.recording is None:  # a graph's memory is its own
            weakref.finalize(array, free.append, memory)
        return array

    def zeros(self, shape: Any, dtype: Any = np.float32) -> DeviceArray:
        return self.made(shape, dtype, lambda to: to.fill(0))

    def clone(self, x: DeviceArray) -> DeviceArray:
        source = raw(x)
        return self.made(x.shape, x.dtype, lambda to: np.copyto(to, source))

    def to_device(self, host: np.ndarray) -> DeviceArray:
        host = np.array(host)
        return self.made(host.shape, host.dtype, lambda to: np.copyto(to, host))

    def to_host(self, array: DeviceArray) -> np.ndarray:
        out = np.empty(array.shape, array.dtype)
        self.copy(out, array, self.main)
        event = self.event()
        event.record()
        event.synchronize()
        return out

    def enqueue_copy(self, to: Any, source: Any) -> None:
        self.copy(to, source, self.main)

    def copy(self, to: Any, source: Any, stream: FakeStream) -> None:
        a, b = raw(to), raw(source)
        self.launch(lambda: np.copyto(a, b), stream)

    def stream(self) -> FakeStream:
        return FakeStream(self.machine)

    def current_stream(self) -> FakeStream:
        return self.main

    def event(self) -> FakeEvent:
        event = FakeEvent(self.machine)
        event.record = lambda stream=None: (stream or self.main).record(event)  # type: ignore[method-assign]
        return event

    def elapsed_ms(self, start: FakeEvent, end: FakeEvent) -> float:
        end.synchronize()
        return 0.0

    def pinned(self, shape: Any, dtype: Any = np.float32) -> np.ndarray:
        return np.full(shape, -7, dtype)

    def mapped(self, shape: Any, dtype: Any = np.float32) -> tuple[np.ndarray, DeviceArray]:
        device = self.zeros(shape, dtype)
        host = np.frombuffer(device.memory, dtype).reshape(shape)
        return host, device

    def capture(self, step: Callable[[], Any]) -> Any:
        step()
        self.recording = kernels = []
        result = step()
        self.recording = None

        def replay() -> Any:
            for kernel in kernels:
                self.launch(kernel)
            return result

        return SimpleNamespace(replay=replay)


class FakeLink:
    """Both ends of the way from stage `number` to the next: a rendezvous. A send is over when its receive is reached, and the other way round."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine, self.number = machine, number
        self.offers: deque[np.ndarray] = deque()  # sends whose streams have come to them
        self.taken = 0
        self.sends = 0

    def send(self, x: Any, stream: FakeStream) -> None:
        source, me = raw(x), self.sends
        self.sends += 1

        def offer() -> None:
            self.machine.sent[self.number].append(source.size)
            self.offers.append(source)

        stream.put(Task(offer))
        stream.put(Task(lambda: None, lambda: self.taken > me))

    def receive(self, out: Any, stream: FakeStream) -> None:
        to = raw(out).reshape(-1)[: out.size]

        def take() -> None:
            source = self.offers.popleft()
            assert source.size == to.size, f"{source.size} numbers sent, {to.size} expected"
            np.copyto(to, source.reshape(-1))
            self.machine.received[self.number].append(to.size)
            self.taken += 1

        stream.put(Task(take, lambda: bool(self.offers)))

    def check(self) -> None:
        pass


class FakeCommunicator:
    """mpi4py's, as far as a pipe needs it, between threads."""

    def __init__(self, machine: Machine, queues: dict[tuple[int, int], queue.Queue], rank: int, size: int) -> None:
        self.machine, self.queues, self.rank, self.size = machine, queues, rank, size

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Isend(self, array: np.ndarray, dest: int) -> Any:
        self.queues[self.rank, dest].put(np.array(array))
        return SimpleNamespace(Test=lambda: True, Wait=lambda: None)

    def Recv(self, out: np.ndarray, source: int) -> None:
        while True:
            try:
                out[...] = self.queues[source, self.rank].get(timeout=0.2)
                return
            except queue.Empty:
                if self.machine.stuck or self.machine.stopped:
                    raise Stuck from None

    def Iprobe(self, source: int) -> bool:
        return not self.queues[source, self.rank].empty()
