"""Model families, a small file each: how published settings and tensor names map to ours.

A new family is a file with a `FAMILY` and a line in FILES.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from l1_kernels.errors import UserError

if TYPE_CHECKING:
    from models.families.family import Family

# model_type of config.json -> file in this folder
FILES = {
    name: name
    for name in (
        "bert", "bloom", "distilbert", "gpt2", "gpt_moe", "gpt_neo", "gpt_neox", "gptj", "llama", "mistral", "mixtral", "olmoe", "opt", "qwen2",
        "qwen2_moe", "qwen3", "roberta",
    )
}  # fmt: skip


def family_of(model_type: object, where: str) -> Family:
    """The family of a config.json's model_type. UserError naming those there are where it is not one of them."""
    if not isinstance(model_type, str):
        raise UserError(f"{where}: no model_type that says which family of models this is")
    if model_type not in FILES:
        raise UserError(f"{where}: model_type {model_type!r} is not supported (have {', '.join(sorted(FILES))})")
    family: Family = import_module(f"models.families.{FILES[model_type]}").FAMILY
    return family
