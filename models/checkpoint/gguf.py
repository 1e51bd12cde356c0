"""A GGUF file: metadata, tokenizer and weights of a model in one file, usually quantised in small blocks.

The header is read here, not by `gguf.GGUFReader`: that one makes several arrays for each of the tokenizer's strings
(2.7 s for 49152 tokens; this takes about 0.1 s). `gguf` dequantises: a row of the last axis is a whole number of
blocks, so any rows can be had alone, and columns to the nearest block.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from l1_kernels.errors import UserError
from models.checkpoint.reader import first_bytes

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
F32, F16, BF16 = 0, 1, 30  # the tensor types that are not blocks
DEQUANTISE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]  # row-major
    kind: int
    offset: int  # in the file


class _Cursor:
    """Reads the header's little-endian fields one after the other."""

    def __init__(self, data: np.memmap, path: Path) -> None:
        self.data, self.path, self.at = data.data, path, 0

    def take(self, count: int) -> memoryview:
        part = self.data[self.at : self.at + count]
        if len(part) < count:
            raise self.truncated()
        self.at += count
        return part

    def truncated(self) -> UserError:
        return UserError(f"{self.path}: truncated GGUF file (its header ends early)")

    def number(self, letter: str) -> Any:
        size = struct.calcsize("<" + letter)
        return struct.unpack("<" + letter, self.take(size))[0]

    def text(self) -> str:
        return bytes(self.take(self.number("Q"))).decode("utf-8", "surrogateescape")

    def texts(self, count: int) -> list[str]:
        """As many strings: a tokenizer has a hundred thousand, so this loop is as short as it can be."""
        data, at, found, length_at = self.data, self.at, [], struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                end = at + 8 + length_at(data, at)[0]
                found.append(str(data[at + 8 : end], "utf-8", "surrogateescape"))
                at = end
        except struct.error:
            at = len(data) + 1
        self.at = at
        if at > len(data):
            raise self.truncated()
        return found

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            item, count = self.number("I"), self.number("Q")
            if item in SCALARS:
                code = np.dtype(np.bool_) if item == 7 else np.dtype("<" + SCALARS[item])
                return np.frombuffer(self.take(count * code.itemsize), code).tolist()
            return self.texts(count) if item == STRING else [self.value(item) for _ in range(count)]
        if kind not in SCALARS:
            raise UserError(f"{self.path}: broken GGUF file (a field of unknown type {kind})")
        return self.number(SCALARS[kind])


