from __future__ import annotations

import pytest

from l1_kernels.attention import decode_region
from l1_kernels.device import Device
from tests.l1_kernels import region_attention_checks as checks

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("group", "multiprocessors"), [(1, 12), (3, 12), (8, 12), (2, 1), (4, 1), (8, 1)])
def test_groups(device: Device, dtype: str, group: int, multiprocessors: int) -> None:
    """Of 12 multiprocessors each query head has one; with 1 a block takes up to four."""
    checks.check_step(device, dtype, [7], group, 1, 16, rotated_dim=16, multiprocessors=multiprocessors)


@pytest.mark.parametrize("ends", [[1], [37, 1, 199], [2, 64, 65]], ids=str)
def test_keys(device: Device, ends: list[int]) -> None:
    checks.check_step(device, "fp16", ends, 2, 1, 64, rotated_dim=64)


def test_sixteen_tokens(device: Device) -> None:
    checks.check_step(device, "bf16", list(range(16, 0, -1)), 4, 1, 8, rotated_dim=8, interleaved=True)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotated_dim"), [(24, 10), (80, 20), (8, 2)])
def test_partial_rotation(device: Device, head_dim: int, rotated_dim: int, interleaved: bool) -> None:
    checks.check_step(device, "fp32", [3], 2, 1, head_dim, rotated_dim=rotated_dim, interleaved=interleaved)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(2, 2, 128), (1, 1, 256), (3, 1, 200), (7, 1, 128), (1, 1, 24)])
def test_widths(device: Device, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """The last one's output is no multiple of 16 wide, and stays float32."""
    checks.check_step(device, "fp16", [37], num_heads, num_kv_heads, head_dim, rotated_dim=16)


@pytest.mark.parametrize("window", [1, 2, 36, 37, 1000])
def test_window(device: Device, window: int) -> None:
    checks.check_step(device, "fp16", [37, 1], 2, 1, 16, window=window, alibi=window != 2)


# Several stretches, joined by the last block


@pytest.mark.parametrize("ends", [[199, 3], [64, 65], [128, 129]], ids=str)
def test_stretches(device: Device, ends: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 keys; of 65 and 129 the last stretch has the new key alone. Where nothing is split blocks have nothing to do."""
    checks.split_from(monkeypatch, 16, 256, "fp16")
    checks.check_step(device, "fp16", ends, 1, 1, 256, rotated_dim=64)


@pytest.mark.slow
def test_more_stretches_than_are_joined_at_once(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirteen of 16 keys, of a key head whose query heads are two blocks'."""
    checks.split_from(monkeypatch, 16, 256, "fp32")
    checks.check_step(device, "fp32", [199], 5, 1, 256, rotated_dim=256, window=198, alibi=True, multiprocessors=64)


@pytest.mark.parametrize("multiprocessors", [2, 3])
def test_fewer_stretches_than_would_do(device: Device, multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    checks.split_from(monkeypatch, 16, 256, "bf16")
    checks.check_step(device, "bf16", [199], 3, 1, 200, multiprocessors=multiprocessors)


def test_query_heads_are_spread() -> None:
    """As far as there are multiprocessors, and only where a block takes all keys at once."""
    of = decode_region.query_heads_a_block
    assert [of(8, 4, 768, multiprocessors, "fp16", 8) for multiprocessors in (132, 32, 31, 16, 15)] == [1, 1, 2, 2, 4]
    assert of(8, 4, 769, 132, "fp16", 8) == 4 and of(32, 1, 100, 132, "fp16", 8) == 1
    assert of(16, 7, 100, 132, "fp16", 8) == 1 and of(17, 7, 100, 132, "fp16", 8) == 1 and of(19, 7, 100, 132, "fp16", 8) == 2


def test_the_grid() -> None:
    """No split where a block takes all the cache holds, or where the GPU is full without it."""
    assert decode_region.keys_a_block("fp16", 8) == 768 and decode_region.keys_a_block("fp32", 32) == 96
    assert decode_region.num_splits(25, 768, 132, "fp16", 8, 1) == 1
    assert decode_region.num_splits(25, 769, 132, "fp16", 8, 1) == 4  # of at least 256 keys
    assert decode_region.num_splits(25, 100000, 132, "fp16", 8, 1) == 5
    assert decode_region.num_splits(67, 100000, 132, "fp16", 8, 1) == 1
    assert decode_region.num_splits(1, 100000, 132, "fp16", 8, 1) == 128
    assert decode_region.num_splits(0, 100000, 132, "fp16", 8, 1) >= 1


@pytest.mark.parametrize("num_tokens", [2, 7])
def test_tokens_of_one_row(device: Device, num_tokens: int) -> None:
    checks.check_one_row(device, num_tokens)


def test_more_blocks_than_multiprocessors(device: Device) -> None:
    """Crowded: smaller blocks, and no split."""
    checks.check_step(device, "fp16", [37, 1, 20], 4, 2, 16, rotated_dim=8, multiprocessors=5)


def test_what_takes_three_launches(device: Device) -> None:
    checks.check_what_takes_three_launches(device)


def test_rejections(device: Device) -> None:
    checks.check_rejections(device)


def test_no_tokens(device: Device) -> None:
    checks.check_no_tokens(device)
