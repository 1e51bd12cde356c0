"""`MoEKernels` on CuPy arrays, or the simulator's NumPy arrays: which kernel of gpu.py, layout.py and product.py, with how many blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from l1_kernels import checks
from l1_kernels.gpu_kernels import GpuKernels, ceil_div, threads
from l1_kernels.weight import CARRIER, Array, Weight
from l3_moe.routing import check, gpu, layout, product
from l3_moe.routing.top_k import parts_at_once
from l3_moe.tables import RoutingTables

NO_LIMIT = (1 << 31) - 1
MAX_TOKENS = 1 << 16  # so that a block's pairs fit into its shared memory


class GpuMoEKernels:
    """multiprocessors: blocks that certainly run at once, which a barrier over them needs. stream: names the current stream."""

    def __init__(self, kernels: GpuKernels, multiprocessors: int, stream: Callable[[], Any]) -> None:
        self.kernels = kernels
        self.multiprocessors = multiprocessors
        self._stream = stream
        self._counters: dict[Any, Array] = {}  # of the grid's barrier, by stream: the launches of a stream follow each other

    def tables(self, logits: Array, top_k: int, softmax_first: bool, renormalise: bool, capacity: int | None = None) -> RoutingTables:
        check.gate(logits, top_k, capacity)
        _limit("top_k", f"at most {gpu.MAX_TOP_K}", top_k, top_k <= gpu.MAX_TOP_K)
        _limit("logits", f"[T, E] with T up to {MAX_TOKENS} and E up to {gpu.MAX_EXPERTS}", logits, _takes(*logits.shape))
        choice = self._new_choice(logits.shape[0], top_k)
        over_all = bool(softmax_first and not renormalise)
        return self._build(logits.reshape(1, *logits.shape), gpu.ONE_PART, over_all, *choice, logits.shape[1], capacity)

    def tables_of(self, experts: Array, share: Array, num_experts: int, capacity: int | None = None) -> RoutingTables:
        check.choice(experts, share, num_experts, capacity)
        num_tokens, top_k = experts.shape
        _limit("num_experts", f"at most {gpu.MAX_EXPERTS}", num_experts, num_experts <= gpu.MAX_EXPERTS)
        small = _takes(num_tokens) and top_k <= gpu.MAX_TOP_K
        _limit("experts", f"[T, k] with T up to {MAX_TOKENS} and k up to {gpu.MAX_TOP_K}", experts, small)
        nothing = self.kernels.or_absent(None).reshape(1, 1, 1)
        return self._build(nothing, gpu.GIVEN, False, experts, share, num_experts, capacity)

    def route_rows(
        self, x: Array, gate: Weight, top_k: int, softmax_first: bool, renormalise: bool, dtype: str, capacity: int | None = None
    ) -> tuple[RoutingTables, Array]:
        check.gated(x, gate, top_k, dtype, capacity)
        if not product.takes(x.shape[1]) or not (checks.is_aligned(x) and checks.is_aligned(gate.data)):
            tables = self.tables(self.kernels.linear(x, gate), top_k, softmax_first, renormalise, capacity)
            return tables, self.dispatch(x, tables, dtype)
        _limit("top_k", f"at most {gpu.MAX_TOP_K}", top_k, top_k <= gpu.MAX_TOP_K)
        _limit("x", f"[T, D] with T up to {MAX_TOKENS}", x, _takes(x.shape[0]))
        _limit("gate", f"[E, D] with E up to {gpu.MAX_EXPERTS}", gate.data, _takes(0, gate.shape[0]))
        return self.route_parts(self.gate_parts(x, gate), gate.shape[0], top_k, bool(softmax_first and not renormalise), capacity, x, dtype)

    def gate_parts(self, x: Array, gate: Weight) -> Array:
        """route_rows' first launch: the logits float32 [P, T, E rounded up to 4], as P parts to be added."""
        across, grid, chunk = product.plan(x.shape[0], gate.shape[0], x.shape[1], self.multiprocessors)
        parts = self.kernels.new((grid[2], x.shape[0], ceil_div(gate.shape[0], 4) * 4), np.float32)
        kernel = product.make_product(across)
        self.kernels.launch(kernel, grid, product.THREADS, product.shared_bytes(across), x, gate.data, chunk, parts)
        return parts

    def route_parts(
        self, parts: Array, num_experts: int, top_k: int, over_all: bool, capacity: int | None, x: Array, dtype: str
    ) -> tuple[RoutingTables, Array]:
        """route_rows' second launch: tables and dispatch. over_all: shares are parts of the sum over all E. D is a multiple of 8."""
        rows = self.kernels.new((x.shape[0] * top_k, x.shape[1]), CARRIER[dtype])
        choice = self._new_choice(x.shape[0], top_k)
        at_once = parts_at_once(gpu.pieces_of(num_experts), parts.shape[0])
        return self._build(parts, at_once, over_all, *choice, num_experts, capacity, dtype, x, rows), rows

    def dispatch(self, x: Array, tables: RoutingTables, dtype: str) -> Array:
        check.dispatch(x, tables, dtype)
        rows = self.kernels.new((tables.num_tokens * tables.top_k, x.shape[1]), CARRIER[dtype])
        numbers = layout.NUMBERS[dtype]
        wide = x.shape[1] % numbers == 0 and checks.is_aligned(x) and checks.is_aligned(rows)
        kernel = layout.make_dispatch(dtype, wide)
        self._launch_rows(kernel, x.shape[0], x.shape[1] // (numbers if wide else 1), x, tables.slots, rows)
        return rows

    def combine(self, y: Array, tables: RoutingTables, residual: Array | None) -> Array:
        check.combine(y, tables, residual)
        _limit("tables.experts", f"[T, k] with k up to {gpu.MAX_TOP_K}", tables.experts, tables.top_k <= gpu.MAX_TOP_K)
        add = residual is not None
        out = residual if add else self.kernels.new((tables.num_tokens, y.shape[1]), np.float32)
        wide = y.shape[1] % 4 == 0 and checks.is_aligned(y) and checks.is_aligned(out)
        kernel = layout.make_combine(tables.top_k, wide, add)
        self._launch_rows(kernel, tables.num_tokens, y.shape[1] // (4 if wide else 1), y, tables.slots, tables.share, out)
        return out

    def _new_choice(self, num_tokens: int, top_k: int) -> tuple[Array, Array]:
        return self.kernels.new((num_tokens, top_k), np.int32), self.kernels.new((num_tokens, top_k), np.float32)

    def _build(
        self, logits: Array, source: int, over_all: bool, experts: Array, share: Array, num_experts: int, capacity: int | None,
        dtype: str | None = None, x: Array | None = None, rows: Array | None = None,
    ) -> RoutingTables:  # fmt: skip
        """gpu.make_tables' launch."""
        num_tokens, top_k = experts.shape
        new, nothing = self.kernels.new, self.kernels.or_absent(None).reshape(1, 1)
        slots, sources = new((num_tokens, top_k), np.int32), new((num_tokens * top_k,), np.int32)
        offsets, dropped = new((num_experts + 1,), np.int32), new((1,), np.int32)
        pieces = gpu.pieces_of(num_experts)
        blocks, stretch = self._spread(num_tokens, with_rows=dtype is not None)
        self.kernels.launch(
            gpu.make_tables(pieces, source, dtype), blocks, 32 * gpu.warps_of(pieces), 4 * top_k * max(1, stretch),
            logits.reshape(-1), logits.shape[0], logits.shape[2], over_all, np.int32(min(capacity or NO_LIMIT, NO_LIMIT)), num_tokens,
            top_k, stretch, self._counter(), new((blocks, 32 * pieces), np.int32),
            experts.reshape(-1), share.reshape(-1), slots.reshape(-1), sources, offsets, dropped,
            nothing if x is None else x, nothing if rows is None else rows,
        )  # fmt: skip
        return RoutingTables(experts, share, slots, sources, offsets, dropped)

    def _spread(self, num_tokens: int, with_rows: bool) -> tuple[int, int]:
        """Blocks, and tokens of each. Rows are copied by all multiprocessors, and from few tokens on."""
        most_alone, least = (gpu.ONE_BLOCK_ROWS, 1) if with_rows else (gpu.ONE_BLOCK, gpu.TOKENS)
        if num_tokens <= most_alone:
            return 1, num_tokens
        stretch = max(least, ceil_div(num_tokens, min(gpu.BLOCKS, self.multiprocessors)))
        return ceil_div(num_tokens, stretch), stretch

    def _counter(self) -> Array:
        stream = self._stream()
        if stream not in self._counters:
            self._counters[stream] = self.kernels.lasting(np.zeros(1, np.int32))
        return self._counters[stream]

    def _launch_rows(self, kernel: Any, num_tokens: int, items: int, *arguments: Array) -> None:
        """A thread for each of a token's items, blocks of one token each."""
        block = threads(items)
        self.kernels.launch(kernel, (num_tokens, ceil_div(items, block)), block, 0, *arguments)


def _takes(num_tokens: int, num_experts: int = 1) -> bool:
    return num_tokens <= MAX_TOKENS and num_experts <= gpu.MAX_EXPERTS


def _limit(name: str, need: str, got: object, good: bool) -> None:
    if not good:
        checks.reject(name, need, checks.describe(got))
