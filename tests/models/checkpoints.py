"""Checkpoints for tests: the conformance cases, copies of them with other numbers, and writing one to a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

CASES = Path(__file__).parents[1] / "conformance"
BUNDLED = Path(__file__).parents[2] / "models" / "bundled"
NAMES = sorted(path.parent.name for path in CASES.glob("*/config.json"))
FOLDERS = [CASES / name for name in NAMES] + [BUNDLED / "shakespeare", BUNDLED / "shakespeare_moe"]

Arrays = dict[str, np.ndarray]


def case(name: str) -> tuple[dict[str, Any], Arrays]:
    """(config.json, stored tensors) of a conformance case, to change and write elsewhere."""
    return json.loads((CASES / name / "config.json").read_text()), load_file(CASES / name / "model.safetensors")


def write(folder: Path, config: dict[str, Any], tensors: Arrays) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, config: dict[str, Any], tensors: Arrays, count: int) -> Path:
    """The same in `count` files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    files = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    home = {name: files[i % count] for i, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({name: array for name, array in tensors.items() if home[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": home}))
    return folder


def resized(tensors: Arrays, sizes: dict[int, int], seed: int = 0) -> Arrays:
    """Random tensors of the same names, every axis of length k as long as sizes[k]."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal([sizes.get(length, length) for length in array.shape]).astype(np.float32)
        for name, array in tensors.items()
    }
