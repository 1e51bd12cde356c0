"""What a rank with a GPU tells its watchdog: that the host waits for the device, and how far the device has come.

    host      with watch: launch . with watch: launch . with watch: wait for step 0 . with watch: launch ...        each `with` counts one
    device    [layer 0] mark . [layer 1] mark ...                                                                    of a long pass alone

All ranks of a group do the same things in the same order, so the counts compare: who has come least far is late. Steps that are short cost the device
nothing; a pass that may take longer than a wait that leads nowhere is marked layer by layer (models/marking.py).
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np

from l1_kernels.weight import Array
from l2_dense_parallel.board import DEVICE
from l2_dense_parallel.collectives import NoCollective
from l2_dense_parallel.watchdog import GROUPS, OPERATIONS, Watchdog

_DEVICE = OPERATIONS.index("the device")


class DeviceWatch:
    """`with watch:` around whatever may wait for the device, and so for a partner: a launch too, which waits where the driver has no room. Not around what
    compiles, which others wait for. It may be entered again and again, not in itself; costs a few microseconds.

    said, says   float64 [1], the same number as the host and as the device see it (`Device.mapped`)
    """

    def __init__(self, watchdog: Watchdog, group: str, members: tuple[int, ...], said: np.ndarray, says: Array) -> None:
        self._watchdog, self._group, self._members = watchdog, GROUPS.index(group), members
        self._said, self._says = said, says
        self._left = 0
        watchdog.progress = self.progress

    def __enter__(self) -> None:
        self._watchdog.enter(_DEVICE, self._group, self._members, DEVICE)

    def __exit__(self, *exception: object) -> None:
        self._left += 1
        self._watchdog.leave()

    def mark(self, part: float) -> None:
        """When the current stream comes to it: so much, above 0 and below 1, is done of what is waited for next."""
        self._says.fill(self._left + part)

    def progress(self) -> float:
        """It only grows: what is marked is done before the wait for it is over. Read by the watchdog's thread, which must not touch the device."""
        return max(float(self._left), float(self._said[0]))


class WatchedAlone(NoCollective):
    """A group of one whose device waits for ranks outside it, with which it exchanges in other ways."""

    def __init__(self, watch: DeviceWatch) -> None:
        super().__init__()
        self._watch = watch

    def watched(self) -> AbstractContextManager[None]:
        return self._watch

    def mark(self, part: float) -> None:
        self._watch.mark(part)
