"""Which of the kernels attends: the simple one (gpu.py), the split one (decode.py), or the one on tensor cores (prompt.py)."""

from __future__ import annotations

from l1_kernels.attention import decode, prompt

FEW_TOKENS = 16


def pick(dtype: str, num_tokens: int, num_rows: int, head_dim: int, aligned: bool) -> str:
    """"simple", "decode" or "prompt", from what the host knows: not whose the tokens are, nor how many keys they have.

    num_rows: of the cache. With at most a token a row this is a decode step; with more, some row has a prompt.
    aligned: do qkv and the caches lie at a multiple of 16 bytes?
    """
    if not aligned:
        return "simple"
    if num_tokens > max(FEW_TOKENS, num_rows) and prompt.takes(dtype, head_dim):
        return "prompt"
    return "decode" if decode.takes(head_dim) else "simple"
