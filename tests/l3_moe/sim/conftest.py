from tests.l1_kernels.sim.conftest import device

__all__ = ["device"]
