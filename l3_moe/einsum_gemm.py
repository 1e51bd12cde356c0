"""a @ b and a^T @ b of fp16 or float32 CuPy matrices by cuBLAS, in graphs too, for einsum_baseline.py: sums in float32, the result in the
matrices' dtype.

cuBLAS thinks in columns, so it computes the result's transpose, b^T a^T or b^T a, of matrices that are stored as it wants them.
"""

from __future__ import annotations

import cupy
from cupy.cuda import cublas, device, runtime

from l1_kernels.linear.cublas import Gemm
from l1_kernels.weight import Array

TYPE = {"e": runtime.CUDA_R_16F, "f": runtime.CUDA_R_32F}


class EinsumGemm(Gemm):
    """cublas.Gemm, whose matrices have an inner size that runs fastest in both, with these two more."""

    def product(self, a: Array, b: Array, transpose: bool) -> Array:
        """a [M, K] (transpose: [K, M]), b [K, N] -> [M, N]"""
        (inner, num_out), rows = b.shape, a.shape[1] if transpose else a.shape[0]
        if a.dtype != b.dtype or a.dtype.char not in TYPE:
            raise TypeError(f"a product of {a.dtype} and {b.dtype}")
        result = cupy.empty((rows, num_out), b.dtype)
        if self._scratch is None:
            self._prepare()
        kind = TYPE[b.dtype.char]
        arguments = (
            cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_T if transpose else cublas.CUBLAS_OP_N, num_out, rows, inner,
            self._one.ctypes.data, b.data.ptr, kind, num_out, a.data.ptr, kind, a.shape[1],
            self._zero.ctypes.data, result.data.ptr, kind, num_out, cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT,
        )  # fmt: skip
        self._run(device.get_cublas_handle(), arguments)
        return result

