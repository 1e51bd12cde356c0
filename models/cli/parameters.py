"""Command-line flags declared once, as the fields of a dataclass, and used by several commands."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, get_type_hints


def takes(command: Callable[..., None], *groups: type) -> Callable[..., Callable[[], None]]:
    """A function with one parameter for every field of every group, as Typer wants it. It returns the call of `command`,
    with one object a group, still to be made: Typer only parses, and what happens in a command is none of its business.
    A field is `name: Annotated[type, typer.Option(...)] = default`."""
    parameters = []
    for group in groups:
        hints = get_type_hints(group, include_extras=True)
        for field in dataclasses.fields(group):
            parameters.append(inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]))

    def flat(**values: Any) -> Callable[[], None]:
        return partial(command, *(group(**{field.name: values[field.name] for field in dataclasses.fields(group)}) for group in groups))

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat
