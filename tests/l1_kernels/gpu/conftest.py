from __future__ import annotations

from collections.abc import Iterator

import pytest

from l1_kernels.device import Device, open_device


@pytest.fixture(scope="session")
def gpu() -> Device:
    return open_device("cuda")


@pytest.fixture(params=["default stream", "own stream"])
def device(request: pytest.FixtureRequest, gpu: Device) -> Iterator[Device]:
    """The GPU, launching on its default stream or on one that nothing else waits for."""
    if request.param == "default stream":
        yield gpu
        return
    with gpu.stream():
        yield gpu
