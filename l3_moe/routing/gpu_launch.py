"""`MoEKernels` on CuPy arrays, or on NumPy arrays in the simulator: which kernel of gpu.py and layout.py, with how many blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from l1_kernels import checks
from l1_kernels.gpu_kernels import GpuKernels, ceil_div, threads
from l1_kernels.weight import CARRIER, Array
from l3_moe.routing import check
from l3_moe.routing.gpu import BLOCKS, MAX_EXPERTS, MAX_TOP_K, ONE_BLOCK, TOKENS, WARPS, make_tables, pieces_of
from l3_moe.routing.layout import NUMBERS, make_combine, make_dispatch
from l3_moe.tables import RoutingTables

NO_LIMIT = (1 << 31) - 1
MAX_TOKENS = 1 << 16  # so that a block's pairs fit into its shared memory


class GpuMoEKernels:
    """multiprocessors: blocks that certainly run at once, which a barrier over them needs. stream: what tells the current stream from others."""

    def __init__(self, kernels: GpuKernels, multiprocessors: int, stream: Callable[[], Any]) -> None:
        self.kernels = kernels
        self.most_blocks = min(BLOCKS, multiprocessors)
        self._stream = stream
        self._counters: dict[Any, Array] = {}  # of the grid's barrier, by stream: the launches of a stream follow each other

    def tables(self, logits: Array, top_k: int, softmax_first: bool, renormalise: bool, capacity: int | None = None) -> RoutingTables:
        check.gate(logits, top_k, capacity)
        shape = (logits.shape[0], top_k)
        experts, share = self.kernels.new(shape, np.int32), self.kernels.new(shape, np.float32)
        over_all = bool(softmax_first and not renormalise)
        return self._tables(logits.reshape(1, *logits.shape), over_all, experts, share, logits.shape[1], capacity, given=False)

    def tables_of(self, experts: Array, share: Array, num_experts: int, capacity: int | None = None) -> RoutingTables:
        check.choice(experts, share, num_experts, capacity)
        nothing = self.kernels.or_absent(None).reshape(1, 1, 1)
        return self._tables(nothing, False, experts, share, num_experts, capacity, given=True)

    def dispatch(self, x: Array, tables: RoutingTables, dtype: str) -> Array:
        check.dispatch(x, tables, dtype)
        rows = self.kernels.new((tables.num_tokens * tables.top_k, x.shape[1]), CARRIER[dtype])
        wide = x.shape[1] % NUMBERS[dtype] == 0 and checks.is_aligned(x) and checks.is_aligned(rows)
        self._launch_rows(make_dispatch(dtype, wide), x.shape[0], x.shape[1] // (NUMBERS[dtype] if wide else 1), x, tables.slots, rows)
        return rows

    def combine(self, y: Array, tables: RoutingTables, residual: Array | None) -> Array:
        check.combine(y, tables, residual)
        _limit("tables.experts", f"[T, k] with k up to {MAX_TOP_K}", tables.experts, tables.top_k <= MAX_TOP_K)
        add = residual is not None
        out = residual if add else self.kernels.new((tables.num_tokens, y.shape[1]), np.float32)
        wide = y.shape[1] % 4 == 0 and checks.is_aligned(y) and checks.is_aligned(out)
        kernel = make_combine(tables.top_k, wide, add)
        self._launch_rows(kernel, tables.num_tokens, y.shape[1] // (4 if wide else 1), y, tables.slots, tables.share, out)
        return out

    def _tables(
        self, logits: Array, over_all: bool, experts: Array, share: Array, num_experts: int, capacity: int | None, given: bool
    ) -> RoutingTables:
        num_tokens, top_k = experts.shape
        what = "experts" if given else "logits"
        _limit("num_experts" if given else "logits", f"of at most {MAX_EXPERTS} experts", num_experts, num_experts <= MAX_EXPERTS)
        _limit("experts" if given else "top_k", f"of k up to {MAX_TOP_K}", top_k, top_k <= MAX_TOP_K)
        _limit(what, f"of at most {MAX_TOKENS} tokens", num_tokens, num_tokens <= MAX_TOKENS)
        new = self.kernels.new
        slots, sources = new((num_tokens, top_k), np.int32), new((num_tokens * top_k,), np.int32)
        offsets, dropped = new((num_experts + 1,), np.int32), new((1,), np.int32)
        pieces = pieces_of(num_experts)
        blocks, stretch = self._spread(num_tokens)
        block = 32 * (WARPS if blocks > 1 else max(min(WARPS, stretch), pieces))
        self.kernels.launch(
            make_tables(pieces, given), blocks, block, 4 * top_k * max(1, stretch),
            logits, over_all, np.int32(min(capacity or NO_LIMIT, NO_LIMIT)), stretch, self._counter(), new((blocks, 32 * pieces), np.int32),
            experts, share, slots.reshape(-1), sources, offsets, dropped,
        )  # fmt: skip
        return RoutingTables(experts, share, slots, sources, offsets, dropped)

    def _spread(self, num_tokens: int) -> tuple[int, int]:
        """Blocks, and tokens of each."""
        if num_tokens <= ONE_BLOCK:
            return 1, num_tokens
        stretch = max(TOKENS, ceil_div(num_tokens, self.most_blocks))
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


def _limit(name: str, need: str, got: object, good: bool) -> None:
    if not good:
        checks.reject(name, need, checks.describe(got))
