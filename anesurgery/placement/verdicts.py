"""Judge the ops of a function, choose their units together, and cut it into segments."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from operator import add
from typing import Any, TypeAlias

from anesurgery.facts.dependence import fixed_ops, loop_rounds
from anesurgery.files.copying import origins
from anesurgery.files.package import Loaded
from anesurgery.mil import (
    Block,
    Function,
    Operation,
    Var,
    any_symbolic,
    constant,
    function_of,
    is_output,
    is_stored,
    is_symbolic,
    is_weight,
    operands,
)
from anesurgery.placement import cost
from anesurgery.placement.evidence import Finding, Grade, Rule, Scope, general
from anesurgery.placement.flexible import AtShape, Flexible, Shapes, at, description_of, flexible, in_words
from anesurgery.placement.inspection import Estimate, Segment
from anesurgery.placement.rules import conditions
from anesurgery.placement.rules.legality import (
    FORBIDDEN,
    INDEXED,
    LEGAL,
    READS_BYTES,
    SPLIT_ATTENTION,
    WITH_STATE,
)
from anesurgery.placement.rules.slow import FIXED, makers
from anesurgery.placement.target import Target
from anesurgery.semantics.analysis_cache import caching
from anesurgery.semantics.reading import kind_of, shape_of
from anesurgery.semantics.rows import Work, runtime, work_of


class Legality:
    """The rows that concern a target, by op type."""

    def __init__(self, target: Target) -> None:
        self.target = target
        speaking = [r for r in FORBIDDEN if r.scope.concerns(target)]
        self._any = [r for r in speaking if not r.ops]
        self._far = [rule for rule in speaking if rule.far]
        self._own: dict[str, list[Rule]] = {}
        for rule in speaking:
            for op_type in rule.ops:
                self._own.setdefault(op_type, []).append(rule)

    def forbids(self, rule: Rule) -> bool:
        """Rows of the private compiler raise no more than a doubt on the chip on which Core ML was measured."""
        return rule.legal is False and not (rule.scope.via != "Core ML" and self.target.on_measured_chip)

    def _found(self, rule: Rule, op: Operation) -> str:
        """What a row finds in an op, in words; "" where it does not speak of it."""
        return rule.test(op, self.target) if rule.test is not None else f"{op.op_type}: {rule.because}"

    def looks_far(self, op: Operation) -> bool:
        """May a row look further than at the neighbours of an op?"""
        far = {rule.far for rule in self._far if not rule.ops or op.op_type in rule.ops}
        integers = conditions.WIDE | conditions.INDEX
        return "any" in far or ("integers" in far and bool(conditions.typed(conditions.values(op), integers)))

    def speaking(self, op: Operation) -> Iterator[Finding]:
        """Every row that forbids an op or makes it doubtful, of which a verdict names the first."""
        for rule in (*self._own.get(op.op_type, ()), *self._any):
            if value := self._found(rule, op):
                yield self._finding(rule, op, value)

    def _finding(self, rule: Rule, op: Operation, value: str) -> Finding:
        return rule.finding_of(op, op.outputs[0].name, value, self.target)

    def verdict(self, op: Operation) -> tuple[bool | None, Finding | None]:
        """Can the ANE run the op? True; False with the reason; or None, with what makes it doubtful.

        None without a finding: no row knows the op, or the integers that it works on.
        """
        doubt: Finding | None = None
        for rule in (*self._own.get(op.op_type, ()), *self._any):
            value = self._found(rule, op)
            if value and self.forbids(rule):
                return False, self._finding(rule, op, value)
            if value and doubt is None:
                doubt = self._finding(rule, op, value)
        listed = op.op_type in LEGAL or op.op_type in WITH_STATE or splits_attention(op)
        return (True if listed and doubt is None and not _untried(op) else None), doubt


def splits_attention(op: Operation) -> bool:
    """Is it an einsum of one head, channels before tokens?"""
    return op.op_type == "einsum" and constant(op.equation) in SPLIT_ATTENTION


def _untried(op: Operation) -> bool:
    """Does it work on integers with which it was not seen?"""
    if op.op_type not in INDEXED and conditions.typed(conditions.values(op), conditions.INDEX):
        return True
    return op.op_type not in READS_BYTES and bool(conditions.typed(runtime(op), conditions.BYTES))


LAUNCH = SWITCH = OUTPUT = 125.0
"""Microseconds: a segment on the ANE, a change of the unit, the last op off the CPU."""

CPU, ANE, GPU = range(3)
Costs = Sequence[float]
"""Of one op on each unit, in microseconds; infinite where it cannot run."""


def _enter(unit: int) -> float:
    return LAUNCH if unit == ANE else 0.0


def _move(old: int, new: int) -> float:
    return 0.0 if old == new else SWITCH + _enter(new)


def _end(unit: int) -> float:
    return 0.0 if unit == CPU else OUTPUT


def shortest(steps: Sequence[Costs]) -> list[int]:
    """The unit of each op; of equal paths, one that is longer on the unit that comes first."""
    if not steps:
        return []
    units = [u for u, column in enumerate(zip(*steps, strict=True)) if min(column) < math.inf] or [CPU]
    steps = [[step[u] for u in units] for step in steps] if len(units) < len(steps[0]) else steps
    costs, came = list(map(add, map(_enter, units), steps[0])), list[list[int]]()
    moves = [[_move(old, new) for old in units] for new in units]
    for step in steps[1:]:
        origins, reached = [], []
        for row, work in zip(moves, step, strict=True):
            ways = list(map(add, costs, row))
            least = min(ways)
            origins.append(ways.index(least))
            reached.append(least + work)
        came.append(origins)
        costs = reached
    path = [min(range(len(units)), key=lambda at: costs[at] + _end(units[at]))]
    for origins in reversed(came):
        path.append(origins[path[-1]])
    return [units[at] for at in reversed(path)]


def total(steps: Sequence[Costs], path: Sequence[int]) -> float:
    """The cost of a path in microseconds."""
    if not steps:
        return 0.0
    work = sum(step[unit] for step, unit in zip(steps, path, strict=True))
    moves = sum(_move(a, b) for a, b in itertools.pairwise(path))
    return _enter(path[0]) + work + moves + _end(path[-1])


UNITS = {CPU: "cpu", ANE: "ane", GPU: "gpu"}


@dataclass
class Judged:
    """What is known of one op; its unit is chosen last."""

    op: Operation
    depth: int
    """Nesting in control flow."""
    legal: bool | None
    findings: tuple[Finding, ...]
    work: Work
    estimate: Estimate | None
    rounds: int = 1
    """How often it runs, in a loop of so many rounds."""

    @property
    def name(self) -> str:
        """The name of the first result: it lives in packages, the name of the op does not."""
        return self.op.outputs[0].name


class Findings:
    """Rows that speak about speed and numbers, by op type."""

    def __init__(self, rules: Iterable[Rule], target: Target) -> None:
        self.target = target
        self._any: list[Rule] = []
        self._own: dict[str, list[Rule]] = {}
        for rule in rules:
            if not rule.scope.concerns(target):
                continue
            for home in [self._own.setdefault(t, []) for t in rule.ops] or [self._any]:
                home.append(rule)

    def about(self, op: Operation) -> tuple[Finding, ...]:
        """What the rows say of an op."""
        rules = (*self._own.get(op.op_type, ()), *self._any)
        said = [(r, r.test(op, self.target)) for r in rules if r.test is not None]
        return tuple(r.finding_of(op, op.outputs[0].name, value, self.target) for r, value in said if value)


Verdict: TypeAlias = tuple[bool | None, Finding | None, Work, Estimate | None]
"""Can the ANE run an op, why not, what it computes, and what that costs."""


@dataclass(eq=False)
class Known:
    """Verdicts of the ops of a program, for copies of it made within: what an edit left is not judged again."""

    origins: dict[Any, Any] = field(default_factory=dict)
    """Op or value of a copy -> of which it is one, through copies of copies."""
    verdicts: dict[tuple[Any, ...], Verdict] = field(default_factory=dict)
    judged: int = 0
    """Ops that were judged anew."""

    @contextmanager
    def within(self) -> Iterator[None]:
        """Note copies, and take verdicts of them from here."""
        token = _KNOWN.set(self)
        try:
            with origins(self.origins):
                yield
        finally:
            _KNOWN.reset(token)

    def verdict(self, op: Operation, legality: Legality) -> Verdict:
        """That of an op that reads the same values, and whose results the same ops read."""
        key = legality.target, *self._neighbours(op)
        found = self.verdicts.get(key)
        if found is None:
            self.judged += 1
            found = _verdict(op, legality)
            if not legality.looks_far(op):
                self.verdicts[key] = found
        return found

    def _neighbours(self, op: Operation) -> Iterator[Any]:
        """What a verdict looks at: values are the same where name and type are too, which edits may change."""
        first = self.origins.get
        yield first(op, op)
        for v in (*op.outputs, *(v for one in (op, *makers(op)) for _, v in operands(one))):
            yield from (first(v, v), v.name, v.sym_type)
        for v in op.outputs:
            yield bool(v.consuming_blocks)
            yield from (first(reader, reader) for reader in v.child_ops)


_KNOWN: ContextVar[Known | None] = ContextVar("known", default=None)


def _verdict(op: Operation, legality: Legality) -> Verdict:
    work = work_of(op)
    return *legality.verdict(op), work, cost.estimate(op, work, legality.target)


def judge(function: Function, target: Target, rules: Iterable[Rule] = ()) -> list[Judged]:
    """Every op in file order, constants left out, nested blocks included.

    What an op of a loop computes and costs counts once for each round, where their number is known.
    """
    legality, notes = Legality(target), Findings(rules, target)
    verdict = _verdict if (known := _KNOWN.get()) is None else known.verdict
    rows: list[Judged] = []

    def walk(block: Block, depth: int, times: int) -> None:
        fixed = fixed_ops(block)
        for op in block.operations:
            if is_weight(op):
                continue
            legal, why, work, costs = verdict(op, legality)
            if depth and legal is not False:
                legal, why = False, _nested(op)
            findings = ((why,) if why else ()) + notes.about(op)
            if op in fixed and not any(is_output(v) for v in op.outputs):
                name = op.outputs[0].name
                findings += (FIXED.finding(f"%{name} is the same in every run", name),)
            costs, work = costs and costs.times(times), work.times(times)
            rows.append(Judged(op, depth, legal, findings, work, costs, times))
            inner = times * (loop_rounds(op) or 1) if op.op_type == "while_loop" else times
            for nested in op.blocks:
                walk(nested, depth + 1, inner)

    with caching():
        walk(function, 0, 1)
    return rows


def longest_chain(judged: Iterable[Judged]) -> int:
    """Ops of the longest row in which each waits for the one before; those of a loop count in each round."""
    ends: dict[Var, int] = {}
    for one in judged:
        end = one.rounds + max((ends.get(v, 0) for v in runtime(one.op)), default=0)
        ends |= dict.fromkeys((*one.op.outputs, *(v for b in one.op.blocks for v in b.inputs)), end)
        for outer in _around(one.op):
            ends |= {v: max(ends[v], end) for v in outer.outputs}
    return max(ends.values(), default=0)


def _around(op: Operation) -> Iterator[Operation]:
    """The ops in whose blocks an op stands, the innermost first."""
    block = op.enclosing_block
    while block is not None and block.outer_op is not None:
        yield block.outer_op
        block = block.outer_op.enclosing_block


NESTED = general(
    "control-flow",
    "a program of the engine is a static graph; no value can steer it at run time",
    "sbryngelson/ane-guide: part-1-machine/02-execution-model",
    legal=False,
    grade=Grade.REPORTED,
    scope=Scope(os="read from the compiler and its operations", via="compiler"),
    remedy="unroll_loop",
    advice="unroll it, or use select",
)


def _nested(op: Operation) -> Finding:
    outer = next(_around(op))
    return NESTED.finding(f"inside {outer.op_type} %{outer.name}", op.outputs[0].name)


@dataclass(frozen=True)
class View:
    """What is taken for true where it is not known, while a path is looked for.

    Attributes:
        hopeful: doubtful ops are legal, and estimates are off in favour of the ANE; otherwise the opposite.
            None: doubtful ops are illegal, and estimates are right.
        gpu: what the GPU costs: "guess", "free", or "" where it is out of the question.
        ane: may the ANE run anything at all?
    """

    hopeful: bool | None
    gpu: str = ""
    ane: bool = True


def views(target: Target, doubts: Sequence[Finding] = ()) -> tuple[View, ...]:
    """The extremes between which the truth lies; an op has a place where all of them give it the same.

    Args:
        target: chips, OS and compute units.
        doubts: why the ANE may run nothing of the model (`rules.whole_model`).
    """
    gpu = "guess" if target.gpu_fitted else ""
    extremes = [View(True, gpu), View(False, gpu)]
    if target.uses_gpu and not gpu:
        extremes.append(View(True, "free"))
    if doubts:
        extremes.append(View(False, gpu, ane=False))
    return tuple(extremes)


def choose(
    judged: Sequence[Judged], target: Target, doubts: Sequence[Finding] = ()
) -> tuple[list[str | None], float]:
    """The unit that each op prefers, None where it is not known; and what the likeliest path costs."""
    ways = views(target, doubts)
    paths = [shortest([_costs(j, target, view) for j in judged]) for view in ways]
    units = [
        UNITS[path[0]] if len(set(path)) == 1 and _is_known(j) else None
        for j, *path in zip(judged, *paths, strict=True)
    ]
    return units, likeliest(judged, target)


def likeliest(judged: Sequence[Judged], target: Target) -> float:
    """What the likeliest path costs in microseconds."""
    plain = [_costs(j, target, View(None, "guess" if target.gpu_fitted else "")) for j in judged]
    return total(plain, shortest(plain))


def _is_known(judged: Judged) -> bool:
    """An op without an estimate has a place only where the ANE is out of the question."""
    return judged.legal is False or judged.estimate is not None


def _costs(judged: Judged, target: Target, view: View) -> tuple[float, float, float]:
    """The costs of the op on each unit."""
    guess = judged.estimate or Estimate(0.0, 0.0)
    ane, cpu = _times(guess, view.hopeful)
    may = target.uses_ane and view.ane
    legal = may and (judged.legal or (judged.legal is None and bool(view.hopeful)))
    return cpu, ane if legal else math.inf, _on_gpu(judged, guess, view, legal)


def _times(guess: Estimate, hopeful: bool | None) -> tuple[float, float]:
    """(ANE, CPU) as estimated, or as far off as may be, in favour of the ANE or against it."""
    told = (guess.ane or 0.0, guess.cpu or 0.0)
    if hopeful is None:
        return told
    choose_ = max if hopeful else min
    ane, cpu = choose_([told, *guess.or_else], key=lambda pair: pair[1] - pair[0])
    off_ane, off_cpu = guess.off
    return (ane / off_ane, cpu * off_cpu) if hopeful else (ane * off_ane, cpu / off_cpu)


def _on_gpu(judged: Judged, guess: Estimate, view: View, legal: bool) -> float:
    if view.gpu == "free":
        return 0.0
    fits = view.gpu and guess.gpu is not None and not (legal and judged.op.op_type in cost.SUMS)
    return guess.gpu if fits and guess.gpu is not None else math.inf


def segments_of(
    judged: Sequence[Judged], units: Sequence[str | None], function: Function
) -> tuple[tuple[Segment, ...], list[int]]:
    """The segments in file order, and the number of that of each op."""
    changed = [a != b for a, b in itertools.pairwise(units)]
    numbers = list(itertools.accumulate(changed, initial=0))[: len(units)]
    home = {v: n for j, n in zip(judged, numbers, strict=True) for v in j.op.outputs}
    members: dict[int, list[Judged]] = {}
    for j, n in zip(judged, numbers, strict=True):
        members.setdefault(n, []).append(j)
    unit = dict(zip(numbers, units, strict=True))
    results = set(function.outputs)
    segments = [_segment(n, ops, unit[n], home, results) for n, ops in members.items()]
    return tuple(segments), numbers


def with_times(
    segments: Iterable[Segment], numbers: Sequence[int], each: Sequence[float]
) -> tuple[Segment, ...]:
    """The segments with the milliseconds of their ops; `numbers` says to which an op belongs."""
    if not each:
        return tuple(segments)
    spent: defaultdict[int, float] = defaultdict(float)
    for number, ms in zip(numbers, each, strict=True):
        spent[number] += ms
    return tuple(replace(segment, ms=spent[segment.index]) for segment in segments)


def _segment(
    number: int, members: Sequence[Judged], unit: str | None, home: dict[Var, int], results: set[Var]
) -> Segment:
    read = dict.fromkeys(v for j in members for _, v in operands(j.op) if not is_stored(v))
    readers = {v: _readers(v, home) - {number} for j in members for v in j.op.outputs}
    outside = [v for v, others in readers.items() if others or v in results]
    return Segment(
        number,
        unit,
        tuple(j.name for j in members),
        {v.name: shape_of(v) for v in read if home.get(v) != number},
        {v.name: shape_of(v) for v in outside},
        tuple(sorted({n for v in outside for n in readers[v]})),
    )


def _readers(var: Var, home: dict[Var, int]) -> set[int]:
    return {home[out] for op in var.child_ops for out in op.outputs if out in home}


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


def found_by(loaded: Loaded, target: Target, rules: Sequence[Rule]) -> Iterator[Finding]:
    """What some rules say of the ops of all functions."""
    asked = {rule.id for rule in rules}
    shaped = (judge_shaped(loaded, name, target, rules) for name in loaded.program.functions)
    yield from (f for one in shaped for judged in one.judged for f in judged.findings if f.rule in asked)


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
