"""Presets against the sizes of the paper's tables."""

import pytest

from l1_kernels.errors import UserError
from models.presets import PRESETS, parameters, preset

BILLIONS = {
    "gpt2-xl": 1.5, "gpt-neo-2.7b": 2.7, "gpt-j-6b": 6, "gpt-13b": 13, "gpt-neox-20b": 20, "gpt-50b": 50, "gpt-87b": 87,
    "lm-175b": 175, "lm-530b": 530, "moe-1.3b-128": 52, "moe-2.4b-128": 107.7, "moe-8b-128": 349.0, "moe-24b-128": 1046.9,
    "moe-47b-128": 2024.0, "mixtral-5.8b": 5.8, "bert-base": 0.110, "distilbert": 0.066,
}  # fmt: skip


def test_every_preset_has_a_size_to_compare_with() -> None:
    assert set(BILLIONS) == set(PRESETS)


@pytest.mark.parametrize("name", BILLIONS)
def test_parameters_agree_with_the_table(name: str) -> None:
    assert parameters(preset(name)) / 1e9 == pytest.approx(BILLIONS[name], rel=0.045)


def test_an_unknown_preset_is_refused_with_those_there_are() -> None:
    with pytest.raises(UserError, match="gpt2-xl"):
        preset("gpt-9")
