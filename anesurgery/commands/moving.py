"""From one of Apple's formats to the other: `to-coreai`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anesurgery.commands.options import Json, Model, Quiet, show
from anesurgery.commands.waiting import load_engine, waiting


def to_coreai(
    model: Model,
    out: Annotated[Path, typer.Argument(metavar="OUT.aimodel", help="Where to write it.", show_default=False)],
    mode: Annotated[
        str,
        typer.Option(
            help="ship, for Apple's devices, or check, for Apple's runtime on Linux, with all of fp16 in fp32."
        ),
    ] = "ship",
    overwrite: Annotated[bool, typer.Option(help="Replace OUT if it exists.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a model in Core AI, Apple's format since iOS and macOS 27."""
    load_engine(quiet)
    from anesurgery.coreai.translating import to_coreai as write

    with waiting("translating", quiet):
        written = write(model, out, mode=mode, overwrite=overwrite)
    show(written.to_json(), str(written), as_json, quiet)
