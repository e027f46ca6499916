"""What the commands of the command line share: arguments, exit codes, and how a result is shown."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from anesurgery import registry
from anesurgery.commands.next_steps import ended
from anesurgery.display import finite
from anesurgery.errors import LoadError, SurgeryError
from anesurgery.files.absence import missing

BAD_INPUT = 64
"""Exit code of bad usage and bad input, as in sysexits.h; 2 is left to `inspect --status`."""
DEFECT = 70
"""Exit code of an unforeseen error: a defect of this program."""

SUFFIXES = (".mlpackage", ".mlmodel", ".mlmodelc", *registry.FORMATS)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="Where to write; OUT as the last argument is the same.")
]
OldOut = Annotated[Path | None, typer.Argument(metavar="[OUT]", help="The same as --out.", show_default=False)]
Full = Annotated[bool, typer.Option("--full", "--details", help="Print the whole report.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


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
    str,
    typer.Argument(
        help="An .mlpackage, .mlmodel, .mlmodelc or .aimodel.", show_default=False, callback=existing
    ),
]
Inputs = Annotated[
    list[Path] | None,
    typer.Option(help="An .npz file of arrays by input name, or a folder of them; repeat for more."),
]
Gate = Annotated[float, typer.Option(help="The least PSNR of the final outputs on --inputs, in dB.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the sampled inputs.")]
Function = Annotated[str | None, typer.Option(help="Name of the function. Default: the default one.")]
Member = Annotated[str | None, typer.Option(help="Name or number of one model of a pipeline. Default: all.")]


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
    """The model and the steps, in whichever order they were written; the older one, steps first, says so.

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


def one_place(out: Path | None, positional: Path | None, example: object) -> Path:
    """Where to write, by `--out` or as the last argument.

    Args:
        out: by `--out`.
        positional: as the last argument.
        example: a name that would do.

    Raises:
        SurgeryError: both are given, and differ; or neither is.
    """
    if (place := any_place(out, positional)) is None:
        raise SurgeryError(f"where to write is missing; name it at the end, or with --out, as {example}")
    return place


def any_place(out: Path | None, positional: Path | None) -> Path | None:
    """Where to write, by `--out` or as the last argument; None without either.

    Raises:
        SurgeryError: both are given, and differ.
    """
    if out is not None and positional is not None and out != positional:
        raise SurgeryError(f"two places to write are named, {positional} and --out {out}; keep one")
    return positional if out is None else out


Jobs = Annotated[int, typer.Option(min=1, help="Number of processes.")]
Scheduler = Annotated[
    str | None, typer.Option(help="Address of a Dask scheduler; its workers do the work.", show_default=False)
]
Aim = Annotated[
    str | None, typer.Option(help='Device or chip, and OS: "iPhone 13", "M1/macOS 14", "M4+", "any".')
]


def check_page(path: Path | None, overwrite: bool) -> None:
    """See that a page may be written, before any work is done.

    Raises:
        LoadError: its folder does not exist, or it exists and may not be replaced.
    """
    if path is not None and not path.expanduser().parent.is_dir():
        raise LoadError(f"the folder {path.parent} does not exist; make it first")
    if path is not None and path.expanduser().exists() and not overwrite:
        raise LoadError(f"{path} exists; choose another name, or use --overwrite")


def show(
    plain: Any,
    shown: Any,
    as_json: bool,
    quiet: bool,
    wrote: Iterable[object] = (),
    *,
    then: str,
    more: str = "",
) -> None:
    """Print plain data as JSON, or something for a rich console with what comes after it, or nothing.

    Args:
        plain: for JSON.
        shown: for a console.
        as_json: is JSON asked for?
        quiet: is nothing printed?
        wrote: files and folders that were written.
        then: the command to run next, "" where no command follows.
        more: what else there is to ask for.
    """
    if as_json:
        print(json.dumps(finite(plain), indent=2, allow_nan=False))
    elif not quiet:
        from anesurgery.show.console import PlainConsole

        PlainConsole().print(shown, crop=False)
        if last := ended(wrote, then, more):
            print(last)
