"""The commands `run`, `compare`, `diff` and `prove`: the numbers of a model, and of two beside each other.

Exit code 1: the outputs differ, or a proof failed; of `diff`, where anything differs.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any

import typer

from anesurgery import registry
from anesurgery.commands.calibrating import certified
from anesurgery.commands.next_steps import command, to_certify
from anesurgery.commands.options import Aim, Function, Inputs, Member, Model, Overwrite, Seed, existing
from anesurgery.commands.subcommand import Call, Outcome, subcommand
from anesurgery.commands.waiting import waiting

Values = Annotated[
    Path | None, typer.Option(help="An .npz file of arrays by input name. Default: random inputs.")
]
Outputs = Annotated[Path | None, typer.Option("--out", "-o", help="The .npz file to write.")]
PRECISION = "fp32 (exact), fp16 (as stored), ane or ane:M1 (an estimate of the Neural Engine)."
Precision = Annotated[str, typer.Option(help=PRECISION)]
Engine = Annotated[str, typer.Option(help="interpreter, or coreai: Apple's Core AI runtime, as stored.")]
Other = Annotated[str | None, typer.Argument(help="The same model after a repair.", callback=existing)]
NOT_PROVED = ("precision", "gate", "function", "member", "prove", "engine")
"""What `prove` has no options for; `compare --prove` has."""
Dialect = Annotated[str, typer.Option(help='"short", or "mil": every attribute and number too.')]


@subcommand()
def run(
    model: Model,
    inputs: Values = None,
    out: Outputs = None,
    precision: Precision = "fp16",
    engine: Engine = registry.INTERPRETER,
    function: Function = None,
    member: Member = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> Outcome:
    """Run a model once, and show or write its outputs."""
    import numpy as np

    from anesurgery.files import arrays
    from anesurgery.files.writing import check_place
    from anesurgery.interpret import Predictor
    from anesurgery.show import surgeries

    if out is not None:
        check_place(out.expanduser().absolute(), overwrite, Path(model).expanduser())
    with waiting("running the model"):
        predictor = Predictor(model, precision=precision, function=function, member=member)
        values = predictor.sample(seed) if inputs is None else arrays.read(inputs)
        drawn = "" if inputs is not None else surgeries.sampled_words(values, seed)
        if engine == registry.INTERPRETER:
            results = predictor(values)
        else:
            results = registry.engine(engine)(model, values, function=function, member=member)
        outputs = {
            name: np.array([*value.values()], np.float32) if isinstance(value, dict) else np.asarray(value)
            for name, value in results.items()
        }
    if out is not None:
        arrays.write(out, outputs, overwrite, Path(model))
    shown = surgeries.arrays_report(outputs, drawn)
    return Outcome(surgeries.arrays_json(outputs), shown=shown, wrote=[out], then=to_certify(model))


@subcommand("checking.comparison:compare", waits="running both models", screen=True)
def compare(call: Call, a: Model, b: Model, precision: Precision = "fp16") -> Outcome:
    """Run two models on the same inputs, and measure the difference."""
    return _compared(call(a, b, precision=precision), a, b)


def _compared(comparison: Any, a: str, b: str) -> Outcome:
    """Return the outcome: exit code 1 where outputs differ, or an op is neither proved equal nor checked."""
    ok = comparison.ok and (comparison.proof is None or comparison.proof.grade is not None)
    then = to_certify(b) if ok else command("diff", a, b)
    return Outcome(comparison, then=then, code=int(not ok))


@subcommand()
def diff(a: Model, b: Model, dialect: Dialect = "short") -> Outcome:
    """Show how two models differ: interface, number of ops, program text."""
    from anesurgery.loading import interface, load_whole, to_text
    from anesurgery.rewriting.ml_program import op_counts

    with waiting("reading both models"):
        old, new = load_whole(a), load_whole(b)
        first, second = (to_text(model, dialect=dialect).splitlines() for model in (old, new))
        lines = list(difflib.unified_diff(first, second, a, b, lineterm="", n=2))
        words = interface(old).difference(interface(new))
    before, after = op_counts(old.program), op_counts(new.program)
    moved = {
        kind: [before.get(kind, 0), after.get(kind, 0)]
        for kind in sorted(before.keys() | after.keys())
        if before.get(kind, 0) != after.get(kind, 0)
    }
    ops = ", ".join(f"{k} {x} -> {y}" for k, (x, y) in moved.items())
    shown = [*lines, *[""] * (not lines), f"interface: {words or 'the same'}", f"ops: {ops or 'the same'}"]
    plain = {"interface": words, "ops": moved, "text": lines}
    then = command("see" if words else "compare", a, b)  # numbers of two interfaces may not be comparable
    return Outcome(plain, shown=tuple(shown), then=then, code=int(bool(lines or words)))


@subcommand("checking.comparison:compare", waits="running both models", screen=True, without=NOT_PROVED)
def prove(call: Call, a: Model, b: Other = None, inputs: Inputs = None, target: Aim = None) -> Outcome:
    """Prove that two models are the same. With one model: certify its numbers in fp16.

    Exit code 1: outputs differ, or an op is neither proved equal nor checked on numbers.
    """
    if b is None:
        certificate = call.of("placement.certifying:certify", "running the model in each arithmetic")
        return certified(certificate(a, inputs, target=target), a, target)
    return _compared(call(a, b, prove=True), a, b)
