"""y[t, k] = table[ids[t] - first, k], or 0 where that row is not in the table.

table [N, K], ids int32 [T] -> y [T, K]. Reads T*K numbers and T ids, writes T*K float32, computes nothing: bound by bytes.
"""

from __future__ import annotations

import numpy as np

from l1_kernels.weight import Weight, decode


def embed(table: Weight, ids: np.ndarray, first: int = 0) -> np.ndarray:
    """Rows of `table` for `ids` int32 [T] -> [T, K]; an id outside first..first+N gives zeros."""
    local = np.asarray(ids, np.int64) - first
    inside = (local >= 0) & (local < table.shape[0])
    rows = np.where(inside, local, 0)
    y = decode(table.data[rows], table.dtype, None if table.scale is None else table.scale[rows])
    return np.where(inside[:, None], y, y.dtype.type(0))
