"""How a command ends: what it wrote, and the command to run next, as a line that can be pasted."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from anesurgery.display import printable

FULL = "--full prints the whole report."
WHY = "--full prints the whole report; --why OP explains one op."
"""What else there is."""


def command(*words: object, target: str | None = None) -> str:
    """Return a command of ours as a shell takes it: ``anesurgery fix gpt2.mlpackage --target iPhone13``.

    Args:
        words: name, arguments and options.
        target: as the user wrote it; blanks are left out, so that it needs no quotes.
    """
    option = [] if target is None else ["--target", target.replace(" ", "")]
    return shlex.join(["anesurgery", *map(str, words), *option])


def without(option: str) -> str:
    """Return the command that is running, as it was written, without an option."""
    return command(*(word for word in sys.argv[1:] if word != option))


def to_certify(model: object, target: str | None = None) -> str:
    """Return the command that certifies a model, or the first of a folder of chunks."""
    chunks = sorted(Path(str(model)).glob("chunk_1.ml*"))
    return command("certify", chunks[0] if chunks else model, target=target)


def beside(model: str, suffix: str = "", stem: str = "ane") -> Path:
    """Return where a changed model goes by default: gpt2_ane.mlpackage in the current folder.

    Args:
        model: the path of the model.
        suffix: of the new one; that of the model by default.
        stem: what is added to the name.
    """
    path = Path(model)
    return Path(f"{path.stem}_{stem}{suffix or path.suffix}")


def picture(model: str, target: str | None) -> str:
    """Return the command that draws a model."""
    return command("draw", model, "--out", f"{Path(model).stem}.html", target=target)


def first_of(
    folder: Any, verb: str, path: str, wanting: Callable[[Any], bool], target: str | None = None
) -> str:
    """Return the command for the first model of a folder that wants one, or else for the first; "" for none.

    Args:
        folder: the result for each model.
        verb: the command.
        path: of the folder, as the user wrote it.
        wanting: does this result want it?
        target: as the user wrote it.
    """
    results = {name: one for name, one in folder.models.items() if not isinstance(one, str)}
    chosen = next((name for name, one in results.items() if wanting(one)), next(iter(results), ""))
    return command(verb, Path(path) / chosen, target=target) if chosen else ""


def pasteable(line: str, width: int = 80) -> str:
    """Return a command; a long one is broken into lines that a shell joins again."""
    lines = textwrap.wrap(line, width - 2, break_long_words=False, break_on_hyphens=False)
    return line if len(line) <= width else " \\\n  ".join(lines)


def ended(wrote: Iterable[object] = (), then: str = "", more: str = "") -> str:
    """Return the last lines of a command.

    Args:
        wrote: files and folders.
        then: the command to run next.
        more: what else there is to ask for.
    """
    places = ", ".join(map(str, wrote))
    lines = [f"wrote {places}" if places else "", pasteable(f"next: {then}") if then else "", more]
    return printable("\n".join(filter(None, lines)))
