"""One model on one rank: a forward pass over a packed batch. The composition of the floors is all in this file.

    ids -> embedding -> block 0 .. block L-1 -> head -> logits        (docs/layout.md follows a prompt through it)
"""

from __future__ import annotations

import numpy as np

from l1_kernels.device import Device
from l1_kernels.sampling.slots import Slots
from l1_kernels.weight import Array
from l2_dense_parallel.collectives import Collective
from l2_dense_parallel.kv_offload import OffloadedKV
from l2_dense_parallel.pipeline.stages import Stage, whole
from l2_dense_parallel.slicing import Shard
from l2_dense_parallel.tensor_reduce import TensorReduce
from l3_moe.table_moe import TableMoE
from l4_offload.resident import ResidentWeights
from layers.alibi import alibi_slopes
from layers.attention import Attention, HeadShare
from layers.batch import Batch
from layers.block import Block
from layers.border import Border, Reader
from layers.config import ModelConfig
from layers.embedding import Embedding, EmbeddingWeights, Head
from layers.feed_forward import DenseFeedForward
from layers.kv_cache import KVCache
from layers.protocols import Cache, FeedForward, WeightSource
from layers.rotary import Rotary
from layers.step import Step
from layers.weights import Tensors, held_bytes
from models.marking import LONG, MarkingCache


