"""`anesurgery choose-sizes` and `sizes`: which sizes to make of a model, and the model at them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from anesurgery.commands.next_steps import command
from anesurgery.commands.options import Json, Model, Quiet, show
from anesurgery.commands.splitting_models import read_shape
from anesurgery.commands.waiting import load_engine, waiting
from anesurgery.errors import SurgeryError


def choose_sizes(
    lengths: Annotated[
        Path,
        typer.Argument(
            help="A text file: a length on each line, or a length and how often.", show_default=False
        ),
    ],
    count: Annotated[int, typer.Option("--count", "-k", help="The most sizes to choose.")] = 4,
    multiple: Annotated[int, typer.Option(help="Each size is a multiple of this.")] = 1,
    model: Annotated[
        str | None,
        typer.Option(help="A model with dynamic shapes. Its expected time decides.", show_default=False),
    ] = None,
    size: Annotated[
        str | None, typer.Option(metavar="INPUT=1xN,...", help="The shapes of its inputs at the length N.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="The chip and OS for the expected time.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Write a plot: .png, .svg or .pdf. An existing file is replaced.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Choose the sizes with the least padding, or the least time, for a sample of lengths."""
    if len({model is None, size is None, target is None}) > 1:
        raise SurgeryError("--model, --size and --target go together, as --size ids=1xN --target 'M4/macOS 15'")
    load_engine(quiet)
    from anesurgery.files.plot_files import check_plot
    from anesurgery.shipping.size_times import size_times
    from anesurgery.show.size_table import choice_group
    from anesurgery.splitting.size_choice import choose_sizes as choose

    if plot is not None:
        check_plot(plot)
    time = None
    if model is not None and size is not None and target is not None:
        shapes = dict(map(_open_shape, size.split(",")))
        with waiting("estimating times", quiet):
            time = size_times(model, shapes, lengths, target, multiple=multiple)
    choice = choose(lengths, count, time=time, multiple=multiple)
    if plot is not None:
        choice.save_plot(plot)
    then = "" if model is None or size is None else _made(model, size, choice.best.sizes)
    wrote = [] if plot is None else [plot]
    show(choice.to_json(), choice_group(choice), as_json, quiet, wrote, then=then)


def _made(model: str, size: str, lengths: Sequence[int]) -> str:
    """The command that makes a model at the lengths that were chosen."""
    each = [("--size", re.sub(r"(?<=[=x])N(?=x|,|$)", str(length), size)) for length in lengths]
    return command(
        "sizes", model, *(word for pair in each for word in pair), "--out", f"{Path(model).stem}_sizes"
    )


def _open_shape(text: str) -> tuple[str, tuple[int | None, ...]]:
    """The name and the shape in "ids=1xN", None in the place of N.

    Raises:
        SurgeryError: it has no N, or is no shape.
    """
    name, _, shape = text.rpartition("=")
    axes = shape.split("x")
    if not name or "N" not in axes or not all(n == "N" or (n.isdigit() and int(n)) for n in axes):
        raise SurgeryError(f"{text!r} is not INPUT=1xN, with N in the place of the length")
    return name, tuple(None if n == "N" else int(n) for n in axes)


def sizes(
    model: Model,
    out: Annotated[str, typer.Option("--out", "-o", help="The folder to write.", show_default=False)],
    size: Annotated[
        list[str],
        typer.Option(
            metavar="INPUT=1x64,...", help="The shapes of the inputs at a size; repeat.", show_default=False
        ),
    ],
    mask: Annotated[
        str | None, typer.Option(help="Add a mask as an input with this name.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a folder of sizes.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make a model at several fixed sizes, with its weights stored once."""
    each = [dict(map(read_shape, text.split(","))) for text in size]
    if any(shapes.keys() != each[0].keys() for shapes in each):
        raise SurgeryError("each --size needs the same inputs, as --size ids=1x64,mask=1x64")
    load_engine(quiet)
    from anesurgery.shipping.several_sizes import sizes as make

    with waiting("making the sizes", quiet):
        sized = make(model, {name: [shapes[name] for shapes in each] for name in each[0]}, mask=mask)
        path = sized.save(out, overwrite=overwrite)
    rows = [row.to_json() for row in sized.rows]
    show({"path": str(path), "sizes": rows}, str(sized), as_json, quiet, [out], then=command("see", out))
