"""Instructions that numba has no name for. Each: its PTX, what it means, and a plain-Python twin that the simulator runs.

"A 16-byte access at (array, index)" starts at element `index` of a C-contiguous array of any dtype, counted as it lies in
memory; its address must be a multiple of 16. It carries four uint32. `inline_ptx.instruction` explains the notation.
An `_at` takes an address in place of an array: of memory that no array of this process's is made of, another GPU's.

    loads and stores     load16 load16_floats load16_stream load16_stream_if load16_shared
                         store16 store16_floats store16_floats_at store16_shared prefetch_l2
    asynchronous copies  copy_async16 commit_async wait_async
    16-bit floats        f16_to_f32 bf16_to_f32 f32_to_f16 f32_to_bf16, and the pairs f16x2_to_f32x2 bf16x2_to_f32x2 ...
                         s8x4_to_f16x4 (int8, for the tensor cores)
    float32              exp2
    tensor cores         mma_f16 mma_bf16 mma_s8
    flags                load_acquire store_release add_release fetch_add_release, and _system ones for other GPUs
                         store_release_system_at
    the next launch      take_turn
    the end              trap
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from l1_kernels.inline_ptx import instruction

# Loads and stores of 16 bytes


def _words(array: np.ndarray, index: Any) -> np.ndarray:
    """The 16 bytes at element `index`, as a view of four uint32."""
    if not array.flags.c_contiguous:
        raise ValueError("array: a 16-byte access needs a C-contiguous one")
    flat = array.reshape(-1)
    count = 16 // array.itemsize
    if not 0 <= index <= flat.size - count:
        raise IndexError(f"16 bytes at element {index} are outside of an array of {flat.size} {array.dtype}")
    piece = flat[index : index + count]
    if piece.ctypes.data % 16:
        raise ValueError(f"16 bytes at element {index} of {array.dtype} are misaligned: their address is no multiple of 16")
    return piece.view(np.uint32)


@instruction("ld.global.v4.u32 {$0,$1,$2,$3}, [$4];", returns="u32x4", takes=["element"], effect="memory")
def load16(array: Any, index: Any) -> Any:
    """16 bytes of global memory, through the caches."""
    return tuple(_words(array, index))


@instruction("ld.global.v4.f32 {$0,$1,$2,$3}, [$4];", returns="f32x4", takes=["element"], effect="memory")
def load16_floats(array: Any, index: Any) -> Any:
    """16 bytes of global memory as four float32, through the caches."""
    return tuple(_words(array, index).view(np.float32))


@instruction("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {$0,$1,$2,$3}, [$4];", returns="u32x4", takes=["element"], effect="read")
def load16_stream(array: Any, index: Any) -> Any:
    """16 bytes of global memory that nobody writes during the kernel and that are read once (weights): kept out of L1. L2 fetches the whole
    cache line: where a warp's load takes 64 bytes of each of 8 rows, as for the tensor cores, its next load finds the rest there."""
    return tuple(_words(array, index))


@instruction(
    "{ .reg .pred inside; setp.ne.s32 inside, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
    " @inside ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {$0,$1,$2,$3}, [$4]; }",
    returns="&u32x4", takes=["element", "i32"], effect="read",
)  # fmt: skip
def load16_stream_if(array: Any, index: Any, inside: Any) -> Any:
    """load16_stream where `inside` holds, with no branch; zeros, and no access, where it does not."""
    return tuple(_words(array, index)) if inside else (np.uint32(0),) * 4


@instruction(
    "{ .reg .u64 address; cvta.to.shared.u64 address, $4; ld.shared.v4.u32 {$0,$1,$2,$3}, [address]; }",
    returns="u32x4", takes=["element"], effect="memory",
)  # fmt: skip
def load16_shared(array: Any, index: Any) -> Any:
    """16 bytes of shared memory."""
    return tuple(_words(array, index))


@instruction("st.global.v4.u32 [$0], {$1,$2,$3,$4};", takes=["element", "u32x4"], effect="memory")
def store16(array: Any, index: Any, words: Any) -> None:
    """Write four uint32 to global memory."""
    _words(array, index)[:] = words


