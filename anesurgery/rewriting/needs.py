"""Check that the values that an edit reads stay below the magnitudes up to which the edit holds.

A pass states the largest magnitude for which its edit is right, in one of these ways:

* the attribute `magnitude` of the pass holds for every operand of the edit;
* `m.bind(limits=...)` has a limit for each value: in `fuse_attention` {factor of the scores: 65504}, since
  beyond it one order of two factors overflows in fp16;
* an `UpperLimit` concerns positive numbers only: in `causal_mask_tensor` a term that is added to masked scores
  must not be too large, but may be any negative number.

`driver.py` calls `needs_of` before it accepts an edit without a proof for all numbers:

* if the intervals of the program show that each value stays below its limit, the edit needs nothing (None);
* else the program is run on the caller's inputs, or on random ones. If the values stay below their limits
  there, the edit is accepted with a `Needs`, which reports print: "holds up to 65504; on 2 given sets of inputs
  %q reaches 41";
* else the edit is refused (`Refusal`): "%q reaches 7e+04 on ...; the rewrite holds up to 65504".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from anesurgery.checking.edit_sites import lies_within
from anesurgery.checking.grades import UpperLimit
from anesurgery.errors import Refusal, SurgeryError
from anesurgery.files.interface import adapt_inputs
from anesurgery.interpret.predictor import run
from anesurgery.interpret.sampling import sample_function
from anesurgery.interpret.table import Listener
from anesurgery.mil import Function, Operation, Program, Var, types
from anesurgery.rewriting.session import Needs, Session
from anesurgery.semantics.intervals import stored_score


class _LargestValues(Listener):
    """Records the largest number and magnitude of each float value of a run; NaN if the value has a NaN."""

    def __init__(self) -> None:
        self.reached: dict[tuple[str, bool], float] = {}
        """(name, True) -> the largest number; (name, False) -> the largest magnitude."""

    def see(self, name: str, value: Any) -> None:
        """Update the record of a name with a value."""
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            for signed, numbers in ((False, value.abs()), (True, value)):
                most = float(numbers.amax()) if value.numel() else 0.0
                before = self.reached.get((name, signed), 0.0)
                self.reached[name, signed] = math.nan if math.isnan(most + before) else max(most, before)

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Update the record of each output of an op."""
        for var, value in zip(op.outputs, outputs, strict=True):
            self.see(var.name, value)


def needs_of(
    limits: Mapping[Var, float], session: Session, program: Program, function: Function
) -> Needs | Refusal | None:
    """Return whether the values that an edit reads stay below its limits.

    Args:
        limits: float value that the edit reads -> the largest magnitude up to which the edit holds.
        session: has the caller's inputs, and the largest values of earlier runs.
        program: the program that is edited.
        function: the function of the program.

    Returns:
        None if the intervals show it for all inputs; `Needs` if only a run on some inputs shows it; a `Refusal`
        if a value is larger on these inputs, or cannot be computed.
    """
    unproved = {
        v: most for v, most in limits.items() if not (lies_within(v, most) or stored_score(v, most) <= most)
    }
    if not unproved:
        return None
    try:
        reached = {v: _largest_in_run(v, most, session, program, function) for v, most in unproved.items()}
    except SurgeryError as error:
        var, most = next(iter(unproved.items()))
        why = str(error).splitlines()[0]
        return Refusal(f"holds up to {most:g}, and what %{var.name} reaches could not be computed: {why}")
    words = _inputs_in_words(session, program, function)
    for var, most in unproved.items():
        if not reached[var] <= most:
            return Refusal(
                f"%{var.name} reaches {reached[var]:.4g} on {words}; the rewrite holds up to {most:g}"
            )
    nearest = max(unproved, key=lambda v: reached[v] / unproved[v])
    return Needs(nearest.name, unproved[nearest], reached[nearest], words)


def _largest_in_run(var: Var, limit: float, session: Session, program: Program, function: Function) -> float:
    """Return the largest magnitude of a value in a run (number, for an `UpperLimit`); 0 in a branch not taken.

    Raises:
        SurgeryError: the program cannot be run, or a loop passes the value on.
    """
    if var.op is None and var.name not in function.inputs:
        raise SurgeryError("a loop passes it on")
    name = next(name for name, candidate in program.functions.items() if candidate is function)
    key = _program_key(session, name, function)
    record, entry = session.reached.get(key, {}), (var.name, isinstance(limit, UpperLimit))
    if math.isnan(record.get(entry, math.nan)):  # an edit may have repaired a NaN of an earlier run
        record = session.reached[key] = _run_and_record(session, program, name)
    return record.setdefault(entry, 0.0)


def _program_key(session: Session, name: str, function: Function) -> tuple[str, ...]:
    """Return a key that changes when values of one name may have other numbers than in an earlier run.

    Only edits that were not checked by themselves may change them, so the names of their passes are in the key.
    """
    unchecked_passes = dict.fromkeys(change.pass_name for change in session.changes if change.unchecked)
    return (name, *function.inputs, "", *(v.name for v in function.outputs), "", *unchecked_passes)


def _run_and_record(session: Session, program: Program, name: str) -> dict[tuple[str, bool], float]:
    """Run a function on the inputs and return the largest values, as `_LargestValues` records them."""
    listener = _LargestValues()
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


def _inputs_in_words(session: Session, program: Program, function: Function) -> str:
    """Return in words on which inputs the program was run."""
    count = len(_given_inputs(session, program, function))
    if not count:
        return "drawn inputs"
    return f"{count} given set{'s' if count > 1 else ''} of inputs"
