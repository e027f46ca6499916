"""What an edit needs of the values that it reads: ranges, or a run on the inputs, show that none is larger."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from anesurgery.checking.grades import AtMost
from anesurgery.checking.site import lies_within
from anesurgery.errors import Refusal, SurgeryError
from anesurgery.files.interface import adapt_inputs
from anesurgery.interpret.predictor import run
from anesurgery.interpret.sampling import sample_function
from anesurgery.interpret.table import Listener
from anesurgery.mil import Function, Operation, Program, Var, types
from anesurgery.rewriting.session import Needs, Session
from anesurgery.semantics.intervals import stored_score


class _Largest(Listener):
    """Keeps the largest magnitude of each float by name, and the largest number; NaN where there was one."""

    def __init__(self) -> None:
        self.reached: dict[tuple[str, bool], float] = {}
        """(name, signed?) -> the largest number, or the largest magnitude."""

    def see(self, name: str, value: Any) -> None:
        """Take one more value into account."""
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            for signed, numbers in ((False, value.abs()), (True, value)):
                most = float(numbers.amax()) if value.numel() else 0.0
                seen = self.reached.get((name, signed), 0.0)
                self.reached[name, signed] = math.nan if math.isnan(most + seen) else max(most, seen)

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Widen the range of each output."""
        for var, value in zip(op.outputs, outputs, strict=True):
            self.see(var.name, value)


def needs_of(
    limits: Mapping[Var, float], session: Session, program: Program, function: Function
) -> Needs | Refusal | None:
    """What an edit needs that only a run shows.

    Args:
        limits: the floats that it reads, each with the largest magnitude up to which the edit holds.
        session: has the inputs, and what earlier runs showed.
        program: in which the edit is made.
        function: of the program.

    Returns:
        The `Needs` that hold on these inputs; a `Refusal` where a value is larger, or cannot be computed; None
        where the intervals show everything.
    """
    shown = {v for v, most in limits.items() if lies_within(v, most) or stored_score(v, most) <= most}
    open_ = {v: most for v, most in limits.items() if v not in shown}
    if not open_:
        return None
    try:
        reached = {v: _reached(v, most, session, program, function) for v, most in open_.items()}
    except SurgeryError as error:
        var, most = next(iter(open_.items()))
        why = str(error).splitlines()[0]
        return Refusal(f"holds up to {most:g}, and what %{var.name} reaches could not be computed: {why}")
    words = _words(session, program, function)
    for var, most in open_.items():
        if not reached[var] <= most:
            return Refusal(
                f"%{var.name} reaches {reached[var]:.4g} on {words}; the rewrite holds up to {most:g}"
            )
    nearest = max(open_, key=lambda v: reached[v] / open_[v])
    return Needs(nearest.name, open_[nearest], reached[nearest], words)


def _reached(var: Var, limit: float, session: Session, program: Program, function: Function) -> float:
    """The largest number or magnitude, as a limit asks; 0 in a branch that no input takes.

    Earlier runs are looked up first.

    Raises:
        SurgeryError: the program cannot be run, or a loop passes the value on.
    """
    if var.op is None and var.name not in function.inputs:
        raise SurgeryError("a loop passes it on")
    name = next(name for name, one in program.functions.items() if one is function)
    key = _program_key(session, name, function)
    seen, asked = session.reached.get(key, {}), (var.name, isinstance(limit, AtMost))
    if math.isnan(seen.get(asked, math.nan)):  # an edit may have repaired what was NaN in an earlier run
        seen = session.reached[key] = _observed(session, program, name)
    return seen.get(asked, 0.0)


def _program_key(session: Session, name: str, function: Function) -> tuple[str, ...]:
    """What tells one program from another in which values of the same names are others.

    Edits keep the values that keep their names, but for those of which only whole models are compared.
    """
    unlike = dict.fromkeys(change.pass_name for change in session.changes if change.unchecked)
    return (name, *function.inputs, "", *(v.name for v in function.outputs), "", *unlike)


def _observed(session: Session, program: Program, name: str) -> dict[tuple[str, bool], float]:
    """What the floats of a function reach, as `_Largest` keeps it."""
    listener = _Largest()
    for values in _inputs(session, program, name):
        for entry, value in values.items():
            listener.see(entry, torch.as_tensor(value) if isinstance(value, np.ndarray) else value)
        run(program, values, function=name, listener=listener)
    return listener.reached


def _inputs(session: Session, program: Program, name: str) -> list[Mapping[str, Any]]:
    """Return the inputs that the caller gave; one random set if they do not fit the program."""
    function = program.functions[name]
    given = _given_inputs(session, program, function)
    return given or [sample_function(function, seed=session.seed, images=session.images)]


def _given_inputs(session: Session, program: Program, function: Function) -> list[Mapping[str, Any]]:
    """Return the inputs that the caller gave, as the program takes them now; none if they do not fit."""
    if len(program.functions) > 1:
        return []
    names = {entry for entry, var in function.inputs.items() if not types.is_state(var.sym_type)}
    adapted = [adapt_inputs(session.contract, values) for values in session.samples]
    if not all(names <= values.keys() for values in adapted):
        return []
    return [{entry: values[entry] for entry in names} for values in adapted]


def _words(session: Session, program: Program, function: Function) -> str:
    """Return on which inputs values were seen."""
    count = len(_given_inputs(session, program, function))
    return "drawn inputs" if not count else f"{count} given set{'s' if count > 1 else ''} of inputs"
