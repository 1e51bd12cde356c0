"""Resident weights: what loading gives, in the device's memory, by role. Needs neither CuPy nor MPI."""

from collections.abc import Iterator

import numpy as np

from l1_kernels.device import open_device
from l1_kernels.weight import Weight, decode, host_weight
from l4_offload.resident import ResidentWeights, to_device


def tensors(seed: int) -> dict[str, Weight | np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "attn_norm.weight": rng.standard_normal(8, np.float32),
        "attn.qkv.weight": host_weight(rng.standard_normal((24, 8), np.float32), "fp16"),
        "attn.qkv.bias": rng.standard_normal(24, np.float32),
        "attn.out.weight": host_weight(rng.standard_normal((8, 8), np.float32), "int8"),
        "ffn.up.weight": host_weight(rng.standard_normal((16, 8), np.float32), "fp32"),
        "ffn.down.weight": host_weight(rng.standard_normal((8, 16), np.float32), "bf16"),
    }


def test_each_layer_is_given_back_by_role() -> None:
    source = ResidentWeights.load(open_device("cpu"), (tensors(i) for i in range(3)))
    assert source.num_layers == 3
    for index in range(3):
        layer, want = source.layer(index), tensors(index)
        np.testing.assert_array_equal(layer.qkv.weight.data, want["attn.qkv.weight"].data)
        np.testing.assert_array_equal(layer.qkv.bias, want["attn.qkv.bias"])
        np.testing.assert_array_equal(layer.attn_out.weight.scale, want["attn.out.weight"].scale)
        assert layer.ffn_norm is None and layer.attn_out.bias is None and layer.moe is None


def test_layers_are_read_one_at_a_time() -> None:
    """Loading must not hold two layers of the host: each is moved before the next is read."""
    moved: list[int] = []

    class Spy(type(open_device("cpu"))):  # type: ignore[misc]
        def to_device(self, host: np.ndarray) -> np.ndarray:
            moved.append(host.nbytes)
            return np.asarray(super().to_device(host))

    def layers() -> Iterator[dict[str, Weight | np.ndarray]]:
        for index in range(3):
            assert len(moved) == index * 7  # six tensors, one of them with a scale
            yield tensors(index)

    ResidentWeights.load(Spy(), layers())
    assert len(moved) == 21


def test_values_survive_the_move() -> None:
    before = tensors(9)
    after = to_device(open_device("cpu"), before)
    for name, tensor in before.items():
        if isinstance(tensor, Weight):
            moved = after[name]
            assert isinstance(moved, Weight) and moved.dtype == tensor.dtype
            np.testing.assert_array_equal(decode(moved.data, moved.dtype, moved.scale), decode(tensor.data, tensor.dtype, tensor.scale))
        else:
            np.testing.assert_array_equal(after[name], tensor)
