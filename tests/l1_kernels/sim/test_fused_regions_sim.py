from __future__ import annotations

import pytest

from l1_kernels.device import Device
from l1_kernels.fused_regions import FusedRegions
from l1_kernels.regions import Regions, UnfusedRegions
from tests.l1_kernels import region_checks as checks

pytestmark = pytest.mark.sim
DTYPES = ["fp32", "fp16", "bf16", "int8"]
TOKENS = [1, 7, 16]


@pytest.mark.parametrize("regions", [FusedRegions, UnfusedRegions])
def test_no_region_is_missing(regions: type) -> None:
    names = {name for name in vars(Regions) if not name.startswith("_")}
    assert names >= {"attend", "linear_add"} and not names - set(dir(regions))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm", None])
def test_norm_linear(device: Device, dtype: str, num_tokens: int, kind: str | None) -> None:
    checks.check_norm_linear(device, dtype, num_tokens, 37, 48, kind)


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
@pytest.mark.parametrize("num_tokens", [7, 16])
def test_norm_of_many_tokens_in_every_block(device: Device, dtype: str, num_tokens: int) -> None:
    checks.check_norm_linear(device, dtype, num_tokens, 37, 272, "layernorm", norm_tokens=16)
    checks.check_feed_forward(device, dtype, num_tokens, 32, 32, "silu", True, norm_tokens=16)


@pytest.mark.parametrize(("dtype", "size"), [("fp16", 2048), ("fp16", 2056), ("bf16", 4104), ("int8", 4112)])
def test_norm_of_a_long_row(device: Device, dtype: str, size: int) -> None:
    """Held in registers in one piece a thread, in two, and not at all."""
    checks.check_norm_linear(device, dtype, 1, 5, size, "layernorm")


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
@pytest.mark.parametrize(("num_tokens", "num_out", "size"), [(1, 1, 16), (1, 199, 16), (2, 7, 1040), (9, 1, 32), (1, 3, 1040)])
def test_awkward_sizes(device: Device, dtype: str, num_tokens: int, num_out: int, size: int) -> None:
    checks.check_norm_linear(device, dtype, num_tokens, num_out, size, "layernorm", with_bias=False)


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 37), (3, 7), (17, 16)])
def test_what_the_kernels_do_not_take(device: Device, num_tokens: int, size: int) -> None:
    checks.check_norm_linear(device, "fp16", num_tokens, 5, size, "layernorm")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize(("kind", "gated", "width"), [("gelu", False, 32), ("silu", True, 32), ("gelu_new", True, 7), ("relu", False, 7)])
def test_feed_forward(device: Device, dtype: str, num_tokens: int, kind: str, gated: bool, width: int) -> None:
    checks.check_feed_forward(device, dtype, num_tokens, width, 32, kind, gated)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("carried", [False, True])
def test_linear_add(device: Device, dtype: str, num_tokens: int, carried: bool) -> None:
    checks.check_linear_add(device, dtype, num_tokens, 19, 80, carried)


def test_tiles_dealt_to_few_blocks(device: Device) -> None:
    """A plan with `blocks`: a block goes from tile to tile, on both sides of a pair, with half sums of its last tile under way."""
    from dataclasses import asdict

    from l1_kernels.fused_regions import FusedRegions
    from l1_kernels.sbi_gemm.tensor import Tensor
    from l1_kernels.sbi_gemm.wide import Wide

    for tokens, plan in ((1, Wide(2, 2, 2, 2, 1)), (8, Tensor(1, 2, 1, 2, 1, 1)), (16, Tensor(2, 2, 2, 1, 2, 1))):
        row = {"dtype": "fp16", "tokens": tokens, "outputs": 64, "inner": 64, "norm": True}
        row |= {"rung": type(plan).__name__.lower(), "parameters": asdict(plan)}

        class Dealt(FusedRegions):
            def __init__(self, kernels, multiprocessors, table=None, ahead_bytes=0, norm_tokens=16, row=row) -> None:
                super().__init__(kernels, 1, [row], ahead_bytes, 16)

        whole = checks.FusedRegions
        checks.FusedRegions = Dealt
        try:
            checks.check_norm_linear(device, "fp16", tokens, 199, 264, "layernorm")
            checks.check_norm_pair(device, "fp16", tokens, 37, 64, 48, False, True)
            checks.check_linear_add(device, "fp16", tokens, 199, 72, True)
        finally:
            checks.FusedRegions = whole


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_no_residual(device: Device, num_tokens: int) -> None:
    checks.check_linear_add(device, "bf16", num_tokens, 19, 80, True, add=False)


@pytest.mark.parametrize(("num_tokens", "size"), [(2, 24), (17, 32)])
def test_bits_that_fall_back_are_widened(device: Device, num_tokens: int, size: int) -> None:
    checks.check_linear_add(device, "int8", num_tokens, 5, size, True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize(("shared_norm", "gated"), [(True, False), (False, True)])
def test_norm_pair(device: Device, dtype: str, num_tokens: int, shared_norm: bool, gated: bool) -> None:
    checks.check_norm_pair(device, dtype, num_tokens, 37, 32, 32, shared_norm, gated)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("carried", [False, True])
def test_linear_add_pair(device: Device, dtype: str, num_tokens: int, carried: bool) -> None:
    checks.check_linear_add_pair(device, dtype, num_tokens, 19, 32, 80, carried)
