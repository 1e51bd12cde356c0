"""Do the numbers of an index array lie where memory is? For 0.3 us: compiled kernels do not check, and a bad row would
write into somebody else's memory."""

from __future__ import annotations

import numpy as np
from numba import njit

from l1_kernels.checks import reject


@njit(cache=True)
def _span(values):
    low = high = values[0]
    for i in range(1, values.size):
        low, high = min(low, values[i]), max(high, values[i])
    return low, high


def within(values: np.ndarray, name: str, low: int, high: int) -> None:
    """Every number of int32 [T] must lie in low..high (both belong)."""
    if values.size:
        least, most = _span(values)
        if least < low or most > high:
            reject(name, f"in {low}..{high}", f"{least}..{most}")
