"""What a command reads from the user: prompts and texts, each with the name by which an error message calls it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from l1_kernels.errors import UserError


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, or ids in its place. name: "--prompt 2", "prompts.jsonl line 7"."""

    name: str
    text: str | None = None
    ids: list[int] | None = None


def prompts_from(texts: list[str], prompts_file: str | None, ids_file: str | None) -> list[Prompt]:
    """The prompts of one of --prompt, --prompts, --ids; [] where none is given. Two of them are refused."""
    given = [name for name, value in (("--prompt", texts), ("--prompts", prompts_file), ("--ids", ids_file)) if value not in (None, [])]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)}: give one of them only")
    if prompts_file is not None:
        return [Prompt(name, text=_prompt_of(name, value)) for name, value in _json_lines(prompts_file, "--prompts")]
    if ids_file is not None:
        return read_ids(ids_file)
    return [Prompt("--prompt" if len(texts) == 1 else f"--prompt {i + 1}", text=text) for i, text in enumerate(texts)]


def read_ids(path: str) -> list[Prompt]:
    """--ids FILE.jsonl: a list of token ids a line."""
    return [Prompt(name, ids=_ids_of(name, value)) for name, value in _json_lines(path, "--ids")]


def read_text(path: str, flag: str) -> str:
    """A whole file of UTF-8. Raises UserError with the line of the first byte that is none."""
    data = _read_bytes(path, flag)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path} line {line}: not valid UTF-8 (byte 0x{data[error.start]:02x}); {flag} takes UTF-8 only") from None


def _read_bytes(path: str, flag: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be read ({error.strerror})") from None


def _json_lines(path: str, flag: str) -> list[tuple[str, Any]]:
    """(name, value) of every line that is not blank."""
    found = []
    text = read_text(path, flag).removeprefix("\ufeff")
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        name = f"{path} line {number}"
        try:
            found.append((name, json.loads(line)))
        except ValueError as error:
            raise UserError(f"{name}: not valid JSON ({error})") from None
        except RecursionError:
            raise UserError(f"{name}: not a prompt (JSON nested too deeply)") from None
    if not found:
        raise UserError(f"{flag} {path}: holds no prompt")
    return found


def _prompt_of(name: str, value: Any) -> str:
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
        raise UserError(f'{name}: expected {{"prompt": TEXT}}')
    return value["prompt"]


def _ids_of(name: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise UserError(f"{name}: expected a list of token ids, [1, 2, 3]")
    return value
