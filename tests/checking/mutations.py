"""Mutations of a rewrite: one constant, attribute, sign or order of operands of its new ops is another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from anesurgery.checking import site
from anesurgery.checking.adversarial import Drawing
from anesurgery.checking.grades import SiteCheck
from anesurgery.checking.numbers import as_tensor
from anesurgery.checking.site import check_site
from anesurgery.errors import SurgeryError
from anesurgery.interpret import TABLE, Evaluator
from anesurgery.mil import Operation, Program, Var, constant, mb, reads, types
from anesurgery.rewriting.passes import Pass
from anesurgery.testing import apply_pass

NOT_COMMUTING = {
    **dict.fromkeys(("sub", "real_div", "floor_div", "mod", "pow", "matmul"), ("x", "y")),
    **dict.fromkeys(("greater", "greater_equal", "less", "less_equal"), ("x", "y")),
    "select": ("a", "b"),
}
"""Op type -> its operands whose order matters."""


@dataclass(frozen=True)
class Mutation:
    """One operand of one op replaced."""

    op: Operation
    what: str
    changed: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.op.op_type}: {self.what}"

    @contextmanager
    def made(self) -> Iterator[None]:
        """The op as mutated, for a while."""
        operands = self.op._input_vars
        before = dict(operands)
        operands.update(self.changed)
        try:
            yield
        finally:
            operands.update(before)


def mutations(ops: Sequence[Operation]) -> Iterator[Mutation]:
    """All mutations of some ops."""
    for op in ops:
        if op.op_type != "const":
            yield from _swaps(op)
            for name, var in op.inputs.items():
                value = constant(var) if isinstance(var, Var) else None
                if value is not None and not isinstance(value, str):
                    yield from _others(op, name, np.asarray(value))


def _swaps(op: Operation) -> Iterator[Mutation]:
    if op.op_type in NOT_COMMUTING:
        x, y = NOT_COMMUTING[op.op_type]
        if op.inputs[x] is not op.inputs[y]:
            yield Mutation(op, f"{x} and {y} swapped", {x: op.inputs[y], y: op.inputs[x]})
    if op.op_type == "concat" and len(set(op.inputs["values"])) > 1:
        yield Mutation(op, "values reversed", {"values": tuple(reversed(op.inputs["values"]))})


def _others(op: Operation, name: str, value: Any) -> Iterator[Mutation]:
    """Other constants, except those that are the same once rounded, and attributes that change nothing."""
    meaning = TABLE.get(op.op_type)  # decoded weights have none: they are constants
    number = value.dtype.kind == "f" and not (meaning and meaning.moves)
    for what, other in _other_values(name, value):
        made = Mutation(op, f"{name}{what}", {name: const(other)})
        if not np.array_equal(other, value) and (number or not _same(made)):
            yield made


def _same(mutation: Mutation) -> bool:
    """Does the op compute the same with another attribute? Axes in another order, padding that is not read."""
    op = mutation.op
    inputs = [v for v in reads(op) if constant(v) is None]
    if any(types.is_list(v.sym_type) for v in (*op.outputs, *inputs)):
        return False
    rng, outside = np.random.default_rng(0), Drawing(lambda v, rng: None)
    numbers = {v: as_tensor(outside.draw(v, "normal", rng)) for v in inputs}
    before = Evaluator([op], op.outputs)(numbers)
    with mutation.made():
        try:
            after = Evaluator([op], op.outputs)(numbers)
        except (SurgeryError, ValueError):  # another number of outputs is a ValueError
            return False
    return all(
        a.shape == b.shape and np.array_equal(a, b, a.is_floating_point())
        for a, b in zip(before, after, strict=True)
    )


def const(value: Any) -> Var:
    """A constant outside any model."""
    made: list[Var] = []

    @mb.program(input_specs=[mb.TensorSpec((1,))])
    def holder(x: Var) -> Var:
        made.append(mb.const(val=value))
        return mb.identity(x=x)

    HELD.append(holder)
    return made[0]


HELD: list[Program] = []
"""Programs that keep the constants alive."""


def _other_values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values next to one, each with words: an element larger by one, negated, or two swapped."""
    if value.size == 0:
        return
    flat = value.reshape(-1)
    at = int(np.argmax(flat != 0))
    if value.dtype.kind == "b":
        yield _changed(value, at, ~flat[at], " flipped")
        return
    if name == "perm":
        swapped = value.copy()
        swapped[[-2, -1]] = swapped[[-1, -2]]
        yield " with two axes swapped", swapped
        return
    if value.dtype.kind in "fiu":
        yield _changed(value, at, flat[at] + 1, " + 1")
        if value.size <= 4096 and not np.array_equal(flat, flat[::-1]):
            yield " reversed", flat[::-1].reshape(value.shape).copy()
        if value.dtype.kind in "fi" and flat[at] != 0:
            yield _changed(value, at, -flat[at], " negated")


def _changed(value: Any, at: int, to: Any, what: str) -> tuple[str, Any]:
    made = value.copy().reshape(-1)
    made[at] = to
    return f"[{at}]{what}", made.reshape(value.shape)[()]


def outcomes(step: Pass, model: Any, patch: pytest.MonkeyPatch, enough: float = math.inf) -> dict[str, bool]:
    """Mutation -> was it caught by the checks of sites, for the edits that a pass makes of a model.

    Args:
        step: the pass.
        model: a program, or a specification.
        patch: undoes what is changed meanwhile.
        enough: so many that were caught end the search.
    """
    found: dict[str, bool] = {}

    def tried(
        replaced: Any, new_ops: Sequence[Operation], sample: Any, seed: int, matched: Any,
        known: Any, promise: Any, declared: Any,
    ) -> Any:  # fmt: skip
        arguments = (replaced, new_ops, sample, seed, matched)
        right = check_site(*arguments, promise=promise, declared=declared)
        for mutation in mutations(new_ops) if isinstance(right, SiteCheck) else ():
            if sum(found.values()) >= enough:
                break
            with mutation.made():
                try:
                    check = check_site(*arguments, promise=promise, declared=declared)
                except (SurgeryError, ValueError):  # a mutated split may make too many outputs
                    check = None
            caught = check is None or (isinstance(check, SiteCheck) and not check.within(promise.tolerance))
            found[str(mutation)] = found.get(str(mutation), True) and caught
        return right

    patch.setattr(site, "check_site", tried)
    apply_pass(step, model)
    return found
