from __future__ import annotations

import pytest

from l1_kernels.device import Device
from tests.l1_kernels.prompt_region_checks import check_attend_prompt

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("lengths", "num_heads", "num_kv_heads", "head_dim", "turned", "interleaved"),
    [([128], 16, 16, 256, 64, True), ([199, 1, 37], 32, 8, 128, 128, False), ([64] * 4, 25, 25, 64, 0, False), ([1031], 4, 1, 80, 20, False)],
)
def test_attend_prompt(
    device: Device, dtype: str, lengths: list[int], num_heads: int, num_kv_heads: int, head_dim: int, turned: int, interleaved: bool
) -> None:
    check_attend_prompt(device, dtype, lengths, num_heads, num_kv_heads, head_dim, turned, interleaved)
