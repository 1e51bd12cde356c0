"""Where threads meet: lanes at a warp operation, a block at its barrier. Whoever does not come is named, with the line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from l1_kernels.simulator.errors import DivergenceError
from l1_kernels.simulator.scheduler import Launch, Site, Thread, Warp, line_of, running

FULL_MASK = 0xFFFFFFFF


class Meeting:
    """A warp operation that some of the lanes in `mask` have reached."""

    __slots__ = ("kind", "mask", "site", "threads")

    def __init__(self, kind: str, mask: int, site: Site) -> None:
        self.kind, self.mask, self.site = kind, mask, site
        self.threads: dict[int, Thread] = {}  # by lane

    def __str__(self) -> str:
        return f"lanes {lanes(self.threads)} wait in {self.kind} at {line_of(self.site)}"


def lanes(found: Any) -> str:
    """Lane numbers, or the bits of a mask, as ranges: "0-3, 7"."""
    numbers = [lane for lane in range(32) if found >> lane & 1] if isinstance(found, int) else sorted(found)
    ranges: list[list[int]] = []
    for n in numbers:
        if ranges and ranges[-1][1] == n - 1:
            ranges[-1][1] = n
        else:
            ranges.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def meet(kind: str, mask: int, value: Any, compute: Callable[[dict[int, Any]], dict[int, Any]], depth: int = 2) -> Any:
    """Wait for all lanes in `mask`; then `compute`, called once with the value of each lane, gives each lane's result.

    depth: how many frames up the kernel's or device function's own frame is. Raises DivergenceError.
    """
    launch = running()
    thread: Thread = launch.current
    warp = thread.warp
    site = launch.site(sys._getframe(depth))
    mask = int(mask) & warp.lanes
    meeting = None
    for other in warp.meetings:
        if other.mask == mask and other.kind == kind and other.site == site:
            meeting = other
    if meeting is None:
        _check_lanes(launch, thread, kind, mask, site)
        meeting = Meeting(kind, mask, site)
        warp.meetings.append(meeting)
    thread.value = value
    meeting.threads[thread.lane] = thread
    if len(meeting.threads) < mask.bit_count():
        thread.doing, thread.site = kind, site
        launch.pause(thread)
    else:
        warp.meetings.remove(meeting)
        results = compute({lane: member.value for lane, member in meeting.threads.items()})
        for lane, member in meeting.threads.items():
            member.result = results[lane]
            member.value = None
            if member is not thread:
                launch.ready.append(member)
    result, thread.result = thread.result, None
    return result


def _check_lanes(launch: Launch, thread: Thread, kind: str, mask: int, site: Site) -> None:
    """The first lane at a warp operation: can the others of its mask still come?"""
    warp = thread.warp
    here = f"{kind} at {line_of(site)} by lane {thread.lane} of warp {warp.index}"
    if not mask >> thread.lane & 1:
        raise DivergenceError(f"{here}: its mask {mask:#010x} leaves the lane itself out")
    if mask & warp.returned:
        raise DivergenceError(f"{here}: lanes {lanes(mask & warp.returned)} of its mask have returned")
    if mask & warp.at_barrier:
        raise DivergenceError(f"{here}: lanes {lanes(mask & warp.at_barrier)} of its mask wait in {_barrier(thread)}")
    for other in warp.meetings:
        if other.mask & mask:
            raise DivergenceError(f"{here}: divergent, {other}")


def _barrier(thread: Thread) -> str:
    return f"{thread.block.barrier_kind} at {line_of(thread.block.barrier_site)}"


def barrier(kind: str, value: Any, compute: Callable[[list[Any]], Any]) -> Any:
    """Wait for all threads of the block; `compute` gives them one result from the values of all. Raises DivergenceError."""
    launch = running()
    thread: Thread = launch.current
    block, warp = thread.block, thread.warp
    site = launch.site(sys._getframe(2))
    if not block.waiting:
        block.barrier_site, block.barrier_kind = site, kind
        if block.num_returned:
            raise DivergenceError(f"{_barrier(thread)}: {block.num_returned} threads of the block have returned and will not come")
    elif block.barrier_site != site or block.barrier_kind != kind:
        raise DivergenceError(f"{kind} at {line_of(site)}: {len(block.waiting)} other threads of the block wait in {_barrier(thread)}")
    _check_meetings(warp, thread, f"waits in {kind} at {line_of(site)}")
    thread.value = value
    block.waiting.append(thread)
    warp.at_barrier |= 1 << thread.lane
    if len(block.waiting) < block.num_threads:
        thread.doing, thread.site = kind, site
        launch.pause(thread)
    else:
        result = compute([member.value for member in block.waiting])
        for member in block.waiting:
            member.result = result
            member.value = None
            if member is not thread:
                launch.ready.append(member)
        block.waiting = []
        for each in block.warps:
            each.at_barrier = 0
    result, thread.result = thread.result, None
    return result


def part_barrier(which: int, count: int) -> None:
    """Wait until `count` threads of the block have come to its barrier number `which`."""
    launch = running()
    thread: Thread = launch.current
    if count % 32 or not 0 < count <= thread.block.num_threads:
        raise DivergenceError(f"bar.sync {which}, {count}: of a block of {thread.block.num_threads} threads")
    site = launch.site(sys._getframe(2))
    _check_meetings(thread.warp, thread, f"waits in bar.sync {which} at {line_of(site)}")
    waiting = thread.block.parts.setdefault(which, [])
    waiting.append(thread)
    if len(waiting) < count:
        thread.doing, thread.site = f"bar.sync {which}", site
        launch.pause(thread)
    else:
        launch.ready.extend(member for member in waiting if member is not thread)
        waiting.clear()


def check_return(thread: Thread) -> None:
    """Refuse the return of a thread that others wait for."""
    if thread.block.waiting:
        raise DivergenceError(f"a thread returns, but {len(thread.block.waiting)} others of its block wait for it in {_barrier(thread)}")
    _check_meetings(thread.warp, thread, "has returned")


def _check_meetings(warp: Warp, thread: Thread, does: str) -> None:
    for meeting in warp.meetings:
        if meeting.mask >> thread.lane & 1:
            raise DivergenceError(f"lane {thread.lane} of warp {warp.index} {does}: divergent, {meeting} for it")
