"""Where a tensor of ours lies in a family's checkpoint: the vocabulary that family files are written in.

    Stored("h.{i}.ln_2")                       one stored tensor for each section of ours (q, k, v; gate, up; or just one)
    Stored("q_proj", "k_proj", "v_proj")
    Stored("c_fc", transposed=True)            stored [in, out] (GPT-2's Conv1D)
    Stored("experts.{e}.w1", "experts.{e}.w3") one for each expert; without {e} a stack is stored as one tensor [E, N, K]
    Fused("c_attn", transposed=True)           all sections one after the other in one stored tensor
    PerHead("query_key_value")                 q, k, v of head 0, then of head 1, ...: [H, 3, d] rows
    RotaryPairs("attn_q", "attn_k", "attn_v")  llama.cpp's order of q and k rows: rotary partners side by side

{i} is the layer, {e} the expert. A source only says which stored rows some rows of ours are; which rows a rank needs is
l2_dense_parallel/slicing.py's business, and reading them models/plan.py's.
"""

from __future__ import annotations

from dataclasses import dataclass

from layers.config import ModelConfig

Span = tuple[str, slice]  # a stored tensor's name and its rows


@dataclass(frozen=True, slots=True, init=False)
class Stored:
    """A stored tensor for each section."""

    names: tuple[str, ...]
    transposed: bool = False

    def __init__(self, *names: str, transposed: bool = False) -> None:
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "transposed", transposed)

    def stored_rows(self, sections: tuple[int, ...]) -> dict[str, int]:
        """Rows of every stored tensor (before transposing), to check its shape by."""
        return dict(zip(self.names, sections, strict=True))

    def locate(self, section: int, rows: range, sections: tuple[int, ...], config: ModelConfig) -> list[Span]:
        """Where rows `rows` of section `section` are stored, in order."""
        return [(self.names[section], slice(rows.start, rows.stop))]


class Fused(Stored):
    """All sections in one stored tensor, one after the other."""

    def stored_rows(self, sections: tuple[int, ...]) -> dict[str, int]:
        return {self.names[0]: sum(sections)}

    def locate(self, section: int, rows: range, sections: tuple[int, ...], config: ModelConfig) -> list[Span]:
        first = sum(sections[:section])
        return [(self.names[0], slice(first + rows.start, first + rows.stop))]


class PerHead(Fused):
    """q, k and v of one head after the other (GPT-NeoX, BLOOM)."""

    def locate(self, section: int, rows: range, sections: tuple[int, ...], config: ModelConfig) -> list[Span]:
        d = config.head_dim
        starts = [(head * len(sections) + section) * d for head in range(rows.start // d, rows.stop // d)]
        return [(self.names[0], slice(start, start + d)) for start in starts]


class RotaryPairs(Stored):
    """q and k rows of a head in llama.cpp's order, ours (0, d/2, 1, d/2 + 1, ...); v rows as they are."""

    def locate(self, section: int, rows: range, sections: tuple[int, ...], config: ModelConfig) -> list[Span]:
        name, d = self.names[section], config.head_dim
        if section == 2:
            return [(name, slice(rows.start, rows.stop))]
        return [(name, slice(head + half, head + d, 2)) for head in range(rows.start, rows.stop, d) for half in (0, 1)]
