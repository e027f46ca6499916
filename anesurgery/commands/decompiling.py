"""Packages out of what holds them: `decompile` of a compiled model, `executorch` of a program of ExecuTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from anesurgery.commands.next_steps import command
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
    target = one_place(out, positional_out, f"{Path(source).stem}.mlpackage")
    load_engine(quiet)
    from anesurgery.files.compiled_package import decompile as write

    with waiting("decompiling", quiet):
        written = write(source, target, overwrite=overwrite)
    plain = {"path": str(written.path), "notes": list(written.notes)}
    show(plain, str(written), as_json, quiet, then=command("see", target))


def executorch(
    source: Annotated[str, typer.Argument(metavar="PTE", help="A .pte file.", show_default=False)],
    out: Out = None,
    overwrite: Annotated[bool, typer.Option(help="Replace OUT if it exists.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List the Core ML parts of an ExecuTorch program (.pte); with --out, write them into a folder."""
    load_engine(quiet)
    from anesurgery.files.executorch_program import executorch as read

    program = read(source)
    lines, record = str(program), program.to_json()
    if out is not None:
        with waiting("extracting", quiet):
            models: list[Any] = [str(path) for path in program.extract(out, overwrite=overwrite)]
        record |= {"models": models}
        show(record, lines, as_json, quiet, models, then=command("see", *models[:1]))
        return
    show(record, lines, as_json, quiet, then=command("executorch", source, "--out", "models"))
