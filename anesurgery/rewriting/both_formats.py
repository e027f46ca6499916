"""One model in both of Apple's formats, and one statement of how well they agree."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anesurgery import registry
from anesurgery.checking.comparison import Comparison, compare
from anesurgery.errors import InterpretError, LoadError, ProofError, UnknownName
from anesurgery.files.writing import check_place, check_target, write_atomically
from anesurgery.loading import load
from anesurgery.mil import exclusive
from anesurgery.semantics.reading import in_decibels

FORMATS = ("coreml", "coreai", "both")
"""The formats that a model can be written in."""
CORE_ML, CORE_AI, BOTH = FORMATS
SINGLE_FORMATS = (CORE_ML, CORE_AI)
ASSET = ".aimodel"


def check_format(name: str, known: Sequence[str] = FORMATS) -> str:
    """Return a format, if it is among some.

    Raises:
        UnknownName: it is not.
    """
    if name not in known:
        raise UnknownName("format", name, known)
    return name


def in_format(model: Any, name: str) -> Any:
    """Return an MLModel in a format, as an object that is saved by its `save`.

    Args:
        model: the MLModel.
        name: "coreml", for the MLModel itself, or "coreai", for a `CoreAI` in a temporary folder.

    Raises:
        LoadError: Apple's package is not installed.
        NotExpressible: Core AI lacks an op of the model.
    """
    if name == CORE_ML:
        return model
    place = Path(tempfile.mkdtemp(prefix="anesurgery-coreai-")) / f"model{ASSET}"
    try:
        write = registry.writer_of(place)
        assert write is not None
        made = write(model, place)
    except BaseException:
        shutil.rmtree(place.parent, ignore_errors=True)
        raise
    weakref.finalize(made, shutil.rmtree, place.parent, ignore_errors=True)
    return made


@dataclass(frozen=True)
class Both:
    """A Core ML model and the Core AI model that was written beside it."""

    coreml: Path
    coreai: Path
    compared: Mapping[str, Comparison]
    """Function -> how the outputs of both compare."""
    lost: tuple[str, ...] = ()
    """What the Core ML model says that the Core AI model does not hold, in words."""
    unchecked: str = ""
    """Why nothing was compared; "" where it was."""

    @property
    def psnr(self) -> float:
        """PSNR in dB of the worst output; infinite where all are identical."""
        return min((one.psnr for one in self.compared.values()), default=float("nan"))

    @property
    def statement(self) -> str:
        """How well both agree, in one sentence."""
        names = f"{self.coreml.name} and {self.coreai.name}"
        if self.unchecked:
            return f"{names} were not compared: {self.unchecked}"
        worst = in_decibels(self.psnr, "the worst output reaches ")
        words = "identical outputs" if self.psnr == float("inf") else worst
        return (
            f"{names} agree: {words} on one set of inputs. Apple's runtime on Linux computed the "
            f".aimodel in fp32, and the interpreter ran the {self.coreml.suffix}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "coreml": str(self.coreml),
            "coreai": str(self.coreai),
            "statement": self.statement,
            "compared": {name: one.to_json() for name, one in self.compared.items()},
            "lost": list(self.lost),
        }

    def __str__(self) -> str:
        return "\n".join([self.statement, *(f"  not kept: {words}" for words in self.lost)])


def check_both(source: Path | None, package: Path, overwrite: bool, suffix: str) -> None:
    """Refuse places that both models cannot be written to, before any work is done.

    Raises:
        LoadError: one may not be written, or Apple's package is not installed.
    """
    check_target(source, package, overwrite, suffix)
    check_place(package.with_suffix(ASSET), overwrite, source)
    registry.writer_of(package.with_suffix(ASSET))  # raises without Apple's package


@exclusive()
def write_beside(package: Path, *, overwrite: bool = False) -> Both:
    """Write the Core AI model of a Core ML model beside it, and compare the two.

    The file is read back, and Apple's runtime runs that program with all values in fp32: on Linux it sums fp16
    products in fp16. So the comparison covers the file, the reading of it, and what its ops mean to Apple.

    Args:
        package: the Core ML model, written already, at a place that `check_both` allows.
        overwrite: may an `.aimodel` of that name be replaced?

    Raises:
        LoadError: Apple's package is not installed, or the place cannot be written to.
        NotExpressible: Core AI lacks an op of the model.
        ProofError: the two do not agree; no `.aimodel` was written.
    """
    target = package.with_suffix(ASSET)
    write, results = registry.writer_of(target), dict[str, Any]()
    assert write is not None

    def write_and_compare(place: Path) -> None:
        results["lost"] = write(package, place).lost
        results["compared"], results["unchecked"] = _compared(package, place)

    write_atomically(target, write_and_compare, overwrite)
    return Both(package, target, **results)


def _compared(package: Path, asset: Path) -> tuple[dict[str, Comparison], str]:
    """Return a comparison for each function; or {}, and why nothing was compared.

    Raises:
        ProofError: the outputs of a function do not agree.
    """
    first = load(package)
    try:
        second = load(asset)
        names = first.program.functions
        compared = {n: compare(first, second, function=n, engine=registry.APPLES) for n in names}
    except (InterpretError, LoadError) as error:
        return {}, str(error)
    for name, one in compared.items():
        if not one.outputs_agree:
            words = f"{package.name} and its Core AI form do not agree; it was not written"
            raise ProofError(f"{words}. {name}: {one.verdict}")
    return compared, ""
