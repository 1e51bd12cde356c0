"""Deep-Fusion's regions over int8 matrices whose x is rounded to int8 too: the norm and the rounding in one launch, product and
epilogue in another. What is no such matrix goes to library_regions.py.

They are W8A8's (Weight.act "int8"), and for 17 to 256 tokens W8A16's: x then in 15 bits, as two planes of int8 (quantize/reference.py, `fine`),
which a library multiplies with weights as they are. To make 16-bit weights of them for each prompt took longer than the whole prompt in fp16.

    region                up to 16 tokens                                        more tokens, with a library's int8 product
    norm_linear           norm + rounding, GeMM + scales + bias            2     the GeMM of both planes, one for scales + bias         3
    norm_feed_forward     norm + rounding, GeMM + ... + activation         2     the same, and the activation                           4
    linear_add            rounding, GeMM + ... + residual                  2     as norm_linear, with the residual                      3

A region cannot round what it hands on: a token's scale needs all of the token, and no block of the GeMM that makes it has that. So
rounding is in the prologue, as the norm is, and like the norm a launch of its own. K or N that is no multiple of 16 bytes, or
too many tokens without a library: every operation by itself, x rounded to int8 and multiplied as W8A16 multiplies.
"""

from __future__ import annotations

import numpy as np

from l1_kernels import checks
from l1_kernels.activation.gpu import KINDS
from l1_kernels.checks import FLOAT32
from l1_kernels.gpu_kernels import GeMM, GpuKernels, ceil_div
from l1_kernels.library_regions import LibraryRegions
from l1_kernels.quantize.gpu import make_scale_planes
from l1_kernels.quantize.launch import Planes, quantized
from l1_kernels.regions import NormArgs
from l1_kernels.sbi_gemm.int8_tensor import PER, make_int8_tensor, plan_of
from l1_kernels.sbi_gemm.job import MAX_TOKENS, Job
from l1_kernels.weight import CARRIER, Array, Weight

FINE_TOKENS = 256  # of W8A16. GPT-J's prompts on an H200: 128 tokens 10.6 ms so (with a product for each plane), 19.5 by way of fp16 weights; 2048 tokens 93 and 68


