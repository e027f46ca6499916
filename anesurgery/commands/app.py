"""The command line: its commands, each a function, some in files of their own.

Exit codes: 0 all is well; 1 a promise was not kept, two models differ, a range overflows, or the doctor found
something; 64 bad usage or bad input; 70 a defect of this program; 130 interrupted. `inspect --status` ends with
the status of the model: 0 every op prefers the ANE, 1 some do, 2 none does.
"""

from __future__ import annotations

import difflib
import importlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from anesurgery import __version__
from anesurgery.commands.options import BAD_INPUT, DEFECT, Function, Json, Member, Model, Quiet, Seed, show
from anesurgery.commands.waiting import load_engine, waiting
from anesurgery.display import printable
from anesurgery.errors import ProofError, SurgeryError

app = typer.Typer(
    help="Rewrite Core ML models for the Apple Neural Engine, and check the result on any machine.\n\n"
    "Exit codes: 0 all is well; 1 a promise was not kept or two models differ; 64 bad usage or input; "
    "70 a defect of this program; 130 interrupted. "
    "`inspect --status`: 0 all, 1 some, 2 no ops on the ANE.\n\n"
    "--debug, anywhere, shows the traceback of an error.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

DEBUG = "--debug"
"""Anywhere on the command line: errors come with their traceback."""

PRECISION = "fp32 (exact), fp16 (as stored), ane or ane:M1 (an estimate of the Neural Engine)."

USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
"""The class of the usage errors of typer, which brings click under one name or another."""


def main() -> None:
    """Run the command line; errors are said on stderr, and end it with an exit code of their own."""
    USAGE_ERROR.exit_code = BAD_INPUT
    debug = DEBUG in sys.argv
    sys.argv = [word for word in sys.argv if word != DEBUG]
    try:
        app()
    except Exception as error:
        if debug:
            raise
        foreseen = isinstance(error, SurgeryError)
        words = str(error) if foreseen else f"{type(error).__name__}: {error} ({DEBUG} shows where)"
        print(printable(f"anesurgery: {words}"), file=sys.stderr)
        sys.exit(1 if isinstance(error, ProofError) else BAD_INPUT if foreseen else DEFECT)


def _version(asked: bool) -> None:
    if asked:
        print(f"anesurgery {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the whole command line."""


COMMANDS = {
    "listing": "list_ explain",
    "trying": "example",
    "inspecting": "inspect",
    "applying": "apply",
    "planning": "plan",
    "decompiling": "decompile executorch",
    "generating": "generate",
    "shipping_models": "build chat swift",
    "splitting_models": "split merge extract",
    "picturing": "draw",
    "doctor": "doctor",
    "chips": "chips",
    "recording": "measure learn calibrate",
    "calibrating": "ranges certify sensitivity",
    "sizing": "choose_sizes sizes",
    "compressing_models": "compress compress_cache",
    "reviewing": "review",
    "serving_models": "serve",
}
"""File of this room -> its commands, in the order in which the help lists them; the others follow below."""

ALIASES = {"inspect": "see", "apply": "fix"}
"""Command -> its other name."""

for _file, _names in COMMANDS.items():
    _module = importlib.import_module(f"anesurgery.commands.{_file}")
    for _name in _names.split():
        _function = getattr(_module, _name)
        app.command(_name.strip("_").replace("_", "-"))(_function)
        if _name in ALIASES:
            app.command(ALIASES[_name], help=f"The same as {_name}.", hidden=True)(_function)


@app.command()
def run(
    model: Model,
    inputs: Annotated[
        Path | None, typer.Option(help="An .npz file of arrays by input name; sampled when absent.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The .npz file to write.")] = None,
    precision: Annotated[str, typer.Option(help=PRECISION)] = "fp16",
    function: Function = None,
    member: Member = None,
    seed: Seed = 0,
    overwrite: Annotated[bool, typer.Option(help="Replace the --out file if it exists.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a model once and show, or write, what comes out."""
    load_engine(quiet)
    import numpy as np

    from anesurgery.files import arrays
    from anesurgery.files.writing import check_place
    from anesurgery.interpret import Predictor
    from anesurgery.show import surgeries

    if out is not None:
        check_place(out.expanduser().absolute(), overwrite, Path(model).expanduser())
    with waiting("running the model", quiet):
        predictor = Predictor(model, precision=precision, function=function, member=member)
        values = predictor.sample(seed) if inputs is None else arrays.read(inputs)
        drawn = "" if inputs is not None else surgeries.sampled_words(values, seed)
        outputs = {name: np.asarray(value) for name, value in predictor(values).items()}
    if out is not None:
        arrays.write(out, outputs, overwrite, Path(model))
    show(surgeries.arrays_json(outputs), surgeries.arrays_group(outputs, drawn), as_json, quiet)


@app.command()
def compare(
    a: Model,
    b: Model,
    precision: Annotated[str, typer.Option(help=PRECISION)] = "fp16",
    gate: Annotated[float, typer.Option(help="PSNR in dB that every output must reach.")] = 60.0,
    last: Annotated[
        bool, typer.Option("--last", help="Where B gives one position and A several, compare A's last.")
    ] = False,
    prove: Annotated[
        bool, typer.Option("--prove", help="Also prove B against A, op by op; exit code 1 if that fails.")
    ] = False,
    function: Function = None,
    member: Member = None,
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run two models on the same inputs and measure how far apart they are."""
    load_engine(quiet)
    from anesurgery.checking.comparison import compare as run
    from anesurgery.show import surgeries

    with waiting("running both models", quiet):
        comparison = run(
            a,
            b,
            precision=precision,
            gate=gate,
            function=function,
            seed=seed,
            last=last,
            member=member,
            prove=prove,
        )
    show(comparison.to_json(), surgeries.comparison_group(comparison), as_json, quiet)
    if not comparison.ok or (comparison.proof is not None and not comparison.proof.proved):
        raise typer.Exit(1)


@app.command()
def diff(
    a: Model,
    b: Model,
    dialect: Annotated[str, typer.Option(help='"short", or "mil": every attribute and number too.')] = "short",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What differs between two models: interface, number of ops, program text."""
    load_engine(quiet)
    from anesurgery.loading import interface, load, to_text
    from anesurgery.rewriting.ml_program import op_counts

    with waiting("reading both models", quiet):
        old, new = load(a), load(b)
        first, second = (to_text(model, dialect=dialect).splitlines() for model in (old, new))
        lines = list(difflib.unified_diff(first, second, a, b, lineterm="", n=2))
        words = interface(old).difference(interface(new))
    before, after = op_counts(old.program), op_counts(new.program)
    moved = {
        kind: [before.get(kind, 0), after.get(kind, 0)]
        for kind in sorted(before.keys() | after.keys())
        if before.get(kind, 0) != after.get(kind, 0)
    }
    if as_json:
        print(json.dumps({"interface": words, "ops": moved, "text": lines}, indent=2))
    elif not quiet:
        print(printable("\n".join(lines)))
        print(f"interface: {words or 'the same'}")
        print(f"ops: {', '.join(f'{k} {x} -> {y}' for k, (x, y) in moved.items()) or 'the same'}")
    if lines or words:
        raise typer.Exit(1)
