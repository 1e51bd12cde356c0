"""A model's settings as published (config.json, or GGUF metadata), read with types, defaults and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from l1_kernels.errors import UserError

# One name for each function; Hugging Face has several for the same one.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_python_tanh": "gelu_new",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


class Fields:
    """Getters take every spelling of a key, first found wins, and the default of the model_type for one left out.

    Each raises UserError naming file and key where the value is not what it should be.
    """

    def __init__(self, raw: Mapping[str, Any], where: str, family: str) -> None:
        self.raw = raw
        self.where = where
        self.family = family

    def error(self, why: str) -> UserError:
        return UserError(f"{self.where}: {why}")

    def get(self, *names: str, default: Any = None) -> Any:
        """The value as it is; an explicit null is None, not the default."""
        return next((self.raw[name] for name in names if name in self.raw), default)

    def has(self, name: str) -> bool:
        return name in self.raw

    def integer(self, *names: str, default: int | None = None) -> int:
        """A whole number above 0. No default: the key must be there."""
        value = self.get(*names, default=default)
        if value is None and not any(name in self.raw for name in names):
            raise self.error(f"{names[0]} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.error(f"{names[0]} must be a whole number above 0, not {value!r}")
        return value

    def optional_integer(self, *names: str, default: int | None = None) -> int | None:
        """As `integer`, but null (or a default of None) is None."""
        return None if self.get(*names, default=default) is None else self.integer(*names, default=default)

    def number(self, *names: str, default: float) -> float:
        value = self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(f"{names[0]} must be a number, not {value!r}")
        return float(value)

    def flag(self, *names: str, default: bool) -> bool:
        value = self.get(*names, default=default)
        if not isinstance(value, bool):
            raise self.error(f"{names[0]} must be true or false, not {value!r}")
        return value

    def integers(self, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """A list of whole numbers; null is the default."""
        value = self.get(name)
        value = list(default) if value is None else value
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise self.error(f"{name} must be a list of whole numbers, not {value!r}")
        return tuple(value)

    def activation(self, name: str, default: str) -> str:
        value = self.get(name, default=default)
        if value not in ACTIVATIONS:
            raise self.error(f"{name} {value!r} is not supported (have {', '.join(ACTIVATIONS)})")
        return ACTIVATIONS[value]

    def token(self, name: str, default: int | None = None) -> int | None:
        """A token id, or None. A negative one means none, as in some published files."""
        value = self.get(name, default=default)
        if value is None or (isinstance(value, int) and value < 0):
            return None
        if not isinstance(value, int):
            raise self.error(f"{name} must be a token id, not {value!r}")
        return value

    def tokens(self, name: str, default: int | None = None) -> tuple[int, ...]:
        """One token id or a list of them."""
        value = self.get(name, default=default)
        if isinstance(value, list) and all(isinstance(item, int) for item in value):
            return tuple(value)
        one = self.token(name, default)
        return () if one is None else (one,)

    def only(self, name: str, *allowed: Any) -> None:
        """Refuses by name any value of an option but these (and its absence)."""
        value = self.get(name, default=allowed[0])
        if value not in allowed:
            raise self.error(f"{name}={value!r} is not supported for {self.family} (only {', '.join(map(repr, allowed))})")


# What architectures that no family here describes, and makers of variants, compute differently by: name -> values that change nothing.
VARIATIONS: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "use_mrope": (None, False),
    "attention_chunk_size": (None,),
}


def refuse_everywhere(fields: Fields) -> None:
    """Options that no family here supports."""
    for name, neutral in VARIATIONS.items():
        if fields.get(name) not in neutral:
            raise fields.error(f"{name}={fields.get(name)!r} is not supported")
    for name in ("is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder"):
        fields.only(name, False, None)
    fields.only("pruned_heads", {}, None)
    fields.only("cross_attention_hidden_size", None)
    method = fields.get("quantization_config")
    if method is not None:
        kind = method.get("quant_method", "unknown method") if isinstance(method, dict) else method
        raise fields.error(f"quantization_config ({kind}) is not supported; give an fp32, fp16 or bf16 checkpoint and --dtype int8")


def refuse_windows(fields: Fields) -> None:
    """For a model whose every layer reads the whole context: `layer_types` may only say just that."""
    kinds = fields.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise fields.error(f"layer_types={kinds!r} is not supported for {fields.family} here (only 'full_attention')")


def special_tokens(fields: Fields, bos: int | None = None, eos: int | None = None, pad: int | None = None) -> dict[str, Any]:
    """The ModelConfig fields of special tokens, with the defaults of the model_type."""
    return {
        "bos_id": fields.token("bos_token_id", bos),
        "eos_ids": fields.tokens("eos_token_id", eos),
        "pad_id": fields.token("pad_token_id", pad),
    }
