"""The command `doctor`: is everything here that the library needs, in versions that fit?

Nothing heavy is imported: versions come from what pip wrote down.
"""

from __future__ import annotations

import platform
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

from anesurgery.commands.next_steps import command
from anesurgery.commands.subcommand import Outcome, subcommand
from anesurgery.errors import SurgeryError
from anesurgery.show.report import Table

PROJECT = "anesurgery"
OPTIONAL = {"transformers": "the demo, and models of Hugging Face", "pillow": "models that take or give images"}
"""Package -> what it is for, where the library itself does without it."""


@dataclass(frozen=True)
class Row:
    """One thing that was looked at; `fits` is None where its absence is no fault."""

    name: str
    found: str
    wanted: str
    fits: bool | None

    @property
    def verdict(self) -> str:
        """Says in a word whether all is well."""
        return {True: "ok", False: "FAILED", None: "optional"}[self.fits]


@subcommand(engine=False)
def doctor() -> Outcome:
    """Check the installed versions. Exit code 1 if something is missing."""
    rows = list(examine())
    cells = [(row.name, row.found, row.wanted, row.verdict) for row in rows]
    table = Table(("what", "found", "wanted", ""), cells, ruled=False)
    sound = all(row.fits is not False for row in rows)
    then = command("example", "gpt2") if sound else "pip install --upgrade anesurgery"
    return Outcome([vars(row) for row in rows], table, then=then, code=int(not sound))


def examine() -> Iterator[Row]:
    """What is installed beside what is wanted.

    Raises:
        SurgeryError: the library itself is not installed, so that its wants are not known.
    """
    try:
        about = metadata.metadata(PROJECT)
    except metadata.PackageNotFoundError as error:
        raise SurgeryError(f"{PROJECT} is not installed here; run `pip install .` in its folder") from error
    here, wanted = platform.python_version(), about["Requires-Python"] or ""
    yield Row("Python", here, wanted, Requirement(f"python{wanted}").specifier.contains(here))
    for text in metadata.requires(PROJECT) or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield _installed(requirement)
    yield _storage()
    for name, purpose in OPTIONAL.items():
        version = _version(name)
        yield Row(name, version or "missing", purpose, True if version else None)
    mac = sys.platform == "darwin"
    yield Row("Core ML itself", platform.platform(terse=True), "macOS: --measured", True if mac else None)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _installed(requirement: Requirement) -> Row:
    version = _version(requirement.name)
    fits = bool(version) and requirement.specifier.contains(version, prereleases=True)
    return Row(requirement.name, version or "missing", str(requirement.specifier) or "any", fits)


def _storage() -> Row:
    """The compiled part of coremltools that reads weights: its wheel lacks it where none was built."""
    try:
        files = [path.name for path in metadata.files("coremltools") or []]
    except metadata.PackageNotFoundError:
        files = []
    names = [name for name in files if name.startswith("libmilstoragepython")]
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ""
    fits = any(name.endswith((suffix, ".abi3.so")) or name == "libmilstoragepython.so" for name in names)
    return Row("weight reader", ", ".join(names) or "missing", "coremltools' compiled part", fits)
