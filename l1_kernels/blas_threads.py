"""How many threads BLAS takes for a product: all of them for a large one, one for a small one.

A BLAS thread that is done spins for a while, on a core that numba's threads or another
process want. A prompt alternates between the two, and on a busy machine small products then took ten times as long on two
threads as on one: `score` of 20 KB with the bundled model 24 to 42 s instead of 2.7 s on 2 cores with two other busy
processes. The size from which all threads are taken is a judgement, not a measured crossover.
"""

from __future__ import annotations

from typing import Any

MANY_OPERATIONS = 150_000_000  # of a product


class BlasThreads:
    """Of the BLAS that NumPy has loaded; does nothing where threadpoolctl is not installed or knows none."""

    def __init__(self) -> None:
        self._libraries: list[Any] = []
        try:
            from threadpoolctl import ThreadpoolController
        except ImportError:
            return
        self._libraries = [library for library in ThreadpoolController().lib_controllers if library.user_api == "blas"]
        self._most = max((library.num_threads for library in self._libraries), default=1)
        self._current = self._most

    def serve(self, operations: int) -> None:
        """Called before a product of so many operations (0: many small ones). 1 us where the number changes."""
        if not self._libraries:
            return
        wanted = self._most if operations >= MANY_OPERATIONS else 1
        if wanted != self._current:
            for library in self._libraries:
                library.set_num_threads(wanted)
            self._current = wanted
