"""The commands `run`, `compare`, `diff` and `prove`: the numbers of a model, and of two beside each other.

Exit code 1: the outputs differ, or a proof failed; of `diff`, where anything differs.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from anesurgery import registry
from anesurgery.commands.calibrating import certify
from anesurgery.commands.next_steps import command, ended
from anesurgery.commands.options import Aim, Function, Inputs, Json, Member, Model, Quiet, Seed, existing, show
from anesurgery.commands.waiting import load_engine, waiting
from anesurgery.display import printable

ENGINE = "interpreter, or coreai: Apple's Core AI runtime, as stored."
PRECISION = "fp32 (exact), fp16 (as stored), ane or ane:M1 (an estimate of the Neural Engine)."


def run(
    model: Model,
    inputs: Annotated[
        Path | None, typer.Option(help="An .npz file of arrays by input name. Default: random inputs.")
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
    """Run a model once, and show or write its outputs."""
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
    wrote = [] if out is None else [out]
    shown = surgeries.arrays_group(outputs, drawn)
    show(surgeries.arrays_json(outputs), shown, as_json, quiet, wrote, then=command("certify", model))


def compare(
    a: Model,
    b: Model,
    precision: Annotated[str, typer.Option(help=PRECISION)] = "fp16",
    gate: Annotated[float, typer.Option(help="The least PSNR of every output, in dB.")] = 60.0,
    last: Annotated[
        bool, typer.Option("--last", help="If B gives one position and A several, compare the last of A.")
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
    """Run two models on the same inputs, and measure the difference."""
    how = {"precision": precision, "gate": gate, "function": function, "seed": seed, "last": last}
    comparison = _compared(a, b, {**how, "member": member, "prove": prove, "engine": engine}, as_json, quiet)
    if not comparison.ok or (comparison.proof is not None and not comparison.proof.proved):
        raise typer.Exit(1)


def _compared(a: str, b: str, how: dict[str, Any], as_json: bool, quiet: bool) -> Any:
    """The comparison of two models, which is shown."""
    load_engine(quiet)
    from anesurgery.checking.comparison import compare as run
    from anesurgery.show import surgeries

    with waiting("running both models", quiet):
        comparison = run(a, b, **how)
    then = command("certify", b) if comparison.ok else command("diff", a, b)
    show(comparison.to_json(), surgeries.comparison_group(comparison), as_json, quiet, then=then)
    return comparison


def diff(
    a: Model,
    b: Model,
    dialect: Annotated[str, typer.Option(help='"short", or "mil": every attribute and number too.')] = "short",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show how two models differ: interface, number of ops, program text."""
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
        print(ended(then=command("compare", a, b)))
    if lines or words:
        raise typer.Exit(1)


def prove(
    model: Model,
    other: Annotated[
        str | None, typer.Argument(help="The same model after a repair.", show_default=False, callback=existing)
    ] = None,
    inputs: Inputs = None,
    target: Aim = None,
    last: Annotated[
        bool, typer.Option("--last", help="If OTHER gives one position and MODEL several, compare the last.")
    ] = False,
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Prove that two models are the same. With one model: certify its numbers in fp16.

    Exit code 1: outputs differ, or an op is neither proved equal nor checked on numbers.
    """
    if other is None:
        certify(model, inputs, target, seed=seed, as_json=as_json, quiet=quiet)
        return
    comparison = _compared(model, other, {"last": last, "prove": True, "seed": seed}, as_json, quiet)
    if not comparison.ok or comparison.proof.grade is None:
        raise typer.Exit(1)
