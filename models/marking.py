"""A long pass tells the watchdog, layer by layer, how far it has come."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from layers.kv_cache import LayerCache
from layers.protocols import Cache

LONG = 512  # tokens; a pass of fewer takes no GPU anything like the 20 s for which nothing may move (l2_dense_parallel/watchdog.py), and need say nothing


class MarkingCache:
    """A pass's cache, that marks each layer as it closes it: a long prompt may take longer than a wait that leads nowhere. A layer's work must not
    (docs/decisions.md).

    mark   takes which part of the pass is done when the device comes there (`Pipe.mark`, `Collective.mark`)
    """

    def __init__(self, cache: Cache, mark: Callable[[float], None], layers: int) -> None:
        self.num_rows, self.context, self.lengths = cache.num_rows, cache.context, cache.lengths
        self._cache, self._mark, self._layers = cache, mark, layers

    def begin_pass(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return self._cache.begin_pass(rows, positions)

    def open_layer(self, index: int) -> LayerCache:
        return self._cache.open_layer(index)

    def close_layer(self, index: int) -> None:
        self._cache.close_layer(index)
        self._mark((index + 1) / (self._layers + 1))
