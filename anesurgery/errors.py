"""The errors of the library, and refusals: what happened, where, and what to do next."""

from __future__ import annotations

import difflib
import re
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

DAMAGED = (LookupError, ArithmeticError, TypeError, ValueError, AttributeError, RecursionError)
"""What code raises that reads the fields of a damaged file, or of one that holds something else."""


class SurgeryWarning(UserWarning):
    """Something that the caller asked for has a cost."""


def warn(words: str) -> None:
    """Warn at the line of the caller's own code."""
    frame, level = sys._getframe(), 1
    ours = ("anesurgery", "contextlib")  # which calls what stands in a context, as in `mil.exclusive`
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith(ours):
        frame, level = frame.f_back, level + 1
    warnings.warn(words, SurgeryWarning, stacklevel=level)


class SurgeryError(Exception):
    """Parent of every error that this library raises on purpose."""

    undone: bool = False
    """Was the op or layer at which it was raised left as it was?"""
    surgery: Any = None
    """The `Surgery` of `apply` with the edits before the failure, if the model is valid with these."""
    step: Any = None
    """The pass that was running."""
    edited: Any = None
    """The model as that pass left it."""


class LoadError(SurgeryError):
    """A model cannot be read, or cannot be written."""


class NotExpressible(LoadError):  # noqa: N818 - reads as a statement
    """A model, or a layer of one, that may be sound, but that no ML Program can be made of."""


class IsPipeline(LoadError):  # noqa: N818 - reads as a statement
    """A pipeline, where a single model is asked for."""


class PatternError(SurgeryError):
    """A pattern is written in a way that cannot match."""


class PassError(SurgeryError):
    """A pass raised, or left an invalid program; names the pass and the op."""


class InterfaceError(SurgeryError):
    """A pass changed the interface of a model without declaring it."""


class InterpretError(SurgeryError):
    """The interpreter cannot run a program on the given inputs."""


class OutOfMemory(SurgeryError):  # noqa: N818 - the name that torch gives it
    """The machine has less memory than the call needs; nothing was written."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the memory does not suffice: {what}")
        self.what = what
        """What asked for memory, and how much."""


class Unsuited(SurgeryError):  # noqa: N818 - reads as a statement
    """What is asked for cannot be done with a model as it is, whatever else is asked; says what it lacks."""


class NotFinite(SurgeryError):  # noqa: N818 - reads as a statement
    """A sample makes NaN or infinity where finite numbers are needed."""


class ProofError(SurgeryError):
    """The numbers after a rewrite are outside the promised tolerance."""


class UnknownName(SurgeryError):  # noqa: N818 - reads as a statement, like KeyError's siblings
    """A pass, recipe, option or input that does not exist; lists near matches.

    Args:
        kind: what is unknown, in words.
        name: as it was given.
        names: the known ones.
        listing: which command lists them, in words, for when many are known and none is near.
    """

    def __init__(self, kind: str, name: str, names: Iterable[str], listing: str = "") -> None:
        names = list(names)
        long = listing and len(names) > LISTED and not _near(name, names)
        known = listing if long else near_matches(name, names)
        super().__init__(f"unknown {kind} {name!r}; {known}")
        self.kind, self.name, self.near = kind, name, tuple(_near(name, names))


LISTED = 10
"""Names in an error at most: two lines; the rest are counted."""


def near_matches(name: str, names: Iterable[str]) -> str:
    """What an error about an unknown name ends with: the near matches, else all names."""
    names = sorted(names)
    if near := _near(name, names):
        return f"did you mean {' or '.join(map(repr, near))}?"
    more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"known: {', '.join(names[:LISTED])}{more}" if names else "there are none"


def _near(name: str, names: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.5)


class Named(Protocol):
    """Something with a name: an op, or a layer."""

    @property
    def name(self) -> str:
        """The name."""


@dataclass(frozen=True)
class Refusal:
    """Why a rewrite did not fire: a value, never an exception; false in a condition."""

    reason: str
    """In words, with the value on which it rests."""
    where: Named | None = None
    """The op or layer at which the reason holds."""
    idle: bool = False
    """Is there nothing to repair? Then recipes that run the pass for safety alone say nothing of it."""

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"{self.where.name}: {self.reason}" if self.where is not None else self.reason


NO_MATCH = Refusal("the pass is not about such a place")
"""What a check gives where there is nothing to rewrite and nothing to say: no report has it."""


class Refused(Exception):  # noqa: N818 - reads as a statement; becomes a `Refusal`, never an error
    """A reason to refuse, found where a value was asked for; the driver of rewrites makes a `Refusal` of it."""


def damage(error: Exception) -> str:
    """Return in words what was wrong in a file, of an error of `DAMAGED`."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    if isinstance(error, (OSError, ValueError)):
        return str(error)
    return f"its content has another form ({type(error).__name__})"


def no_folder(folder: Path) -> str:
    """Return the error for a place in a folder that is none."""
    if folder.exists():
        return f"{folder} is a file, and no folder; choose another place"
    return f"the folder {folder} does not exist; make it first"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].strip()


MOST_NEIGHBOURS = 8
"""Names of neighbours at most."""


def missing(path: Path) -> str:
    """Return the error for a path that does not exist: it names the models beside it, or a similar path."""
    if path.is_symlink():
        return f"{path} is a link that leads nowhere; copy the model itself"
    if re.match(r"[a-z]+:/", str(path)):
        address = re.sub(":/+", "://", str(path), count=1)  # a path has one slash
        return f"{address} is an address; download the model, and give the file"
    near = sorted(p.name for p in path.parent.glob("*.ml*") if p.exists()) if path.parent.is_dir() else []
    if near:
        return f"{path} does not exist; in its folder: {', '.join(near[:MOST_NEIGHBOURS])}"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not path.suffix.startswith(".ml"):
        return f"{path} does not exist; download that checkpoint, and give its folder to `anesurgery build`"
    return f"{path} does not exist; `anesurgery example gpt2` makes a model to try"
