"""Keys and values in host memory: what is moved, in which order, and that nothing else is touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from l1_kernels.device import CpuDevice
from l2_dense_parallel.kv_offload import OffloadedKV

G, S, R = 2, 9, 4  # key heads, places, dimensions


class Log(CpuDevice):
    """The CPU, with a diary of what goes to which stream: ("compute" | "copies", what)."""

    def __init__(self) -> None:
        super().__init__()
        self.diary: list[tuple[str, Any]] = []
        self.compute, self.copies = LogStream(self, "compute"), LogStream(self, "copies")

    def stream(self) -> Any:
        return self.copies

    def current_stream(self) -> Any:
        return self.compute

    def event(self) -> Any:
        return object()

    def copy(self, to: Any, source: Any, stream: Any) -> None:
        self.diary.append((stream.name, "copy"))
        to[...] = source


class LogStream:
    def __init__(self, log: Log, name: str) -> None:
        self.log, self.name = log, name

    def record(self, event: Any) -> None:
        self.log.diary.append((self.name, ("record", id(event))))

    def wait_event(self, event: Any) -> None:
        self.log.diary.append((self.name, ("wait", id(event))))

    def synchronize(self) -> None:
        self.log.diary.append((self.name, "synchronize"))


def make(device: Any, layers: int = 3, rows: int = 4, at_once: int | None = None, parity: int | None = None) -> OffloadedKV:
    cache = OffloadedKV(device, layers, rows, G, S, R, "fp32", at_once, parity)
    for layer in [*cache.layers, *cache.buffers]:
        layer.k[...] = layer.v[...] = np.nan
    return cache


def write(cache: OffloadedKV, rows: list[int], positions: list[int], value: float) -> None:
    """A pass that writes value + layer at its tokens' places, and checks that all before them are there."""
    slots = cache.begin_pass(np.array(rows, np.int32), np.array(positions, np.int32))
    for index in range(len(cache.layers)):
        layer = cache.open_layer(index)
        for slot, position in zip(slots, positions, strict=True):
            layer.k[slot, :, position] = value + index
            layer.v[slot, :, position] = -value - index
        for slot, position in zip(slots, positions, strict=True):
            assert np.isfinite(layer.k[slot, :, : position + 1]).all() and np.isfinite(layer.v[slot, :, : position + 1]).all()
        cache.close_layer(index)


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
@pytest.mark.parametrize("parity", [None, 0, 1])
def test_what_was_written_is_there_in_later_passes(parity: int | None, layers: int) -> None:
    cache = make(CpuDevice(), layers, at_once=2, parity=parity)
    write(cache, [3, 3, 3, 1], [0, 1, 2, 0], 10)
    write(cache, [1, 3], [1, 3], 20)
    write(cache, [0, 0], [0, 1], 30)
    write(cache, [3], [4], 40)
    for index, layer in enumerate(cache.layers):
        np.testing.assert_array_equal(layer.k[3, 0, :, 0], [10 + index] * 3 + [20 + index, 40 + index] + [np.nan] * (S - 5))
        np.testing.assert_array_equal(layer.v[1, 1, :3, 3], [-10 - index, -20 - index, np.nan])
        assert np.isnan(layer.k[2]).all() and np.isfinite(layer.k[0, :, :2]).all() and np.isnan(layer.k[0, :, 2:]).all()


def test_only_old_keys_come_in_and_only_new_ones_go_out() -> None:
    cache = make(CpuDevice())
    write(cache, [2] * 6, list(range(6)), 1)
    number = 2 * 3 * G * R * 4  # keys and values, layers, float32
    assert (cache.bytes_in, cache.bytes_out) == (0, 6 * number)
    write(cache, [2, 0], [6, 0], 2)
    assert (cache.bytes_in, cache.bytes_out) == (6 * number, 8 * number)


def test_a_layer_waits_for_its_load_and_a_load_for_the_buffers_last_layer() -> None:
    device = Log()
    cache = make(device, layers=4)
    write(cache, [1], [0], 1)
    device.diary.clear()
    write(cache, [1], [1], 1)
    compute = [what for stream, what in device.diary if stream == "compute"]
    loaded, computed = ([id(event) for event in events] for events in (cache.loaded, cache.computed))
    assert compute == [step for i in range(4) for step in (("wait", loaded[i % 2]), ("record", computed[i % 2]))]
    # Of the copies' stream: two loads, then for each layer its wait, its store and, where there is one, the load of the next but one.
    copies = [what if what == "copy" else what for stream, what in device.diary if stream == "copies"]
    load = ["copy", "copy"]
    want: list[Any] = []
    for i in range(2):
        want += [*load, ("record", loaded[i])]
    for i in range(4):
        want += [("wait", computed[i % 2]), *load]
        if i + 2 < 4:
            want += [*load, ("record", loaded[i % 2])]
    assert copies == want
    # And a load is never asked for before the layer that had its buffer was closed.
    order = device.diary.index(("compute", ("record", computed[0])))
    assert device.diary[order + 1] == ("copies", ("wait", computed[0]))


def test_memory_is_taken_and_given_back_in_the_streams_order() -> None:
    """Pools hand memory on by the current stream, which the copies' is not: it waits for what had the buffers before, and is done when they go."""
    device = Log()
    cache = make(device)
    (made,) = {what[1] for stream, what in device.diary if stream == "compute"}
    assert device.diary == [("compute", ("record", made)), ("copies", ("wait", made))]
    write(cache, [1], [0], 1)
    device.diary.clear()
    del cache
    assert device.diary == [("copies", "synchronize")]


def copying(parity: int | None, layers: int) -> set[int]:
    """Layers in whose time this rank copies: between a layer's opening and the next one's."""
    device = Log()
    cache = make(device, layers, parity=parity)
    write(cache, [1], [0], 1)
    slots = cache.begin_pass(np.array([1], np.int32), np.array([1], np.int32))
    assert slots.tolist() == ([0] if parity is None else [1])
    found = set()
    for index in range(layers):
        device.diary.clear()
        cache.open_layer(index)
        cache.close_layer(index)
        if ("copies", "copy") in device.diary:
            found.add(index)
    return found


def test_with_parity_two_ranks_never_copy_in_the_time_of_one_layer() -> None:
    """Ranks of a tensor-parallel pair go through the layers together."""
    odd, even = copying(1, 7), copying(0, 7)
    assert odd == {1, 3, 5} and even == {0, 2, 4, 6} and not odd & even
    assert copying(None, 7) == set(range(7))


def test_more_rows_than_there_is_room_for() -> None:
    cache = make(CpuDevice(), at_once=2)
    with pytest.raises(ValueError, match="a pass over 3 rows, and buffers of 2"):
        cache.begin_pass(np.array([0, 1, 2], np.int32), np.zeros(3, np.int32))


def test_the_devices_memory_is_two_layers() -> None:
    cache = make(CpuDevice(), layers=7, rows=6, at_once=3)
    assert sum(layer.k.nbytes + layer.v.nbytes for layer in cache.buffers) == OffloadedKV.bytes_needed(3, G, S, R, "fp32")