class Int8Regions(LibraryRegions):
    """`regions.Regions`: LibraryRegions, and W8A8 besides."""

    def __init__(self, kernels: GpuKernels, gemm: GeMM | None) -> None:
        super().__init__(kernels, gemm)

    def norm_linear(self, x: Array, norm: NormArgs | None, weight: Weight, bias: Array | None) -> Array:
        if not self._rounds(x, norm, weight, bias):
            return super().norm_linear(x, norm, weight, bias)
        return self._linear(self._planes(x, norm, weight), weight, bias)

    def norm_feed_forward(self, x: Array, norm: NormArgs | None, weight: Weight, bias: Array | None, kind: str, gated: bool) -> Array:
        if not self._rounds(x, norm, weight, bias) or (gated and weight.data.shape[0] % 2):
            return super().norm_feed_forward(x, norm, weight, bias, kind, gated)
        return self._feed_forward(self._planes(x, norm, weight), weight, bias, kind, gated)

    def linear_add(self, x: Array, weight: Weight, bias: Array | None, residual: Array | None) -> Array:
        if not self._rounds(x, None, weight, bias):
            return super().linear_add(x, weight, bias, residual)
        if residual is not None:
            checks.array(residual, "residual", FLOAT32, (x.shape[0], weight.data.shape[0]))
        return self._linear(self._planes(x, None, weight), weight, bias, residual)

    def norm_pair(
        self, x: Array, norms: tuple[NormArgs | None, NormArgs | None], qkv: tuple[Weight, Array | None],
        up: tuple[Weight, Array | None], kind: str, gated: bool,
    ) -> tuple[Array, Array]:  # fmt: skip
        both = norms[0] is norms[1] and qkv[0].act == up[0].act and self._rounds(x, norms[0], *qkv) and self._rounds(x, norms[1], *up)
        if not both or (gated and up[0].data.shape[0] % 2):
            return super().norm_pair(x, norms, qkv, up, kind, gated)
        planes = self._planes(x, norms[0], qkv[0])  # once for both
        return self._linear(planes, *qkv), self._feed_forward(planes, *up, kind, gated)

    def _rounds(self, x: Array, norm: NormArgs | None, weight: Weight, bias: Array | None) -> bool:
        """Whether the int8 kernels do this product; bad arguments are left to the other regions' checks."""
        if weight.dtype != "int8" or getattr(x, "ndim", 0) != 2 or 0 in x.shape or 0 in weight.data.shape or x.shape[1] != weight.data.shape[1]:
            return False
        if weight.data.shape[1] % PER or not checks.is_aligned(weight.data):
            return False
        if weight.act is None and not MAX_TOKENS < x.shape[0] <= FINE_TOKENS:
            return False
        if x.shape[0] > MAX_TOKENS and not self._library_rounds(weight):
            return False
        checks.matrix(weight, "weight")
        if bias is not None:
            checks.array(bias, "bias", FLOAT32, weight.data.shape[:1])
        checks.ranked(x, "x", np.dtype(CARRIER["fp16"]) if norm is None and x.dtype != FLOAT32 else FLOAT32, 2)
        return True

    def _library_rounds(self, weight: Weight) -> bool:
        takes = getattr(self.gemm, "takes_int8", None)
        return takes is not None and takes(*weight.data.shape)

    def _planes(self, x: Array, norm: NormArgs | None, weight: Weight) -> Planes:
        return quantized(self.gpu, x, norm, "fp32" if x.dtype == FLOAT32 else "fp16", fine=weight.act is None)

    def _linear(self, planes: Planes, weight: Weight, bias: Array | None, residual: Array | None = None) -> Array:
        y = self.gpu.new((len(planes.scale), weight.data.shape[0]), np.float32) if residual is None else residual
        self._multiply(Job("int8", add=residual is not None), planes, weight, bias, y)
        return y

    def _feed_forward(self, planes: Planes, weight: Weight, bias: Array | None, kind: str, gated: bool) -> Array:
        checks.known(kind, "kind", KINDS)
        num_tokens, num_out = planes.low.shape[0], weight.data.shape[0]
        if num_tokens > MAX_TOKENS:
            y = self._linear(planes, weight, bias)
            return self.gpu.gate(y, kind) if gated else self.gpu.activate(y, kind)
        hidden = self.gpu.new((num_tokens, num_out // (2 if gated else 1)), np.float32)
        self._multiply(Job("int8", activation=kind, gated=gated), planes, weight, bias, hidden)
        return hidden

    def _multiply(self, job: Job, planes: Planes, weight: Weight, bias: Array | None, y: Array) -> None:
        num_tokens, size = len(planes.scale), planes.both.shape[1]
        num_out = weight.data.shape[0]
        shift = self.gpu.or_absent(bias), bias is not None
        if num_tokens <= MAX_TOKENS:
            plan = plan_of(num_tokens, num_out, size)
            slots = ceil_div(num_out // 2, 8) * 16 if job.gated else num_out
            self.gpu.launch(
                make_int8_tensor(job, plan), ceil_div(slots, plan.tile), plan.threads, 0,
                planes.low, planes.high, planes.scale, weight.data, weight.scale, *shift, y,
            )  # fmt: skip
            return
        assert self.gemm is not None and not job.gated and job.activation is None
        products = self.gpu.new((2 * num_tokens, num_out), np.int32)
        self.gemm.int8(planes.both, weight.data, products)  # type: ignore[attr-defined]
        self._by_rows(make_scale_planes(job.add), y.shape, products[:num_tokens], products[num_tokens:], planes.scale, weight.scale, *shift, y)
