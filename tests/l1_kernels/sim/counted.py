"""Arrays that know which of their bytes a kernel reads and writes: the ledger of a region, counted instead of computed.

What a launch touches it counts once, however often: that is what must travel between a GPU's memory and its caches. A byte that the
next launch touches again counts again.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from l1_kernels import ptx
from l1_kernels.gpu_kernels import GpuKernels


class Counted(np.ndarray):
    """An array whose elements, taken or set, are noted in `ledger` under `name`. `offsets`: of each element, in bytes."""

    ledger: Ledger | None = None
    name = ""
    offsets: np.ndarray

    def reshape(self, *shape: Any, **options: Any) -> Counted:
        made = np.ndarray.reshape(self, *shape, **options)
        made.ledger, made.name, made.offsets = self.ledger, self.name, self.offsets.reshape(*shape)
        return made

    def __getitem__(self, index: Any) -> Any:
        if self.ledger is not None:
            self.ledger.note("read", self.name, self.offsets[index], self.itemsize)
        return np.asarray(self)[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        if self.ledger is not None:
            self.ledger.note("written", self.name, self.offsets[index], self.itemsize)
        np.asarray(self)[index] = value


class Ledger:
    """read, written: bytes by array, of all launches so far."""

    def __init__(self) -> None:
        self.read: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self._touched: dict[tuple[str, str], set[int]] = {}
        self.made = 0

    def array(self, name: str, numbers: np.ndarray) -> Counted:
        made = np.ascontiguousarray(numbers).view(Counted)
        made.ledger, made.name = self, name
        made.offsets = np.arange(made.size, dtype=np.int64).reshape(made.shape) * made.itemsize
        return made

    def empty(self, shape: Any, dtype: Any = np.float32) -> Counted:
        self.made += 1
        return self.array(f"made {self.made}", np.empty(shape, dtype))

    def note(self, how: str, name: str, offsets: Any, itemsize: int) -> None:
        found = self._touched.setdefault((how, name), set())
        for offset in np.ravel(offsets):
            found.update(range(int(offset), int(offset) + itemsize))

    def end_launch(self) -> None:
        for (how, name), found in self._touched.items():
            getattr(self, how)[name] += len(found)
        self._touched.clear()

    @property
    def total(self) -> int:
        return self.read.total() + self.written.total()


class CountedKernels(GpuKernels):
    """The GPU's kernels, on a ledger's arrays."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger.empty, lasting=lambda host: host.copy())
        self.ledger = ledger

    def launch(self, *arguments: Any) -> None:
        self.ledger._touched.clear()  # what the host looked at
        super().launch(*arguments)
        self.ledger.end_launch()


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    """A ledger that sees 16-byte accesses too: on the simulator they go through ptx._words, whose caller says which way."""
    words = ptx._words

    def noted(array: Any, index: Any) -> np.ndarray:
        if isinstance(array, Counted) and array.ledger is not None:
            how = "written" if sys._getframe(1).f_code.co_name.startswith("store") else "read"
            array.ledger.note(how, array.name, [int(index) * array.itemsize], 16)
        return words(np.asarray(array), index)

    with monkeypatch.context() as patch:
        patch.setattr(ptx, "_words", noted)
        yield Ledger()