def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, _Tensor]]:
    if first_bytes(path, 4) != MAGIC:
        raise UserError(f"{path}: not a GGUF file")
    cursor = _Cursor(np.memmap(path, np.uint8, mode="r"), path)
    cursor.take(4)
    version = cursor.number("I")
    if version not in VERSIONS:
        raise UserError(f"{path}: GGUF version {version} is not supported (have {VERSIONS})")
    tensor_count, field_count = cursor.number("Q"), cursor.number("Q")
    fields: dict[str, Any] = {}
    for _ in range(field_count):
        key = cursor.text()
        fields[key] = cursor.value(cursor.number("I"))
    found: dict[str, _Tensor] = {}
    for _ in range(tensor_count):
        name = cursor.text()
        shape = tuple(cursor.number("Q") for _ in range(cursor.number("I")))[::-1]
        found[name] = _Tensor(shape, cursor.number("I"), cursor.number("Q"))
    alignment = fields.get("general.alignment", 32)
    start = -(-cursor.at // alignment) * alignment
    return fields, {name: _Tensor(tensor.shape, tensor.kind, start + tensor.offset) for name, tensor in found.items()}


def read_gguf_metadata(path: Path | str) -> dict[str, Any]:
    """Every metadata field of a GGUF file: numbers, strings and lists of them (`tokenizer.ggml.tokens`, ...)."""
    return _read_header(Path(path))[0]


class GGUFReader:
    """Reader of a GGUF file (models/checkpoint/reader.py says what the methods promise)."""

    def __init__(self, path: Path) -> None:
        self.path = self.config_path = path
        self.metadata, self._tensors = _read_header(path)
        size = path.stat().st_size
        for name in self._tensors:
            if self._tensors[name].offset + self._rows(name) * self.row_bytes(name) > size:
                raise UserError(f"{path}: truncated GGUF file (tensor {name} lies beyond its end)")
        self._file = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        return {F16: "fp16", BF16: "bf16"}.get(self._tensors[name].kind, "fp32")

    def own_dtype(self) -> str:
        """A quantised file is held in fp16: its own scales are fp16 numbers."""
        largest = max(self._tensors, key=lambda name: int(np.prod(self.shape(name))))
        return {F32: "fp32", BF16: "bf16"}.get(self._tensors[largest].kind, "fp16")

    def where(self, name: str) -> str:
        return str(self.path)

    def row_bytes(self, name: str) -> int:
        numbers, size = self._block(name)
        return self.shape(name)[-1] // numbers * size

    def _rows(self, name: str) -> int:
        return int(np.prod(self.shape(name)[:-1]))

    def _block(self, name: str) -> tuple[int, int]:
        """Numbers and bytes of a block of the tensor's type."""
        import gguf  # only where a GGUF file is read

        kind = self._tensors[name].kind
        try:
            return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise UserError(f"{self.path}: tensor {name} is held in a type ({kind}) that is not supported") from None

    def read(self, name: str, *index: slice) -> np.ndarray:
        tensor = self._tensors[name]
        numbers, size = self._block(name)
        *leading, columns = (range(*part.indices(length)) for part, length in zip(index, tensor.shape, strict=True))
        first, last = columns.start // numbers, -(-columns.stop // numbers)
        raw = self._raw_rows(tensor, leading, self.row_bytes(name))[:, first * size : last * size]
        values = self._numbers(name, raw)[:, columns.start - first * numbers : columns.stop - first * numbers : columns.step]
        return np.ascontiguousarray(values).reshape(*map(len, leading), len(columns))

    def _raw_rows(self, tensor: _Tensor, leading: list[range], row_bytes: int) -> np.ndarray:
        """The bytes of the rows at `leading` (all axes but the last): uint8 [rows, row_bytes]."""
        if not leading:
            return self._bytes(tensor.offset, 1, row_bytes)
        *stacks, rows = leading
        if not stacks:
            return self._bytes(tensor.offset + rows.start * row_bytes, rows[-1] - rows.start + 1, row_bytes)[:: rows.step]
        if len(stacks) > 1:
            raise ValueError(f"read: {len(leading) + 1} axes")
        matrix = tensor.shape[-2] * row_bytes
        return np.concatenate([self._raw_rows(_Tensor((), 0, tensor.offset + e * matrix), [rows], row_bytes) for e in stacks[0]])

    def _bytes(self, offset: int, rows: int, row_bytes: int) -> np.ndarray:
        out = np.empty((rows, row_bytes), np.uint8)
        view, at = out.data.cast("B"), 0
        while at < len(view):
            got = os.preadv(self._file, [view[at:]], offset + at)
            if got == 0:
                raise UserError(f"{self.path}: truncated GGUF file")
            at += got
        return out

    def _numbers(self, name: str, raw: np.ndarray) -> np.ndarray:
        """Bytes [rows, n] -> float32, or uint16 bits, [rows, numbers]."""
        raw = np.ascontiguousarray(raw)
        kind = self._tensors[name].kind
        if kind in (F16, BF16):
            return raw.view("<u2")
        if kind == F32:
            return raw.view("<f4")
        return self._dequantise(name, raw)

    def _dequantise(self, name: str, raw: np.ndarray) -> np.ndarray:
        """`gguf` works on 16 rows at a time, in many small steps. A row is whole blocks, so rows laid end to end are one
        long row; a few hundred KB at a time stay in the cache."""
        from gguf import GGMLQuantizationType, quants

        kind = GGMLQuantizationType(self._tensors[name].kind)
        dequantise: Callable[..., np.ndarray] = quants.dequantize
        numbers, size = self._block(name)
        out = np.empty((raw.shape[0], raw.shape[1] // size * numbers), np.float32)
        at_once = max(1, DEQUANTISE_BYTES // max(1, raw.shape[1]))
        try:
            for row in range(0, raw.shape[0], at_once):
                rows = raw[row : row + at_once]
                out[row : row + at_once] = dequantise(rows.reshape(1, -1), kind).reshape(len(rows), -1)
        except NotImplementedError:
            raise UserError(f"{self.path}: tensor {name} is held as {kind.name}, which is not supported") from None
        return out
