"""Deep-Fusion's regions with a library's matrix products: cuBLAS adds what it can, and one launch each side does the rest.

    region                launches here                                          unfused, with cuBLAS
    norm_linear           norm to 16 bits, GeMM + bias                    2      norm, rounding, GeMM, bias                        4
    norm_feed_forward     norm to 16 bits, GeMM, bias + activation        3      norm, rounding, GeMM, bias, activation            5
    linear_add            GeMM + bias + residual                          1      rounding, GeMM, bias, addition                    4
    attend (prompts)      rotary + cache write, attention                 2      rotary, cache write, attention                    3
                                      and one more for each bias where the library has no kernel that adds it

Two uses. Above 16 tokens (prompts, encoders) it is what FusedRegions does: there a product is bound by the tensor cores, which
cuBLAS feeds well. And at any number of tokens it is the middle step of the paper's Fig 10a, fusion without SBI-GeMM
(open_device(gemm="cublas")). `hidden` and `mixed` go on in 16 bits, as in fused_regions.py: the same rounding, a launch earlier.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from l1_kernels import checks
from l1_kernels.activation.gpu import KINDS
from l1_kernels.attention.prompt_region import attend_prompt
from l1_kernels.checks import FLOAT32
from l1_kernels.elementwise import epilogue
from l1_kernels.elementwise.gpu import make_add_bias, make_round
from l1_kernels.gpu_kernels import MAX_BLOCKS, MAX_GRID_Y, GeMM, GpuKernels, ceil_div, threads
from l1_kernels.regions import CacheArgs, NormArgs, RotaryArgs, UnfusedRegions
from l1_kernels.sbi_gemm.job import CARRIED
from l1_kernels.sbi_gemm.launch import norm_rows
from l1_kernels.weight import CARRIER, Array, Weight


class LibraryKernels(GpuKernels):
    """Every product by the library, for few tokens too, and every operation a launch: what a framework without kernels of its own
    does, and so the baseline (open_device(fused=False)). int8 weights are no library's: they keep our plain kernel."""

    def linear(self, x: Array, weight: Weight, bias: Array | None = None) -> Array:
        checks.matrix(weight, "weight")
        checks.ranked(x, "x", FLOAT32, 2)
        if weight.dtype == "int8" or not self._cublas_takes(weight) or not x.size or not weight.data.size:
            return super().linear(x, weight, bias)
        checks.array(x, "x", FLOAT32, (x.shape[0], weight.data.shape[1]))
        if bias is not None:
            checks.array(bias, "bias", FLOAT32, (weight.data.shape[0],))
        y = self.new((x.shape[0], weight.data.shape[0]), np.float32)
        self._linear_cublas(x, weight, bias, y)
        return y


