"""Tensor slicing: which part of every tensor a tensor-parallel rank holds (paper, Section IV-A).

A transformer layer needs two sums over the ranks. The first matrix of each half is cut by its outputs (column
parallel: qkv, ffn.up), the second by its inputs (row parallel: out, ffn.down), so that nothing has to be exchanged in
between and each rank ends with a partial sum:

        qkv [(H+2G)d, D]     out [D, H d]            rank 0 of 2 holds the parts marked 0
        0 0 0 0  q           0 0 1 1
        1 1 1 1              0 0 1 1
        0 0 0 0  k           0 0 1 1
        1 1 1 1
        ...

The bias of a row-parallel matrix is held by rank 0 only: the sum then adds it once. Tables over the vocabulary are cut
by rows, padded with zero rows to a multiple of the ranks. All else is replicated.

Experts are cut twice (paper, Section V-A): a rank holds whole experts side by side, and of each a slice along F (`ExpertShard`).
Without expert parallelism it is the case ep = 1, es = tp: a slice of every expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from l1_kernels.errors import UserError
from layers.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """Owner `ep_rank` of `ep` has E/ep experts, of which this rank is slice `es_rank` of `es`."""

    ep_rank: int = 0
    ep: int = 1
    es_rank: int = 0
    es: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.ep_rank < self.ep and 0 <= self.es_rank < self.es):
            raise ValueError(f"ExpertShard: owner {self.ep_rank} of {self.ep}, slice {self.es_rank} of {self.es}")

    def owned(self, num_experts: int) -> range:
        """The experts that this rank has something of."""
        if num_experts % self.ep:
            raise ValueError(f"owned: {num_experts} experts do not divide over {self.ep} owners")
        count = num_experts // self.ep
        return range(self.ep_rank * count, (self.ep_rank + 1) * count)


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of a tensor-parallel group of `size`. experts: its part of the experts; None: a slice of each, like a dense feed-forward."""

    rank: int = 0
    size: int = 1
    experts: ExpertShard | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"Shard: rank {self.rank} of size {self.size}")

    @property
    def of_experts(self) -> ExpertShard:
        return self.experts or ExpertShard(0, 1, self.rank, self.size)

    def split(self, count: int) -> range:
        """This rank's part of `count` things; parts may differ by one."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def heads(self, num_heads: int) -> range:
        """Query heads of this rank: H/tp of them."""
        if num_heads % self.size:
            raise ValueError(f"heads: {num_heads} heads do not divide over {self.size} ranks")
        return self.split(num_heads)

    def kv_heads(self, num_kv_heads: int) -> range:
        """KV heads of this rank: G/tp of them, or with fewer heads than ranks the one that its query heads read."""
        if self.size <= num_kv_heads:
            return self.heads(num_kv_heads)
        if self.size % num_kv_heads:
            raise ValueError(f"kv_heads: {num_kv_heads} KV heads do not divide over {self.size} ranks")
        head = self.rank * num_kv_heads // self.size
        return range(head, head + 1)

    def ffn(self, ffn_size: int) -> range:
        """Columns of the feed-forward layer (and of each expert); uneven where F does not divide."""
        return self.split(ffn_size)

    def vocabulary(self, vocab_size: int) -> range:
        """Rows of the vocabulary tables, of V padded up to a multiple of the ranks: the last ones may lie beyond V."""
        rows = -(-vocab_size // self.size)
        return range(self.rank * rows, (self.rank + 1) * rows)


def possible_tp(config: ModelConfig, most: int | None = None) -> list[int]:
    """The tensor-parallel degrees (up to `most`) under which every rank has whole heads and its own KV heads."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    degrees = [tp for tp in range(1, heads + 1) if heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)]
    return [tp for tp in degrees if most is None or tp <= most]


def check_tp(config: ModelConfig, tp: int) -> None:
    """UserError unless `tp` ranks can share the heads of this model."""
    degrees = possible_tp(config)
    if tp not in degrees:
        kv = "" if config.num_kv_heads == config.num_heads else f" ({config.num_kv_heads} KV heads)"
        raise UserError(
            f"--tp {tp}: the {config.num_heads} heads{kv} of this model do not divide over {tp} ranks; "
            f"--tp can be {', '.join(map(str, degrees))} (more ranks: split its layers with --pp)"
        )


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """One tensor of the whole model, and a rank's part of it.

    A tensor is a stack of `experts` matrices (0: no stack), of which a rank has those in `owned`, each of which has rows in named groups one
    after the other ("sections": q, k, v; gate, up), and `width` columns (0: a vector).
    """

    sections: tuple[int, ...]  # rows of each section in the whole tensor
    rows: tuple[range, ...]  # this rank's rows of each section; a row beyond the section is a zero row
    width: int = 0
    columns: range = range(0)
    experts: int = 0
    owned: range = range(0)
    held: bool = True  # False: this rank has nothing of it
    matrix: bool = True  # held in --dtype; otherwise always float32

    @property
    def shape(self) -> tuple[int, ...]:
        """Of this rank's part."""
        return self._shape(len(self.owned), sum(map(len, self.rows)), len(self.columns))

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self._shape(self.experts, sum(self.sections), self.width)

    def _shape(self, experts: int, rows: int, columns: int) -> tuple[int, ...]:
        return ((experts,) if self.experts else ()) + (rows,) + ((columns,) if self.width else ())

    @property
    def size(self) -> int:
        """Numbers in this rank's part."""
        return prod(self.shape) if self.held else 0


def _matrix(sections: tuple[int, ...], rows: tuple[range, ...], width: int, columns: range | None = None) -> TensorSlice:
    return TensorSlice(sections, rows, width, range(width) if columns is None else columns)


