"""Weights from disk to host memory: a rank's own slices, in the dtype that they will be held in, a block at a time.

    checkpoint = open_checkpoint(path)             headers only: config, names, shapes
    ends = load_globals(path, dtype, shard)        tensors outside the layers
    for layer in load_layers(path, dtype, shard)   one layer after the other, so that only one need be in host memory
    config, ends, layers = load_model(...)         all of it

Tensors come under their canonical names (docs/notation.md): matrices and tables as `Weight` in `dtype` (`held_dtype` has the
exceptions), vectors as float32 arrays. What a rank does not hold (the bias of a row-parallel matrix on ranks other than 0)
is not in the dict. int8 has one scale for each row of the rank's own slice, max|row| / 127: where the columns are sliced, the
scale is of the columns it has, so ranks may differ in it and the sum of their products is still right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from l1_kernels.errors import UserError
from l1_kernels.weight import CARRIER, Weight, decode, encode, quantize
from l2_dense_parallel.pipeline.stages import Stage
from l2_dense_parallel.slicing import Shard
from layers.config import ModelConfig
from models.checkpoint import open_reader
from models.checkpoint.reader import Reader
from models.families.family import Family
from models.plan import Piece, Plan, Planned, PlannedTensor, make_plan

BLOCK_BYTES = 4 << 20  # of the file, read at a time: what a matrix needs beside its own memory

Progress = Callable[[int, int], None]  # bytes read so far, bytes to read in all
Tensors = dict[str, "Weight | np.ndarray"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint: its headers are read and its settings understood; no weights are in memory."""

    path: Path
    reader: Reader
    family: Family
    config: ModelConfig

    def plan(self, shard: Shard | None = None, layers: Iterable[int] | None = None) -> Plan:
        """Checks every tensor and says what a rank reads. UserError for a checkpoint that is not whole."""
        return make_plan(self.reader, self.family, self.config, shard or Shard(), layers)


def open_checkpoint(path: Path | str) -> Checkpoint:
    """A Hugging Face folder or a .gguf file (models/find.py turns --model into one). UserError where it is neither,
    broken, of an unknown family, or asks for something unsupported."""
    from models.families.choose import choose_family

    reader = open_reader(path)
    family, fields = choose_family(reader)
    shapes = {family.plain(name): reader.shape(name) for name in reader.names()}
    try:
        config = family.config(fields, shapes)
    except UserError as error:  # ModelConfig's own checks know no file
        raise error if str(error).startswith(fields.where) else UserError(f"{fields.where}: {error}") from None
    return Checkpoint(Path(path), reader, family, replace(config, dtype=reader.own_dtype()))


def describe(path: Path | str) -> ModelConfig:
    """What the checkpoint at `path` is."""
    return open_checkpoint(path).config


def load_globals(
    checkpoint: Checkpoint | Path | str, dtype: str | None = None, shard: Shard | None = None, progress: Progress | None = None
) -> Tensors:
    """The tensors outside the layers. dtype "fp32" | "fp16" | "bf16" | "int8"; None: the checkpoint's own."""
    checkpoint = _opened(checkpoint)
    plan = checkpoint.plan(shard, layers=())
    return _Loading(checkpoint, dtype, [plan.ends], progress).tensors(plan.ends)


def load_layers(
    checkpoint: Checkpoint | Path | str,
    dtype: str | None = None,
    shard: Shard | None = None,
    progress: Progress | None = None,
    layers: Iterable[int] | None = None,
) -> Iterator[Tensors]:
    """The layers (all, or those of a pipeline stage) one after the other. The checkpoint is checked at once, before the
    first is asked for."""
    checkpoint = _opened(checkpoint)
    plan = checkpoint.plan(shard, layers)
    loading = _Loading(checkpoint, dtype, plan.layers, progress)
    return map(loading.tensors, plan.layers)


def load_model(
    path: Checkpoint | Path | str, dtype: str | None = None, shard: Shard | None = None, progress: Progress | None = None
) -> tuple[ModelConfig, Tensors, list[Tensors]]:
    """(config, tensors outside the layers, tensors of each layer), all in host memory."""
    config, ends, layers = stream_model(path, dtype, shard, progress)
    return config, ends, list(layers)


