"""Which thread runs next.

A launch hands its threads out in order, block by block, to a worker greenlet, which runs one after the other for as long as
none waits. One that waits keeps its greenlet; another worker goes on with the rest. What became ready runs before what has not
been started, so that few threads are alive at a time; blocks are started one after the other, and a thread that polls a flag
stands back until every block has started. Nothing depends on time: a run is the same every time.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import numpy as np
from greenlet import GreenletExit, getcurrent, greenlet

from l1_kernels.simulator.errors import DeadlockError, SimulatorError

WARP_SIZE = 32
IDLE_ROUNDS = 1000  # rounds in which every live thread only polls a flag, and none changes: a deadlock

Dim3 = tuple[int, int, int]  # x, y, z
Site = tuple[tuple[CodeType, int], ...]  # where a thread stands: (code, instruction), innermost first, up to the kernel


class Index:
    """threadIdx, blockIdx, blockDim or gridDim of the thread that runs now."""

    __slots__ = ("x", "y", "z")

    def __init__(self) -> None:
        self.x = self.y = self.z = 0

    def set(self, xyz: Dim3) -> None:
        self.x, self.y, self.z = xyz


thread_index, block_index, block_dim, grid_dim = Index(), Index(), Index(), Index()


class Warp:
    """Up to 32 threads of a block. Masks have bit l for lane l."""

    __slots__ = ("at_barrier", "index", "lanes", "meetings", "returned")

    def __init__(self, index: int, num_lanes: int) -> None:
        self.index = index
        self.lanes = (1 << num_lanes) - 1  # those that exist
        self.returned = 0
        self.at_barrier = 0
        self.meetings: list[Any] = []  # open ones (meeting.py)


class Block:
    """The threads that share `shared`; `waiting` stand at its barrier."""

    __slots__ = (
        "barrier_kind",
        "barrier_site",
        "dynamic",
        "num_returned",
        "num_threads",
        "parts",
        "shared",
        "shared_bytes",
        "waiting",
        "warps",
        "xyz",
    )

    def __init__(self, xyz: Dim3, num_threads: int) -> None:
        self.xyz = xyz
        self.num_threads = num_threads
        self.num_returned = 0
        self.shared: dict[Any, np.ndarray] = {}
        self.shared_bytes = 0
        self.dynamic: np.ndarray | None = None
        self.waiting: list[Thread] = []
        self.parts: dict[int, list[Thread]] = {}  # who waits at a barrier of a part of the block
        self.barrier_site: Site = ()
        self.barrier_kind = ""
        self.warps = [Warp(w, min(WARP_SIZE, num_threads - w * WARP_SIZE)) for w in range(-(-num_threads // WARP_SIZE))]


class Thread:
    """One CUDA thread; `doing` and `site` say what it waits for."""

    __slots__ = ("block", "doing", "greenlet", "lane", "polled", "result", "site", "value", "warp", "xyz")

    def __init__(self, block: Block, number: int, xyz: Dim3) -> None:
        self.block = block
        self.xyz = xyz
        self.lane = number % WARP_SIZE
        self.warp = block.warps[number // WARP_SIZE]
        self.greenlet: Any = None
        self.result: Any = None  # what the operation that it waited for gives
        self.value: Any = None  # what it brings to it
        self.polled: Any = None  # (what, value) of its last look at a flag
        self.doing = ""
        self.site: Site = ()


class Launch:
    """One launch of a kernel, from its first thread to its last."""

    def __init__(self, function: Callable[..., Any], grid: Dim3, block: Dim3, shared_bytes: int, arguments: tuple[Any, ...]) -> None:
        self.function = function
        self.arguments = arguments
        self.grid, self.block = grid, block
        self.dynamic_bytes = shared_bytes
        self.current: Any = None  # the thread that runs now
        self.ready: deque[Thread] = deque()
        self.polling: list[Thread] = []
        self.live: dict[Thread, None] = {}  # started, and neither returned nor failed; in the order of their start
        self.unstarted: Iterator[Thread] = self._threads()
        self.all_started = False
        self.progress = False  # since the last round of polling: a thread has returned, a flag has changed
        self.system_thread = threading.get_ident()
        self.hub: Any = None
        self.context: Any = None

    def _threads(self) -> Iterator[Thread]:
        width, height, depth = self.block
        indices = [(x, y, z) for z in range(depth) for y in range(height) for x in range(width)]
        for bz in range(self.grid[2]):
            for by in range(self.grid[1]):
                for bx in range(self.grid[0]):
                    block = Block((bx, by, bz), len(indices))
                    for number, xyz in enumerate(indices):
                        yield Thread(block, number, xyz)

    def run(self) -> None:
        """Run every thread to its end. Raises what a thread raised, or DeadlockError."""
        block_dim.set(self.block)
        grid_dim.set(self.grid)
        self.hub = getcurrent()
        with np.errstate(all="ignore"):  # a device's arithmetic does not trap; greenlets get this state by their context
            self.context = contextvars.copy_context()
        try:
            self._run_all()
        finally:
            for thread in self.live:
                if thread.greenlet:
                    thread.greenlet.throw(GreenletExit)

    def _run_all(self) -> None:
        idle = 0
        while True:
            if self.ready:
                self.ready.popleft().greenlet.switch()
            elif not self.all_started:
                worker = greenlet(self._work, self.hub)
                worker.gr_context = self.context
                worker.switch()
            elif self.polling:
                idle = 0 if self.progress else idle + 1
                if idle > IDLE_ROUNDS:
                    raise DeadlockError(self._stuck("polls a flag that nobody changes"))
                self.progress = False
                self.ready.extend(self.polling)
                self.polling.clear()
            elif self.live:
                raise DeadlockError(self._stuck("waits for threads that will not come"))
            else:
                return

    def _work(self) -> None:
        """Run unstarted threads until something else is ready. The greenlet of a thread that waits is this very one."""
        me = getcurrent()
        function, arguments, live, ready = self.function, self.arguments, self.live, self.ready
        for thread in self.unstarted:
            thread.greenlet = me
            live[thread] = None
            self.enter(thread)
            try:
                if function(*arguments) is not None:
                    raise SimulatorError(f"kernel {function.__name__} returns a value, which no kernel can")
                del live[thread]
                thread.block.num_returned += 1
                thread.warp.returned |= 1 << thread.lane
                if thread.block.waiting or thread.warp.meetings:
                    self.check_return(thread)
            except GreenletExit:
                raise
            except BaseException as error:
                live.pop(thread, None)
                error.add_note(f"in {self.place(thread)}")
                raise
            self.progress = True
            if ready:
                return
        self.all_started = True

    def enter(self, thread: Thread) -> None:
        """`thread` runs now."""
        self.current = thread
        thread_index.x, thread_index.y, thread_index.z = thread.xyz
        block_index.x, block_index.y, block_index.z = thread.block.xyz

    def pause(self, thread: Thread) -> None:
        """Leave `thread`, the one that runs, until somebody makes it ready."""
        (self.ready.popleft().greenlet if self.ready else self.hub).switch()
        self.enter(thread)

    def check_return(self, thread: Thread) -> None:
        """`thread` has returned, while others wait; meeting.py refuses if they wait for it."""
        from l1_kernels.simulator import meeting

        meeting.check_return(thread)

    def place(self, thread: Thread) -> str:
        return f"kernel {self.function.__name__}, block {thread.block.xyz}, thread {thread.xyz}"

    def site(self, frame: FrameType | None) -> Site:
        """Where `frame` and its callers stand, up to the kernel."""
        kernel = self.function.__code__
        path = []
        while frame is not None:
            path.append((frame.f_code, frame.f_lasti))
            if frame.f_code is kernel:
                break
            frame = frame.f_back
        return tuple(path)

    def _stuck(self, why: str) -> str:
        """The message of a deadlock: where all the threads stand."""
        places = Counter((thread.block.xyz, thread.doing, line_of(thread.site)) for thread in self.live)
        lines = [f"{count} of block {xyz}: {doing} at {line}" for (xyz, doing, line), count in places.items()]
        shown = "; ".join(lines[:8]) + (f"; and {len(lines) - 8} more places" if len(lines) > 8 else "")
        return f"deadlock in kernel {self.function.__name__}: every thread that has not returned {why}: {shown}"


def line_of(site: Site) -> str:
    """file:line of the innermost frame of a site."""
    if not site:
        return "?"
    code, instruction = site[0]
    line: int | None = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end:
            line = number
    return f"{code.co_filename}:{line}"


# The one global: a kernel names its thread by global words (threadIdx), so one launch runs at a time, and this is it.
_running: Launch | None = None
_one_at_a_time = threading.Lock()


def running() -> Launch:
    """The launch whose thread calls this. Raises SimulatorError outside of a kernel."""
    if _running is None:
        raise SimulatorError("only a kernel can call this: no launch is running")
    return _running


def launch(function: Callable[..., Any], grid: Dim3, block: Dim3, shared_bytes: int, arguments: tuple[Any, ...]) -> None:
    """Run a kernel over grid and block; returns when its last thread has."""
    global _running
    if _running is not None and _running.system_thread == threading.get_ident():
        raise SimulatorError(f"kernel {function.__name__} is launched from within kernel {_running.function.__name__}")
    with _one_at_a_time:
        _running = Launch(function, grid, block, shared_bytes, arguments)
        try:
            _running.run()
        finally:
            _running = None


def poll(what: Any, value: Any, again: Callable[[], Any], depth: int = 2) -> Any:
    """A look at a flag gave `value`. If it is the second in a row to find the same, others go first; then look `again`.

    depth: how many frames up the kernel's or device function's own frame is.
    """
    launch_ = running()
    thread = launch_.current
    if thread.polled is None or thread.polled != (what, value):
        thread.polled = (what, value)
        return value
    thread.doing, thread.site = "polling", launch_.site(sys._getframe(depth))
    launch_.polling.append(thread)
    launch_.pause(thread)
    now = again()
    if now != value:
        launch_.progress = True
        thread.polled = (what, now)
    return now


def stand_back() -> None:
    """Let every other thread go first (nanosleep)."""
    launch_ = running()
    thread = launch_.current
    thread.doing, thread.site = "sleeping", launch_.site(sys._getframe(2))
    launch_.polling.append(thread)
    launch_.pause(thread)
