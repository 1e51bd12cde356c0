"""Where keys and values live by `--kv auto`, and how many sequences go side by side (paper, Section IV-C).

    while all that were asked for fit     the device's memory
    otherwise, what gives more tokens/s   as many side by side as fit;   or all of them, their caches in host memory (kv_offload.py)

A step of b sequences reads the weights once and each sequence's cache of `row` bytes, which from host memory has to cross the link too:

    device's memory   b / ((weights + b * row) / bandwidth)
    host memory       b / max((weights + b * row) / bandwidth, b * row / link)     at most link / row, however many there are

So host memory pays where the room for caches is less than about weights * link / bandwidth: on an H200 some 1 % of the weights' bytes. It is the only way where not one
sequence fits. What prompts take is left out: it is the same either way, as their keys go out while they are computed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from l1_kernels.errors import UserError
from l1_kernels.weight import BYTES
from l2_dense_parallel.kv_offload import BUFFERS
from layers.config import ModelConfig

HOMES = ("auto", "gpu", "cpu")
UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes on one rank. free: of the device's memory, for caches; row: a sequence's cache; row_in_buffers: of it what is on the device while
    caches are in host memory; weights: what a step reads."""

    free: int
    row: int
    row_in_buffers: int
    weights: int


@dataclass(frozen=True, slots=True)
class Speed:
    """Bytes a second: of the device's memory, and from host memory to it."""

    bandwidth: float
    link: float


@dataclass(frozen=True, slots=True)
class Home:
    """kv "gpu" | "cpu"; rows: sequences side by side; tokens_per_s: that the formulas above promise, 0 where nothing had to be weighed."""

    kv: str
    rows: int
    tokens_per_s: float = 0.0


def bytes_of(flag: str, text: str) -> int:
    """"8GiB", "500MB", "1.5G", "1000000" -> bytes. UserError that names the flag."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    size = int(float(found[1]) * UNITS[found[2] or ""]) if found else 0
    if size < 1:
        raise UserError(f"{flag} {text}: give a size, as in 8GiB or 500MB")
    return size


def worst(needs: Sequence[Need]) -> Need:
    """Of several ranks, which all do the same."""
    return Need(min(n.free for n in needs), max(n.row for n in needs), max(n.row_in_buffers for n in needs), max(n.weights for n in needs))


def slowest(speeds: Sequence[Speed]) -> Speed:
    return Speed(min(s.bandwidth for s in speeds), min(s.link for s in speeds))


def fits(rows: int, need: Need) -> bool:
    return rows * need.row <= need.free


def on_device(rows: int, need: Need, speed: Speed) -> float:
    """Tokens a second of `rows` sequences side by side, their caches in the device's memory."""
    return rows * speed.bandwidth / (need.weights + rows * need.row)


def in_host_memory(rows: int, need: Need, speed: Speed) -> float:
    return rows / max((need.weights + rows * need.row) / speed.bandwidth, rows * need.row / speed.link)


def weigh(rows: int, need: Need, speed: Speed) -> Home:
    """`rows`, which do not all fit, side by side in the best way. UserError where not one does in any."""
    free = max(0, need.free)
    few, many = free // need.row, min(rows, free // need.row_in_buffers)
    ways = [Home("gpu", few, on_device(few, need, speed))] if few else []
    ways += [Home("cpu", many, in_host_memory(many, need, speed))] if many else []
    if not ways:
        raise UserError(
            f"--kv auto: one sequence's keys and values are {need.row / 2**20:.3g} MiB, two layers of them {need.row_in_buffers / 2**20:.3g}, and {max(0, need.free) / 2**20:.3g} MiB are free; "
            "use fewer --max-new-tokens, a shorter prompt or more ranks"
        )
    return max(ways, key=lambda home: home.tokens_per_s)  # of equals the first: nothing moves


def row_bytes(config: ModelConfig, num_layers: int, num_kv_heads: int, context: int, dtype: str) -> tuple[int, int]:
    """(a sequence's cache of `num_layers` layers and `num_kv_heads` key heads here, what of it kv_offload.py has on the device)."""
    layer = 2 * num_kv_heads * context * config.head_dim * BYTES[dtype]
    return num_layers * layer, min(BUFFERS, num_layers) * layer


def work_bytes(config: ModelConfig, tokens: int, rows: int) -> int:
    """About what the largest pass keeps besides: two of each of a layer's float32 arrays, and the logits."""
    return 4 * (tokens * 2 * (6 * config.hidden_size + 2 * config.ffn_size) + 2 * rows * config.vocab_size)
