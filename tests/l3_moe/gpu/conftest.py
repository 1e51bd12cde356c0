from tests.l1_kernels.gpu.conftest import device, gpu

__all__ = ["device", "gpu"]
