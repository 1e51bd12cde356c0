"""y[t, n] = sum_k x[t, k] * w[n, k] by cuBLAS, on the tensor cores where w is 16-bit; y and the sum are float32

cuBLAS thinks in columns: its matrices are the transposes of ours, so it computes y^T = w x^T, with w (which it sees as
[K, N]) transposed and x (which it sees as [K, T]) as it is. COMPUTE_32F: float32 sums, and for fp32 no TF32.

16-bit products go to cuBLASLt where it has a kernel for them (cublaslt.py): it adds the bias in the same launch, and takes two
calls of C where CuPy takes more. CuPy refuses to call cuBLAS while a graph is captured, as cuBLAS might allocate its scratch
memory then. With scratch of ours it does not, so there the same functions are called by way of ctypes.
"""

from __future__ import annotations

import ctypes

import cupy
import numpy as np
from cupy.cuda import cublas, device, runtime, stream

from l1_kernels.linear.cublaslt import CublasLt, loaded, loaded_library
from l1_kernels.weight import Array

TYPE = {"fp32": runtime.CUDA_R_32F, "fp16": runtime.CUDA_R_16F, "bf16": runtime.CUDA_R_16BF}
INT32 = 10  # cudaDataType's CUDA_R_32I, which CuPy has no name for
SCRATCH = 32 << 20  # bytes: what cuBLAS takes for itself on a GPU of compute capability 9.0


class Gemm:
    """Holds the two numbers on the host that cuBLAS wants by address, and scratch memory for graphs and cuBLASLt: products of one
    object must not run on several streams at once."""

    def __init__(self) -> None:
        self._one = np.ones(1, np.float32)
        self._zero = np.zeros(1, np.float32)
        self._whole = np.array([1, 0], np.int32)  # one and zero of int8 products
        self._scratch: Array | None = None
        self._library: ctypes.CDLL | None = None
        self._lt: CublasLt | None = None

    def usable(self) -> bool:
        """Inside a capture after a call outside of one, which a capture is begun with."""
        return self._library is not None or not stream.get_current_stream().is_capturing()

    def __call__(self, x: Array, w: Array, dtype: str, y: Array, bias: Array | None = None, add: bool = False) -> bool:
        """x [T, K] and w [N, K] in the carrier of `dtype` ("fp32", "fp16", "bf16"), y float32 [T, N], on CuPy's current stream;
        add: y += instead of y =. Returns whether bias float32 [N] was added too; where not, the caller does."""
        num_tokens, size = x.shape
        num_out = w.shape[0]
        if self._scratch is None:
            self._prepare()
        if self._lt is not None and dtype != "fp32":
            addresses = x.data.ptr, w.data.ptr, y.data.ptr, 0 if bias is None else bias.data.ptr
            if self._lt(num_tokens, num_out, size, dtype, *addresses, add, cupy.cuda.get_current_stream().ptr):
                return True
        handle = device.get_cublas_handle()
        arguments = (
            cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N, num_out, num_tokens, size,
            self._one.ctypes.data, w.data.ptr, TYPE[dtype], size, x.data.ptr, TYPE[dtype], size,
            (self._one if add else self._zero).ctypes.data, y.data.ptr, TYPE["fp32"], num_out,
            cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT,
        )  # fmt: skip
        self._run(handle, arguments)
        return bias is None

    def takes_int8(self, num_out: int, size: int) -> bool:
        """Whether `int8` multiplies more than 16 tokens with a w [num_out, size]: cuBLAS asks for whole words."""
        return num_out % 8 == 0 and size % 8 == 0 and self.usable()

    def int8(self, x: Array, w: Array, y: Array) -> None:
        """y int32 [T, N] = x int8 [T, K] @ w int8 [N, K]^T, exact."""
        (num_tokens, size), num_out = x.shape, w.shape[0]
        if self._scratch is None:
            self._prepare()
        one, zero = self._whole.ctypes.data, self._whole[1:].ctypes.data
        arguments = (
            cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N, num_out, num_tokens, size,
            one, w.data.ptr, runtime.CUDA_R_8I, size, x.data.ptr, runtime.CUDA_R_8I, size,
            zero, y.data.ptr, INT32, num_out,
            cublas.CUBLAS_COMPUTE_32I, cublas.CUBLAS_GEMM_DEFAULT,
        )  # fmt: skip
        self._run(device.get_cublas_handle(), arguments)

    def _run(self, handle: int, arguments: tuple[int, ...]) -> None:
        if stream.get_current_stream().is_capturing():
            self._captured(handle, arguments)
        else:
            cublas.gemmEx(handle, *arguments)

    def _prepare(self) -> None:
        """Scratch memory, and the libraries, which making a handle loads."""
        device.get_cublas_handle()
        with cupy.cuda.using_allocator(cupy.get_default_memory_pool().malloc):  # not a graph's pool, which ends with the graph
            self._scratch = cupy.empty(SCRATCH, np.uint8)
        paths, lt = loaded("libcublas.so"), loaded_library()
        self._library = ctypes.CDLL(paths[0]) if len(paths) == 1 else None
        if lt is not None:
            self._lt = CublasLt(lt, self._scratch.data.ptr, SCRATCH)

    def _captured(self, handle: int, arguments: tuple[int, ...]) -> None:
        assert self._library is not None and self._scratch is not None
        int32, pointer = ctypes.c_int, ctypes.c_void_p
        kinds = (int32,) * 5 + (pointer, pointer, int32, int32, pointer, int32, int32, pointer, pointer, int32, int32, int32, int32)
        _check(self._library.cublasSetStream_v2(pointer(handle), pointer(stream.get_current_stream().ptr)))
        _check(self._library.cublasSetWorkspace_v2(pointer(handle), pointer(self._scratch.data.ptr), ctypes.c_size_t(SCRATCH)))
        _check(self._library.cublasGemmEx(pointer(handle), *(kind(value) for kind, value in zip(kinds, arguments, strict=True))))


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS: status {status}")
