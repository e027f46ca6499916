"""The sketches in the docstrings of passes."""

from __future__ import annotations

import textwrap
from types import ModuleType


def sketch(module: ModuleType, title: str) -> str:
    """The block under `Before::` or `After::`."""
    after_title = (module.__doc__ or "").split(f"{title}::\n", 1)[1]
    lines = []
    for line in after_title.splitlines()[1:]:
        if line and not line.startswith("    "):
            break
        lines.append(line)
    return textwrap.dedent("\n".join(lines)).strip("\n")
