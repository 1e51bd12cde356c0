"""cuBLASLt by ctypes: y = x w^T, with a bias and what y held before added by the same kernel, which cuBLAS cannot.

As in cublas.py the matrices are seen transposed: y^T [N, T] = w x^T, w as [K, N] transposed, x as [K, T]; so the bias, a number a
row of y^T, is one of cuBLASLt's epilogues. fp16 or bf16 in, float32 sums, y and bias float32.

A product is asked for by its shape: which kernel to take (the library's heuristic says) is found once for each and kept. Then a
call costs two calls of C.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

TYPE = {"fp16": 2, "bf16": 14}  # cudaDataType
FLOAT32, COMPUTE_32F, TRANSPOSE = 0, 68, 1
TRANS_A, EPILOGUE, BIAS_POINTER, BIAS_TYPE = 3, 7, 8, 26  # attributes of a product
EPILOGUE_BIAS = 4
MOST_SCRATCH = 1  # attribute of a preference
ALIGN = 256  # bytes: what the heuristic takes for granted of addresses
MOST_PLANS = 1024  # prompts of so many lengths and shapes, then all are found anew


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8), ("scratch", ctypes.c_size_t), ("state", ctypes.c_int), ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]  # fmt: skip


class _Plan:
    """One shape's product: descriptors and algorithm. `bias` is where the description of the product reads a bias' address from."""

    def __init__(self, product: ctypes.c_void_p, layouts: tuple[ctypes.c_void_p, ...], found: _Found) -> None:
        self.product, self.layouts, self.found = product, layouts, found
        self.algorithm = ctypes.addressof(found.algorithm)
        self.bias = ctypes.c_void_p()
        self.bias_at = ctypes.addressof(self.bias)


class CublasLt:
    """scratch, size: device memory that products may use. Those on several streams at once would share it, and must not be."""

    def __init__(self, library: ctypes.CDLL, scratch: int, size: int) -> None:
        self._library, self._scratch, self._size = library, scratch, size
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self._multiply = library.cublasLtMatmul
        self._multiply.argtypes = [pointer] * 14 + [ctypes.c_size_t, pointer]
        self._set = library.cublasLtMatmulDescSetAttribute
        self._set.argtypes = [pointer, number, pointer, ctypes.c_size_t]
        library.cublasLtMatmulDescCreate.argtypes = [pointer, number, number]
        library.cublasLtMatrixLayoutCreate.argtypes = [pointer, number, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64]
        library.cublasLtMatmulPreferenceCreate.argtypes = [pointer]
        library.cublasLtMatmulPreferenceSetAttribute.argtypes = [pointer, number, pointer, ctypes.c_size_t]
        library.cublasLtMatmulAlgoGetHeuristic.argtypes = [pointer] * 7 + [number, pointer, pointer]
        for name in ("MatmulDescDestroy", "MatrixLayoutDestroy", "MatmulPreferenceDestroy"):
            getattr(library, "cublasLt" + name).argtypes = [pointer]
        self._handle = ctypes.c_void_p()
        library.cublasLtCreate.argtypes = [pointer]
        _check(library.cublasLtCreate(ctypes.byref(self._handle)))
        self._preference = ctypes.c_void_p()
        _check(library.cublasLtMatmulPreferenceCreate(ctypes.byref(self._preference)))
        most = ctypes.c_size_t(size)
        _check(library.cublasLtMatmulPreferenceSetAttribute(self._preference, MOST_SCRATCH, ctypes.byref(most), 8))
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._one_at, self._zero_at = ctypes.addressof(self._one), ctypes.addressof(self._zero)
        self._plans: dict[tuple[int, int, int, str, bool, bool], _Plan | None] = {}

    def __call__(
        self, num_tokens: int, num_out: int, size: int, dtype: str, x: int, w: int, y: int, bias: int, add: bool, stream: int
    ) -> bool:
        """x [T, K], w [N, K], y [T, N], bias [N] by their addresses; bias 0: none. False, and nothing done, where the library has
        no kernel for it."""
        if (x | w | y | bias) % ALIGN:
            return False
        key = (num_tokens, num_out, size, dtype, bias != 0, add)
        plan = self._plans.get(key)
        if plan is None:
            if key in self._plans:
                return False
            if len(self._plans) >= MOST_PLANS:
                self._forget()
            plan = self._plans[key] = self._find(*key)
            if plan is None:
                return False
        if bias:
            plan.bias.value = bias
            self._set(plan.product, BIAS_POINTER, plan.bias_at, 8)
        a, b, c = plan.layouts
        status = self._multiply(
            self._handle, plan.product, self._one_at, w, a, x, b, self._one_at if add else self._zero_at, y, c, y, c,
            plan.algorithm, self._scratch, self._size, stream,
        )  # fmt: skip
        if status:  # what the heuristic promised does not run: nothing was launched
            self._plans[key] = None
        return status == 0

    def _find(self, num_tokens: int, num_out: int, size: int, dtype: str, with_bias: bool, add: bool) -> _Plan | None:
        library = self._library
        product = ctypes.c_void_p()
        _check(library.cublasLtMatmulDescCreate(ctypes.byref(product), COMPUTE_32F, FLOAT32))
        attributes = [(TRANS_A, TRANSPOSE)] + [(EPILOGUE, EPILOGUE_BIAS), (BIAS_TYPE, FLOAT32)] * with_bias
        for attribute, value in attributes:
            _check(self._set(product, attribute, ctypes.byref(ctypes.c_int(value)), 4))
        if with_bias:  # some address, as aligned as those to come
            _check(self._set(product, BIAS_POINTER, ctypes.byref(ctypes.c_void_p(self._scratch)), 8))
        layouts = tuple(self._layouts(num_tokens, num_out, size, TYPE[dtype]))
        found, count = _Found(), ctypes.c_int()
        status = library.cublasLtMatmulAlgoGetHeuristic(
            self._handle, product, *layouts, layouts[2], self._preference, 1, ctypes.byref(found), ctypes.byref(count)
        )
        if status or not count.value or found.state:
            return None
        return _Plan(product, layouts, found)

    def _layouts(self, num_tokens: int, num_out: int, size: int, number: int) -> Iterator[ctypes.c_void_p]:
        """Of w, x and y: type, rows, columns, and from column to column."""
        for kind, rows, columns in ((number, size, num_out), (number, size, num_tokens), (FLOAT32, num_out, num_tokens)):
            layout = ctypes.c_void_p()
            _check(self._library.cublasLtMatrixLayoutCreate(ctypes.byref(layout), kind, rows, columns, rows))
            yield layout

    def _forget(self) -> None:
        for plan in self._plans.values():
            if plan is not None:
                self._library.cublasLtMatmulDescDestroy(plan.product)
                for layout in plan.layouts:
                    self._library.cublasLtMatrixLayoutDestroy(layout)
        self._plans.clear()


def loaded_library() -> ctypes.CDLL | None:
    """A libcublasLt that this process has loaded (libcublas brings it)."""
    paths = loaded("libcublasLt.so")
    return ctypes.CDLL(paths[0]) if paths else None


def loaded(name: str) -> list[str]:
    """Paths of the shared libraries of this name that the process has loaded; none where that cannot be told."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    return sorted({line.split()[-1] for line in maps.read_text().splitlines() if f"/{name}" in line})


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt: status {status}")
