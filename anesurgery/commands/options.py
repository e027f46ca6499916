"""What the commands of the command line share: arguments, options, exit codes, and checks of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from anesurgery import registry
from anesurgery.errors import LoadError, SurgeryError, missing, no_folder

BAD_INPUT = 64
"""Exit code of bad usage and bad input, as in sysexits.h; 2 is left to `inspect --status`."""
DEFECT = 70
"""Exit code of an unforeseen error: a defect of this program."""

SUFFIXES = (".mlpackage", ".mlmodel", ".mlmodelc", *registry.FORMATS)

SHARED = {
    "target": 'Device or chip, and OS: "iPhone 13", "M1/macOS 14", "M4+", "any".',
    "function": "Name of the function. Default: the model's default function.",
    "member": "Name or number of one model of a pipeline. Default: all.",
    "seed": "Seed of the random inputs.",
    "jobs": "Number of processes.",
    "scheduler": "Address of a Dask scheduler; its workers do the work.",
    "shard": "Do only one part of the work, such as 3/8. --merge joins the parts.",
    "overwrite": "Replace existing files.",
}
"""Parameter of a public call -> what every command says of its option, in place of the docstring."""
LEAST = {
    **dict.fromkeys(("context", "contexts", "shorter"), 2),
    **dict.fromkeys(("jobs", "longest", "prefill", "runs", "steps", "width"), 1),
    **dict.fromkeys(("after", "before", "search", "seed", "smallest"), 0),
}
"""Parameter of a public call -> the least number that its option takes."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="Where to write; OUT as the last argument is the same.")
]
OldOut = Annotated[Path | None, typer.Argument(metavar="[OUT]", help="The same as --out.")]
Full = Annotated[bool, typer.Option("--full", "--details", help="Print the whole report.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")]


def ending(*suffixes: str) -> Callable[[Path | None], Path | None]:
    """Return a check that a place to write to ends in one of these suffixes, as what is written does."""

    def check(place: Path | None) -> Path | None:
        if place is not None and place.suffix not in suffixes:
            raise LoadError(f"{place} ends in {place.suffix!r}; let it end in {' or '.join(suffixes)}")
        return place

    return check


Html = Annotated[Path | None, typer.Option(help="Write a page.", callback=ending(".html", ".htm"))]


def existing(model: str | None) -> str | None:
    """See that a model is there, before what reads it is imported.

    Raises:
        LoadError: it is not; says what is beside it.
    """
    if model is not None and not model.strip():
        raise LoadError("the name of the model is empty; if a variable of the shell gave it, set that first")
    if model is not None and model.endswith(SUFFIXES) and not os.path.lexists(os.path.expanduser(model)):
        raise LoadError(missing(Path(model).expanduser()))
    return model


Model = Annotated[
    str, typer.Argument(help="An .mlpackage, .mlmodel, .mlmodelc or .aimodel.", callback=existing)
]
Inputs = Annotated[
    list[Path] | None,
    typer.Option(help="An .npz file of arrays by input name, or a folder of them; repeat for more."),
]
Gate = Annotated[float, typer.Option(help="The least PSNR of the final outputs on --inputs, in dB.")]
Aim = Annotated[str | None, typer.Option(help=SHARED["target"])]
Function = Annotated[str | None, typer.Option(help=SHARED["function"])]
Member = Annotated[str | None, typer.Option(help=SHARED["member"])]
Seed = Annotated[int, typer.Option(min=0, help=SHARED["seed"])]


def is_folder(model: str) -> bool:
    """Is it a folder that may hold models, and no model itself? Chunks and sizes are models."""
    from anesurgery.placement.folders import is_folder_of_models

    return is_folder_of_models(Path(model).expanduser())


def refuse_for_folders(asked: dict[str, Any]) -> None:
    """Refuse options that are for one model.

    Raises:
        SurgeryError: one is given; names it.
    """
    if named := [name for name, given in asked.items() if given]:
        raise SurgeryError(f"{named[0]} is for one model; name one in the folder")


def complete_steps(incomplete: str) -> list[str]:
    """Complete recipes and passes in the shell, after each comma again."""
    done, comma, word = incomplete.rpartition(",")
    return [f"{done}{comma}{name}" for name in complete_name(word)]


def complete_name(incomplete: str) -> list[str]:
    """Complete the name of a recipe or a pass in the shell."""
    names = [*registry.recipe_names(), *registry.pass_names()]
    return [name for name in names if name.startswith(incomplete)]


def model_first(first: str, second: str, quiet: bool = False) -> tuple[str, str]:
    """Return the model and the steps, in whichever order they were written; warn if the steps come first.

    Args:
        first: what was written first.
        second: what was written after it.
        quiet: is nothing said?
    """
    if _is_model(first) or not _is_model(second):
        return first, second
    if not quiet:
        print("the model comes first now: apply MODEL STEPS; the older order still works", file=sys.stderr)
    return second, first


def _is_model(word: str) -> bool:
    return word.endswith(SUFFIXES) or os.path.exists(word)


def check_pages(overwrite: bool, *paths: Path | None) -> None:
    """See that pages may be written, before any work is done.

    Raises:
        LoadError: the folder of one does not exist, or it exists and may not be replaced.
    """
    for path in filter(None, paths):
        if not path.expanduser().parent.is_dir():
            raise LoadError(no_folder(path.parent))
        if path.expanduser().exists() and not overwrite:
            raise LoadError(f"{path} exists; choose another name, or use --overwrite")
