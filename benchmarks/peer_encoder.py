"""The peer of fig12: Hugging Face transformers' encoders on PyTorch, fp16, random weights of the same shape; only with --peer."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any


def measure_peer(name: str, num_tokens: int) -> list[dict[str, Any]]:
    """Rows like fig12's own: eager, and torch.compile(mode="reduce-overhead"), which replays CUDA graphs. [] without torch."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        print(f"{name}: torch or transformers is not installed, no peer", file=sys.stderr)
        return []
    import torch

    model = peer_model(name)
    if model is None:
        return []
    ids = torch.randint(0, model.config.vocab_size, (1, num_tokens), device="cuda")
    rows = []
    for engine, compiled in (("transformers, eager", False), ("transformers, compiled", True)):
        try:
            run: Any = torch.compile(model, mode="reduce-overhead") if compiled else model
            milliseconds = _time(run, ids)
        except Exception as error:  # a compiler that this machine has not got
            print(f"{name}, {engine}: {type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}", file=sys.stderr)
            continue
        rows.append({"model": name, "engine": engine, "dtype": "fp16", "tokens": num_tokens, "replay_ms": milliseconds})
    return rows


def _time(run: Any, ids: Any, repeats: int = 30) -> float:
    """Milliseconds by events, the median; the compiled model records its graphs in the first calls."""
    import torch

    times = []
    with torch.inference_mode():
        for i in range(10 + repeats):
            torch.cuda.synchronize()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run(ids)
            end.record()
            end.synchronize()
            if i >= 10:
                times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def peer_model(name: str) -> Any:
    import torch
    import transformers

    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("cuda"):
            if name == "bert-base":
                return transformers.BertModel(transformers.BertConfig(), add_pooling_layer=False).eval()
            if name == "distilbert":
                return transformers.DistilBertModel(transformers.DistilBertConfig()).eval()
            return None
    finally:
        torch.set_default_dtype(torch.float32)
