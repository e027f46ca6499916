"""Judge the ops of a function, at the default shape of its inputs where they may vary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from anesurgery.files.package import Loaded
from anesurgery.mil import Function, Operation, any_symbolic, function_of, is_symbolic, operands
from anesurgery.placement.evidence import Finding, Rule
from anesurgery.placement.flexible import AtShape, Flexible, Shapes, at, description_of, flexible, in_words
from anesurgery.placement.rules.slow import FIXED
from anesurgery.placement.target import Target
from anesurgery.placement.verdicts import Judged, choose, judge
from anesurgery.semantics.byte_sizes import kind_of

MOST = 16
"""Enumerated shapes that are looked at; Core ML takes up to 128. A choice: each is an inspection of the whole
model."""
AT_DEFAULT = "shapes, estimates and units are those of the default shape, {}"
IN_RANGE = "other shapes of a range are not known"
SOME = "{} of {} enumerated shapes are estimated, the default first"
NO_DEFAULT = (
    "the default shape of {} is not known: dynamic lengths count as 1, and what reads them has no unit; a MIL "
    "program does not tell it, so give the path of the model, or what `load` gives, as it is"
)


@dataclass(frozen=True)
class Shaped:
    """A function whose ops were judged.

    Attributes:
        function: the one that was judged, with fixed inputs where a default shape is known.
        judged: its ops.
        flexible: the shapes that it names; None where all are fixed.
        notes: what the reader must know about the shape.
    """

    function: Function
    judged: list[Judged]
    flexible: Flexible | None = None
    notes: tuple[str, ...] = ()


def judge_shaped(loaded: Loaded, name: str | None, target: Target, rules: Iterable[Rule]) -> Shaped:
    """Judge a function as it is, or at its default shape."""
    function, rules = function_of(loaded.program, name), tuple(rules)
    judged = judge(function, target, rules)
    shapes = flexible(function, description_of(loaded.description, name))
    if shapes is None:
        return Shaped(function, judged)
    fixed = _at(loaded, name, shapes.default, target, rules)
    if fixed is None and shapes.default and _all_one(function, shapes.default):
        return Shaped(function, judged, shapes, _notes(shapes))
    if fixed is None:
        dynamic = [n for n, v in function.inputs.items() if any_symbolic(v.shape or ())]
        words = ", ".join(f"%{n}" for n in dynamic)
        return Shaped(function, list(map(_unknown, judged)), shapes, (NO_DEFAULT.format(words),))
    both = [_both(a, b) for a, b in zip(judged, fixed.judged, strict=True)]
    return Shaped(fixed.function, both, shapes, _notes(shapes))


def _notes(shapes: Flexible) -> tuple[str, ...]:
    """Says at which shape the ops are told, and what is not."""
    rest = SOME.format(MOST, len(shapes.listed)) if len(shapes.listed) > MOST else ""
    rest = rest if shapes.listed else IN_RANGE
    return tuple(filter(None, (AT_DEFAULT.format(in_words(shapes.default)), rest)))


def at_each(
    loaded: Loaded,
    name: str | None,
    declared: Flexible | None,
    target: Target,
    rules: Iterable[Rule],
    doubts: Sequence[Finding] = (),
) -> tuple[AtShape, ...]:
    """The units at each enumerated shape, `MOST` at most; doubts about the whole count at each."""
    rules, told = tuple(rules), []
    for shapes in [] if declared is None else declared.listed[:MOST]:
        fixed = _at(loaded, name, shapes, target, rules)
        units: Sequence[str | None] = [None] if fixed is None else choose(fixed.judged, target, doubts)[0]
        told.append(AtShape(in_words(shapes), dict(Counter(unit or "unknown" for unit in units))))
    return tuple(told)


def _at(
    loaded: Loaded, name: str | None, shapes: Shapes, target: Target, rules: tuple[Rule, ...]
) -> Shaped | None:
    """The function at one shape, op for op."""
    if not shapes:
        return None
    function = function_of(loaded.program, name)
    key = next(n for n, f in loaded.program.functions.items() if f is function)
    fixed = at(loaded.program, key, shapes)
    return None if fixed is None else Shaped(fixed, judge(fixed, target, rules))


def _all_one(function: Function, shapes: Shapes) -> bool:
    """Are the dynamic lengths 1 at a shape, which is what they count as where they stay dynamic?"""
    pairs = [
        (d, n)
        for name, shape in shapes.items()
        for d, n in zip(function.inputs[name].shape, shape, strict=True)
    ]
    return all(n == 1 for d, n in pairs if is_symbolic(d))


def _both(dynamic: Judged, fixed: Judged) -> Judged:
    """What is said at the default shape, and what is said because lengths are dynamic."""
    verdicts = {dynamic.legal, fixed.legal}
    legal = False if False in verdicts else None if None in verdicts else True
    said = [f for f in fixed.findings if f.rule != FIXED.id]  # a length that was fixed is no constant
    more: list[Finding] = [f for f in dynamic.findings if f.rule not in {g.rule for g in said}]
    return replace(fixed, legal=legal, findings=(*said, *more))


def _unknown(judged: Judged) -> Judged:
    """Drops the estimate of an op that reads or makes a dynamic length."""
    return replace(judged, estimate=None) if _is_dynamic(judged.op) else judged


def _is_dynamic(op: Operation) -> bool:
    values = [*op.outputs, *(v for _, v in operands(op))]
    return any(any_symbolic(v.shape or ()) for v in values if kind_of(v).is_tensor)
