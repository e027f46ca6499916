"""The command `draw`: the ops of a model, or those around one, as a picture or a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anesurgery.commands.next_steps import command
from anesurgery.commands.options import Aim, Function, Model, Quiet, show
from anesurgery.commands.waiting import load_engine, waiting


def draw(
    model: Model,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="An .svg picture, or an .html page to zoom.", show_default=False)
    ],
    around: Annotated[str | None, typer.Option(help="Name of an op. Default: the whole function.")] = None,
    before: Annotated[int, typer.Option(min=0, help="Number of steps upstream.")] = 2,
    after: Annotated[int, typer.Option(min=0, help="Number of steps downstream.")] = 2,
    target: Aim = None,
    function: Function = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the --out file if it exists.")] = False,
    quiet: Quiet = False,
) -> None:
    """Draw ops as a picture or a page. --target colours them by unit."""
    load_engine(quiet)
    from anesurgery.files.writing import check_place
    from anesurgery.show.pictures import check_picture
    from anesurgery.show.pictures import draw as picture

    check_picture(out)
    check_place(out.expanduser().absolute(), overwrite, Path(model).expanduser())
    with waiting("drawing", quiet):
        drawing = picture(model, around, before, after, function=function, target=target)
        path = drawing.save(out)
    show(None, f"{len(drawing.ops)} ops", False, quiet, [path], then=command("see", model, target=target))
