"""What int8 costs in predictions with the matrix that gives the logits in fp16, and in int8: mean NLL against fp32's, on the CPU.

    python -m benchmarks.int8_head [--model NAME ...] [--tokens N]

The models at hand are tied: their head is the token table. Here the head is a matrix of its own, as in a model that is not tied (GPT-J), and the
table, which the embedding looks ids up in, stays as it is; so the head's rounding alone is what differs. Texts: `shakespeare`'s validation text;
for other models a page of Python's own documentation (pydoc's topic `specialnames`, which differs a little from version to version).
"""

from __future__ import annotations

import argparse
import time
from pydoc_data.topics import topics

from l1_kernels.device import open_device
from l1_kernels.weight import Weight, host_weight
from l2_dense_parallel.collectives import NoCollective
from l2_dense_parallel.slicing import Shard
from l4_offload.resident import ResidentWeights, to_device
from models.find import BUNDLED, find_model
from models.generate import context_limit
from models.loading import Checkpoint, load_globals, load_model, open_checkpoint, rounding_activations
from models.runner import Runner
from models.scoring import change_of, token_losses, windows
from models.tokenizer import tokenizer_of

MODELS = ("shakespeare", "shakespeare_moe", "smollm2")
SCHEMES = ("w8a16", "w8a8")


def text_for(name: str) -> str:
    if name.startswith("shakespeare"):
        return (BUNDLED / "shakespeare" / "validation.txt").read_text(encoding="utf-8")
    return topics["specialnames"]


def with_head_in(dtype: str, checkpoint: Checkpoint, scheme: str) -> Runner:
    """Layers in int8 by `scheme`, the head in `dtype`."""
    device = open_device("cpu")
    config, ends, layers = load_model(checkpoint, "int8")
    table = load_globals(checkpoint, "fp32")["head.weight" if "head.weight" in ends else "embed.tokens"]
    assert isinstance(table, Weight)
    ends = {**ends, "head.weight": host_weight(table.data, dtype)}
    kept = rounding_activations(layers) if scheme == "w8a8" else layers
    return Runner(config, device, Shard(), NoCollective(), to_device(device, ends), ResidentWeights.load(device, kept), "int8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], prog="python -m benchmarks.int8_head")
    parser.add_argument("--model", action="append", metavar="NAME", help=f"repeatable; default {', '.join(MODELS)}")
    parser.add_argument("--tokens", type=int, default=12_000, help="of each text, at most")
    options = parser.parse_args()
    for name in options.model or MODELS:
        compare(name, options.tokens)


def compare(name: str, tokens: int) -> None:
    path = find_model(name)
    checkpoint, tokenizer = open_checkpoint(path), tokenizer_of(path)
    assert tokenizer is not None
    cut = list(windows([tokenizer.encode(text_for(name))[:tokens]], min(context_limit(checkpoint.config), 1024)))
    exact = token_losses(plain(checkpoint), cut)
    print(f"{name}: {len(exact)} predictions, mean NLL {exact.mean():.4f} in fp32", flush=True)
    for scheme in SCHEMES:
        for dtype in ("fp16", "int8"):
            start = time.perf_counter()
            losses = token_losses(with_head_in(dtype, checkpoint, scheme), cut)
            change, error = (100 * share for share in change_of(losses, exact))
            print(f"    {scheme}, head in {dtype}: {change:+.3f} % (standard error {error:.3f} %), {time.perf_counter() - start:.0f} s", flush=True)


def plain(checkpoint: Checkpoint) -> Runner:
    device = open_device("cpu")
    config, ends, layers = load_model(checkpoint, "fp32")
    return Runner(config, device, Shard(), NoCollective(), to_device(device, ends), ResidentWeights.load(device, layers), "fp32")


if __name__ == "__main__":
    main()