class Runner:
    """Holds no sequence: what a sequence needs to go on is in the `KVCache` that the caller passes."""

    def __init__(
        self, config: ModelConfig, device: Device, shard: Shard, collective: Collective, ends: Tensors, weights: WeightSource, dtype: str,
        stage: Stage | None = None, kv: str = "gpu",
        offload_parity: int | None = None, sparse: FeedForward | None = None,
    ) -> None:  # fmt: skip
        """`ends` are the tensors outside the layers, on the device; `weights` gives the layers'; `dtype` is --dtype. With a `stage` of
        a pipeline, those that it holds, and `weights` counts its layers from 0; models/pipeline.py then runs it. kv: --kv; offload_parity: which of every two layers move, None: all.
        sparse: the feed-forward of layers with experts; default l3_moe/table_moe.py's."""
        self.config = config
        self.stage = stage or whole(config)
        self.kv, self.offload_parity = kv, offload_parity
        self.device = device
        self.weights = weights
        self.collective = collective
        self.dtype = dtype
        self.kv_dtype = "fp16" if dtype == "int8" else dtype  # int8 names the weights; keys and values stay in 16 bits
        self.heads = head_share(config, shard)
        self._reduce = TensorReduce(collective, device.kernels)
        edges = EmbeddingWeights.from_tensors(ends, first_row=shard.vocabulary(config.vocab_size).start)
        self.embedding = Embedding(config, device, edges, self._reduce)
        self.head = Head(config, device, edges, self._gather)
        self.rotary = None if config.rope is None else Rotary(config.rope, config.max_positions, device)
        self.blocks = self._build_blocks(sparse)

    def _build_blocks(self, sparse: FeedForward | None) -> list[Block]:
        config, device, heads = self.config, self.device, self.heads
        slopes = None
        if config.positions == "alibi":
            slopes = device.to_device(alibi_slopes(config.num_heads)[heads.first : heads.first + heads.count])
        dense = DenseFeedForward(config, device)
        if sparse is None and config.moe is not None:
            sparse = TableMoE(config, device, self.collective.watched)

        def block(layer: int) -> Block:
            ffn: FeedForward = sparse if sparse is not None and config.is_moe(layer) else dense
            attention = Attention(config, layer, device, heads, slopes, self._reduce)
            return Block(config, device, attention, ffn, self._reduce if self.collective.size > 1 else None)

        return [block(layer) for layer in self.stage.layers]

    def new_cache(self, num_rows: int, context: int, rows_at_once: int | None = None) -> Cache:
        """Room for `num_rows` sequences of up to `context` tokens, of which a pass has at most `rows_at_once`. An encoder's layers share one."""
        if self.kv == "cpu":
            return OffloadedKV(
                self.device, len(self.blocks), num_rows, self.heads.kv_count, context, self.config.head_dim, self.kv_dtype, rows_at_once,
                self.offload_parity,
            )  # fmt: skip
        return KVCache.allocate(
            self.device, len(self.blocks), num_rows, self.heads.kv_count, context, self.config.head_dim, self.kv_dtype,
            shared=not self.config.causal,
        )  # fmt: skip

    def forward(self, batch: Batch, cache: Cache) -> Array:
        """Logits float32 [len(batch.outputs), V] on the device, the same on every tensor-parallel rank."""
        return self.logits(batch, self._pass(batch, cache))

    def logits(self, batch: Batch, x: Array) -> Array:
        """The head, for the batch's outputs of x [T, D]."""
        if len(batch.outputs) < len(batch.tokens):
            x = x[self.device.to_device(batch.outputs)]
        return self.head(x)

    def hidden(self, batch: Batch, cache: Cache) -> Array:
        """Last hidden states float32 [T, D] on the device."""
        return self.head.final_norm(self._pass(batch, cache))

    def decode(self, slots: Slots, cache: Cache) -> Array:
        """Logits float32 [B, V] of a token a slot, from inputs that live on the device: no upload, no wait, and no check,
        so that a graph can hold it (models/decode_graph.py, which checks)."""
        rotary = None if self.rotary is None else self.rotary.at(slots.positions)
        step = Step(slots.tokens, slots.rows, slots.positions, slots.ends, rotary, distinct=True)  # a slot, a row (layers/decode.py)
        return self.head(self.layers(step, cache))

    def encode(self, step: Step, cache: Cache) -> tuple[Array, Array]:
        """Of an encoder: what the layers give and the last hidden states (`hidden`), float32 [T, D] each, from inputs that live on
        the device; for a graph, as `decode` (models/encode_graph.py, which checks)."""
        x = self.layers(step, cache)
        return x, self.head.final_norm(x)

    def held_bytes(self) -> int:
        """Of this rank's weights in the device's memory."""
        layers = self.weights.layers if isinstance(self.weights, ResidentWeights) else []
        return held_bytes(self.embedding.weights, *layers)

    def graph_problem(self, num_tokens: int = 1) -> str | None:
        """Why a graph cannot hold `decode`, or an encoder's `encode`, of so many tokens, in a few words, or None."""
        return self.step_problem(num_tokens) or ("a stage has no model of its own" if self.stage.count > 1 else None)

    def step_problem(self, num_tokens: int = 1) -> str | None:
        """Why a graph cannot hold a pass of so many tokens through this runner's layers (models/stage_graph.py), or None."""
        if self.rotary is not None and self.rotary.table is None:
            return "dynamic rotary scaling makes its tables on the host"
        if not isinstance(self.weights, ResidentWeights):
            return "the weights are streamed"
        for block, weights in zip(self.blocks, self.weights.layers, strict=True):
            problem = None if weights.moe is None else block.ffn.graph_problem(num_tokens, weights)
            if problem is not None:
                return problem
        if self.kv == "cpu":
            return "keys and values are in host memory"
        if self.device.name == "cuda" and not self.collective.capturable:
            return "the ranks exchange through host memory"
        return None

    def first_not_finite(self, batch: Batch, cache: Cache) -> str:
        """Where numbers stop being finite in this pass: "layer 3" or so. Runs it again (the cache gets what it has), a look
        after every layer; on all tensor-parallel ranks together."""
        step = self._upload(batch, cache)
        x = self.embedding(step)
        if not self._finite(x):
            return "the embedding"
        for index, block in enumerate(self.blocks):
            x = block(x, self.weights.layer(index), step, cache.open_layer(index))
            cache.close_layer(index)
            if not self._finite(x):
                return f"layer {index}"
        return "the head"

    def _finite(self, x: Array) -> bool:
        finite = self.device.xp.isfinite(x).all()
        with self.collective.watched():
            return bool(finite)

    def _pass(self, batch: Batch, cache: Cache) -> Array:
        if self.collective.size > 1 and len(batch.tokens) > LONG:
            cache = MarkingCache(cache, self.collective.mark, len(self.blocks))
        return self.stage_pass(batch, cache, None)

    def stage_pass(self, batch: Batch, cache: Cache, x: Array | None) -> Array:
        """What this stage's last block gives, float32 [T, D], from what the stage before gave (None: there is none)."""
        self.check(batch, cache)
        x = self.layers(self._upload(batch, cache), cache, x)
        np.maximum.at(cache.lengths, batch.rows, batch.ends)
        return x

    def layers(self, step: Step, cache: Cache, x: Array | None = None) -> Array:
        """What the last block gives, float32 [T, D], from inputs that live on the device: no upload, no wait, no check, so that a
        graph can hold it (models/prompt_graph.py, which checks). x: a stage's, from the stage before, changed."""
        if x is None:
            x = self.embedding(step)
        border = Border()
        for index, block in enumerate(self.blocks):
            border.following = self._reader(index + 1)
            x = block(x, self.weights.layer(index), step, cache.open_layer(index), border)
            cache.close_layer(index)
        return x

    def _reader(self, index: int) -> Reader | None:
        """What layer `index` begins with, if the sum before may make it: one over ranks or over experts, and its weights are at hand."""
        if index == len(self.blocks) or not isinstance(self.weights, ResidentWeights) or (self.collective.size == 1 and self.config.moe is None):
            return None
        return self.blocks[index].first_reader(self.weights.layer(index))

    def _upload(self, batch: Batch, cache: Cache) -> Step:
        upload = self.device.to_device
        rows = cache.begin_pass(batch.rows, batch.positions)
        positions = upload(batch.positions)
        rotary = None if self.rotary is None else self.rotary.step(batch, positions)
        types = None if batch.types is None else upload(batch.types)
        distinct = len(set(batch.rows.tolist())) == len(batch.rows)  # then a token is alone in its row, and the last of it
        return Step(upload(batch.tokens), upload(rows), positions, upload(batch.ends), rotary, types, distinct)

    def check(self, batch: Batch, cache: Cache) -> None:
        """A wrong index on a GPU would read another sequence's memory, so it is refused on the host."""
        limit = self.limit(cache)
        if int(batch.ends.max()) > limit:
            raise ValueError(f"batch: position {int(batch.ends.max()) - 1} in a context of {limit}")
        if int(batch.rows.max()) >= cache.num_rows or int(batch.rows.min()) < 0:
            raise ValueError(f"batch: row {int(batch.rows.max())} in a cache of {cache.num_rows} rows")
        if int(batch.tokens.max()) >= self.config.vocab_size or int(batch.tokens.min()) < 0:
            raise ValueError(f"batch: a token id outside the vocabulary of {self.config.vocab_size}")

    def limit(self, cache: Cache) -> int:
        """Positions that a row may have."""
        if self.config.rope is not None and self.config.rope.kind == "dynamic":
            return cache.context  # made to go past the trained context
        return min(cache.context, self.config.max_positions)

    def _gather(self, logits: Array) -> Array:
        """[n, V of a rank] -> [n, V]: side by side, the padding of the last rank cut off."""
        if self.collective.size > 1:
            logits = self.collective.all_gather(logits)
        if logits.shape[1] > self.config.vocab_size:
            logits = self.device.xp.ascontiguousarray(logits[:, : self.config.vocab_size])
        return logits


def head_share(config: ModelConfig, shard: Shard) -> HeadShare:
    """The heads of this rank, and on how many ranks each of its KV heads lies."""
    query, kv = shard.heads(config.num_heads), shard.kv_heads(config.num_kv_heads)
    return HeadShare(query.start, len(query), len(kv), kv_copies=max(1, shard.size // config.num_kv_heads))