def stream_model(
    path: Checkpoint | Path | str,
    dtype: str | None = None,
    shard: Shard | None = None,
    progress: Progress | None = None,
    layers: Iterable[int] | None = None,
    stage: Stage | None = None,
) -> tuple[ModelConfig, Tensors, Iterator[Tensors]]:
    """As `load_model`, the layers still to be read, and progress counted over all of it. stage: only what it holds."""
    checkpoint = _opened(path)
    plan = checkpoint.plan(shard, layers if stage is None else stage.layers)
    ends = plan.ends if stage is None else {name: part for name, part in plan.ends.items() if stage.holds(name, checkpoint.config)}
    loading = _Loading(checkpoint, dtype, [ends, *plan.layers], progress)
    return checkpoint.config, loading.tensors(ends), map(loading.tensors, plan.layers)


def held_dtype(name: str, config: ModelConfig, dtype: str) -> str:
    """What matrix `name` is held in under --dtype `dtype`: that, but the gates of a mixture of experts are fp32, since they decide by
    comparing, and with int8 a tied model's token table, which gives the logits too, is fp16.

    Measured on SmolLM2-135M, int8 everywhere: of the 4.1e-3 nats by which its predictions move (mean KL divergence) the logits' own
    rounding makes 1.5e-3 with a fifth of the weights, ffn.down 1.0, attn.qkv 0.8, ffn.up 0.5, attn.out 0.1, the embedding 0.05.
    Nothing follows that matrix which could average its errors away. Other scales for the rows did not help: chosen for the least
    squared error 4.8e-3 against 4.2e-3 on twice the text, with a norm's gain moved into the columns 4.2 to 6.6e-3; a row's largest
    number is 3.5 times its root mean square, so there is little to clip.

    In NLL it is little: SmolLM2's +0.04 % becomes +0.07 % (`python -m benchmarks.int8_head`; 0.3 % may be). So a head of its own is int8: larger
    models have one, and each token reads all of it (GPT-J's is 413 MB in fp16, 93 us of a step of 1.82 ms)."""
    if name in ("moe.gate.weight", "moe.shared_gate.weight"):
        return "fp32"
    is_tied_head = name == "embed.tokens" and config.tie_embeddings and (config.causal or config.mlm_head != "none")
    return "fp16" if dtype == "int8" and is_tied_head else dtype


def rounding_activations(layers: Iterable[Tensors]) -> Iterator[Tensors]:
    """W8A8 (`--int8 w8a8`): the layers' int8 matrices say that what they are multiplied with is rounded to int8 too. The gates of a
    mixture of experts are fp32, and what lies outside the layers is multiplied in 16 bits."""
    for tensors in layers:
        yield {
            name: replace(tensor, act="int8") if isinstance(tensor, Weight) and tensor.dtype == "int8" else tensor
            for name, tensor in tensors.items()
        }


def _opened(checkpoint: Checkpoint | Path | str) -> Checkpoint:
    return checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)


