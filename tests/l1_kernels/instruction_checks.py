"""One small kernel for each instruction of ptx.py and each word of groups.py, with what it must give.

The same checks run on the simulator (sim/test_ptx_twins.py, sim/test_groups.py) and on a GPU (gpu/test_ptx_gpu.py), and are
assembled without one (ptx/test_assemble.py). Expected values come from NumPy, in float64 where there is a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from l1_kernels import groups, ptx
from l1_kernels.cuda_api import cuda

Arrays = list[np.ndarray]
THREADS = 64
WORDS, TWICE = 4 * THREADS, 8 * THREADS  # sizes of shared arrays must be plain constants


@dataclass(frozen=True)
class Check:
    """kernel[grid, block](*arguments(rng)) must leave what expected(arguments) says: {argument: its value}."""

    name: str
    kernel: Any
    signature: str
    arguments: Callable[[np.random.Generator], Arrays]
    expected: Callable[[Arrays], dict[int, np.ndarray]]
    grid: int = 1
    block: int = THREADS
    tolerance: float = 0.0  # relative to the largest expected number; 0: the same bits, any NaN for a NaN
    ptx: str = ""  # a piece of its PTX

    def __str__(self) -> str:
        return self.name


def run(check: Check, seed: int, to_device: Callable[[np.ndarray], Any], to_host: Callable[[Any], np.ndarray]) -> None:
    """Launch on fresh random arguments and assert."""
    arguments = check.arguments(np.random.default_rng(seed))
    expected = check.expected([argument.copy() for argument in arguments])
    held = [to_device(argument) for argument in arguments]
    check.kernel[check.grid, check.block](*held)
    for index, wanted in expected.items():
        got = to_host(held[index])
        if check.tolerance:
            worst = np.abs(got.astype(np.float64) - wanted).max() / np.abs(wanted).max()
            assert worst <= check.tolerance, f"{check}: argument {index} is off by {worst:.2e} of its maximum"
        else:
            np.testing.assert_array_equal(got, wanted, err_msg=f"{check}: argument {index}")


def words(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint32)


def unset(size: int, dtype: Any = np.uint32) -> np.ndarray:
    """An output that no kernel has written."""
    return np.full(size, np.nan if np.dtype(dtype).kind == "f" else 0xA5 % (np.iinfo(dtype).max + 1), dtype)


# Loads, stores and copies of 16 bytes


@cuda.jit
def load_kernel(source, out):
    i = cuda.grid(1)
    a, b, c, d = ptx.load16(source, i * 8)
    out[i, 0], out[i, 1], out[i, 2], out[i, 3] = a, b, c, d


@cuda.jit
def load_floats_kernel(source, out):
    i = cuda.grid(1)
    a, b, c, d = ptx.load16_floats(source, i * 4)
    out[i, 0], out[i, 1], out[i, 2], out[i, 3] = a, b, c, d


@cuda.jit
def load_stream_kernel(source, out):
    i = cuda.grid(1)
    ptx.prefetch_l2(source, i)
    a, b, c, d = ptx.load16_stream(source, i * 16)
    out[i, 0], out[i, 1], out[i, 2], out[i, 3] = a, b, c, d


@cuda.jit
def load_stream_if_kernel(source, out):
    i = cuda.grid(1)
    a, b, c, d = ptx.load16_stream_if(source, i * 16, i % 3 > 0)
    out[i, 0], out[i, 1], out[i, 2], out[i, 3] = a, b, c, d


@cuda.jit
def store_kernel(source, out):
    i = cuda.grid(1)
    ptx.store16(out, i * 4, ptx.load16(source, i * 8))


@cuda.jit
def store_floats_kernel(source, out):
    i = cuda.grid(1)
    ptx.store16_floats(out, i * 4, ptx.load16_floats(source, i * 4))


@cuda.jit
def store_at_kernel(source, out):
    """By address; the array stands for another GPU's memory."""
    i = cuda.grid(1)
    ptx.store16_floats_at(out.ctypes.data + i * 16, ptx.load16_floats(source, i * 4))


