"""Which family a checkpoint is of, by its config.json or its GGUF metadata."""

from __future__ import annotations

from models.checkpoint.reader import Reader
from models.families import family_of
from models.families.family import Family
from models.families.fields import Fields, refuse_everywhere


def choose_family(reader: Reader) -> tuple[Family, Fields]:
    """The family, and the checkpoint's settings as it reads them. UserError for one that is not known."""
    if "general.architecture" in reader.metadata:
        from models.families.llama_cpp import gguf_family

        return gguf_family(reader)
    where = str(reader.config_path)
    family = family_of(reader.metadata.get("model_type"), where)
    fields = Fields(reader.metadata, where, family.name)
    refuse_everywhere(fields)
    return family, fields
