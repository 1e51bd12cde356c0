"""A rank's memory while it loads stays near its share of the weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.models.checkpoints import write

HIDDEN, FFN, LAYERS, TP = 1024, 4096, 3, 4

# VmHWM, the peak of this process's own memory: ru_maxrss would begin with what the parent had when it forked.
MEASURE = """
import re, sys
from l2_dense_parallel.slicing import Shard
from models.loading import load_model, open_checkpoint
import ml_dtypes

def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read()).group(1)) * 1024

checkpoint = open_checkpoint(sys.argv[1])
before = peak()
config, ends, layers = load_model(checkpoint, sys.argv[2], Shard(1, int(sys.argv[3])))
print(peak() - before, sum(tensor.nbytes for tensors in (ends, *layers) for tensor in tensors.values()))
"""


def llama(folder: Path) -> Path:
    """200 MB in fp32, most of it in four matrices a layer."""
    shapes = {"model.embed_tokens.weight": (64, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        shapes |= {layer + "input_layernorm.weight": (HIDDEN,), layer + "post_attention_layernorm.weight": (HIDDEN,)}
        shapes |= {f"{layer}self_attn.{part}_proj.weight": (HIDDEN, HIDDEN) for part in "qkvo"}
        shapes |= {layer + "mlp.gate_proj.weight": (FFN, HIDDEN), layer + "mlp.up_proj.weight": (FFN, HIDDEN)}
        shapes |= {layer + "mlp.down_proj.weight": (HIDDEN, FFN)}
    config = {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
        "vocab_size": 64, "max_position_embeddings": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    return write(folder, config, {name: np.full(shape, 0.5, np.float32) for name, shape in shapes.items()})


def gpt2(folder: Path) -> Path:
    """200 MB of matrices stored [in, out]: a column-parallel rank's part lies across every row of the file."""
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (64, HIDDEN),
        "wpe.weight": (64, HIDDEN),
        "ln_f.weight": (HIDDEN,),
        "ln_f.bias": (HIDDEN,),
    }
    for i in range(4):
        for name, shape in (
            ("attn.c_attn", (HIDDEN, 3 * HIDDEN)),
            ("attn.c_proj", (HIDDEN, HIDDEN)),
            ("mlp.c_fc", (HIDDEN, FFN)),
            ("mlp.c_proj", (FFN, HIDDEN)),
        ):
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[1:]}
        shapes |= {f"h.{i}.ln_{n}.{part}": (HIDDEN,) for n in (1, 2) for part in ("weight", "bias")}
    config = {"model_type": "gpt2", "n_embd": HIDDEN, "n_layer": 4, "n_head": 8, "n_positions": 64, "vocab_size": 64}
    return write(folder, config, {name: np.full(shape, 0.5, np.float32) for name, shape in shapes.items()})


@pytest.mark.parametrize("make", [llama, gpt2], ids=["rows", "turned"])
def test_a_rank_of_four_stays_near_its_quarter(make, tmp_path):
    folder = make(tmp_path)
    stored = (folder / "model.safetensors").stat().st_size
    assert stored > 190e6
    for dtype in ("fp32", "int8"):
        command = [sys.executable, "-c", MEASURE, str(folder), dtype, str(TP)]
        grown, held = map(
            int, subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]).stdout.split()
        )
        assert held < stored / TP * 1.1
        assert grown < held + 45e6, f"{dtype}: {grown / 1e6:.0f} MB for {held / 1e6:.0f} MB of weights"
