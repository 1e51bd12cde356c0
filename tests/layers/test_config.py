from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from l1_kernels.errors import UserError
from layers.config import ModelConfig, MoEConfig, RopeConfig

GOOD = ModelConfig("gpt2", 100, 64, 2, 4, 2, 16, 256, 32)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_kv_heads": 3}, "KV heads"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"activation": "swish7"}, "swish7"),
        ({"positions": "rotary"}, "rotary"),
        ({"rope": RopeConfig(dim=8)}, "rotary"),
        ({"positions": "rotary", "rope": RopeConfig(dim=18)}, "18"),
        ({"positions": "rotary", "rope": RopeConfig(dim=8, kind="longrope")}, "longrope"),
        ({"windows": (8,)}, "windows"),
        ({"moe": MoEConfig((0,), num_experts=2, top_k=3, expert_size=8)}, "top_k"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        replace(GOOD, **change)


def test_it_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        GOOD.num_heads = 8  # type: ignore[misc]


def test_defaults_of_a_layer() -> None:
    assert GOOD.scale(1) == 0.25
    assert GOOD.window(1) == 0
    assert replace(GOOD, windows=(0, 8)).window(1) == 8
