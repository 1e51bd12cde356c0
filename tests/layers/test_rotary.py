"""Rotary tables against loops written from each scheme's published formula, one frequency at a time."""

import math

import numpy as np
import pytest

from l1_kernels.device import open_device
from layers.batch import Batch
from layers.config import RopeConfig
from layers.rotary import Rotary, dynamic_base, frequencies


def test_plain_frequencies_fall_from_one_to_almost_one_over_theta() -> None:
    found = frequencies(RopeConfig(dim=8, theta=10000.0))
    assert found == pytest.approx([1.0, 10000.0**-0.25, 10000.0**-0.5, 10000.0**-0.75], rel=1e-12)


def test_linear_divides_every_frequency() -> None:
    plain = frequencies(RopeConfig(dim=16, theta=500.0))
    assert frequencies(RopeConfig(dim=16, theta=500.0, kind="linear", factor=2.5)) == pytest.approx(plain / 2.5)


@pytest.mark.parametrize(("dim", "theta", "factor", "trained"), [(16, 1e4, 8.0, 32), (128, 5e5, 32.0, 8192)])
def test_llama3_keeps_short_waves_and_divides_long_ones(dim: int, theta: float, factor: float, trained: int) -> None:
    rope = RopeConfig(dim=dim, theta=theta, kind="llama3", factor=factor, original_positions=trained)
    for i, found in enumerate(frequencies(rope)):
        plain = theta ** (-2 * i / dim)
        wavelength = 2 * math.pi / plain
        if wavelength < trained / rope.high_freq_factor:
            expected = plain
        elif wavelength > trained / rope.low_freq_factor:
            expected = plain / factor
        else:
            smooth = (trained / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            expected = (1 - smooth) * plain / factor + smooth * plain
        assert found == pytest.approx(expected, rel=1e-12)


def test_yarn_of_the_conformance_case_keeps_one_blends_one_and_divides_six() -> None:
    """tests/conformance/llama_rope_yarn's note states these by hand."""
    rope = RopeConfig(dim=16, theta=1000.0, kind="yarn", factor=4.0, original_positions=16)
    plain = frequencies(RopeConfig(dim=16, theta=1000.0))
    divisor = plain / frequencies(rope)
    assert divisor[0] == pytest.approx(1.0)
    assert 1.0 < divisor[1] < 4.0
    assert frequencies(rope)[1] == pytest.approx((plain[1] + plain[1] / 4) / 2)
    assert divisor[2:] == pytest.approx(np.full(6, 4.0))


def test_attention_factor_scales_both_tables() -> None:
    device = open_device("cpu")
    plain = Rotary(RopeConfig(dim=4), 10, device).table
    scaled = Rotary(RopeConfig(dim=4, attention_factor=1.5), 10, device).table
    assert plain is not None and scaled is not None
    for a, b in zip(plain, scaled, strict=True):
        np.testing.assert_allclose(b, 1.5 * a, rtol=1e-6)


def test_dynamic_base_is_unscaled_up_to_the_trained_context_and_grows_after() -> None:
    rope = RopeConfig(dim=16, theta=1e4, kind="dynamic", factor=2.0, original_positions=20)
    bases = dynamic_base(rope, np.array([1, 20, 24]))
    assert bases[:2] == pytest.approx([1e4, 1e4])
    assert bases[2] == pytest.approx(1e4 * (2 * 24 / 20 - 1) ** (16 / 14))


def test_dynamic_rotates_each_sequence_by_its_own_length_and_not_the_batch_s() -> None:
    rope = RopeConfig(dim=16, theta=1e4, kind="dynamic", factor=2.0, original_positions=20)
    rotary = Rotary(rope, 20, open_device("cpu"))
    short, long = list(range(5)), list(range(24))
    both = Batch.prompts([short, long], [0, 1])
    together = rotary.step(both, both.positions)
    for prompt, part in ((short, slice(0, 5)), (long, slice(5, 29))):
        single = Batch.prompts([prompt], [0])
        alone = rotary.step(single, single.positions)
        np.testing.assert_array_equal(together.cos[together.index[part]], alone.cos[alone.index])
        np.testing.assert_array_equal(together.sin[together.index[part]], alone.sin[alone.index])
