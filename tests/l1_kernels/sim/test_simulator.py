"""The simulator itself: what it runs, and what it refuses and how it says so."""

from __future__ import annotations

import numpy as np
import pytest
from greenlet import getcurrent

from l1_kernels import groups, ptx
from l1_kernels.cuda_api import at_most, cuda, math
from l1_kernels.simulator import scheduler
from l1_kernels.simulator.errors import DeadlockError, DivergenceError, SimulatorError

pytestmark = pytest.mark.sim
ALL = 0xFFFFFFFF


# Running


@cuda.jit("void(float32[:], float32[:])", fastmath=True)
def double(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = x[i] * np.float32(2)


@pytest.mark.parametrize("size", [1, 7, 37, 199])
def test_straight_line_kernel(size: int) -> None:
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    y = np.full(size + 1, np.nan, np.float32)
    double[(size + 31) // 32, 32, None](x, y)
    np.testing.assert_array_equal(y[:-1], 2 * x)
    assert np.isnan(y[-1])


def test_threads_that_do_not_wait_share_a_greenlet() -> None:
    seen = set()

    @cuda.jit
    def note(out):
        seen.add(id(getcurrent()))
        out[cuda.grid(1)] = 1

    out = np.zeros(4 * 64)
    note[4, 64](out)
    assert out.all() and len(seen) == 1


def test_blocks_that_do_not_poll_are_alive_one_at_a_time() -> None:
    alive = []

    @cuda.jit
    def note(out):
        cuda.syncthreads()
        alive.append(len(scheduler.running().live))
        out[cuda.grid(1)] = 1

    out = np.zeros(5 * 40)
    note[5, 40](out)
    assert out.all() and max(alive) <= 40


@cuda.jit
def where_am_i(out):
    x, y, z = cuda.grid(3)
    out[z, y, x, 0] = cuda.threadIdx.x + 10 * cuda.threadIdx.y + 100 * cuda.threadIdx.z
    out[z, y, x, 1] = cuda.blockIdx.x + 10 * cuda.blockIdx.y + 100 * cuda.blockIdx.z
    out[z, y, x, 2] = cuda.laneid
    cuda.syncthreads()
    out[z, y, x, 3] = cuda.threadIdx.x + 10 * cuda.threadIdx.y + 100 * cuda.threadIdx.z


def test_indices_in_three_dimensions() -> None:
    out = np.full((2 * 2, 3 * 2, 2 * 5, 4), -1)
    where_am_i[(2, 3, 2), (5, 2, 2)](out)
    z, y, x = np.meshgrid(np.arange(4), np.arange(6), np.arange(10), indexing="ij")
    thread = x % 5 + 10 * (y % 2) + 100 * (z % 2)
    np.testing.assert_array_equal(out[..., 0], thread)
    np.testing.assert_array_equal(out[..., 1], x // 5 + 10 * (y // 2) + 100 * (z // 2))
    np.testing.assert_array_equal(out[..., 2], (x % 5 + 5 * (y % 2) + 10 * (z % 2)) % 32)
    np.testing.assert_array_equal(out[..., 3], thread)


@cuda.jit
def block_reverse(x, y):
    kept = cuda.shared.array(96, np.float32)
    i = cuda.threadIdx.x
    kept[i] = x[cuda.grid(1)]
    cuda.syncthreads()
    y[cuda.grid(1)] = kept[cuda.blockDim.x - 1 - i]


def test_shared_memory_and_barrier() -> None:
    x = np.random.default_rng(0).standard_normal(3 * 96).astype(np.float32)
    y = np.full_like(x, np.nan)
    block_reverse[3, 96](x, y)
    np.testing.assert_array_equal(y.reshape(3, 96), x.reshape(3, 96)[:, ::-1])


@cuda.jit
def draw_order(ticket, order):
    cuda.syncwarp()
    order[cuda.atomic.add(ticket, 0, 1)] = cuda.grid(1)
    cuda.syncthreads()
    order[cuda.atomic.add(ticket, 0, 1)] = cuda.grid(1)


def test_the_order_of_threads_is_the_same_every_time() -> None:
    orders = []
    for _ in range(3):
        order = np.full(2 * 3 * 64, -1)
        draw_order[3, 64](np.zeros(1, np.int32), order)
        orders.append(order)
    assert sorted(orders[0]) == sorted([*range(192), *range(192)])
    np.testing.assert_array_equal(orders[0], orders[1])
    np.testing.assert_array_equal(orders[0], orders[2])


@cuda.jit
def warp_words(x, out):
    i = cuda.grid(1)
    out[i, 0] = cuda.shfl_sync(ALL, x[i], 5)
    out[i, 1] = cuda.shfl_up_sync(ALL, x[i], 1)
    out[i, 2] = cuda.shfl_down_sync(ALL, x[i], 4)
    out[i, 3] = cuda.shfl_xor_sync(ALL, x[i], 3)
    out[i, 4] = cuda.ballot_sync(ALL, x[i] > 4)
    out[i, 5] = cuda.any_sync(ALL, x[i] > 8)
    out[i, 6] = cuda.all_sync(ALL, x[i] >= 0)
    out[i, 7] = cuda.match_any_sync(ALL, x[i])
    out[i, 8] = cuda.eq_sync(ALL, x[i] > 4)
    out[i, 9], _ = cuda.match_all_sync(ALL, x[i] // 10)
    if i % 32 < 8:  # a part of the warp, by a mask of its own
        out[i, 10] = cuda.shfl_down_sync(0xFF, x[i], 1)
    else:
        out[i, 10] = cuda.shfl_up_sync(0xFFFFFF00, x[i], 1)
    out[i, 11] = cuda.syncthreads_count(x[i] > 4)
    out[i, 12] = cuda.syncthreads_or(x[i] > 8) + 2 * cuda.syncthreads_and(x[i] >= 0)


def test_warp_operations() -> None:
    x = np.random.default_rng(1).integers(0, 10, 64)
    out = np.full((64, 13), -1)
    warp_words[1, 64](x, out)
    w, lane = x.reshape(2, 32), np.arange(32)
    bits = np.int64(1) << lane
    expected = [
        np.repeat(w[:, 5:6], 32, 1), w[:, np.maximum(lane - 1, 0)], w[:, np.where(lane + 4 < 32, lane + 4, lane)], w[:, lane ^ 3],
        np.repeat((bits * (w > 4)).sum(1), 32), np.repeat((w > 8).any(1), 32), np.ones(64),
        ((w[:, :, None] == w[:, None, :]) * bits).sum(2),
        np.zeros(64), np.full(64, ALL),
    ]  # fmt: skip
    for column, wanted in enumerate(expected):
        np.testing.assert_array_equal(out[:, column], np.reshape(wanted, 64), err_msg=f"column {column}")
    halves = out[:, 10].reshape(2, 32)
    np.testing.assert_array_equal(halves[:, :7], w[:, 1:8])
    np.testing.assert_array_equal(halves[:, 9:], w[:, 8:31])
    assert (halves[:, 7:9] == np.iinfo(np.int64).min).all()  # from lanes that took no part: poison
    assert (out[:, 11] == (x > 4).sum()).all()
    assert (out[:, 12] == (x > 8).any() + 2).all()


@cuda.jit
def with_lock(lock, total):
    while cuda.atomic.cas(lock, 0, 0, 1) != 0:
        pass
    before = total[0]
    ptx.load_acquire(lock, 0)
    ptx.load_acquire(lock, 0)  # the others run here
    total[0] = before + 1
    cuda.atomic.exch(lock, 0, 0)


def test_a_spin_lock_lets_the_others_run() -> None:
    total = np.zeros(1, np.int64)
    with_lock[3, 8](np.zeros(1, np.int32), total)
    assert total[0] == 24


@cuda.jit
def atomics(a, old):
    old[0] = cuda.atomic.add(a, 0, 5)
    old[1] = cuda.atomic.sub(a, 1, 5)
    old[2] = cuda.atomic.max(a, 2, 5)
    old[3] = cuda.atomic.min(a, 3, 5)
    old[4] = cuda.atomic.exch(a, 4, 5)
    old[5] = cuda.atomic.and_(a, 5, 5)
    old[6] = cuda.atomic.or_(a, 6, 5)
    old[7] = cuda.atomic.xor(a, 7, 5)
    old[8] = cuda.atomic.inc(a, 8, 5)
    old[9] = cuda.atomic.dec(a, 9, 5)
    old[10] = cuda.atomic.cas(a, 10, 10, 5)
    old[11] = cuda.atomic.cas(a, 11, 10, 5)


def test_atomics_give_the_old_value() -> None:
    a = np.arange(12, dtype=np.uint32)
    old = np.full(12, -1)
    atomics[1, 1](a, old)
    np.testing.assert_array_equal(old, np.arange(12))
    np.testing.assert_array_equal(a, [5, np.uint32((1 - 5) % 2**32), 5, 3, 5, 5 & 5, 6 | 5, 7 ^ 5, 0, 5, 5, 11])


# Memory


@cuda.jit
def unwritten(floats, integers):
    shared_floats = cuda.shared.array((2, 3), np.float32)
    local_bits = cuda.local.array(4, np.uint16)
    local_ints = cuda.local.array(2, np.int32)
    floats[0] = shared_floats[1, 2]
    floats[1] = ptx.f16_to_f32(local_bits[3])
    floats[2] = ptx.bf16_to_f32(local_bits[0])
    integers[0] = local_ints[1]


def test_unwritten_memory_is_poison() -> None:
    floats, integers = np.zeros(3, np.float32), np.zeros(1, np.int32)
    unwritten[1, 1](floats, integers)
    assert np.isnan(floats).all() and integers[0] == np.iinfo(np.int32).min


def test_shared_memory_is_not_kept_between_launches() -> None:
    @cuda.jit
    def leave(out):
        kept = cuda.shared.array(1, np.float32)
        out[0] = kept[0]
        kept[0] = 1

    out = np.zeros(1, np.float32)
    for _ in range(2):
        leave[2, 1](out)
        assert np.isnan(out[0])


def make_keeper(value: int):  # a factory: both functions have one source line
    @cuda.jit(device=True)
    def keep(first):
        kept = cuda.shared.array(1, np.int32)
        if first:
            kept[0] = value
        return kept[0]

    return keep


keep_one, keep_two = make_keeper(1), make_keeper(2)


@cuda.jit
def two_keepers(out):
    keep_one(True)
    keep_two(True)
    out[0] = keep_one(False)
    out[1] = keep_two(False)


def test_functions_of_one_factory_have_shared_arrays_of_their_own() -> None:
    out = np.zeros(2, np.int32)
    two_keepers[1, 1](out)
    np.testing.assert_array_equal(out, [1, 2])


@cuda.jit
def dynamic(out):
    numbers = cuda.shared.array(0, np.float32)
    bits = cuda.shared.array(0, np.uint32)
    out[0], out[1], out[2] = numbers.size, bits.size, np.isnan(numbers[0])
    numbers[0] = 1.0
    out[3] = bits[0]


def test_dynamic_shared_memory() -> None:
    out = np.zeros(4, np.int64)
    dynamic[1, 1, 0, 40](out)
    np.testing.assert_array_equal(out, [10, 10, 1, 0x3F800000])


@cuda.jit
def greedy(out):
    a = cuda.shared.array(10000, np.float32)
    b = cuda.shared.array(3000, np.float32)
    out[0] = a[0] + b[0]


def test_too_much_shared_memory() -> None:
    with pytest.raises(SimulatorError, match="52000 bytes of static shared memory"):
        greedy[1, 1](np.zeros(1))


# Numbers


@cuda.jit
def arithmetic(x, floats, integers):
    floats[0] = math.exp(x[0])  # beyond float32: infinity
    floats[1] = np.float32(1) / (np.float32(1) + math.exp(x[0]))
    floats[2] = math.log(x[1])
    floats[3] = math.sqrt(x[2])
    floats[4] = x[0] / x[1]
    floats[5] = math.pow(x[0], x[0])
    floats[6] = math.exp(1000.0)
    integers[0] = np.uint32(0xFFFFFFFF) + np.uint32(2)
    integers[1] = cuda.popc(0xF0F0) + 100 * cuda.clz(1) + 10000 * cuda.ffs(8)
    integers[2] = cuda.brev(np.uint32(1))
    integers[3] = math.floor(x[3]) + 10 * math.ceil(x[3])


@pytest.mark.filterwarnings("error")
def test_arithmetic_does_not_trap() -> None:
    floats, integers = np.zeros(7, np.float32), np.zeros(4, np.int64)
    arithmetic[1, 1](np.array([1000, 0, -1, 2.5], np.float32), floats, integers)
    np.testing.assert_array_equal(floats, np.array([np.inf, 0, -np.inf, np.nan, np.inf, np.inf, np.inf], np.float32))
    np.testing.assert_array_equal(integers, [1, 8 + 3100 + 40000, 1 << 31, 32])


@pytest.mark.parametrize("name", ["exp", "log", "tanh", "erf", "sqrt", "cos", "expm1"])
def test_math_keeps_float32(name: str) -> None:
    x = np.float32(0.37)
    result = getattr(math, name)(x)
    assert type(result) is np.float32
    import math as exact

    assert result == np.float32(getattr(exact, name)(float(x)))


# Faults


@cuda.jit
def write_beyond(out):
    cuda.syncthreads()
    out[cuda.grid(1)] = 1


def test_an_index_error_names_kernel_block_and_thread() -> None:
    with pytest.raises(IndexError, match="index 63 is out of bounds") as caught:
        write_beyond[2, 32](np.zeros(37))
    assert caught.value.__notes__ == ["in kernel write_beyond, block (1, 0, 0), thread (31, 0, 0)"]  # the last at the barrier goes on first
    y = np.full(4, np.nan, np.float32)
    double[1, 4](np.ones(4, np.float32), y)  # and the next launch is none the wiser
    assert (y == 2).all()


@cuda.jit
def half_a_shuffle(x):
    if cuda.threadIdx.x < 16:
        x[cuda.threadIdx.x] = cuda.shfl_down_sync(ALL, x[cuda.threadIdx.x], 1)  # here


@cuda.jit
def two_shuffles(x):
    i = cuda.threadIdx.x
    if i < 16:
        x[i] = cuda.shfl_xor_sync(ALL, x[i], 1)
    else:
        x[i] = cuda.shfl_xor_sync(ALL, x[i], 1)


@cuda.jit
def shuffle_against_barrier(x):
    if cuda.threadIdx.x < 16:
        cuda.syncthreads()
    else:
        x[0] = cuda.shfl_sync(ALL, x[0], 0)


@cuda.jit
def barrier_against_shuffle(x):
    if cuda.threadIdx.x < 16:
        x[0] = cuda.shfl_sync(ALL, x[0], 0)
    else:
        cuda.syncthreads()


@cuda.jit
def early_return(x):
    if cuda.threadIdx.x >= 7:
        return
    cuda.syncthreads()


@cuda.jit
def late_return(x):
    if cuda.threadIdx.x >= 7:
        cuda.syncthreads()


@cuda.jit
def two_barriers(x):
    if cuda.threadIdx.x < 32:
        cuda.syncthreads()
    else:
        cuda.syncthreads()


@cuda.jit
def not_in_its_mask(x):
    x[0] = cuda.shfl_sync(0xFE, x[0], 0)


@cuda.jit
def returned_lane(x):
    i = cuda.threadIdx.x
    if i >= 16:
        return
    cuda.syncwarp(0xFFFF)
    cuda.syncwarp(ALL)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (half_a_shuffle, "lane 16 of warp 0 has returned: divergent, lanes 0-15 wait in shfl_down_sync at .*test_simulator.py:{line}"),
        (two_shuffles, "shfl_xor_sync at .* by lane 16 of warp 0: divergent, lanes 0-15 wait in shfl_xor_sync at "),
        (shuffle_against_barrier, "lanes 0-15 of its mask wait in syncthreads at "),
        (barrier_against_shuffle, "lane 16 of warp 0 waits in syncthreads at .*: divergent, lanes 0-15 wait in shfl_sync at "),
        (early_return, "a thread returns, but 7 others of its block wait for it in syncthreads at "),
        (late_return, "syncthreads at .*: 7 threads of the block have returned"),
        (two_barriers, "syncthreads at .*: 32 other threads of the block wait in syncthreads at "),
        (not_in_its_mask, "mask 0x000000fe leaves the lane itself out"),
        (returned_lane, "lane 16 of warp 0 has returned|lanes 16-31 of its mask have returned"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_divergence_is_refused(kernel, message: str) -> None:
    line = half_a_shuffle.py_func.__code__.co_firstlineno + 3
    with pytest.raises(DivergenceError, match=message.format(line=line)) as caught:
        kernel[1, 64](np.zeros(64))
    assert any(f"in kernel {kernel.__name__}, block (0, 0, 0)" in note for note in caught.value.__notes__)


@cuda.jit
def wait_for_nobody(flags):
    if cuda.threadIdx.x == 0:
        while ptx.load_acquire(flags, 0) == 0:
            pass
    cuda.syncthreads()


def test_a_flag_that_nobody_sets_is_a_deadlock() -> None:
    line = wait_for_nobody.py_func.__code__.co_firstlineno
    with pytest.raises(DeadlockError, match="polls a flag that nobody changes") as caught:
        wait_for_nobody[2, 40](np.zeros(1, np.int32))
    message = str(caught.value)
    assert f"1 of block (0, 0, 0): polling at {__file__}:{line + 3}" in message
    assert f"39 of block (1, 0, 0): syncthreads at {__file__}:{line + 5}" in message


@cuda.jit
def cross_wait():
    if cuda.threadIdx.x < 16:
        cuda.syncwarp(0x1FFFF)  # waits for lane 16 too, which
    else:
        cuda.syncwarp(0xFFFF8000)  # waits for lane 15


def test_lanes_that_wait_for_one_another_are_refused() -> None:
    with pytest.raises(DivergenceError, match="divergent, lanes 0-15 wait in syncwarp"):
        cross_wait[1, 32]()


def test_a_bounded_spin_ends_by_itself() -> None:
    @cuda.jit
    def look(flags, out):
        looks = 0
        while ptx.load_acquire(flags, 0) == 0 and looks < 100:
            looks += 1
        out[0] = looks

    out = np.zeros(1, np.int32)
    look[1, 1](np.zeros(1, np.int32), out)
    assert out[0] == 100


def test_more_blocks_than_a_gpu_holds_can_meet() -> None:
    @cuda.jit
    def meet_all(counter, out):
        out[cuda.blockIdx.x] = 1
        groups.grid_sync(counter)
        if cuda.blockIdx.x == 0:
            out[0] = out.sum()

    out = np.zeros(300, np.int64)
    meet_all[300, 1](np.zeros(1, np.int32), out)
    assert out[0] == 300


# Launching


@pytest.mark.parametrize(
    ("grid", "block", "name"), [(0, 32, "grid"), (1, 0, "block"), (1, 1025, "block"), (1, (32, 33), "block"), ((1, 70000), 32, "grid")]
)
def test_impossible_launches(grid, block, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        double[grid, block]


def test_a_list_is_no_argument() -> None:
    with pytest.raises(TypeError, match="argument 1 of kernel double is a list"):
        double[1, 1](np.ones(1, np.float32), [0.0])


def test_a_kernel_gives_nothing_back() -> None:
    @cuda.jit
    def give(x):
        return x

    with pytest.raises(SimulatorError, match="returns a value"):
        give[1, 1](3)


def test_a_kernel_launches_no_kernel() -> None:
    @cuda.jit
    def outer(x, y):
        double[1, 1](x, y)

    with pytest.raises(SimulatorError, match="kernel double is launched from within kernel outer"):
        outer[1, 1](np.ones(1, np.float32), np.ones(1, np.float32))


def test_outside_of_a_kernel() -> None:
    for call in (cuda.syncthreads, lambda: cuda.laneid, lambda: cuda.shared.array(3, np.float32), lambda: groups.reduce_sum(1)):
        with pytest.raises(SimulatorError, match="only a kernel"):
            call()


def test_a_block_larger_than_its_kernel_says() -> None:
    """As a GPU refuses it for `launch_bounds`, and for want of registers."""

    def nothing(x):
        x[0] = 1

    x = np.zeros(1, np.float32)
    for kernel, most in ((cuda.jit(nothing), 1024), (cuda.jit(launch_bounds=(64, 2))(nothing), 64), (cuda.jit(launch_bounds=96)(nothing), 96), (at_most(128)(cuda.jit(nothing)), 128)):
        kernel[1, most](x)
        with pytest.raises(ValueError, match=f"more than {most} threads, the most of nothing"):
            kernel[1, most + 32](x)
