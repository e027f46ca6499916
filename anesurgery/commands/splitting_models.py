"""`anesurgery split`, `merge` and `extract`: models in chunks, and functions of one model."""

from __future__ import annotations

from typing import Annotated

import typer

from anesurgery.commands.next_steps import command
from anesurgery.commands.options import Aim, Json, Model, Quiet, show
from anesurgery.commands.waiting import load_engine, waiting
from anesurgery.errors import SurgeryError

Overwrite = Annotated[bool, typer.Option(help="Replace what is there.")]
Out = Annotated[str, typer.Option("--out", "-o", help="The .mlpackage to write.", show_default=False)]


def split(
    model: Model,
    out: Annotated[
        str,
        typer.Option(
            "--out", "-o", help="A folder of packages, or an .mlpackage with all.", show_default=False
        ),
    ],
    parts: Annotated[int | None, typer.Option(help="How many chunks.", show_default=False)] = None,
    max_size: Annotated[
        str | None, typer.Option(help="The most bytes of weights in a chunk, as 950MB.", show_default=False)
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            help='"unsupported" cuts before and after ops that the ANE cannot run.', show_default=False
        ),
    ] = None,
    balance: Annotated[
        str, typer.Option(help='Make --parts even by "bytes" or by "estimate" (time).')
    ] = "bytes",
    target: Aim = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BLOB=CxHxW",
            help="With --at: the shape that a custom layer makes. Repeat for more.",
            show_default=False,
        ),
    ] = None,
    function: Annotated[str | None, typer.Option(help="The function to cut.", show_default=False)] = None,
    compare: Annotated[
        bool, typer.Option(help="Run the model and the chunks once and compare, if that is quick.")
    ] = True,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Cut a model into chunks that run one after the other."""
    if [parts, max_size, at].count(None) != 2:
        raise SurgeryError("give either --parts N or --max-size 950MB or --at unsupported")
    shapes = dict(map(read_shape, shape or ()))
    load_engine(quiet)
    from anesurgery.show.chunk_table import chain_group, chain_json
    from anesurgery.splitting.split import split as cut

    with waiting("cutting", quiet):
        chain = cut(
            model,
            parts,
            max_bytes=max_size,
            at=at,
            balance=balance,
            target=target,
            function=function,
            shapes=shapes,
            compare=compare,
        )
        path = chain.save(out, overwrite=overwrite)
    plain = {"path": str(path), **chain_json(chain)}
    show(plain, chain_group(chain), as_json, quiet, [out], then=command("see", out, target=target))


def read_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """The name and the shape in "name=3x224x224".

    Raises:
        SurgeryError: there are none.
    """
    name, _, sizes = text.rpartition("=")
    if not name or not all(size.isdigit() and int(size) for size in sizes.split("x")):
        raise SurgeryError(f"{text!r} is no name with a shape; write it as input_ids=1x128")
    return name, tuple(map(int, sizes.split("x")))


def merge(
    models: Annotated[
        list[str],
        typer.Argument(metavar="NAME=MODEL...", help="Functions and their models.", show_default=False),
    ],
    out: Out,
    default: Annotated[
        str | None,
        typer.Option(help="The function that runs by default. Default: the first.", show_default=False),
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write one package with several models as functions that share equal weights."""
    load_engine(quiet)
    from anesurgery.splitting.merge import merge as join

    pairs = [pair.partition("=") for pair in models]
    if wrong := [name for name, sign, path in pairs if not (name and sign and path)]:
        raise SurgeryError(f"{wrong[0]!r} is not NAME=MODEL, as prefill=prefill.mlpackage")
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise SurgeryError("two models have the same name; each function needs its own")
    with waiting("merging", quiet):
        path = join({name: path for name, _, path in pairs}, out, default=default, overwrite=overwrite)
    show({"path": str(path)}, "", as_json, quiet, [out], then=command("see", out))


def extract(
    model: Model,
    function: Annotated[str, typer.Argument(help="The function.", show_default=False)],
    out: Out,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a package with one function of a model."""
    load_engine(quiet)
    from anesurgery.splitting.merge import extract as take

    with waiting("extracting", quiet):
        path = take(model, function, out, overwrite=overwrite)
    show({"path": str(path)}, "", as_json, quiet, [out], then=command("see", out))