@cuda.jit
def shared_kernel(source, out):
    """Through shared memory, turned around: the last thread's 16 bytes first."""
    kept = cuda.shared.array(WORDS, np.float32)
    i = cuda.threadIdx.x
    ptx.store16_shared(kept, i * 4, ptx.load16(source, i * 4))
    cuda.syncthreads()
    ptx.store16(out, i * 4, ptx.load16_shared(kept, (THREADS - 1 - i) * 4))


@cuda.jit
def copy_async_kernel(source, out):
    """Two groups under way; the second half is waited for after the first is used."""
    kept = cuda.shared.array(TWICE, np.float32)
    i = cuda.threadIdx.x
    ptx.copy_async16(kept, i * 4, source, i * 4)
    ptx.commit_async()
    ptx.copy_async16(kept, (THREADS + i) * 4, source, (THREADS + i) * 4)
    ptx.commit_async()
    ptx.wait_async(1)
    cuda.syncthreads()
    ptx.store16(out, i * 4, ptx.load16_shared(kept, (THREADS - 1 - i) * 4))
    ptx.wait_async(0)
    cuda.syncthreads()
    ptx.store16(out, (THREADS + i) * 4, ptx.load16_shared(kept, (2 * THREADS - 1 - i) * 4))


def random_words(rng: np.random.Generator, dtype: Any, size: int) -> np.ndarray:
    return rng.integers(0, 1 << 32, size * np.dtype(dtype).itemsize // 4, np.uint32).view(dtype)


def floats(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.standard_normal(size).astype(np.float32)


def turned(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, 4)[::-1].reshape(-1)


MEMORY = [
    Check(
        "load16", load_kernel, "void(uint16[::1], uint32[:, ::1])",
        lambda rng: [random_words(rng, np.uint16, 8 * 2 * THREADS), unset(8 * THREADS).reshape(-1, 4)],
        lambda a: {1: words(a[0]).reshape(-1, 4)}, grid=2, ptx="ld.global.v4.u32",
    ),
    Check(
        "load16_floats", load_floats_kernel, "void(float32[::1], float32[:, ::1])",
        lambda rng: [floats(rng, 4 * 2 * THREADS), unset(8 * THREADS, np.float32).reshape(-1, 4)],
        lambda a: {1: a[0].reshape(-1, 4)}, grid=2, ptx="ld.global.v4.f32",
    ),
    Check(
        "load16_stream", load_stream_kernel, "void(int8[::1], uint32[:, ::1])",
        lambda rng: [random_words(rng, np.int8, 16 * 2 * THREADS), unset(8 * THREADS).reshape(-1, 4)],
        lambda a: {1: words(a[0]).reshape(-1, 4)}, grid=2, ptx="ld.global.nc.L1::no_allocate.L2::128B.v4.u32",
    ),
    Check(
        "load16_stream_if", load_stream_if_kernel, "void(int8[::1], uint32[:, ::1])",
        lambda rng: [random_words(rng, np.int8, 8 * 2 * THREADS * 2), unset(8 * THREADS).reshape(-1, 4)],
        lambda a: {1: words(a[0]).reshape(-1, 4) * (np.arange(2 * THREADS) % 3 > 0)[:, None]}, grid=2, ptx="@inside ld.global.nc",
    ),
    Check(
        "store16", store_kernel, "void(uint16[:, ::1], uint32[::1])",
        lambda rng: [random_words(rng, np.uint16, 8 * 2 * THREADS).reshape(4, -1), unset(8 * THREADS)],
        lambda a: {1: words(a[0])}, grid=2, ptx="st.global.v4.u32",
    ),
    *(
        Check(
            name, kernel, "void(float32[::1], float32[::1])",
            lambda rng: [floats(rng, 4 * 2 * THREADS), unset(8 * THREADS, np.float32)],
            lambda a: {1: a[0]}, grid=2, ptx="st.global.v4.f32",
        )
        for name, kernel in (("store16_floats", store_floats_kernel), ("store16_floats_at", store_at_kernel))
    ),
    Check(
        "load16_shared", shared_kernel, "void(float32[::1], float32[::1])",
        lambda rng: [floats(rng, 4 * THREADS), unset(4 * THREADS, np.float32)],
        lambda a: {1: turned(a[0])}, ptx="ld.shared.v4.u32",
    ),
    Check(
        "copy_async16", copy_async_kernel, "void(float32[::1], float32[::1])",
        lambda rng: [floats(rng, 8 * THREADS), unset(8 * THREADS, np.float32)],
        lambda a: {1: np.concatenate([turned(a[0][: 4 * THREADS]), turned(a[0][4 * THREADS :])])}, ptx="cp.async.wait_group 1",
    ),
]  # fmt: skip

# 16-bit floats


@cuda.jit
def from_f16_kernel(bits, out):
    i = cuda.grid(1)
    out[i] = ptx.f16_to_f32(bits[i])


@cuda.jit
def from_bf16_kernel(bits, out):
    i = cuda.grid(1)
    out[i] = ptx.bf16_to_f32(bits[i])


@cuda.jit
def to_f16_kernel(x, out):
    i = cuda.grid(1)
    out[i] = ptx.f32_to_f16(x[i])


@cuda.jit
def to_bf16_kernel(x, out):
    i = cuda.grid(1)
    out[i] = ptx.f32_to_bf16(x[i])


@cuda.jit
def f16_pairs_kernel(pairs, out, back, packed):
    i = cuda.grid(1)
    low, high = ptx.f16x2_to_f32x2(pairs[i])
    out[2 * i], out[2 * i + 1] = low, high
    back[i] = ptx.f32x2_to_f16x2(low, high)
    packed[i] = ptx.pack16x2(ptx.f32_to_f16(high), ptx.f32_to_f16(low))


@cuda.jit
def bf16_pairs_kernel(pairs, out, back, packed):
    i = cuda.grid(1)
    low, high = ptx.bf16x2_to_f32x2(pairs[i])
    out[2 * i], out[2 * i + 1] = low, high
    back[i] = ptx.f32x2_to_bf16x2(low, high)
    packed[i] = ptx.pack16x2(ptx.f32_to_bf16(high), ptx.f32_to_bf16(low))


@cuda.jit
def int8_pairs_kernel(fours, out):
    i = cuda.grid(1)
    out[2 * i], out[2 * i + 1] = ptx.s8x4_to_f16x4(fours[i])


@cuda.jit
def exp2_kernel(x, out):
    i = cuda.grid(1)
    out[i] = ptx.exp2(x[i])


ALL_BITS = np.arange(1 << 16).astype(np.uint16)


def values_of_f16(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.float16).astype(np.float32)


def values_of_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def numbers_to_round(rng: np.random.Generator) -> np.ndarray:
    """Random bits of float32 (so every magnitude), numbers half-way between neighbours of both formats, and the ends."""
    anything = rng.integers(0, 1 << 32, 4096, np.uint32).view(np.float32)
    near = (rng.standard_normal(4096) * 10.0 ** rng.integers(-9, 6, 4096)).astype(np.float32)
    halfway_f16 = (near.view(np.uint32) & np.uint32(0xFFFFE000) | np.uint32(0x1000)).view(np.float32)
    halfway_bf16 = (anything.view(np.uint32) & np.uint32(0xFFFF0000) | np.uint32(0x8000)).view(np.float32)
    ends = np.array([0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.996, 65520, -65520, 3.4e38, 6e-8, 3e-8, 2.98e-8, 1e-45], np.float32)
    every = np.concatenate([anything, near, halfway_f16, halfway_bf16, ends])
    return np.concatenate([every, np.ones(-len(every) % THREADS, np.float32)])


def f16_bits(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16))


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """Rounded in float64 by the spacing of bf16 at x (8 bits of significand), beside the bit trick of the twin."""
    with np.errstate(invalid="ignore", over="ignore"):
        spacing = 2.0 ** (np.maximum(np.frexp(x.astype(np.float64))[1], -125) - 8)
        rounded = (np.rint(x / spacing) * spacing).astype(np.float32)
    return np.where(np.isnan(x), np.uint16(0x7FFF), np.where(np.isinf(x), x, rounded).view(np.uint32) >> 16).astype(np.uint16)


def rounded_arguments(rng: np.random.Generator) -> Arrays:
    x = numbers_to_round(rng)
    return [x, unset(len(x), np.uint16)]


ROUNDED = len(numbers_to_round(np.random.default_rng(0))) // THREADS


def f16_pair_arguments(rng: np.random.Generator) -> Arrays:
    pairs = words(f16_bits(floats(rng, 8 * THREADS)))
    return [pairs, unset(8 * THREADS, np.float32), unset(4 * THREADS), unset(4 * THREADS)]


def bf16_pair_arguments(rng: np.random.Generator) -> Arrays:
    pairs = words(bf16_bits(floats(rng, 8 * THREADS)))
    return [pairs, unset(8 * THREADS, np.float32), unset(4 * THREADS), unset(4 * THREADS)]


def swapped(pairs: np.ndarray) -> np.ndarray:
    return pairs >> 16 | pairs << 16


def power_of_two(x: np.ndarray) -> np.ndarray:
    """2^x of whole x, exactly: the exponent is put in place. (np.exp2 of float32 is off by a bit at 127 on some processors.)"""
    with np.errstate(over="ignore"):
        return np.ldexp(np.float32(1), np.clip(x, -1000, 1000).astype(np.int32))


CONVERSIONS = [
    Check(
        "f16_to_f32", from_f16_kernel, "void(uint16[::1], float32[::1])", lambda rng: [ALL_BITS, unset(1 << 16, np.float32)],
        lambda a: {1: values_of_f16(a[0])}, grid=(1 << 16) // 256, block=256, ptx="cvt.f32.f16",
    ),
    Check(
        "bf16_to_f32", from_bf16_kernel, "void(uint16[::1], float32[::1])", lambda rng: [ALL_BITS, unset(1 << 16, np.float32)],
        lambda a: {1: values_of_bf16(a[0])}, grid=(1 << 16) // 256, block=256, ptx="mov.b32",
    ),
    Check(
        "f32_to_f16", to_f16_kernel, "void(float32[::1], uint16[::1])", rounded_arguments,
        lambda a: {1: f16_bits(a[0])}, grid=ROUNDED, ptx="cvt.rn.f16.f32",
    ),
    Check(
        "f32_to_bf16", to_bf16_kernel, "void(float32[::1], uint16[::1])", rounded_arguments,
        lambda a: {1: bf16_bits(a[0])}, grid=ROUNDED, ptx="cvt.rn.bf16.f32",
    ),
    Check(
        "f16_pairs", f16_pairs_kernel, "void(uint32[::1], float32[::1], uint32[::1], uint32[::1])", f16_pair_arguments,
        lambda a: {1: values_of_f16(a[0].view(np.uint16)), 2: a[0], 3: swapped(a[0])}, grid=4, ptx="cvt.rn.f16x2.f32",
    ),
    Check(
        "int8_pairs", int8_pairs_kernel, "void(uint32[::1], uint32[::1])", lambda rng: [random_words(rng, np.uint32, 4 * THREADS), unset(8 * THREADS)],
        lambda a: {1: words(a[0].view(np.int8).astype(np.float16))}, grid=4, ptx="sub.f16x2",
    ),
    Check(  # whole numbers: exact there
        "exp2", exp2_kernel, "void(float32[::1], float32[::1])",
        lambda rng: [np.r_[-np.inf, np.inf, rng.integers(-126, 128, 4 * THREADS - 2)].astype(np.float32), unset(4 * THREADS, np.float32)],
        lambda a: {1: power_of_two(a[0])}, grid=4, ptx="ex2.approx.ftz.f32",
    ),
    Check(
        "bf16_pairs", bf16_pairs_kernel, "void(uint32[::1], float32[::1], uint32[::1], uint32[::1])", bf16_pair_arguments,
        lambda a: {1: values_of_bf16(a[0].view(np.uint16)), 2: a[0], 3: swapped(a[0])}, grid=4, ptx="cvt.rn.bf16x2.f32",
    ),
]  # fmt: skip

# Tensor cores: every warp multiplies matrices of its own


@cuda.jit
def mma_f16_kernel(a, b, c, d):
    i = cuda.grid(1)
    r = ptx.mma_f16((a[i, 0], a[i, 1], a[i, 2], a[i, 3]), (b[i, 0], b[i, 1]), (c[i, 0], c[i, 1], c[i, 2], c[i, 3]))
    d[i, 0], d[i, 1], d[i, 2], d[i, 3] = r


@cuda.jit
def mma_bf16_kernel(a, b, c, d):
    i = cuda.grid(1)
    r = ptx.mma_bf16((a[i, 0], a[i, 1], a[i, 2], a[i, 3]), (b[i, 0], b[i, 1]), (c[i, 0], c[i, 1], c[i, 2], c[i, 3]))
    d[i, 0], d[i, 1], d[i, 2], d[i, 3] = r


@cuda.jit
def mma_s8_kernel(a, b, c, d):
    i = cuda.grid(1)
    r = ptx.mma_s8((a[i, 0], a[i, 1], a[i, 2], a[i, 3]), (b[i, 0], b[i, 1]), (c[i, 0], c[i, 1], c[i, 2], c[i, 3]))
    d[i, 0], d[i, 1], d[i, 2], d[i, 3] = r


def place_a(lane: int, element: int, n: int) -> tuple[int, int]:
    """(row, column) of A for element 0..4n of a lane, n elements to a register, by the tables of the PTX ISA."""
    register, offset = divmod(element, n)
    row = lane // 4 + (8 if register in (1, 3) else 0)
    return row, lane % 4 * n + offset + (4 * n if register >= 2 else 0)


def place_b(lane: int, element: int, n: int) -> tuple[int, int]:
    register, offset = divmod(element, n)
    return lane % 4 * n + offset + 4 * n * register, lane // 4


def place_c(lane: int, element: int) -> tuple[int, int]:
    return lane // 4 + (8 if element >= 2 else 0), lane % 4 * 2 + element % 2


def deal(matrices: np.ndarray, place: Callable[..., tuple[int, int]], count: int, *n: int) -> np.ndarray:
    """Matrices [W, rows, columns] -> what the lanes hold [W * 32, count]."""
    held = np.empty((len(matrices), 32, count), matrices.dtype)
    for lane in range(32):
        for element in range(count):
            held[:, lane, element] = matrices[(slice(None), *place(lane, element, *n))]
    return held.reshape(-1, count)


def collect(held: np.ndarray) -> np.ndarray:
    """What the lanes hold of C or D [W * 32, 4] -> matrices [W, 16, 8]."""
    matrices = np.empty((len(held) // 32, 16, 8), held.dtype)
    for lane in range(32):
        for element in range(4):
            matrices[(slice(None), *place_c(lane, element))] = held[lane::32, element]
    return matrices


def undeal(held: np.ndarray, place: Callable[..., tuple[int, int]], shape: tuple[int, int], n: int) -> np.ndarray:
    matrices = np.empty((len(held) // 32, *shape), held.dtype)
    for lane in range(32):
        for element in range(held.shape[1]):
            matrices[(slice(None), *place(lane, element, n))] = held[lane::32, element]
    return matrices


WARPS = 6


def float_fragments(encode: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.random.Generator], Arrays]:
    def arguments(rng: np.random.Generator) -> Arrays:
        a = deal(encode(floats(rng, WARPS * 256)).reshape(WARPS, 16, 16), place_a, 8, 2)
        b = deal(encode(floats(rng, WARPS * 128)).reshape(WARPS, 16, 8), place_b, 4, 2)
        c = floats(rng, WARPS * 128).reshape(-1, 4)
        return [a.view(np.uint32), b.view(np.uint32), c, np.full_like(c, np.nan)]

    return arguments


def float_products(decode: Callable[[np.ndarray], np.ndarray]) -> Callable[[Arrays], dict[int, np.ndarray]]:
    def expected(arguments: Arrays) -> dict[int, np.ndarray]:
        a = undeal(decode(arguments[0].view(np.uint16)).astype(np.float64), place_a, (16, 16), 2)
        b = undeal(decode(arguments[1].view(np.uint16)).astype(np.float64), place_b, (16, 8), 2)
        return {3: deal(a @ b + collect(arguments[2].astype(np.float64)), place_c, 4)}

    return expected


def byte_fragments(rng: np.random.Generator) -> Arrays:
    a = deal(rng.integers(-128, 128, (WARPS, 16, 32)).astype(np.int8), place_a, 16, 4)
    b = deal(rng.integers(-128, 128, (WARPS, 32, 8)).astype(np.int8), place_b, 8, 4)
    c = rng.integers(-(1 << 20), 1 << 20, (WARPS * 32, 4)).astype(np.int32)
    return [a.view(np.uint32), b.view(np.uint32), c, np.full_like(c, -1)]


def byte_products(arguments: Arrays) -> dict[int, np.ndarray]:
    a = undeal(arguments[0].view(np.int8).astype(np.int64), place_a, (16, 32), 4)
    b = undeal(arguments[1].view(np.int8).astype(np.int64), place_b, (32, 8), 4)
    return {3: deal(a @ b + collect(arguments[2].astype(np.int64)), place_c, 4)}


FRAGMENTS = "void(uint32[:, ::1], uint32[:, ::1], {0}[:, ::1], {0}[:, ::1])"
TENSOR_CORES = [
    Check(
        "mma_f16", mma_f16_kernel, FRAGMENTS.format("float32"), float_fragments(f16_bits), float_products(values_of_f16),
        grid=WARPS // 2, tolerance=1e-6, ptx="mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    ),
    Check(
        "mma_bf16", mma_bf16_kernel, FRAGMENTS.format("float32"), float_fragments(bf16_bits), float_products(values_of_bf16),
        grid=WARPS // 2, tolerance=1e-6, ptx="mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    ),
    Check(
        "mma_s8", mma_s8_kernel, FRAGMENTS.format("int32"), byte_fragments, byte_products,
        grid=WARPS // 2, ptx="mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32",
    ),
]  # fmt: skip

# Flags between blocks


@cuda.jit
def turn_kernel(x):
    """Launched like any other it waits for nothing. (Early: tests/l1_kernels/gpu/test_early_gpu.py.)"""
    ptx.take_turn()
    x[cuda.threadIdx.x] += np.float32(1)


@cuda.jit
def message_kernel(data, flags, out):
    """Every block waits for the message of the block after it; the last one, which starts last, sends without waiting."""
    i = cuda.threadIdx.x
    last = cuda.gridDim.x - 1
    if cuda.blockIdx.x < last:
        if i == 0:
            while ptx.load_acquire(flags, cuda.blockIdx.x + 1) == 0:
                pass
        cuda.syncthreads()
        data[cuda.blockIdx.x, i] += data[cuda.blockIdx.x + 1, i]
    cuda.syncthreads()
    if i == 0:
        ptx.store_release(flags, cuda.blockIdx.x, 1)
    out[cuda.blockIdx.x, i] = data[cuda.blockIdx.x, i]


@cuda.jit
def system_message_kernel(data, flags, out):
    """As message_kernel, by flags that other GPUs would see."""
    i = cuda.threadIdx.x
    last = cuda.gridDim.x - 1
    if cuda.blockIdx.x < last:
        if i == 0:
            while ptx.load_acquire_system(flags, cuda.blockIdx.x + 1) == 0:
                pass
        cuda.syncthreads()
        data[cuda.blockIdx.x, i] += data[cuda.blockIdx.x + 1, i]
    cuda.syncthreads()
    if i == 0:
        ptx.store_release_system(flags, cuda.blockIdx.x, 1)
    out[cuda.blockIdx.x, i] = data[cuda.blockIdx.x, i]


@cuda.jit
def address_message_kernel(data, flags, out):
    """As system_message_kernel, by flags whose address alone the sender knows."""
    i = cuda.threadIdx.x
    last = cuda.gridDim.x - 1
    if cuda.blockIdx.x < last:
        if i == 0:
            while ptx.load_acquire_system(flags, cuda.blockIdx.x + 1) == 0:
                pass
        cuda.syncthreads()
        data[cuda.blockIdx.x, i] += data[cuda.blockIdx.x + 1, i]
    cuda.syncthreads()
    if i == 0:
        ptx.store_release_system_at(flags.ctypes.data + 4 * cuda.blockIdx.x, 1)
    out[cuda.blockIdx.x, i] = data[cuda.blockIdx.x, i]


@cuda.jit
def counter_kernel(counters, tickets):
    """Each thread draws a ticket; all tickets are different."""
    ptx.add_release(counters, 0, 3)
    tickets[ptx.fetch_add_release(counters, 1, 1)] = 1


@cuda.jit
def grid_sync_kernel(counter, data, out, rounds):
    """Every round each block adds its right neighbour's number to its own, all at once."""
    here, right = cuda.blockIdx.x, (cuda.blockIdx.x + 1) % cuda.gridDim.x
    i = cuda.threadIdx.x
    for _ in range(rounds[0]):
        number = data[here, i] + data[right, i]
        groups.grid_sync(counter)
        data[here, i] = number
        groups.grid_sync(counter)
    out[here, i] = data[right, i]


BLOCKS = 5


def message_arguments(rng: np.random.Generator) -> Arrays:
    return [rng.integers(0, 100, (BLOCKS, THREADS)), np.zeros(BLOCKS, np.int32), unset(BLOCKS * THREADS, np.int64).reshape(BLOCKS, THREADS)]


def messages(arguments: Arrays) -> dict[int, np.ndarray]:
    return {1: np.ones(BLOCKS, np.int32), 2: np.cumsum(arguments[0][::-1], axis=0)[::-1]}


def grid_sync_result(arguments: Arrays) -> dict[int, np.ndarray]:
    data = arguments[1]
    for _ in range(arguments[3][0]):
        data = data + np.roll(data, -1, axis=0)
    return {1: data, 2: np.roll(data, -1, axis=0)}


def grid_sync_arguments(blocks: int, counter: int) -> Callable[[np.random.Generator], Arrays]:
    def arguments(rng: np.random.Generator) -> Arrays:
        shape = (blocks, THREADS)
        return [np.array([counter], np.int32), rng.integers(0, 100, shape), unset(blocks * THREADS, np.int64).reshape(shape), np.array([7])]

    return arguments


MESSAGE = "void(int64[:, ::1], int32[::1], int64[:, ::1])"
GRID_SYNC = "void(int32[::1], int64[:, ::1], int64[:, ::1], int64[::1])"
FLAGS = [
    Check("take_turn", turn_kernel, "void(float32[::1])", lambda rng: [rng.standard_normal(THREADS, dtype=np.float32)], lambda a: {0: a[0] + np.float32(1)}),
    Check("messages", message_kernel, MESSAGE, message_arguments, messages, grid=BLOCKS, ptx="ld.acquire.gpu.global.s32"),
    Check("system_messages", system_message_kernel, MESSAGE, message_arguments, messages, grid=BLOCKS, ptx="st.release.sys.global.s32"),
    Check("address_messages", address_message_kernel, MESSAGE, message_arguments, messages, grid=BLOCKS, ptx="st.release.sys.global.s32"),
    Check(
        "counters", counter_kernel, "void(int32[::1], int32[::1])", lambda rng: [np.zeros(2, np.int32), np.zeros(3 * THREADS, np.int32)],
        lambda a: {0: np.array([9 * THREADS, 3 * THREADS], np.int32), 1: np.ones(3 * THREADS, np.int32)},
        grid=3, ptx="atom.acq_rel.gpu.global.add.s32",
    ),
    Check("grid_sync", grid_sync_kernel, GRID_SYNC, grid_sync_arguments(BLOCKS, 0), grid_sync_result, grid=BLOCKS),
    Check("grid_sync_one_block", grid_sync_kernel, GRID_SYNC, grid_sync_arguments(1, -(1 << 31)), grid_sync_result),
]  # fmt: skip

# Cooperative groups


@cuda.jit
def tile_kernel(x, sums, largest, inclusive, counts, exclusive, below, lanes):
    i = cuda.grid(1)
    sums[i] = groups.reduce_sum(x[i])
    largest[i] = groups.reduce_max(x[i])
    inclusive[i] = groups.inclusive_scan(x[i])
    exclusive[i] = groups.exclusive_scan(counts[i])
    groups.sync()
    below[i] = groups.shfl_down(x[i], 3)
    votes = groups.ballot(x[i] > 0)
    lanes[i, 0] = groups.lane()
    lanes[i, 1] = groups.warp()
    lanes[i, 2] = 1 if groups.any_lane(x[i] > 2) else 0
    lanes[i, 3] = 1 if groups.all_lanes(x[i] > -2) else 0
    lanes[i, 4] = cuda.popc(votes)


@cuda.jit
def block_kernel(x, sums, largest):
    """Blocks in three dimensions; both results twice, so that a reused buffer would show."""
    block, thread = cuda.blockIdx.x, groups.warp() * 32 + groups.lane()
    value = x[block, thread]
    for i in range(2):
        sums[block, thread, i] = groups.block_sum(value)
        largest[block, thread, i] = groups.block_max(value)
        groups.block_sync()
        value = -value


def tile_arguments(rng: np.random.Generator) -> Arrays:
    n = 4 * THREADS
    counts = rng.integers(0, 9, n).astype(np.int32)
    sums, largest, inclusive, below = (unset(n, np.float32) for _ in range(4))
    return [floats(rng, n), sums, largest, inclusive, counts, unset(n, np.int32), below, unset(5 * n, np.int32).reshape(n, 5)]


def tile_results(arguments: Arrays) -> dict[int, np.ndarray]:
    x = arguments[0].reshape(-1, 32)
    counts = arguments[4].reshape(-1, 32)
    lane = np.tile(np.arange(32), len(x))
    votes = [lane, np.arange(x.size) % THREADS // 32]
    votes += [np.repeat(flag, 32) for flag in ((x > 2).any(1), (x > -2).all(1), (x > 0).sum(1))]
    return {
        2: np.repeat(x.max(1), 32),
        5: (np.cumsum(counts, axis=1) - counts).reshape(-1),
        6: np.concatenate([x[:, 3:], x[:, 29:]], axis=1).reshape(-1),
        7: np.stack(votes, axis=1),
    }


def tile_sums(arguments: Arrays) -> dict[int, np.ndarray]:
    x = arguments[0].reshape(-1, 32).astype(np.float64)
    return {1: np.repeat(x.sum(1), 32), 3: np.cumsum(x, axis=1).reshape(-1)}


def block_arguments(threads: int) -> Callable[[np.random.Generator], Arrays]:
    def arguments(rng: np.random.Generator) -> Arrays:
        shape = (3, threads, 2)
        return [floats(rng, 3 * threads).reshape(3, -1), *(unset(6 * threads, np.float32).reshape(shape) for _ in range(2))]

    return arguments


def block_results(arguments: Arrays) -> dict[int, np.ndarray]:
    x = arguments[0].astype(np.float64)
    shape = arguments[1].shape
    sums, largest = x.sum(1), x.max(1)
    return {
        1: np.broadcast_to(np.stack([sums, -sums], axis=1)[:, None, :], shape),
        2: np.broadcast_to(np.stack([largest, -x.min(1)], axis=1)[:, None, :], shape),
    }


TILE = "void(float32[::1], float32[::1], float32[::1], float32[::1], int32[::1], int32[::1], float32[::1], int32[:, ::1])"
BLOCK = "void(float32[:, ::1], float32[:, :, ::1], float32[:, :, ::1])"
GROUPS = [
    Check("tile", tile_kernel, TILE, tile_arguments, tile_results, grid=4, ptx="shfl.sync"),
    Check("tile_sums", tile_kernel, TILE, tile_arguments, tile_sums, grid=4, tolerance=1e-6),
    *(
        Check(f"block_{threads}", block_kernel, BLOCK, block_arguments(threads), block_results, grid=3, block=threads, tolerance=1e-6)
        for threads in (32, 96, 256, 1024)
    ),
]

INSTRUCTIONS = [*MEMORY, *CONVERSIONS, *TENSOR_CORES, *FLAGS]
