"""The mixture of experts by tables against a loop over tokens in float64."""

import math

import numpy as np
import pytest

from l1_kernels.device import open_device
from l1_kernels.weight import Weight, host_weight
from l3_moe.einsum_moe import EinsumMoE
from l3_moe.table_moe import TableMoE
from layers.config import ModelConfig, MoEConfig
from layers.weights import LayerWeights, Linear, MoEWeights

D, F, SHARED = 12, 10, 6


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gated(x: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    half = len(up) // 2
    return down @ (silu(up[:half] @ x) * (up[half:] @ x))


@pytest.mark.parametrize("tokens", [1, 7, 37])
@pytest.mark.parametrize(("experts", "top_k", "renormalise", "softmax_first"), [(8, 2, True, True), (8, 2, False, True), (4, 1, False, True), (5, 5, False, False)])
@pytest.mark.parametrize("shared", [False, True])
def test_against_a_loop_over_tokens(tokens: int, experts: int, top_k: int, renormalise: bool, softmax_first: bool, shared: bool) -> None:
    rng = np.random.default_rng([tokens, experts, shared])
    gate, up, down = rng.standard_normal((experts, D)), rng.standard_normal((experts, 2 * F, D)), rng.standard_normal((experts, D, F))
    shared_up, shared_down, shared_gate = rng.standard_normal((2 * SHARED, D)), rng.standard_normal((D, SHARED)), rng.standard_normal((1, D))
    x = rng.standard_normal((tokens, D)).astype(np.float32)

    want = np.zeros((tokens, D))
    for t in range(tokens):
        logits = gate @ x[t]
        p = np.exp(logits - logits.max())
        best = np.argsort(-logits, kind="stable")[:top_k]
        weight = p[best] / (p[best].sum() if renormalise or not softmax_first else p.sum())
        for e, w in zip(best, weight, strict=True):
            want[t] += w * gated(x[t], up[e], down[e])
        if shared:
            want[t] += gated(x[t], shared_up, shared_down) / (1 + math.exp(-float(shared_gate[0] @ x[t])))

    moe = MoEConfig((0,), experts, top_k, F, softmax_first, renormalise, SHARED if shared else 0, shared)
    config = ModelConfig("test", 10, D, 1, 2, 2, 6, F, 32, activation="silu", gated_ffn=True, moe=moe)

    def w(a: np.ndarray) -> Weight:
        return host_weight(a, "fp32")

    weights = MoEWeights(
        w(gate), Linear(w(up), None), Linear(w(down), None),
        Linear(w(shared_up), None) if shared else None, Linear(w(shared_down), None) if shared else None, w(shared_gate) if shared else None,
    )  # fmt: skip
    nothing = Linear(w(np.zeros((1, 1))), None)
    layer = LayerWeights(None, nothing, None, None, nothing, None, None, None, weights)
    residual = rng.standard_normal(x.shape).astype(np.float32)
    added = residual.copy()
    got = TableMoE(config, open_device("cpu"))(x, None, layer, None)
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
    assert TableMoE(config, open_device("cpu"))(x, None, layer, added) is added
    np.testing.assert_allclose(added, residual + got, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (7, 2), (37, 2)])
def test_the_einsum_baseline_is_the_same_layer(tokens: int, top_k: int) -> None:
    """With room for every token in every expert nothing is dropped."""
    rng, experts = np.random.default_rng([tokens, top_k]), 4
    moe = MoEConfig((0,), experts, top_k, F, True, True)
    config = ModelConfig("test", 10, D, 1, 2, 2, 6, F, 32, activation="silu", gated_ffn=True, moe=moe)
    gate, up, down = (host_weight(rng.standard_normal(shape), "fp32") for shape in ((experts, D), (experts, 2 * F, D), (experts, D, F)))
    nothing = Linear(host_weight(np.zeros((1, 1)), "fp32"), None)
    layer = LayerWeights(None, nothing, None, None, nothing, None, None, None, MoEWeights(gate, Linear(up, None), Linear(down, None), None, None, None))
    x, device = rng.standard_normal((tokens, D)).astype(np.float32), open_device("cpu")
    residual = rng.standard_normal(x.shape).astype(np.float32)
    want = TableMoE(config, device)(x, None, layer, residual.copy())
    got = EinsumMoE(config, device, experts / top_k)(x, None, layer, residual.copy())
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
