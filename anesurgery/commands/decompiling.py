"""`anesurgery decompile`: the package of a compiled model."""

from __future__ import annotations

from typing import Annotated

import typer

from anesurgery.commands.options import Json, OldOut, Out, Quiet, one_place, show
from anesurgery.commands.waiting import load_engine, waiting


def decompile(
    source: Annotated[str, typer.Argument(metavar="MODELC", help="An .mlmodelc folder.", show_default=False)],
    positional_out: OldOut = None,
    out: Out = None,
    overwrite: Annotated[bool, typer.Option(help="Replace OUT if it exists.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the package of a compiled ML Program (.mlmodelc)."""
    target = one_place(out, positional_out)
    load_engine(quiet)
    from anesurgery.files.compiled_package import decompile as write

    with waiting("decompiling", quiet):
        made = write(source, target, overwrite=overwrite)
    show({"path": str(made.path), "notes": list(made.notes)}, str(made), as_json, quiet)
