"""What a command writes for other programs to read."""

from __future__ import annotations

import json
import sys
from typing import Any


def json_line(document: Any) -> str:
    """A JSON document on a line, its text as it is. Where standard output is not UTF-8, which JSON must be, as ASCII escapes."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return json.dumps(document, ensure_ascii=encoding.lower().replace("-", "") != "utf8") + "\n"
