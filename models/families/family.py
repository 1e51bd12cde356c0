"""What a family file says: how its settings become a `ModelConfig`, and where its tensors lie."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from layers.config import ModelConfig
from models.families.fields import Fields
from models.families.sources import Stored

Shapes = Mapping[str, tuple[int, ...]]  # plain name (no prefix) -> shape, of every tensor in the checkpoint


@dataclass(frozen=True, slots=True)
class Family:
    """A model architecture as published checkpoints have it.

    layer, ends  canonical name without its ".weight" or ".bias" -> source without them (or, where a name does not end
                 so, both in full)
    prefixes     what names may begin with; the first that fits is taken off before looking a name up
    renames      (pattern, replacement) of older spellings
    ignored      patterns of tensors that are stored and not needed (masks, buffers, heads of other tasks); any other
                 tensor that no source names is an error
    """

    name: str
    config: Callable[[Fields, Shapes], ModelConfig]
    layer: Mapping[str, Stored]
    ends: Mapping[str, Stored]
    prefixes: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()

    def plain(self, stored: str) -> str:
        """The stored name without prefix, in the spelling that the sources use."""
        for prefix in self.prefixes:
            if stored.startswith(prefix):
                stored = stored.removeprefix(prefix)
                break
        for pattern, replacement in self.renames:
            stored = re.sub(pattern, replacement, stored)
        return stored

    def ignores(self, plain: str) -> bool:
        return any(re.fullmatch(pattern, plain) for pattern in self.ignored)
