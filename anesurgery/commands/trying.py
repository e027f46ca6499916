"""The commands `example` and `draw`: a small model to try the others on, and a picture of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anesurgery.byte_counts import byte_words
from anesurgery.commands.next_steps import command
from anesurgery.commands.options import Model, Overwrite
from anesurgery.commands.subcommand import Call, Outcome, subcommand

Name = Annotated[str, typer.Argument(help="gpt2, llama, bert, vit, whisper, unet, network or tiny.")]
Picture = Annotated[Path, typer.Option("--out", "-o", help="An .svg picture, or an .html page to zoom.")]


@subcommand("examples.example_models:example", waits="converting")
def example(call: Call, name: Name = "gpt2") -> Outcome:
    """Write a small model to try this on: a real architecture with random weights."""
    from anesurgery.examples.example_models import EXAMPLES

    path = call(name)
    chosen = EXAMPLES[name]
    size = sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())
    out = call["out"] or Path(f"{name}{chosen.suffix}")
    plain = {"path": str(path), "recipe": chosen.recipe, "bytes": size}
    words = f"{chosen.words[:1].upper()}{chosen.words[1:]}, random weights, {byte_words(size)}"
    return Outcome(plain, words, [out], then=command("see", out, target=chosen.target))


@subcommand("show.pictures:draw", waits="drawing")
def draw(call: Call, model: Model, out: Picture, overwrite: Overwrite = False) -> Outcome:
    """Draw ops as a picture or a page. --target colours them by unit."""
    from anesurgery.files.writing import check_place
    from anesurgery.show.pictures import check_picture

    check_picture(out)
    check_place(out.expanduser().absolute(), overwrite, Path(model).expanduser())
    drawing = call(model)
    path, then = drawing.save(out), command("see", model, target=call["target"])
    return Outcome({"path": str(path), "ops": list(drawing.ops)}, f"{len(drawing.ops)} ops", [path], then=then)
