"""The slots of a decode step: what the host fills in, what it refuses, and how they move on by themselves."""

import numpy as np
import pytest

from l1_kernels.device import open_device
from layers.decode import RING, DecodeState, bucket


@pytest.fixture(scope="module")
def device():
    return open_device("cpu")


def test_idle_slots_lie_in_rows_of_their_own_and_stay(device):
    state = DecodeState(device, 4, 5, limit=9)
    state.fill([11, 12], [3, 0], [6, 7])
    slots = state.slots
    assert slots.tokens.tolist() == [11, 12, 0, 0] and slots.positions.tolist() == [6, 7, 0, 0] and slots.ends.tolist() == [7, 8, 1, 1]
    rows = slots.rows.tolist()
    assert rows[:2] == [3, 0] and len(set(rows)) == 4 and set(rows) <= set(range(5))
    for turn in range(RING + 2):
        logits = np.zeros((4, 30), np.float32)
        logits[np.arange(4), [turn, 20 + turn, 5, 6]] = 1
        device.kernels.greedy(logits, slots)
        assert state.chosen(turn).tolist() == [turn, 20 + turn, 5, 6] == slots.tokens.tolist()
        assert slots.positions.tolist() == [min(7 + turn, 8), 8, 0, 0]  # never past the last place
        assert slots.ends.tolist() == (slots.positions + 1).tolist()
    assert slots.rows.tolist() == rows
    state.fill([1, 2, 3], [4, 1, 2], [0, 5, 8])
    assert slots.tokens.tolist() == [1, 2, 3, 0] and slots.turns.tolist() == [0] * 4 and slots.ends.tolist() == [1, 6, 9, 1]


def test_force_leaves_the_idle_slots(device):
    state = DecodeState(device, 2, 2, limit=9)
    state.fill([11], [1], [6])
    state.force([4])
    assert state.slots.tokens.tolist() == [4, 0]


@pytest.mark.parametrize(
    "rows, positions, name",
    [([0, 0], [1, 2], "rows"), ([0, 3], [1, 2], "rows"), ([-1], [0], "rows"), ([], [], "rows"), ([0, 1, 2], [0, 0, 0], "rows"),
     ([0], [9], "positions"), ([0], [-1], "positions")],
)  # fmt: skip
def test_a_wrong_place_is_refused(device, rows, positions, name):
    with pytest.raises(ValueError, match=name):
        DecodeState(device, 2, 3, limit=9).fill([0] * len(rows), rows, positions)


def test_more_slots_than_rows_are_refused(device):
    with pytest.raises(ValueError, match="size"):
        DecodeState(device, 3, 2, limit=9)


def test_buckets_are_few_and_large_enough():
    for num_rows in (1, 3, 8, 64, 100):
        sizes = [bucket(count, num_rows) for count in range(1, num_rows + 1)]
        assert all(count <= size <= num_rows for count, size in enumerate(sizes, 1)) and sizes == sorted(sizes)
        assert len(set(sizes)) <= num_rows.bit_length() + 1
