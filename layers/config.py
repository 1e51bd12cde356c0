"""What a model is: one frozen description, validated once, that every floor reads.

A family file in models/ makes it from a config.json or GGUF metadata; layers/ builds blocks from it. Nothing here knows
a family by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from l1_kernels.errors import UserError

ACTIVATIONS = ("gelu", "gelu_new", "relu", "silu")
ROPE_KINDS = ("none", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions (docs/notation.md). `dim` of each head's d dimensions turn."""

    dim: int
    theta: float = 10000.0
    interleaved: bool = False  # pairs (2i, 2i+1); otherwise (i, i + dim/2)
    kind: str = "none"  # how it is stretched to longer contexts
    factor: float = 1.0
    original_positions: int = 0  # llama3, yarn: the context before stretching; dynamic: max_position_embeddings
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    truncate: bool = True  # yarn: floor and ceil the ramp's ends


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Sparse feed-forward layers (paper, Section V). E experts, top_k a token."""

    layers: tuple[int, ...]  # which layers are sparse
    num_experts: int
    top_k: int
    expert_size: int  # F of one expert
    softmax_first: bool = True
    renormalise: bool = False
    shared_size: int = 0  # F of an expert that every token visits; 0: none
    shared_gated: bool = False  # its output times sigmoid(x . w)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One transformer. Sizes are the whole model's, not a rank's."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    max_positions: int

    causal: bool = True
    norm: str = "layernorm"  # | "rmsnorm"
    norm_eps: float = 1e-5
    pre_norm: bool = True  # False: the norm follows the residual sum (BERT)
    final_norm: bool = True
    parallel_residual: bool = False  # x + attention(norm1 x) + ffn(norm2 x)
    shared_norm: bool = False  # parallel, and norm2 is norm1 (GPT-J)
    embed_norm: bool = False
    embed_size: int = 0  # width of the token embedding where it differs from hidden_size; 0: the same
    token_types: int = 0  # rows of the token-type table; 0: none

    positions: str = "learned"  # | "rotary" | "alibi"
    position_offset: int = 0  # row of the position table for position 0
    rope: RopeConfig | None = None
    attention_scale: tuple[float, ...] = ()  # one a layer; () means 1/sqrt(head_dim) everywhere
    windows: tuple[int, ...] = ()  # one a layer, 0 = whole context; () means 0 everywhere
    qk_norm: str = "none"  # | "head" (each head by itself) | "span" (over all heads together)

    activation: str = "gelu"
    gated_ffn: bool = False
    qkv_bias: bool = True
    out_bias: bool = True
    ffn_bias: bool = True
    tie_embeddings: bool = True
    head_bias: bool = False
    mlm_head: str = "none"  # | "gelu" ...: activation of a masked-LM head's dense layer
    moe: MoEConfig | None = None

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    dtype: str = "fp32"  # how the checkpoint holds its weights
    extra: dict[str, str] = field(default_factory=dict)  # notes for `env` and --verbose; never read by layers

    def __post_init__(self) -> None:
        def check(ok: bool, why: str) -> None:
            if not ok:
                raise UserError(f"config of this {self.family} model: {why}")

        sizes = "vocab_size hidden_size num_layers num_heads num_kv_heads head_dim max_positions"
        for name in sizes.split():
            check(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
        check(self.num_heads % self.num_kv_heads == 0, f"{self.num_heads} heads do not divide into {self.num_kv_heads} KV heads")
        check(self.norm_eps >= 0, f"the norm's epsilon must not be negative, got {self.norm_eps}")
        check(self.norm in ("layernorm", "rmsnorm"), f"unknown norm {self.norm!r}")
        check(self.activation in ACTIVATIONS, f"unknown activation {self.activation!r} (have {', '.join(ACTIVATIONS)})")
        check(self.positions in ("learned", "rotary", "alibi"), f"unknown positions {self.positions!r}")
        check((self.positions == "rotary") == (self.rope is not None), "rotary positions and rope settings go together")
        if self.rope is not None:
            check(self.rope.kind in ROPE_KINDS, f"unknown rope scaling {self.rope.kind!r}")
            check(self.rope.theta > 0, f"the rotary base must be positive, got {self.rope.theta}")
            check(0 < self.rope.dim <= self.head_dim and self.rope.dim % 2 == 0, f"rotary dim {self.rope.dim} of head_dim {self.head_dim}")
        for name in ("attention_scale", "windows"):
            check(len(getattr(self, name)) in (0, self.num_layers), f"{name} needs one entry a layer")
        check(self.qk_norm in ("none", "head", "span"), f"unknown qk_norm {self.qk_norm!r}")
        check(not (self.moe and self.parallel_residual), "experts beside attention (a parallel residual) are not supported")
        if self.moe is not None:
            check(0 < self.moe.top_k <= self.moe.num_experts, f"top_k {self.moe.top_k} of {self.moe.num_experts} experts")

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def scale(self, layer: int) -> float:
        return self.attention_scale[layer] if self.attention_scale else self.head_dim**-0.5

    def is_moe(self, layer: int) -> bool:
        return self.moe is not None and layer in self.moe.layers
