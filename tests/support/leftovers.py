"""What a save leaves whose process dies, for tests of what cleans up after it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from anesurgery.files import writing
from anesurgery.files.writing import NEW, SCRATCH, write_atomically


def die(target: Path, when: str) -> list[Path]:
    """The scratch folders beside a target after a save over it died; a system without an exchange is pretended.

    Args:
        target: what is saved.
        when: "at the write", or "between" the two moves: what was there is then in the scratch folder.
    """
    child = os.fork()
    if not child:
        try:
            _die(target, when)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return sorted(p for p in target.parent.iterdir() if p.name.startswith(SCRATCH))


def _die(target: Path, when: str) -> None:
    rename: Callable[[Path, Path], Path] = Path.rename

    def last(self: Path, to: Path) -> Path:
        if self.parent.name == NEW:
            os._exit(0)
        return rename(self, to)

    def write(place: Path) -> None:
        place.mkdir()
        (place / "content").write_text("new")
        if when == "at the write":
            os._exit(0)

    writing._rename = lambda fresh, target, *, exchange: False
    Path.rename = last  # type: ignore[assignment, method-assign]
    write_atomically(target, write, overwrite=True)