def _vector(size: int, rows: range | None = None, held: bool = True) -> TensorSlice:
    return TensorSlice((size,), (range(size) if rows is None else rows,), held=held, matrix=False)


def _replicated(rows: int, width: int, matrix: bool = True) -> TensorSlice:
    return TensorSlice((rows,), (range(rows),), width, range(width), matrix=matrix)


def _norm(name: str, config: ModelConfig) -> dict[str, TensorSlice]:
    parts = ("weight", "bias") if config.norm == "layernorm" else ("weight",)
    return {f"{name}.{part}": _vector(config.hidden_size) for part in parts}


def _widths(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _attention(config: ModelConfig, shard: Shard) -> dict[str, TensorSlice]:
    head_dim, hidden = config.head_dim, config.hidden_size
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    q = _widths(shard.heads(config.num_heads), head_dim)
    kv = _widths(shard.kv_heads(config.num_kv_heads), head_dim)
    sections, rows = (q_size, kv_size, kv_size), (q, kv, kv)
    tensors = {"attn.qkv.weight": _matrix(sections, rows, hidden)}
    if config.qkv_bias:
        tensors["attn.qkv.bias"] = TensorSlice(sections, rows, matrix=False)
    if config.qk_norm == "head":
        tensors |= {"attn.q_norm.weight": _vector(head_dim), "attn.k_norm.weight": _vector(head_dim)}
    if config.qk_norm == "span":
        tensors |= {"attn.q_norm.weight": _vector(q_size, q), "attn.k_norm.weight": _vector(kv_size, kv)}
    tensors["attn.out.weight"] = _matrix((hidden,), (range(hidden),), q_size, q)
    if config.out_bias:
        tensors["attn.out.bias"] = _vector(hidden, held=shard.rank == 0)
    return tensors


def _feed_forward(config: ModelConfig, shard: Shard, size: int, names: tuple[str, str], bias: bool) -> dict[str, TensorSlice]:
    up, down = names
    hidden, part = config.hidden_size, shard.ffn(size)
    copies = 2 if config.gated_ffn else 1
    sections, rows = (size,) * copies, (part,) * copies
    tensors = {f"{up}.weight": _matrix(sections, rows, hidden), f"{down}.weight": _matrix((hidden,), (range(hidden),), size, part)}
    if bias:
        tensors[f"{up}.bias"] = TensorSlice(sections, rows, matrix=False)
        tensors[f"{down}.bias"] = _vector(hidden, held=shard.rank == 0)
    return tensors


def _experts(config: ModelConfig, shard: ExpertShard, num_experts: int, size: int) -> dict[str, TensorSlice]:
    """The slices of one expert add up as the ranks of a dense feed-forward do, so each tensor is cut like theirs."""
    of_one = _feed_forward(config, Shard(shard.es_rank, shard.es), size, ("moe.up", "moe.down"), config.ffn_bias)
    return {name: replace(part, experts=num_experts, owned=shard.owned(num_experts)) for name, part in of_one.items()}


def layer_tensors(config: ModelConfig, layer: int, shard: Shard | None = None) -> dict[str, TensorSlice]:
    """Canonical name (docs/notation.md) -> slice, for every tensor that layer `layer` has."""
    shard = shard or Shard()
    tensors = _norm("attn_norm", config) | _attention(config, shard)
    if not config.shared_norm:
        tensors |= _norm("ffn_norm", config)
    if not config.is_moe(layer):
        return tensors | _feed_forward(config, shard, config.ffn_size, ("ffn.up", "ffn.down"), config.ffn_bias)
    moe = config.moe
    assert moe is not None
    tensors["moe.gate.weight"] = _replicated(moe.num_experts, config.hidden_size, matrix=False)
    tensors |= _experts(config, shard.of_experts, moe.num_experts, moe.expert_size)
    if moe.shared_size:
        tensors |= _feed_forward(config, shard, moe.shared_size, ("moe.shared_up", "moe.shared_down"), False)
    if moe.shared_gated:
        tensors["moe.shared_gate.weight"] = _replicated(1, config.hidden_size, matrix=False)
    return tensors


def global_tensors(config: ModelConfig, shard: Shard | None = None) -> dict[str, TensorSlice]:
    """Canonical name -> slice, for every tensor outside the layers."""
    shard = shard or Shard()
    hidden, width, vocab_size = config.hidden_size, config.embed_size or config.hidden_size, config.vocab_size
    vocabulary = shard.vocabulary(vocab_size)
    tensors = {"embed.tokens": _matrix((vocab_size,), (vocabulary,), width)}
    if config.positions == "learned":
        tensors["embed.positions"] = _replicated(config.max_positions + config.position_offset, hidden)
    if config.token_types:
        tensors["embed.types"] = _replicated(config.token_types, hidden)
    if config.embed_norm:
        tensors |= _norm("embed.norm", config)
    if width != hidden:
        tensors["embed.project_in.weight"] = _replicated(hidden, width)
        tensors["embed.project_out.weight"] = _replicated(width, hidden)
    if config.final_norm:
        tensors |= _norm("final_norm", config)
    if config.mlm_head != "none":
        tensors |= {"mlm.dense.weight": _replicated(hidden, hidden), "mlm.dense.bias": _vector(hidden)} | _norm("mlm.norm", config)
    if not config.tie_embeddings:
        tensors["head.weight"] = _matrix((vocab_size,), (vocabulary,), width)
    if config.head_bias:
        tensors["head.bias"] = _vector(vocab_size, vocabulary)
    return tensors
