"""`anesurgery example`: a small model to try the other commands on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anesurgery.byte_counts import byte_words
from anesurgery.commands.next_steps import command
from anesurgery.commands.options import Json, Quiet, show
from anesurgery.commands.waiting import load_engine, waiting


def example(
    name: Annotated[
        str, typer.Argument(help="gpt2, llama, bert, vit, whisper, unet, network or tiny.", show_default=False)
    ] = "gpt2",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The package to write. Default: NAME.mlpackage.")
    ] = None,
    ios: Annotated[int, typer.Option(help="The first version of iOS that runs it: 16, 17 or 18.")] = 16,
    overwrite: Annotated[bool, typer.Option(help="Replace what is there.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a small model to try this on: a real architecture with random weights."""
    load_engine(quiet or as_json)
    from anesurgery.examples.example_models import EXAMPLES
    from anesurgery.examples.example_models import example as make

    with waiting("converting", quiet or as_json):
        path = make(name, out, ios=ios, overwrite=overwrite)
    files = [path, *path.rglob("*")]
    chosen, size = EXAMPLES[name], sum(file.stat().st_size for file in files if file.is_file())
    shown = Path(f"{name}{chosen.suffix}") if out is None else out
    plain = {"path": str(path), "recipe": chosen.recipe, "bytes": size}
    words = f"{chosen.words[:1].upper()}{chosen.words[1:]}, random weights, {byte_words(size)}"
    show(plain, words, as_json, quiet, [shown], then=command("see", shown, target=chosen.target))
