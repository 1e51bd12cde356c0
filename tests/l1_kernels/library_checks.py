"""Regions with a library's products: region_checks.py's, over library_regions.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from l1_kernels.fused_regions import FusedRegions
from l1_kernels.weight import decode
from tests.l1_kernels import region_checks


class HostGemm:
    """cuBLAS's place on the simulator: 16-bit numbers, float32 products. Counts its calls. adds_bias: as cuBLASLt does."""

    def __init__(self, adds_bias: bool = True) -> None:
        self.adds_bias = adds_bias
        self.calls = 0

    def usable(self) -> bool:
        return True

    def __call__(self, x: Any, w: Any, dtype: str, y: Any, bias: Any = None, add: bool = False) -> bool:
        assert x.dtype == w.dtype == np.uint16 and y.dtype == np.float32 and x.flags.c_contiguous
        self.calls += 1
        product = decode(x, dtype) @ decode(w, dtype).T
        if bias is not None and self.adds_bias:
            product += bias
        y[...] = y + product if add else product
        return bias is None or self.adds_bias


def use(monkeypatch: pytest.MonkeyPatch, gemm: Any, most_tokens: int = 0) -> None:
    """region_checks' cases build their regions so."""
    monkeypatch.setattr(region_checks, "FusedRegions", partial(FusedRegions, gemm=gemm, most_tokens=most_tokens))
