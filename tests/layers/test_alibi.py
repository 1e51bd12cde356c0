import math

import pytest

from layers.alibi import alibi_slopes


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 16, 25, 112])
def test_slopes_follow_the_rule_for_any_head_count(heads: int) -> None:
    below = 2 ** math.floor(math.log2(heads))
    expected = [2 ** (-8 * (h + 1) / below) for h in range(below)]
    expected += [2 ** (-8 * (2 * h + 1) / (2 * below)) for h in range(heads - below)]
    assert alibi_slopes(heads) == pytest.approx(expected, rel=1e-6)
