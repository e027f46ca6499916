"""`anesurgery split`, `merge` and `extract`: models in chunks, and functions of one model."""

from __future__ import annotations

from typing import Annotated

import typer

from anesurgery.commands.next_steps import command
from anesurgery.commands.options import Model, Overwrite
from anesurgery.commands.subcommand import Call, Outcome, Place, subcommand
from anesurgery.display import counted, drawn
from anesurgery.errors import SurgeryError

Out = Annotated[str, typer.Option("--out", "-o", help="The .mlpackage to write.")]
SHAPE = "With --at: the shape that a custom layer makes. Repeat for more."
Shape = Annotated[list[str] | None, typer.Option(metavar="BLOB=CxHxW", help=SHAPE)]
Models = Annotated[list[str], typer.Argument(metavar="NAME=MODEL...", help="Functions and their models.")]
Name = Annotated[str, typer.Argument(help="The function.")]


@subcommand("splitting.split:split", waits="cutting", engine=False, names={"max_bytes": "max_size"})
def split(call: Call, model: Model, out: Place, shape: Shape = None, overwrite: Overwrite = False) -> Outcome:
    """Cut a model into chunks that run one after the other: a folder of packages, or an .mlpackage with all."""
    if [call["parts"], call["max_bytes"], call["at"]].count(None) != 2:
        raise SurgeryError("give either --parts N or --max-size 950MB or --at unsupported")
    chain = call(model, shapes=dict(map(read_shape, shape or ())))
    path = chain.save(out, overwrite=overwrite)
    plain, then = {"path": str(path), **drawn(chain, "json")}, command("see", out, target=call["target"])
    return Outcome(plain, shown=chain, wrote=[out], then=then)


def read_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Read the name and the shape in "name=3x224x224".

    Raises:
        SurgeryError: there are none.
    """
    name, _, sizes = text.rpartition("=")
    if not name or not all(size.isdigit() and int(size) for size in sizes.split("x")):
        raise SurgeryError(f"{text!r} is no name with a shape; write it as input_ids=1x128")
    return name, tuple(map(int, sizes.split("x")))


@subcommand("splitting.merge:merge", waits="merging", engine=False)
def merge(call: Call, models: Models, out: Out) -> Outcome:
    """Write one package with several models as functions that share equal weights."""
    pairs = [pair.partition("=") for pair in models]
    if wrong := [name for name, sign, path in pairs if not (name and sign and path)]:
        raise SurgeryError(f"{wrong[0]!r} is not NAME=MODEL, as prefill=prefill.mlpackage")
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise SurgeryError("two models have the same name; each function needs its own")
    path = call({name: path for name, _, path in pairs}, out)
    words = f"{counted(len(pairs), 'function')}: {', '.join(name for name, _, _ in pairs)}"
    return Outcome({"path": str(path)}, shown=words, wrote=[out], then=command("see", out))


@subcommand("splitting.merge:extract", waits="extracting")
def extract(call: Call, model: Model, function: Name, out: Place) -> Outcome:
    """Write a package with one function of a model."""
    path = call(model, function, out)
    return Outcome({"path": str(path)}, shown="", wrote=[out], then=command("see", out))