@instruction("st.global.v4.f32 [$0], {$1,$2,$3,$4};", takes=["element", "f32x4"], effect="memory")
def store16_floats(array: Any, index: Any, numbers: Any) -> None:
    """Write four float32 to global memory."""
    _words(array, index).view(np.float32)[:] = numbers


def _at(address: Any, dtype: Any, count: int) -> np.ndarray:
    """What lies at an address of this process's memory; nothing checks that it is anybody's."""
    if address % (count * 4):
        raise ValueError(f"address {address}: {count * 4} bytes there are misaligned")
    return np.ctypeslib.as_array((ctypes.c_uint32 * count).from_address(int(address))).view(dtype)


@instruction("st.global.v4.f32 [$0], {$1,$2,$3,$4};", takes=["i64", "f32x4"], effect="memory")
def store16_floats_at(address: Any, numbers: Any) -> None:
    """Write four float32 to an address in global memory, this GPU's or one that it can reach."""
    _at(address, np.float32, 4)[:] = numbers


@instruction(
    "{ .reg .u64 address; cvta.to.shared.u64 address, $0; st.shared.v4.u32 [address], {$1,$2,$3,$4}; }",
    takes=["element", "u32x4"], effect="memory",
)  # fmt: skip
def store16_shared(array: Any, index: Any, words: Any) -> None:
    """Write four uint32 to shared memory."""
    _words(array, index)[:] = words


@instruction("prefetch.global.L2 [$0];", takes=["element"], effect="read")
def prefetch_l2(array: Any, index: Any) -> None:
    """Fetch the cache line of an element of global memory into L2; nothing waits for it."""
    if not 0 <= index < array.size:
        raise IndexError(f"element {index} is outside of an array of {array.size} {array.dtype}")


# Copies that go on while the thread computes (compute capability 8.0)


@instruction(
    "{ .reg .u64 address; cvta.to.shared.u64 address, $0; cp.async.cg.shared.global.L2::128B [address], [$1], 16; }",
    takes=["element", "element"], effect="memory",
)  # fmt: skip
def copy_async16(shared: Any, shared_index: Any, source: Any, source_index: Any) -> None:
    """Begin to copy 16 bytes from global to shared memory. They are there after a wait_async by this thread; the simulator
    copies at once, so a forgotten wait shows on a GPU only."""
    _words(shared, shared_index)[:] = _words(source, source_index)


@instruction("cp.async.commit_group;", effect="memory")
def commit_async() -> None:
    """Close a group of this thread's copies, all since the last commit (none is a group too)."""


@instruction("cp.async.wait_group #groups;", takes=["immediate"], effect="memory")
def wait_async(groups: Any) -> None:
    """Wait until at most `groups` of this thread's latest groups are still under way. `groups` is a compile-time constant."""


# 16-bit floats; bits travel as uint16, pairs as uint32 with the first number in the low half

_ALL_BITS = np.arange(1 << 16, dtype=np.uint32)
_F16_VALUES = _ALL_BITS.astype(np.uint16).view(np.float16).astype(np.float32)
_BF16_VALUES = (_ALL_BITS << np.uint32(16)).view(np.float32)
_NAN_BITS = np.uint16(0x7FFF)  # what a GPU makes of any NaN


@instruction("cvt.f32.f16 $0, $1;", returns="f32", takes=["u16"])
def f16_to_f32(bits: Any) -> Any:
    """fp16 bits -> float32, exact."""
    return _F16_VALUES[bits]


@instruction("{ .reg .b16 zero; mov.b16 zero, 0; mov.b32 $0, {zero, $1}; }", returns="f32", takes=["u16"])
def bf16_to_f32(bits: Any) -> Any:
    """bf16 bits -> float32, exact: they are its upper half."""
    return _BF16_VALUES[bits]


@instruction("cvt.rn.f16.f32 $0, $1;", returns="u16", takes=["f32"])
def f32_to_f16(x: Any) -> Any:
    """float32 -> fp16 bits, to nearest even; beyond 65504 infinity."""
    return _NAN_BITS if x != x else np.float16(np.float32(x)).view(np.uint16)