class LibraryRegions(UnfusedRegions):
    """`regions.Regions` over 16-bit weights and a usable `gemm`; for anything else, and with none (the simulator), the unfused
    regions. A `hidden` or `mixed` in 16 bits is taken in every case."""

    def __init__(self, kernels: GpuKernels, gemm: GeMM | None) -> None:
        super().__init__(kernels)
        self.gpu = kernels
        self.gemm = gemm

    def norm_linear(self, x: Array, norm: NormArgs | None, weight: Weight, bias: Array | None) -> Array:
        if not self._takes(x, norm, weight, bias):
            return super().norm_linear(self._wide(x, weight), norm, weight, bias)
        return self._linear16(self._rounded(x, norm, weight), weight, bias)

    def norm_feed_forward(self, x: Array, norm: NormArgs | None, weight: Weight, bias: Array | None, kind: str, gated: bool) -> Array:
        if not self._takes(x, norm, weight, bias) or (gated and weight.data.shape[0] % 2):
            return super().norm_feed_forward(self._wide(x, weight), norm, weight, bias, kind, gated)
        return self._feed_forward16(self._rounded(x, norm, weight), weight, bias, kind, gated)

    def linear_add(self, x: Array, weight: Weight, bias: Array | None, residual: Array | None) -> Array:
        if not self._takes(x, None, weight, bias):
            return super().linear_add(self._wide(x, weight), weight, bias, residual)
        shape = (x.shape[0], weight.data.shape[0])
        if residual is None:
            y = self.gpu.new(shape, np.float32)
        else:
            checks.array(residual, "residual", FLOAT32, shape)
            y = residual
        self._product(self._rounded(x, None, weight), weight, y, bias, residual is not None)
        return y

    def attend(
        self, qkv: Array, num_heads: int, rotary: RotaryArgs | None, cache: CacheArgs, window: int, scale: float, slopes: Array | None
    ) -> Array:
        mixed = attend_prompt(self.gpu, qkv, num_heads, rotary, cache, window, scale, slopes)
        return super().attend(qkv, num_heads, rotary, cache, window, scale, slopes) if mixed is None else mixed

    def norm_pair(
        self, x: Array, norms: tuple[NormArgs | None, NormArgs | None], qkv: tuple[Weight, Array | None],
        up: tuple[Weight, Array | None], kind: str, gated: bool,
    ) -> tuple[Array, Array]:  # fmt: skip
        shared = norms[0] is norms[1] and qkv[0].dtype == up[0].dtype
        whole = not gated or up[0].data.shape[0] % 2 == 0
        if shared and whole and self._takes(x, norms[0], *qkv) and self._takes(x, norms[0], *up):
            x = self._rounded(x, norms[0], qkv[0])  # once for both
            return self._linear16(x, *qkv), self._feed_forward16(x, *up, kind, gated)
        return self.norm_linear(x, norms[0], *qkv), self.norm_feed_forward(x, norms[1], *up, kind, gated)

    def _takes(self, x: Array, norm: NormArgs | None, weight: Weight, bias: Array | None) -> bool:
        """Whether the library does this product; bad arguments are left to the unfused regions' checks."""
        if self.gemm is None or weight.dtype not in ("fp16", "bf16") or not self.gemm.usable():
            return False
        if getattr(x, "ndim", 0) != 2 or 0 in x.shape or 0 in weight.data.shape or x.shape[1] != weight.data.shape[1]:
            return False
        if bias is not None:
            checks.array(bias, "bias", FLOAT32, weight.data.shape[:1])
        checks.matrix(weight, "weight")
        carried = norm is None and x.dtype != FLOAT32
        checks.ranked(x, "x", np.dtype(CARRIER[weight.dtype]) if carried else FLOAT32, 2)
        return norm is None or (x.shape[1] % 8 == 0 and checks.is_aligned(x) and checks.is_aligned(norm.weight))

    def _rounded(self, x: Array, norm: NormArgs | None, weight: Weight) -> Array:
        """norm(x) as the product reads it, in 16 bits."""
        if norm is not None:
            checks.array(norm.weight, "norm.weight", FLOAT32, x.shape[1:])
            if norm.bias is not None:
                checks.array(norm.bias, "norm.bias", FLOAT32, x.shape[1:])
            return norm_rows(self.gpu, x, norm.kind, norm.weight, norm.bias, norm.eps, weight.dtype)
        if x.dtype != FLOAT32:
            return x
        bits = self.gpu.new(x.shape, CARRIER[weight.dtype])
        self._flat(make_round(weight.dtype), x.size, x.reshape(-1), bits.reshape(-1))
        return bits

    def _linear16(self, x: Array, weight: Weight, bias: Array | None) -> Array:
        y = self.gpu.new((x.shape[0], weight.data.shape[0]), np.float32)
        self._product(x, weight, y, bias)
        return y

    def _feed_forward16(self, x: Array, weight: Weight, bias: Array | None, kind: str, gated: bool) -> Array:
        y = self.gpu.new((x.shape[0], weight.data.shape[0]), np.float32)
        self._product(x, weight, y)
        return self._activated(y, weight.dtype, bias, kind, gated)

    def _product(self, x: Array, weight: Weight, y: Array, bias: Array | None = None, add: bool = False) -> None:
        """y (+)= x w^T + bias, in one launch where the library can add a bias."""
        assert self.gemm is not None
        if not self.gemm(x, weight.data, weight.dtype, y, bias, add):
            self._flat(make_add_bias(), y.size, y, bias)

    def _activated(self, y: Array, dtype: str, bias: Array | None, kind: str, gated: bool) -> Array:
        checks.known(kind, "kind", KINDS)
        bits = self.gpu.new((y.shape[0], y.shape[1] // (2 if gated else 1)), CARRIER[dtype])
        # y and bits are new, and so aligned.
        eights = bits.shape[1] % epilogue.EIGHT == 0 and (bias is None or checks.is_aligned(bias))
        kernel = (epilogue.make_activation_of_eights if eights else epilogue.make_activation)(dtype, kind, bool(gated))
        shape = (bits.shape[0], bits.shape[1] // epilogue.EIGHT) if eights else bits.shape
        self._by_rows(kernel, shape, y, self.gpu.or_absent(bias), bias is not None, bits)
        return bits

    def _wide(self, x: Array, weight: Weight) -> Array:
        """What an unfused region takes: float32."""
        return x if getattr(x, "dtype", FLOAT32) == FLOAT32 else self.gpu.widen(x, CARRIED[weight.dtype])

    def _flat(self, kernel: Any, size: int, *arguments: Any) -> None:
        block = threads(size)
        self.gpu.launch(kernel, min(ceil_div(size, block), MAX_BLOCKS), block, 0, *arguments)

    def _by_rows(self, kernel: Any, shape: tuple[int, ...], *arguments: Any) -> None:
        block = threads(shape[1])
        self.gpu.launch(kernel, (ceil_div(shape[1], block), min(shape[0], MAX_GRID_Y)), block, 0, *arguments)
