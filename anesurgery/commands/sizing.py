"""`anesurgery choose-sizes`: which sizes to make of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anesurgery.commands.options import Json, Quiet, show
from anesurgery.commands.waiting import load_engine


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