@instruction("cvt.rn.bf16.f32 $0, $1;", returns="u16", takes=["f32"])
def f32_to_bf16(x: Any) -> Any:
    """float32 -> bf16 bits, to nearest even."""
    if x != x:
        return _NAN_BITS
    bits = int(np.float32(x).view(np.uint32))
    return np.uint16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


@instruction(
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
    returns="f32x2", takes=["u32"],
)  # fmt: skip
def f16x2_to_f32x2(pair: Any) -> Any:
    """Two fp16 -> two float32."""
    pair = int(pair)
    return _F16_VALUES[pair & 0xFFFF], _F16_VALUES[pair >> 16]


@instruction("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", returns="f32x2", takes=["u32"])
def bf16x2_to_f32x2(pair: Any) -> Any:
    """Two bf16 -> two float32."""
    pair = int(pair)
    return _BF16_VALUES[pair & 0xFFFF], _BF16_VALUES[pair >> 16]


@instruction("cvt.rn.f16x2.f32 $0, $2, $1;", returns="u32", takes=["f32", "f32"])
def f32x2_to_f16x2(low: Any, high: Any) -> Any:
    """Two float32 -> two fp16, to nearest even."""
    return _pack(_twin(f32_to_f16)(low), _twin(f32_to_f16)(high))


@instruction("cvt.rn.bf16x2.f32 $0, $2, $1;", returns="u32", takes=["f32", "f32"])
def f32x2_to_bf16x2(low: Any, high: Any) -> Any:
    """Two float32 -> two bf16, to nearest even."""
    return _pack(_twin(f32_to_bf16)(low), _twin(f32_to_bf16)(high))


@instruction(
    "{ .reg .b32 raised, low, high, offset; xor.b32 raised, $2, 0x80808080; mov.b32 offset, 0x64806480;"
    " prmt.b32 low, raised, 0x64646464, 0x4140; prmt.b32 high, raised, 0x64646464, 0x4342;"
    " sub.f16x2 $0, low, offset; sub.f16x2 $1, high, offset; }",
    returns="u32x2", takes=["u32"],
)  # fmt: skip
def s8x4_to_f16x4(four: Any) -> Any:
    """Four int8 -> two pairs of fp16, exact, and without a conversion: 0x6400 + u is the fp16 number 1024 + u, so the byte
    u = q + 128 under that upper half, less 1152, is q."""
    q = np.array([four], np.uint32).view(np.int8).astype(np.float16).view(np.uint16)
    return _pack(q[0], q[1]), _pack(q[2], q[3])


@instruction("mov.b32 $0, {$1, $2};", returns="u32", takes=["u16", "u16"])
def pack16x2(low: Any, high: Any) -> Any:
    """Two 16-bit values -> one uint32."""
    return _pack(low, high)


def _pack(low: Any, high: Any) -> np.uint32:
    return np.uint32(int(low) | int(high) << 16)


def _twin(function: Any) -> Any:
    """The plain-Python form of an instruction of this file."""
    return getattr(function, "twin", function)


# float32


@instruction("ex2.approx.ftz.f32 $0, $1;", returns="f32", takes=["f32"])
def exp2(x: Any) -> Any:
    """2^x to 2^-22 of itself, in one instruction; below 2^-126 zero."""
    return np.float32(np.exp2(np.float64(x)))  # in float64: NumPy's of float32 misses powers of two by a bit on some processors


# Tensor cores: D[16, 8] = A[16, K] B[K, 8] + C, by the whole warp; who holds what: simulator/tensor_core.py


@instruction(
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
    returns="f32x4", takes=["u32x4", "u32x2", "f32x4"], effect="warp",
)  # fmt: skip
def mma_f16(a: Any, b: Any, c: Any) -> Any:
    """K = 16: pairs of fp16 in `a` (four registers) and `b` (two), float32 in `c` and in the result (four)."""
    from l1_kernels.simulator import tensor_core

    return tensor_core.mma("mma_f16", tensor_core.halves, a, b, c, np.float32)


