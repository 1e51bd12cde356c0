"""y[t, n] = sum_k x[t, k] * w[n, k] by cuBLAS, on the tensor cores where w is 16-bit; y and the sum are float32

cuBLAS thinks in columns: its matrices are the transposes of ours, so it computes y^T = w x^T, with w (which it sees as
[K, N]) transposed and x (which it sees as [K, T]) as it is. COMPUTE_32F: float32 sums, and for fp32 no TF32.
"""

from __future__ import annotations

import numpy as np
from cupy.cuda import cublas, device, runtime, stream

from l1_kernels.weight import Array

TYPE = {"fp32": runtime.CUDA_R_32F, "fp16": runtime.CUDA_R_16F, "bf16": runtime.CUDA_R_16BF}


class Gemm:
    """Holds the two numbers on the host that cuBLAS wants by address."""

    def __init__(self) -> None:
        self._one = np.ones(1, np.float32)
        self._zero = np.zeros(1, np.float32)

    def usable(self) -> bool:
        """CuPy refuses cuBLAS inside a graph capture."""
        return not stream.get_current_stream().is_capturing()

    def __call__(self, x: Array, w: Array, dtype: str, y: Array) -> None:
        """x [T, K] and w [N, K] in the carrier of `dtype` ("fp32", "fp16", "bf16"), y float32 [T, N], on CuPy's current stream."""
        num_tokens, size = x.shape
        num_out = w.shape[0]
        handle = device.get_cublas_handle()
        cublas.gemmEx(
            handle, cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N, num_out, num_tokens, size,
            self._one.ctypes.data, w.data.ptr, TYPE[dtype], size, x.data.ptr, TYPE[dtype], size,
            self._zero.ctypes.data, y.data.ptr, TYPE["fp32"], num_out, cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT,
        )  # fmt: skip
