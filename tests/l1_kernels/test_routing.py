from __future__ import annotations

import numpy as np
import pytest

from l1_kernels.device import Device
from l1_kernels.routing import reference
from tests.l1_kernels import operation_checks as checks


def test_reference_by_hand() -> None:
    logits = np.log([[0.1, 0.4, 0.4, 0.1]])
    experts, weights = reference.route(logits, 3, softmax_first=True, renormalise=False)
    assert experts.tolist() == [[1, 2, 0]]  # ties: the lowest expert first
    np.testing.assert_allclose(weights, [[0.4, 0.4, 0.1]], rtol=1e-13)
    for softmax_first in (True, False):  # renormalising undoes the difference
        weights = reference.route(logits, 3, softmax_first, renormalise=True)[1]
        np.testing.assert_allclose(weights, [[4 / 9, 4 / 9, 1 / 9]], rtol=1e-13)


@pytest.mark.parametrize(("softmax_first", "renormalise"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("num_tokens", [1, 7, 37])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (7, 2), (37, 8), (199, 199)])
def test_cpu(cpu: Device, num_tokens: int, num_experts: int, top_k: int, softmax_first: bool, renormalise: bool) -> None:
    checks.check_route(cpu, num_tokens, num_experts, top_k, softmax_first, renormalise)
