from __future__ import annotations

import numpy as np
import pytest

from l1_kernels.attention.prompt_region import attend_prompt
from l1_kernels.device import Device
from l1_kernels.regions import CacheArgs, RotaryArgs
from tests.l1_kernels.prompt_region_checks import check_attend_prompt

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("turned", "interleaved"), [(0, False), (16, True), (16, False), (10, True), (10, False)])
def test_attend_prompt(device: Device, dtype: str, turned: int, interleaved: bool) -> None:
    check_attend_prompt(device, dtype, [17, 5], 2, 1, 16, turned, interleaved)


def test_many_heads_and_a_window(device: Device) -> None:
    check_attend_prompt(device, "fp16", [19], 6, 3, 72, 64, True, window=7)


def arguments(num_tokens: int, dtype: str = "fp16") -> tuple[np.ndarray, RotaryArgs, CacheArgs]:
    carrier = np.float32 if dtype == "fp32" else np.uint16
    caches = [np.zeros((1, 1, 40, 16), carrier) for _ in range(2)]
    index = np.arange(num_tokens, dtype=np.int32)
    rotary = RotaryArgs(*[np.zeros((40, 8), np.float32) for _ in range(2)], index, True)
    return np.zeros((num_tokens, 3, 16), np.float32), rotary, CacheArgs(*caches, dtype, index * 0, index, index + 1)


@pytest.mark.parametrize(("num_tokens", "dtype"), [(16, "fp16"), (20, "fp32")])
def test_others_are_left_alone(device: Device, num_tokens: int, dtype: str) -> None:
    qkv, rotary, cache = arguments(num_tokens, dtype)
    before = device.launches()
    assert attend_prompt(device.kernels, qkv, 1, rotary, cache, 0, 1.0, None) is None  # type: ignore[arg-type]
    assert device.launches() == before


@pytest.mark.parametrize("name", ["rows", "positions", "ends", "index", "sin", "cos", "slopes", "window"])
def test_bad_arguments_are_named(device: Device, name: str) -> None:
    qkv, rotary, cache = arguments(20)
    window, slopes = 0, None
    if name in ("rows", "positions", "ends"):
        object.__setattr__(cache, name, np.zeros(19, np.int32))
    elif name == "index":
        object.__setattr__(rotary, name, np.zeros(20, np.int64))
    elif name == "sin":
        object.__setattr__(rotary, name, np.zeros((40, 7), np.float32))
    elif name == "cos":
        for table in ("cos", "sin"):
            object.__setattr__(rotary, table, np.zeros((40, 9), np.float32))
    elif name == "slopes":
        slopes = np.zeros(2, np.float32)
    else:
        window = -1
    with pytest.raises(ValueError, match=name):
        attend_prompt(device.kernels, qkv, 1, rotary, cache, window, 1.0, slopes)  # type: ignore[arg-type]
