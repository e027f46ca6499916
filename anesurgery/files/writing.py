"""Write a model whole or not at all, and only where it may go."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from anesurgery.errors import LoadError


def write_whole(target: Path, write: Callable[[Path], object]) -> Path:
    """Write a file or folder beside its place, and move it there when it is whole.

    Raises:
        LoadError: it cannot be written; what was there before is still there.
    """
    try:
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise LoadError(
            f"cannot write into {target.parent}: {error.strerror}; choose another folder"
        ) from error
    try:
        made = scratch / f"new{target.suffix}"
        write(made)
        if target.exists():
            target.rename(scratch / f"old{target.suffix}")
        made.rename(target)
    except OSError as error:
        raise LoadError(f"{target} was not written: {error.strerror}; nothing was changed") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def check_target(source: Path | None, target: Path, overwrite: bool, suffix: str = ".mlpackage") -> None:
    """Refuse a place that a model cannot be written to, before any work is done.

    Raises:
        LoadError: wrong suffix, no such folder, the input itself, or something is there already.
    """
    if target.suffix != suffix:
        what = "package name" if suffix == ".mlpackage" else "name for this model"
        raise LoadError(f"{target.name!r} is no {what}; let it end in {suffix}")
    if not target.parent.is_dir():
        raise LoadError(f"the folder {target.parent} does not exist; make it first")
    if not os.access(target.parent, os.W_OK):
        raise LoadError(f"cannot write into {target.parent}; choose another folder")
    if source is not None and target.resolve() == source.resolve():
        raise LoadError(f"{target} is the input, which is never changed; choose another name")
    if target.exists() and not overwrite:
        raise LoadError(f"{target} exists; choose another name, or overwrite it on request")