@instruction(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
    returns="f32x4", takes=["u32x4", "u32x2", "f32x4"], effect="warp",
)  # fmt: skip
def mma_bf16(a: Any, b: Any, c: Any) -> Any:
    """K = 16: as mma_f16, with pairs of bf16."""
    from l1_kernels.simulator import tensor_core

    return tensor_core.mma("mma_bf16", tensor_core.brain_halves, a, b, c, np.float32)


@instruction(
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
    returns="i32x4", takes=["u32x4", "u32x2", "i32x4"], effect="warp",
)  # fmt: skip
def mma_s8(a: Any, b: Any, c: Any) -> Any:
    """K = 32: four int8 to a register of `a` and `b`, int32 in `c` and in the result."""
    from l1_kernels.simulator import tensor_core

    return tensor_core.mma("mma_s8", tensor_core.signed_bytes, a, b, c, np.int32)


# Flags: int32 in global memory. What was written before a release is seen after the acquire that sees it.


def _look(array: np.ndarray, index: Any) -> Any:
    from l1_kernels.simulator.scheduler import poll

    flat = array.reshape(-1)
    return poll((id(array), int(index)), flat[index], lambda: flat[index], depth=3)


@instruction("ld.acquire.gpu.global.s32 $0, [$1];", returns="i32", takes=["element"], effect="memory")
def load_acquire(flags: Any, index: Any) -> Any:
    """Read a flag. A loop that waits for one must read it by this: on the simulator it lets the other threads run."""
    return _look(flags, index)


@instruction("ld.acquire.sys.global.s32 $0, [$1];", returns="i32", takes=["element"], effect="memory")
def load_acquire_system(flags: Any, index: Any) -> Any:
    """load_acquire of a flag that another GPU writes."""
    return _look(flags, index)


@instruction("st.release.gpu.global.s32 [$0], $1;", takes=["element", "i32"], effect="memory")
def store_release(flags: Any, index: Any, value: Any) -> None:
    """Set a flag, after everything that this thread has written."""
    flags.reshape(-1)[index] = value


@instruction("st.release.sys.global.s32 [$0], $1;", takes=["element", "i32"], effect="memory")
def store_release_system(flags: Any, index: Any, value: Any) -> None:
    """store_release for another GPU to see."""
    flags.reshape(-1)[index] = value


@instruction("st.release.sys.global.s32 [$0], $1;", takes=["i64", "i32"], effect="memory")
def store_release_system_at(address: Any, value: Any) -> None:
    """store_release_system of the flag at an address: another GPU's."""
    _at(address, np.int32, 1)[0] = value


@instruction("red.release.gpu.global.add.s32 [$0], $1;", takes=["element", "i32"], effect="memory")
def add_release(flags: Any, index: Any, value: Any) -> None:
    """Add to a counter atomically, after everything that this thread has written."""
    flags.reshape(-1)[index] += np.int32(value)


@instruction("atom.acq_rel.gpu.global.add.s32 $0, [$1], $2;", returns="i32", takes=["element", "i32"], effect="memory")
def fetch_add_release(flags: Any, index: Any, value: Any) -> Any:
    """add_release that gives the old value, and acquires too. It wraps around like all int32."""
    flat = flags.reshape(-1)
    old = flat[index]
    flat[index] = old + np.int32(value)
    return old


# Launches that overlap (programmatic dependent launch), from compute capability 9.0 on; before, a launch waits for the last one anyway


@instruction("griddepcontrol.wait; griddepcontrol.launch_dependents;", effect="memory", least=90)
def take_turn() -> None:
    """Wait until the launch before has ended and all it wrote can be seen; from then on the next one may begin, as far as there is room. What a
    kernel that is launched early (cuda_api.early) reads before this must be written by no launch under way: weights, keys of earlier steps. As
    every kernel lets the next begin only when its own turn has come, never more than two are under way."""


@instruction("trap;", effect="memory")
def trap() -> None:
    """End the kernel with an error: the launch fails, and on a GPU the whole process's context with it."""
    from l1_kernels.simulator.errors import SimulatorError

    raise SimulatorError("the kernel gave up (trap)")
