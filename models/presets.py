"""The paper's models (Tables I and II) as descriptions: shapes to plan and to measure with, no weights.

Sizes are those of the tables; where the paper gives none, the common ones of that family (a vocabulary of 50257 or 50400,
four times the hidden size inside the feed-forward, 2048 positions). `params` counts what such a model holds.
"""

from __future__ import annotations

from math import prod

from l1_kernels.errors import UserError
from l2_dense_parallel.slicing import global_tensors, layer_tensors
from layers.config import ModelConfig, MoEConfig, RopeConfig


def _gpt(family: str, hidden: int, layers: int, heads: int, **changes: object) -> ModelConfig:
    settings: dict = dict(
        family=family, vocab_size=50257, hidden_size=hidden, num_layers=layers, num_heads=heads, num_kv_heads=heads,
        head_dim=hidden // heads, ffn_size=4 * hidden, max_positions=2048, activation="gelu_new",
    )  # fmt: skip
    return ModelConfig(**(settings | changes))


def _gpt_neo(hidden: int, layers: int, heads: int) -> ModelConfig:
    windows = tuple(0 if i % 2 == 0 else 256 for i in range(layers))
    return _gpt("gpt_neo", hidden, layers, heads, windows=windows, attention_scale=(1.0,) * layers, qkv_bias=False)


def _gptj() -> ModelConfig:
    rope = RopeConfig(dim=64, interleaved=True)
    return _gpt(
        "gptj", 4096, 28, 16, vocab_size=50400, positions="rotary", rope=rope, parallel_residual=True, shared_norm=True,
        qkv_bias=False, out_bias=False, tie_embeddings=False, head_bias=True,
    )  # fmt: skip


def _gpt_neox() -> ModelConfig:
    rope = RopeConfig(dim=24)  # a quarter of 96
    return _gpt(
        "gpt_neox", 6144, 44, 64, vocab_size=50432, positions="rotary", rope=rope, parallel_residual=True, tie_embeddings=False
    )


def _bert(layers: int, token_types: int) -> ModelConfig:
    return _gpt(
        "bert" if token_types else "distilbert", 768, layers, 12, vocab_size=30522, max_positions=512, causal=False, pre_norm=False,
        final_norm=False, embed_norm=True, token_types=token_types, activation="gelu", mlm_head="gelu", head_bias=True, norm_eps=1e-12,
    )  # fmt: skip


def _moe(hidden: int, layers: int, heads: int, experts: int = 128) -> ModelConfig:
    sparse = MoEConfig(tuple(range(1, layers, 2)), experts, top_k=1, expert_size=4 * hidden)
    return _gpt("gpt_moe", hidden, layers, heads, moe=sparse)


def _mixtral(hidden: int, layers: int, heads: int, kv_heads: int, width: int) -> ModelConfig:
    sparse = MoEConfig(tuple(range(layers)), 8, top_k=2, expert_size=width, renormalise=True)
    rope = RopeConfig(dim=hidden // heads, theta=1e6)
    return _gpt(
        "mixtral", hidden, layers, heads, vocab_size=32000, num_kv_heads=kv_heads, ffn_size=width, max_positions=32768, activation="silu",
        gated_ffn=True, norm="rmsnorm", positions="rotary", rope=rope, qkv_bias=False, out_bias=False, ffn_bias=False, tie_embeddings=False, moe=sparse,
    )  # fmt: skip


PRESETS = {
    "gpt2-xl": lambda: _gpt("gpt2", 1600, 48, 25, max_positions=1024),
    "gpt-neo-2.7b": lambda: _gpt_neo(2560, 32, 20),
    "gpt-j-6b": _gptj,
    "gpt-13b": lambda: _gpt("gpt2", 5120, 40, 40),
    "gpt-neox-20b": _gpt_neox,
    "gpt-50b": lambda: _gpt("gpt2", 8192, 62, 64),
    "gpt-87b": lambda: _gpt("gpt2", 12288, 48, 96),
    "lm-175b": lambda: _gpt("gpt2", 12288, 96, 96),
    "lm-530b": lambda: _gpt("gpt2", 20480, 105, 128),
    "moe-1.3b-128": lambda: _moe(2048, 24, 16),
    "moe-2.4b-128": lambda: _moe(3584, 16, 28),
    "moe-8b-128": lambda: _moe(4096, 40, 32),
    "moe-24b-128": lambda: _moe(8192, 30, 64),
    "moe-47b-128": lambda: _moe(8192, 58, 64),
    "mixtral-5.8b": lambda: _mixtral(2048, 16, 32, 8, 7168),  # no model of the paper: Mixtral's shape at a size that other engines run, too
    "bert-base": lambda: _bert(12, token_types=2),
    "distilbert": lambda: _bert(6, token_types=0),
}


def preset(name: str) -> ModelConfig:
    """The description called `name`. UserError for another name, listing those there are."""
    if name not in PRESETS:
        raise UserError(f"--preset {name}: have {', '.join(PRESETS)}")
    return PRESETS[name]()


def parameters(config: ModelConfig) -> int:
    """Numbers in all tensors of the whole model."""
    slices = [*global_tensors(config).values()]
    for layer in range(config.num_layers):
        slices += layer_tensors(config, layer).values()
    return sum(prod(tensor.whole_shape) for tensor in slices)
