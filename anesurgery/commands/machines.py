"""The commands `doctor` and `chips`: what is installed here, and what is known of each chip's Neural Engine.

Nothing heavy is imported: versions come from what pip wrote down.
"""

from __future__ import annotations

import platform
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Annotated, Any

import typer
from packaging.requirements import Requirement

from anesurgery.commands.next_steps import command
from anesurgery.commands.options import Full
from anesurgery.commands.subcommand import Outcome, subcommand
from anesurgery.display import byte_words
from anesurgery.errors import SurgeryError
from anesurgery.show.report import Table

PROJECT, MISSING = "anesurgery", "missing"
OPTIONAL = {"transformers": "the demo, and models of Hugging Face", "pillow": "models that take or give images"}
"""Package -> what it is for, where the library itself does without it."""
VERDICTS = {True: "ok", False: "FAILED", None: "optional"}
"""`Row.fits` in a word."""


@dataclass(frozen=True)
class Row:
    """One thing that was looked at; `fits` is None where its absence is no fault."""

    name: str
    found: str
    wanted: str
    fits: bool | None


@subcommand(engine=False)
def doctor() -> Outcome:
    """Check the installed versions. Exit code 1 if something is missing."""
    rows = list(examine())
    cells = [(row.name, row.found, row.wanted, VERDICTS[row.fits]) for row in rows]
    table = Table(("what", "found", "wanted", ""), cells, ruled=False)
    sound = all(row.fits is not False for row in rows)
    then = command("example", "gpt2") if sound else "pip install --upgrade anesurgery"
    return Outcome([vars(row) for row in rows], shown=table, then=then, code=int(not sound))


def examine() -> Iterator[Row]:
    """Yield what is installed beside what is wanted.

    Raises:
        SurgeryError: the library itself is not installed, so that its wants are not known.
    """
    try:
        about = metadata.metadata(PROJECT)
    except metadata.PackageNotFoundError as error:
        raise SurgeryError(f"{PROJECT} is not installed here; run `pip install .` in its folder") from error
    here, wanted = ".".join(map(str, sys.version_info[:3])), about["Requires-Python"] or ""
    yield Row("Python", here, wanted, Requirement(f"python{wanted}").specifier.contains(here))
    for text in metadata.requires(PROJECT) or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield _installed(requirement)
    yield _storage()
    for name, purpose in OPTIONAL.items():
        version = _version(name)
        yield Row(name, version, purpose, version != MISSING or None)
    mac = sys.platform == "darwin"
    yield Row("Core ML itself", platform.platform(terse=True), "macOS: --measured", mac or None)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return MISSING


def _installed(requirement: Requirement) -> Row:
    version = _version(requirement.name)
    fits = version != MISSING and requirement.specifier.contains(version, prereleases=True)
    return Row(requirement.name, version, str(requirement.specifier) or "any", fits)


def _storage() -> Row:
    """Look for the compiled part of coremltools that reads weights; some wheels lack it."""
    try:
        files = [path.name for path in metadata.files("coremltools") or []]
    except metadata.PackageNotFoundError:
        files = []
    names = [name for name in files if name.startswith("libmilstoragepython")]
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ""
    fits = any(name.endswith((suffix, ".abi3.so")) or name == "libmilstoragepython.so" for name in names)
    return Row("weight reader", ", ".join(names) or MISSING, "coremltools' compiled part", fits)


LEGEND = """axis: the longest last axis. kernel: the largest convolution.
weights: of one program. loaded: of all programs. on chip: room for one value.
"""


@subcommand()
def chips(
    target: Annotated[str | None, typer.Option(help='Only these chips, for example "M1-M3".')] = None,
    full: Full = False,
) -> Outcome:
    """List the chips, the devices that have them, and the known limits and faults of each."""
    from anesurgery.placement.rules.faulty_ops import faults_on
    from anesurgery.placement.target import CHIPS, SOURCES, Target, products_of

    named = Target.parse(target)
    chosen = [CHIPS[name] for name in named.chips]
    faults = [_fault(fault) for fault in faults_on(named)]
    devices = {chip.name: products_of(chip.name) for chip in chosen}
    all_facts = [asdict(chip) | {"devices": devices[chip.name]} for chip in chosen]
    plain = {"chips": all_facts, "sources": SOURCES, "faults": faults}
    sources = [f"{name}: {source}" for name, source in SOURCES.items()]
    wrong = [f"{f['name']}: {f['what']} ({f['seen']}; {f['source']})" for f in faults]
    legend = [f"\n{LEGEND}\n--full adds the sources, and the ops that were reported wrong."]
    more = ["", *sources, "\nOps that were reported wrong:", *wrong] if full else legend
    shown = [_devices(chosen, devices), "", _limits(chosen), *more]
    return Outcome(plain, shown=shown, then=command("example", "gpt2"))


def _fault(fault: Any) -> dict[str, Any]:
    """Return a row of the table of engine faults as plain data."""
    return {
        "name": fault.name,
        "ops": sorted(fault.ops),
        "what": fault.what,
        "seen": fault.seen,
        "chips": list(fault.chips),
        "format": fault.runtime,
        "repair": fault.remedy,
        "advice": fault.advice,
        "source": fault.source,
    }


def _limits(chosen: list[Any]) -> Table:
    """Return a row for each chip; "?" stands for what is unknown."""
    head = ("chip", "engine", "cores", "GB/s", "axis", "kernel", "weights", "loaded", "on chip")
    rows = [
        (
            chip.name,
            f"H{chip.family}",
            chip.cores,
            chip.bandwidth,
            chip.axis,
            f"{chip.kernel_h}x{chip.kernel_w}",
            byte_words(chip.program),
            None if chip.address_space is None else byte_words(chip.address_space),
            byte_words(chip.working_set),
        )
        for chip in chosen
    ]
    known = [["?" if cell is None else cell for cell in row] for row in rows]
    return Table(head, known, ruled=False, edge=False)


def _devices(chosen: list[Any], devices: Mapping[str, Sequence[str]]) -> Table:
    """Return the devices of each chip, and the oldest OS that runs on it."""
    macs = {"macOS": ["Macs and iPads with this chip"]}
    rows = [
        (c.name, f"{c.platform} {c.first_os}", ", ".join([*devices[c.name], *macs.get(c.platform, [])]))
        for c in chosen
    ]
    return Table(("chip", "from", "devices"), rows, ruled=False, edge=False)
