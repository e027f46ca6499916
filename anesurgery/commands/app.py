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

from anesurgery import __version__, registry
from anesurgery.commands.options import (
    BAD_INPUT,
    DEFECT,
    Function,
    Gate,
    Inputs,
    Json,
    Member,
    Model,
    OldOut,
    Out,
    Quiet,
    Seed,
    any_place,
    complete_steps,
    model_first,
    one_place,
    show,
)
from anesurgery.commands.planning import chosen_steps, is_plan, read_plan, value_range
from anesurgery.commands.waiting import load_engine, waiting
from anesurgery.display import printable
from anesurgery.errors import ProofError, SurgeryError, UnknownName

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
ENGINE = "interpreter, or coreai: Apple's Core AI runtime, as stored."
PROOFS = ("sites", "model", "both", "none")

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
    "planning": "plan",
    "decompiling": "decompile executorch",
    "core_ai": "lint to_coreml to_coreai",
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

for _file, _names in COMMANDS.items():
    _module = importlib.import_module(f"anesurgery.commands.{_file}")
    for _name in _names.split():
        app.command(_name.strip("_").replace("_", "-"))(getattr(_module, _name))


@app.command()
def apply(
    source: Model,
    steps: Annotated[
        str,
        typer.Argument(
            help="A recipe, or passes with commas.", show_default=False, autocompletion=complete_steps
        ),
    ],
    positional_out: OldOut = None,
    out: Out = None,
    target: Annotated[
        str | None, typer.Option(help='Chip or product, and OS: "M1/macOS 14", "iPhone 15 Pro".')
    ] = None,
    inputs: Inputs = None,
    member: Member = None,
    assume: Annotated[
        list[str] | None, typer.Option(help="Range of an integer input, as input_ids=0:50256; repeat for more.")
    ] = None,
    prove: Annotated[
        str, typer.Option(help="What is proved or checked: sites (each edit), model (as a whole), both, none.")
    ] = "sites",
    require: Annotated[
        str | None, typer.Option(help="Grade that each edit must reach: checked, exhaustive, proved, bits.")
    ] = None,
    compressed: Annotated[
        str, typer.Option(help="Compressed weights that passes compute with: keep (refuse), decode, reencode.")
    ] = "keep",
    option: Annotated[
        list[str] | None,
        typer.Option("--set", help="Of a step: multiple=32, embedding_matmul.mode=input; STEP=false."),
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace OUT if it exists.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing.")] = False,
    gate: Gate = 40.0,
    details: Annotated[bool, typer.Option("--details", help="What each check rests on, too.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Apply a recipe, passes or a plan to a model and write the result.

    Exit code 1 where outputs on --inputs are below --gate in the end.
    """
    source, steps = (source, steps) if is_plan(steps) else model_first(source, steps, quiet or as_json)
    target_path = (any_place if dry_run else one_place)(out, positional_out)
    if prove not in PROOFS:
        raise UnknownName("proof", prove, PROOFS)
    load_engine(quiet)
    chosen = read_plan(steps, option) if is_plan(steps) else chosen_steps(steps, option or [])
    from anesurgery.files import arrays
    from anesurgery.rewriting.ml_program import check_out
    from anesurgery.rewriting.passes import subject_of
    from anesurgery.show import surgeries
    from anesurgery.surgery import apply as operate
    from anesurgery.surgery import steps_of

    if target_path is not None and not dry_run:
        check_out(source, target_path, overwrite, subject_of(steps_of(chosen)).suffix)
    surgery = operate(
        source,
        chosen,
        target=target,
        member=member,
        assume=dict(map(value_range, assume or [])),
        prove=None if prove == "none" else prove,
        require=require,
        compressed=compressed,
        inputs=arrays.read_all(inputs),
        gate=gate,
        quiet=quiet or as_json,
    )
    kept = target_path is not None and target_path.suffix != surgery.subject.suffix and not surgery.changes
    if target_path is not None and not dry_run and not kept:
        with waiting("saving", quiet or as_json):
            surgery.save(target_path, overwrite=overwrite)
    show(surgery.to_json(), surgeries.surgery_group(surgery, details=details), as_json, quiet)
    if kept:
        raise SurgeryError(f"the model stays {source}; nothing was written to {target_path}")
    if surgery.below(gate):
        raise typer.Exit(1)


@app.command()
def run(
    model: Model,
    inputs: Annotated[
        Path | None, typer.Option(help="An .npz file of arrays by input name; sampled when absent.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The .npz file to write.")] = None,
    precision: Annotated[str, typer.Option(help=PRECISION)] = "fp16",
    engine: Annotated[str, typer.Option(help=ENGINE)] = registry.INTERPRETER,
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
        if engine == registry.INTERPRETER:
            results = predictor(values)
        else:
            results = registry.engine(engine)(model, values, function=function, member=member)
        outputs = {name: np.asarray(value) for name, value in results.items()}
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
    engine: Annotated[str, typer.Option(help=f"What runs B: {ENGINE}")] = registry.INTERPRETER,
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
            engine=engine,
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
