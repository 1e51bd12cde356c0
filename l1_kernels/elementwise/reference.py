"""x[i] += y[i]

Any equal shapes. Reads 8 bytes and writes 4 a number: bound by bytes. NumPy is at that bound, so there is no CPU twin.
"""

from __future__ import annotations

import numpy as np


def add(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """In place; returns x."""
    x += y
    return x
