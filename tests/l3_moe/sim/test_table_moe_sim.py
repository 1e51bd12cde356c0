"""The sparse layer as it runs on a GPU, with few tokens and with more, against the same layer on the CPU. The whole model takes the simulator minutes, and is
a GPU's test (tests/equivalence)."""

from __future__ import annotations

import numpy as np
import pytest

from l1_kernels.device import open_device
from l1_kernels.regions import NormArgs
from l1_kernels.weight import Weight, decode, host_weight
from l3_moe.table_moe import TableMoE
from layers.border import Reader
from layers.weights import LayerWeights, Linear, MoEWeights
from tests.l1_kernels.operation_checks import fresh, normal
from tests.l3_moe.expert_checks import config_of

pytestmark = pytest.mark.sim
E, K, D, F = 3, 2, 32, 16


@pytest.mark.parametrize("num_tokens", [1, 3, 18])
def test_as_on_the_cpu(num_tokens: int) -> None:
    """One token: pairs; three: active experts; eighteen: tables, dispatch and the experts' rows."""
    rng = fresh()
    sim, cpu = open_device("sim", fused=True), open_device("cpu")
    up, down = (host_weight(normal(rng, E, *shape) / 5, "fp16") for shape in ((2 * F, D), (D, F)))
    gate, gain = Weight(normal(rng, E, D), "fp32"), normal(rng, D) * np.float32(0.1) + 1
    moe = MoEWeights(gate, Linear(up, None), Linear(down, None), None, None, None)
    nothing = Linear(host_weight(np.zeros((1, 1)), "fp32"), None)
    layer = LayerWeights(None, nothing, None, None, nothing, None, None, None, moe)
    config, norm = config_of(E, K, D, F, "silu", True), NormArgs("rmsnorm", gain, None, 1e-5)
    x = normal(rng, num_tokens, D)
    want = TableMoE(config, cpu)(x, norm, layer, x.copy())
    layer_of = TableMoE(config, sim)
    got = layer_of(x, norm, layer, x.copy())
    assert np.abs(got - want).max() <= 4e-3 * np.abs(want).max()  # three roundings to fp16, of 2^-11 each
    if num_tokens <= 16:
        again, rows = layer_of.add_norm(x, norm, layer, x.copy(), Reader(norm, (host_weight(np.zeros((1, D)), "fp16"),)))
        np.testing.assert_array_equal(again, got)
        assert rows is not None
        normed = got / np.sqrt((got.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5) * gain
        assert np.abs(decode(rows, "fp16") - normed).max() <= 2e-3 * np.abs(normed).max()