class _Loading:
    """Reads planned tensors and counts the bytes."""

    def __init__(self, checkpoint: Checkpoint, dtype: str | None, planned: Iterable[Planned], progress: Progress | None) -> None:
        self.reader, self.config = checkpoint.reader, checkpoint.config
        self.dtype = dtype or checkpoint.config.dtype
        if self.dtype not in CARRIER:
            raise ValueError(f"dtype: {dtype!r} is not one of {', '.join(CARRIER)}")
        self.progress = progress
        self.done = 0.0
        self.total = sum(self._bytes(piece) for tensors in planned for tensor in tensors.values() for piece in tensor.pieces)

    def tensors(self, planned: Planned) -> Tensors:
        return {name: self._tensor(tensor, held_dtype(name, self.config, self.dtype)) for name, tensor in planned.items()}

    def _tensor(self, planned: PlannedTensor, dtype: str) -> Weight | np.ndarray:
        part = planned.part
        dtype = dtype if part.matrix else "fp32"
        if not part.width:
            return self._fill(planned.pieces, 1, dtype).data.reshape(part.shape)
        weight = self._fill(planned.pieces, len(part.columns), dtype)
        scale = None if weight.scale is None else weight.scale.reshape(part.shape[:-1])
        return Weight(weight.data.reshape(part.shape), dtype, scale)

    def _fill(self, pieces: tuple[Piece, ...], width: int, dtype: str) -> Weight:
        """The pieces one below the other, [rows, width]."""
        rows = sum(piece.num_rows + piece.zeros for piece in pieces)
        out = np.empty((rows, width), CARRIER[dtype])
        scale = np.empty(rows, np.float32) if dtype == "int8" else None
        row = 0
        for piece in pieces:
            end = row + piece.num_rows + piece.zeros
            self._place(piece, dtype, out[row:end], None if scale is None else scale[row:end])
            row = end
        return Weight(out, dtype, scale)

    def _place(self, piece: Piece, dtype: str, out: np.ndarray, scale: np.ndarray | None) -> None:
        if piece.zeros:
            out[:] = 0
            if scale is not None:
                scale[:] = 1 / 127  # what quantize gives a row of zeros
        elif scale is None:
            for where, block in self._blocks(piece):
                out[where] = self._convert(piece, block, dtype)
        elif piece.transposed:  # a row's scale needs all of the row, and blocks of the file are columns of ours
            whole = np.empty(out.shape, np.float32)
            self._place(piece, "fp32", whole, None)
            out[:], scale[:] = quantize(whole)
        else:
            for where, block in self._blocks(piece):
                out[where], scale[where[0]] = quantize(self._convert(piece, block, "fp32"))

    def _blocks(self, piece: Piece) -> Iterator[tuple[tuple[slice, slice], np.ndarray]]:
        """(place in the piece, numbers in the stored dtype): at most about BLOCK_BYTES of whole stored rows at a time."""
        columns = piece.columns or slice(0, 1)
        num_columns = columns.stop - columns.start
        stored = columns if piece.transposed else piece.rows
        across = piece.rows if piece.transposed else columns
        step = stored.step or 1
        count = len(range(stored.start, stored.stop, step))
        row_bytes = (
            self.reader.row_bytes(piece.name) if piece.columns else self.reader.row_bytes(piece.name) / self.reader.shape(piece.name)[-1]
        )
        rows_at_once = max(1, int(BLOCK_BYTES / (row_bytes * step)))
        stack = () if piece.expert is None else (slice(piece.expert, piece.expert + 1),)
        for first in range(0, count, rows_at_once):
            last = min(first + rows_at_once, count)
            rows = slice(stored.start + first * step, min(stored.start + last * step, stored.stop), stored.step)
            block = self.reader.read(piece.name, *stack, rows, *((across,) if piece.columns else ()))
            block = block.reshape(last - first, -1)
            yield ((slice(None), slice(first, last)), block.T) if piece.transposed else ((slice(first, last), slice(0, num_columns)), block)
            self._count(block.size / (num_columns * piece.num_rows) * self._bytes(piece))

    def _convert(self, piece: Piece, block: np.ndarray, dtype: str) -> np.ndarray:
        """Stored carrier -> carrier of `dtype`; the same 16-bit dtype goes through bit by bit."""
        stored = self.reader.dtype(piece.name)
        if stored == dtype:
            return block
        try:
            with np.errstate(over="raise"):
                return encode(decode(block, stored), dtype)
        except FloatingPointError:
            raise UserError(
                f"{self.reader.where(piece.name)}: tensor {piece.name} has numbers too large for fp16; use --dtype bf16"
            ) from None

    def _bytes(self, piece: Piece) -> float:
        """Bytes that the piece takes in the file."""
        if not piece.name:
            return 0
        per_number = self.reader.row_bytes(piece.name) / self.reader.shape(piece.name)[-1]
        return piece.num_rows * (piece.columns.stop - piece.columns.start if piece.columns else 1) * per_number

    def _count(self, read: float) -> None:
        self.done += read
        if self.progress is not None:
            self.progress(round(self.done), round(self.total))
