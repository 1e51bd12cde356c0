"""Instructions for a kernel that feeds itself (l1_kernels/step): memory by its address, copies that a barrier counts.

What ptx.py's instructions say of an array's element these say of an address: int64, in bytes, of global memory; the
program that the step kernel runs is a table of such addresses. Shared memory goes by uint32.

An mbarrier is 8 bytes in shared memory. A phase of it ends when `count` arrivals have been made, at once or when copies
are done; then the next begins, with the same count. Phases are told apart by their parity, 0 first. (Bulk copies, which
bring their bytes with one instruction, were tried and were slower: step/README.md.)

    global memory        load16_at load16_floats_at load_f32_at load_i32_at store_f32_at store_u16_at
    shared memory        shared_address load16_shared_at store16_shared_at store8_shared_at load_f32_shared_at store_f32_shared_at
    mbarriers            barrier_init barrier_arrive barrier_arrive_copied barrier_passed
    copies               copy16
    part of a block      named_barrier
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from l1_kernels.inline_ptx import instruction


def _at(address: Any, dtype: Any, count: int = 1, align: int = 0) -> np.ndarray:
    """Host memory at an address, as the simulator has it. What is not there faults, as on a GPU."""
    kind = np.dtype(dtype)
    size = kind.itemsize * count
    if int(address) % (align or size):
        raise ValueError(f"{size} bytes at {int(address):#x} are misaligned")
    memory: Any = (ctypes.c_char * size).from_address(int(address))
    return np.frombuffer(memory, kind)


@instruction("ld.global.v4.u32 {$0,$1,$2,$3}, [$4];", returns="u32x4", takes=["i64"], effect="memory")
def load16_at(address: Any) -> Any:
    """16 bytes."""
    return tuple(_at(address, np.uint32, 4))


@instruction("ld.global.v4.f32 {$0,$1,$2,$3}, [$4];", returns="f32x4", takes=["i64"], effect="memory")
def load16_floats_at(address: Any) -> Any:
    """16 bytes as four float32."""
    return tuple(_at(address, np.float32, 4))


@instruction("ld.global.f32 $0, [$1];", returns="f32", takes=["i64"], effect="memory")
def load_f32_at(address: Any) -> Any:
    return _at(address, np.float32)[0]


@instruction("ld.global.s32 $0, [$1];", returns="i32", takes=["i64"], effect="memory")
def load_i32_at(address: Any) -> Any:
    return _at(address, np.int32)[0]


@instruction("st.global.f32 [$0], $1;", takes=["i64", "f32"], effect="memory")
def store_f32_at(address: Any, value: Any) -> None:
    _at(address, np.float32)[0] = value


@instruction("st.global.u16 [$0], $1;", takes=["i64", "u16"], effect="memory")
def store_u16_at(address: Any, bits: Any) -> None:
    _at(address, np.uint16)[0] = bits


# Shared memory by its address: uint32, in bytes, of the launch's dynamic shared memory


def _shared(address: Any, size: int, align: int) -> np.ndarray:
    from l1_kernels.simulator.scheduler import running

    memory = running().current.block.dynamic
    if not 0 <= int(address) <= memory.nbytes - size:
        raise IndexError(f"{size} bytes at {int(address)} are outside of {memory.nbytes} bytes of shared memory")
    if int(address) % align:
        raise ValueError(f"{size} bytes at {int(address)} of shared memory are misaligned")
    return memory[int(address) : int(address) + size]


@instruction("{ .reg .u64 address; cvta.to.shared.u64 address, $1; cvt.u32.u64 $0, address; }", returns="u32", takes=["element"])
def shared_address(array: Any, index: Any) -> Any:
    """Of an element of the dynamic shared array. A block's other addresses are counted from it."""
    return np.uint32(int(index) * array.itemsize)


@instruction("ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];", returns="u32x4", takes=["u32"], effect="memory")
def load16_shared_at(address: Any) -> Any:
    """16 bytes."""
    return tuple(_shared(address, 16, 16).view(np.uint32))


@instruction("st.shared.v4.u32 [$0], {$1,$2,$3,$4};", takes=["u32", "u32x4"], effect="memory")
def store16_shared_at(address: Any, words: Any) -> None:
    _shared(address, 16, 16).view(np.uint32)[:] = words


@instruction("st.shared.v2.u32 [$0], {$1,$2};", takes=["u32", "u32x2"], effect="memory")
def store8_shared_at(address: Any, words: Any) -> None:
    _shared(address, 8, 8).view(np.uint32)[:] = words


@instruction("ld.shared.f32 $0, [$1];", returns="f32", takes=["u32"], effect="memory")
def load_f32_shared_at(address: Any) -> Any:
    return _shared(address, 4, 4).view(np.float32)[0]


@instruction("st.shared.f32 [$0], $1;", takes=["u32", "f32"], effect="memory")
def store_f32_shared_at(address: Any, value: Any) -> None:
    _shared(address, 4, 4).view(np.float32)[0] = value


# mbarriers, by address too. The simulator keeps in the 64 bits: parity, count, threads still to arrive


def _update(barrier: Any) -> None:
    word = _shared(barrier, 8, 8).view(np.uint64)
    bits = int(word[0])
    parity, count, left = bits >> 63, bits >> 32 & 0xFFFF, bits & 0xFFFF
    left -= 1
    if left == 0:
        parity, left = 1 - parity, count
    word[0] = parity << 63 | count << 32 | left


@instruction("mbarrier.init.shared.b64 [$0], $1;", takes=["u32", "u32"], effect="memory")
def barrier_init(barrier: Any, count: Any) -> None:
    """One thread makes an mbarrier for `count` arrivals a phase; then the block's barrier."""
    _shared(barrier, 8, 8).view(np.uint64)[0] = int(count) << 32 | int(count)


@instruction("mbarrier.arrive.shared.b64 _, [$0];", takes=["u32"], effect="memory")
def barrier_arrive(barrier: Any) -> None:
    """Arrive: what this thread has read and written is done for those that pass."""
    _update(barrier)


@instruction(
    "{ .reg .pred done; mbarrier.try_wait.parity.shared.b64 done, [$1], $2; selp.b32 $0, 1, 0, done; }",
    returns="i32", takes=["u32", "u32"], effect="memory",
)  # fmt: skip
def barrier_passed(barrier: Any, parity: Any) -> Any:
    """1 when the phase of this parity has ended, 0 after a while of waiting: to be asked again."""
    from l1_kernels.simulator.scheduler import poll, running

    word = _shared(barrier, 8, 8).view(np.uint64)

    def look() -> int:
        return int(int(word[0]) >> 63 != int(parity))

    return np.int32(poll((id(running().current.block), int(barrier), int(parity)), look(), look, depth=2))


@instruction("cp.async.cg.shared.global.L2::128B [$0], [$1], 16;", takes=["u32", "i64"], effect="memory")
def copy16(shared: Any, address: Any) -> None:
    """Begin to copy 16 bytes from global to shared memory. The simulator copies at once."""
    _shared(shared, 16, 16)[:] = _at(address, np.uint8, 16, 16)


@instruction("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", takes=["u32"], effect="memory")
def barrier_arrive_copied(barrier: Any) -> None:
    """Arrive as soon as this thread's copies so far are done; it does not wait."""
    _update(barrier)


@instruction("bar.sync #which, #threads;", takes=["immediate", "immediate"], effect="warp")
def named_barrier(which: Any, threads: Any) -> None:
    """syncthreads for `threads` of the block's threads, whole warps; `which` is 1..15. Both are compile-time constants."""
    from l1_kernels.simulator.meeting import part_barrier

    part_barrier(int(which), int(threads))
