"""`anesurgery choose-sizes` and `sizes`: which sizes to make of a model, and the model at them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Choose the sizes to make of a model, with the least padding of a sample of lengths."""
    load_engine(quiet)
    from anesurgery.show.size_table import choice_group
    from anesurgery.splitting.size_choice import choose_sizes as choose

    found = choose(lengths, count, multiple=multiple)
    show(found.to_json(), choice_group(found), as_json, quiet)


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
        str | None, typer.Option(help="Add a mask as an input of this name.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a folder of sizes.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make a model of dynamic shapes at several fixed sizes, with its weights stored once."""
    each = [dict(map(read_shape, text.split(","))) for text in size]
    if any(shapes.keys() != each[0].keys() for shapes in each):
        raise SurgeryError("each --size needs the same inputs, as --size ids=1x64,mask=1x64")
    load_engine(quiet)
    from anesurgery.shipping.several_sizes import sizes as make

    with waiting("making the sizes", quiet):
        sized = make(model, {name: [shapes[name] for shapes in each] for name in each[0]}, mask=mask)
        path = sized.save(out, overwrite=overwrite)
    rows = [row.to_json() for row in sized.rows]
    show({"path": str(path), "sizes": rows}, f"wrote {path}\n{sized}", as_json, quiet)
