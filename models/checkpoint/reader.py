"""What a checkpoint on disk offers, whatever its format: tensors by name, read a slice at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from l1_kernels.errors import UserError

LFS_POINTER = b"version https://git-lfs"


class Reader(Protocol):
    """An open checkpoint. Only headers are in memory; `read` takes from the file what it is asked for."""

    path: Path
    config_path: Path  # the file to name when the model's settings are wrong

    @property
    def metadata(self) -> Mapping[str, Any]:
        """config.json, or the fields of a GGUF file."""
        ...

    def names(self) -> list[str]:
        """Every tensor of the checkpoint, in the file's names."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Row-major, as PyTorch prints it: [outputs, inputs]."""
        ...

    def dtype(self, name: str) -> str:
        """How `read` returns it, "fp32" | "fp16" | "bf16". UserError where it is held in something else."""
        ...

    def own_dtype(self) -> str:
        """The dtype to hold the model in unless another is asked for: "fp32" | "fp16" | "bf16"."""
        ...

    def row_bytes(self, name: str) -> int:
        """Bytes on disk of one row (of the last axis)."""
        ...

    def where(self, name: str) -> str:
        """The file that holds the tensor, for messages."""
        ...

    def read(self, name: str, *index: slice) -> np.ndarray:
        """The numbers at `index` (a slice with step 1 or 2 for each axis) in the carrier of `dtype(name)`: float32, or
        uint16 bits."""
        ...


def first_bytes(path: Path, count: int) -> bytes:
    """The head of a file, after making sure that it is a file of weights or settings and not a Git-LFS pointer."""
    try:
        with open(path, "rb") as file:
            head = file.read(max(count, len(LFS_POINTER)))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if head.startswith(LFS_POINTER):
        raise UserError(f"{path}: this is a Git-LFS pointer, not the file itself; fetch it with `git lfs pull`")
    return head[:count]
