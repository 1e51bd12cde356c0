"""A Hugging Face folder: config.json and safetensors, in one file or in shards with an index.

Slices come from `safetensors`' get_slice, which maps the file and copies what is asked for. Pages of a mapping count as
the process's memory while it is open (a quarter of the columns of a 256 MB matrix: 384 MB, of which 64 are wanted), so
models/loading.py reads in blocks and the mapping is closed and opened again after every REMAP_BYTES.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from l1_kernels.errors import UserError
from models.checkpoint.reader import first_bytes

DTYPES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
REMAP_BYTES = 16 << 20


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. UserError naming the file where it is missing or broken."""
    first_bytes(path, 1)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


class HuggingFaceReader:
    """Reader of a folder (models/checkpoint/reader.py says what the methods promise)."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.config_path = folder / "config.json"
        if not self.config_path.is_file():
            raise UserError(f"{folder}: no config.json in this folder")
        self.metadata = read_json(self.config_path)
        generation = folder / "generation_config.json"
        if generation.is_file():  # where it names end tokens, they are the ones to stop at
            end = read_json(generation).get("eos_token_id")
            self.metadata |= {} if end is None else {"eos_token_id": end}
        self._files = {path: _Mapped(path) for path in weight_files(folder)}
        self._home = {name: file for file in self._files.values() for name in file.tensors}
        check_index(folder, self._home)

    def names(self) -> list[str]:
        return list(self._home)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._home[name].tensors[name][0]

    def dtype(self, name: str) -> str:
        stored = self._home[name].tensors[name][1]
        if stored not in DTYPES:
            raise UserError(f"{self.where(name)}: tensor {name} is held as {stored}; expected one of {', '.join(DTYPES)}")
        return DTYPES[stored]

    def own_dtype(self) -> str:
        largest = max(self._home, key=lambda name: int(np.prod(self.shape(name))))
        return self.dtype(largest)

    def row_bytes(self, name: str) -> int:
        return (self.shape(name)[-1] if self.shape(name) else 1) * (4 if self.dtype(name) == "fp32" else 2)

    def where(self, name: str) -> str:
        return str(self._home[name].path)

    def read(self, name: str, *index: slice) -> np.ndarray:
        dtype = self.dtype(name)
        if dtype == "bf16":
            import ml_dtypes  # noqa: F401  (NumPy learns the name "bfloat16", which safetensors asks it for)
        steps = tuple(slice(None, None, part.step) for part in index)
        whole = tuple(slice(part.start, part.stop) for part in index)  # get_slice knows no steps
        found = self._home[name].read(name, whole)[steps]
        return found if dtype == "fp32" else found.view(np.uint16)


class _Mapped:
    """One safetensors file: its header, and the mapping that is renewed as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        first_bytes(path, 8)
        self._open: Any = None
        self._touched = 0
        file = self._file()
        slices = {name: file.get_slice(name) for name in file.keys()}
        self.tensors = {name: (tuple(part.get_shape()), str(part.get_dtype())) for name, part in slices.items()}

    def _file(self) -> Any:
        if self._open is None:
            try:
                self._open = safe_open(self.path, "numpy")
            except SafetensorError as error:
                raise UserError(f"{self.path}: truncated or not a safetensors file ({error})") from None
            except OSError as error:
                raise UserError(f"{self.path}: cannot be read ({error})") from None
        return self._open

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        shape = self.tensors[name][0]
        found = self._file().get_slice(name)[index]
        rows = len(range(*index[-2].indices(shape[-2]))) * shape[-1] if len(index) > 1 else found.size
        self._touched += rows * found.itemsize  # columns of a row lie on pages that hold all of it
        if self._touched > REMAP_BYTES:
            self._open, self._touched = None, 0
        return found


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint in `folder`."""
    single = folder / "model.safetensors"
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if single.is_file() or single.is_symlink():  # a dangling link is named, not passed over
        return [single]
    if indices:
        shards = sorted(set(weight_map(indices[0]).values()))
        for shard in shards:
            if not (folder / shard).is_file():
                raise UserError(f"{folder / shard}: missing, but {indices[0].name} names it")
        return [folder / shard for shard in shards]
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return others
    if others:
        raise UserError(f"{folder}: {len(others)} safetensors files and no model.safetensors.index.json to say which belong together")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise UserError(f"{folder}: weights only as PyTorch pickles (.bin); convert them to safetensors first")
    raise UserError(f"{folder}: no model.safetensors and no model.safetensors.index.json in this folder")


def weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, from an index."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(shard, str) for shard in names.values()):
        raise UserError(f"{index}: no weight_map that says which file holds which tensor")
    return names


def check_index(folder: Path, home: dict[str, _Mapped]) -> None:
    """UserError where the index names a tensor that its shard does not hold."""
    if (folder / "model.safetensors").is_file():
        return
    for index in sorted(folder.glob("*.safetensors.index.json"))[:1]:
        for name, shard in weight_map(index).items():
            if name not in home or home[name].path.name != shard:
                raise UserError(f"{folder / shard}: tensor {name} is missing, but {index.name} places it there")
