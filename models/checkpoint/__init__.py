"""Checkpoints on disk: a Hugging Face folder or a GGUF file, read slice by slice."""

from __future__ import annotations

from pathlib import Path

from l1_kernels.errors import UserError
from models.checkpoint.reader import Reader


def open_reader(path: Path | str) -> Reader:
    """The reader for a folder or a .gguf file. UserError where it is neither, or broken."""
    path = Path(path)
    if path.is_dir():
        from models.checkpoint.huggingface import HuggingFaceReader

        return HuggingFaceReader(path)
    if not path.exists():
        raise UserError(f"{path}: no such file or folder (--model)")
    if path.suffix == ".h5":
        raise UserError(f"{path}: our own .h5 store is not supported yet; give --model the folder or GGUF file it was made of")
    if path.suffix == ".safetensors":
        raise UserError(f"{path}: give --model the folder that holds this file and its config.json")
    from models.checkpoint.gguf import GGUFReader

    return GGUFReader(path)
