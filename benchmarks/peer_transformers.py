"""The peer of benchmarks.cpu_decode: the same file through Hugging Face transformers. Runs where torch, transformers,
accelerate and gguf are installed, and imports nothing of Strata. Prints one JSON document.

    python peer_transformers.py MODEL.gguf [--dtype fp32|bf16] [--prompt-length 16] [--new-tokens 64]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Clock(StoppingCriteria):
    """Never stops; notes when each token was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def load(path: Path, dtype: torch.dtype) -> tuple[Any, str]:
    """The model with every tensor dequantised to `dtype`; where that reader fails, the same shape with random weights."""
    try:
        return AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=dtype), "the file's, dequantised"
    except Exception as error:  # noqa: BLE001 (whatever it is, the time of the same shape can still be had)
        print(f"peer: {path.name} cannot be read ({type(error).__name__}: {error}); random weights", file=sys.stderr)
    shape = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(shape).to(dtype), "random"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--prompt-length", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    model, weights = load(options.model, DTYPES[options.dtype])
    model.eval()
    ids = torch.randint(0, model.config.vocab_size, (1, options.prompt_length), generator=torch.Generator().manual_seed(0))

    def once(new_tokens: int) -> list[float]:
        """Seconds from the call to each token."""
        clock = Clock()
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, use_cache=True, pad_token_id=0,
                min_new_tokens=new_tokens, max_new_tokens=new_tokens, stopping_criteria=StoppingCriteriaList([clock]),
            )  # fmt: skip
        return [moment - start for moment in clock.times]

    once(2)
    times = once(options.new_tokens)
    step = (times[-1] - times[0]) / (len(times) - 1)
    found = {
        "weights": weights,
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "first_token_ms": round(1e3 * times[0], 3),
        "token_ms": round(1e3 * step, 4),
        "tokens_per_s": round(1 / step, 2),
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "transformers": transformers.__version__},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
