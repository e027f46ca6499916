"""The sketches of passes: what the text of an example is before and after.

    python tests/support/sketches.py NAME

writes the sketch of a pass: a long one into `sketches/` beside the passes, a short one on the screen, for its
docstring.
"""

from __future__ import annotations

import importlib
import sys
import textwrap
from types import ModuleType
from typing import Any

from anesurgery import registry
from anesurgery.testing import apply_pass, text_of

LONG = 14
"""Lines of both programs together from which a sketch stands in a file."""


def words_of(module: ModuleType) -> str:
    """What `explain` prints of a pass; the template is no pass."""
    name = module.__name__.rsplit(".", 1)[1]
    return module.__doc__ or "" if name.startswith("_") else registry.documentation(name)


def sketch(module: ModuleType, title: str) -> str:
    """The block under `Before::` or `After::`."""
    after_title = words_of(module).split(f"{title}::\n", 1)[1]
    lines = []
    for line in after_title.splitlines()[1:]:
        if line and not line.startswith("    "):
            break
        lines.append(line)
    return textwrap.dedent("\n".join(lines)).strip("\n")


def write(name: str) -> None:
    """Make the sketch of a pass from its example."""
    step = registry.make_pass(name)
    module: Any = importlib.import_module(type(step).__module__)
    before = module.example()
    texts = [text_of(before), text_of(apply_pass(step, before)[0])]
    pairs = zip(("Before", "After"), texts, strict=True)
    made = "\n".join(f"{title}::\n\n{textwrap.indent(text, '    ')}\n" for title, text in pairs)
    room = "passes" if step.subject.converts else registry.LAYERS
    home = registry.ROOT / room / "sketches"
    if sum(len(text.splitlines()) for text in texts) > LONG:
        home.mkdir(exist_ok=True)
        (home / f"{name}.txt").write_text(made, encoding="utf-8")
    else:
        print(made)


if __name__ == "__main__":
    for one in sys.argv[1:]:
        write(one)
