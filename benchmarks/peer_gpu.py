"""The peer of fig6: Hugging Face transformers on PyTorch, fp16, random weights of the same shape. Imported only with --peer."""

from __future__ import annotations

import time
from statistics import median
from typing import Any


def measure_peer(name: str, batches: list[int], prompt: int, new: int, steady: int, warm: int) -> list[dict[str, Any]]:
    """Rows like fig6's own, of `generate` with its default (dynamic) cache; [] for a shape that is not one of transformers'."""
    import torch

    model = peer_model(name)
    if model is None:
        return []
    rows = []
    for batch in batches:
        ids = torch.randint(0, model.config.vocab_size, (batch, prompt), device="cuda")

        def seconds(tokens: int, ids: Any = ids) -> float:
            torch.cuda.synchronize()
            start = time.perf_counter()
            model.generate(ids, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False, attention_mask=torch.ones_like(ids), pad_token_id=0)
            torch.cuda.synchronize()
            return time.perf_counter() - start

        seconds(2)
        first, total = median(seconds(1) for _ in range(3)), median(seconds(new) for _ in range(3))
        long = (seconds(warm + steady) - seconds(warm)) / steady
        rows.append({
            "model": name, "engine": "transformers", "dtype": "fp16", "batch": batch,
            "total_ms": 1e3 * total, "first_ms": 1e3 * first, "token_ms": 1e3 * long,
        })  # fmt: skip
    return rows


def peer_model(name: str) -> Any:
    import torch
    import transformers

    if name == "gpt2-xl":
        config = transformers.GPT2Config(n_embd=1600, n_layer=48, n_head=25)
    elif name == "gpt-j-6b":
        config = transformers.GPTJConfig()
    else:
        return None
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("cuda"):
            return transformers.AutoModelForCausalLM.from_config(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
