"""Judge each op of a function, choose the units of all ops together, and cut the function into segments.

`inspector.inspect_program` calls it in this order: `judge_shaped` asks the rules about each op (can the
engine run it, what does it cost), `choose` finds the cheapest path over CPU, engine and GPU, as Core ML's
segmenter does, and `segments_of` groups neighbouring ops of one unit. Where estimates or verdicts are
uncertain, paths are found for the extremes (`View`), and an op has a unit only if all of them agree on it.

Sections: the rules about an op; the cheapest path; judged ops; the units of all ops; segments; flexible shapes.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from operator import add
from typing import Any, NamedTuple

from anesurgery.facts.dependence import fixed_ops
from anesurgery.facts.loops import loop_rounds
from anesurgery.files.copying import recording_originals
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
from anesurgery.placement.flexible import (
    AtShape,
    Flexible,
    Shapes,
    description_of,
    flexible_shapes,
    function_at,
    function_at_all_places,
    in_words,
)
from anesurgery.placement.inspection import Estimate, Segment
from anesurgery.placement.rules import conditions
from anesurgery.placement.rules.legality import (
    FORBIDDEN,
    LEGAL,
    SPLIT_ATTENTION,
    TAKES_INT8,
    TAKES_INT16,
    UNROLL,
    WITH_STATE,
)
from anesurgery.placement.rules.slow import FIXED_VALUES, recurrent_step, remedy_for_control, weight_decoders
from anesurgery.placement.target import Target
from anesurgery.semantics.analysis_cache import caching
from anesurgery.semantics.reading import kind_of, shape_of
from anesurgery.semantics.rows import Work, runtime, work_of

# The rules about an op.


class _RulesByType:
    """Those of some rules that concern a target, by op type."""

    def __init__(self, rules: Iterable[Rule], target: Target) -> None:
        self.concerned = [rule for rule in rules if rule.scope.concerns(target)]
        self._about_all_ops = [rule for rule in self.concerned if not rule.ops]
        self._of_type: dict[str, list[Rule]] = {}
        for rule in self.concerned:
            for op_type in rule.ops:
                self._of_type.setdefault(op_type, []).append(rule)

    def about(self, op: Operation) -> Iterator[Rule]:
        """Yield the rules to ask about an op: those of its type, then those about all ops."""
        yield from self._of_type.get(op.op_type, ())
        yield from self._about_all_ops


class LegalVerdict(NamedTuple):
    """Whether the ANE can run an op."""

    legal: bool | None
    """None: unknown."""
    reason: Finding | None = None
    """The rule that forbids it, or makes it doubtful. None for a legal op, and for one whose type, or the
    integers that it works on, no rule knows."""


class Legality:
    """The rules of legality that concern a target."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._rules = _RulesByType(FORBIDDEN, target)
        self._looking_beyond = [rule for rule in self._rules.concerned if rule.looks_beyond]

    def forbids(self, rule: Rule) -> bool:
        """Does a rule that applies make an op illegal, and not only doubtful?

        Rules read from the private compiler only raise a doubt on the chip on which Core ML itself was
        measured.
        """
        return rule.legal is False and not (rule.scope.via != "Core ML" and self.target.on_measured_chip)

    def may_look_beyond(self, op: Operation) -> bool:
        """May a rule look further than at the neighbours of an op, so that its verdict cannot be cached?"""
        rules = (rule for rule in self._looking_beyond if not rule.ops or op.op_type in rule.ops)
        looked_at = {rule.looks_beyond for rule in rules}
        if "any" in looked_at:
            return True
        integers = conditions.WIDE | conditions.INDEX
        values = conditions.runtime_values(op)
        return "integers" in looked_at and bool(conditions.values_of_dtypes(values, integers))

    def _applying(self, op: Operation) -> Iterator[tuple[Rule, Finding]]:
        """Yield each rule that forbids an op or makes it doubtful, with its finding."""
        for rule in self._rules.about(op):
            words = rule.test(op, self.target) if rule.test is not None else f"{op.op_type}: {rule.because}"
            if words:
                yield rule, rule.finding_about(op, op.outputs[0].name, words, self.target)

    def speaking(self, op: Operation) -> Iterator[Finding]:
        """Yield the finding of every rule that forbids an op or makes it doubtful."""
        return (finding for _, finding in self._applying(op))

    def verdict(self, op: Operation) -> LegalVerdict:
        """Say whether the ANE can run an op. The first rule that forbids it decides, else the first doubt."""
        doubt: Finding | None = None
        for rule, finding in self._applying(op):
            if self.forbids(rule):
                return LegalVerdict(False, finding)
            doubt = doubt or finding
        listed = op.op_type in LEGAL or op.op_type in WITH_STATE or is_split_attention(op)
        is_legal = listed and doubt is None and not _has_untried_integers(op)
        return LegalVerdict(True if is_legal else None, doubt)


def is_split_attention(op: Operation) -> bool:
    """Is an op an einsum of attention over one head, with channels before tokens?"""
    return op.op_type == "einsum" and constant(op.equation) in SPLIT_ATTENTION


def _has_untried_integers(op: Operation) -> bool:
    """Does an op work on integers with which it was never seen on the engine?"""
    short = conditions.values_of_dtypes(conditions.runtime_values(op), conditions.INDEX)
    if short and op.op_type not in TAKES_INT16:
        return True
    return op.op_type not in TAKES_INT8 and bool(conditions.values_of_dtypes(runtime(op), conditions.BYTES))


# The cheapest path.

LAUNCH = SWITCH = OUTPUT = 125.0
"""Microseconds that Core ML's segmenter counts: of a segment on the ANE, of a change of the unit, and of a last
op that is not on the CPU."""

CPU, ANE, GPU = range(3)
Costs = Sequence[float]
"""The costs of one op on CPU, ANE and GPU, in microseconds; infinite where it cannot run."""


def _entry_cost(unit: int) -> float:
    return LAUNCH if unit == ANE else 0.0


def _switch_cost(old: int, new: int) -> float:
    return 0.0 if old == new else SWITCH + _entry_cost(new)


def _exit_cost(unit: int) -> float:
    return 0.0 if unit == CPU else OUTPUT


def cheapest_path(ops: Sequence[Costs]) -> list[int]:
    """Return the unit of each op on the path of least cost; if paths are equal, lower unit numbers win.

    A shortest path by dynamic programming: after each op, `costs[k]` is the least cost of a path that ends on
    `units[k]`, and `origins[k]` the index in `units` from which that path came. Units that can run nothing are
    left out.
    """
    if not ops:
        return []
    units = [u for u, column in enumerate(zip(*ops, strict=True)) if min(column) < math.inf] or [CPU]
    ops = [[own[u] for u in units] for own in ops] if len(units) < len(ops[0]) else ops
    costs = [_entry_cost(unit) + work for unit, work in zip(units, ops[0], strict=True)]
    origins_of_ops: list[list[int]] = []  # of all ops but the first
    switch_costs = [[_switch_cost(old, new) for old in units] for new in units]
    for own in ops[1:]:
        origins, new_costs = [], []
        for cost_from, work in zip(switch_costs, own, strict=True):
            costs_by_origin = list(map(add, costs, cost_from))
            least = min(costs_by_origin)
            origins.append(costs_by_origin.index(least))
            new_costs.append(least + work)
        origins_of_ops.append(origins)
        costs = new_costs
    path = [min(range(len(units)), key=lambda k: costs[k] + _exit_cost(units[k]))]
    for origins in reversed(origins_of_ops):
        path.append(origins[path[-1]])
    return [units[k] for k in reversed(path)]


def path_cost(ops: Sequence[Costs], path: Sequence[int]) -> float:
    """Return the cost of a path in microseconds, with launches and switches."""
    if not ops:
        return 0.0
    work = sum(own[unit] for own, unit in zip(ops, path, strict=True))
    moves = sum(_switch_cost(a, b) for a, b in itertools.pairwise(path))
    return _entry_cost(path[0]) + work + moves + _exit_cost(path[-1])


UNITS = {CPU: "cpu", ANE: "ane", GPU: "gpu"}


# Judged ops.


@dataclass
class Judged:
    """One op with its verdict, findings and estimate; `choose` gives its unit later."""

    op: Operation
    depth: int
    """Nesting in control flow."""
    legal: bool | None
    findings: tuple[Finding, ...]
    work: Work
    estimate: Estimate | None
    rounds: int = 1
    """How often it runs in one prediction: the number of rounds of the loops around it."""
    decided: bool = True
    """Is it known before the run how often its blocks run, and which of them?"""
    dynamic: bool = False
    """Does it read or return a value of dynamic shape?"""

    @property
    def name(self) -> str:
        """The name of the first output: packages store it, but not the name of the op."""
        return self.op.outputs[0].name


class Verdict(NamedTuple):
    """What is known of an op: whether the ANE can run it, what it computes, and what that costs."""

    legality: LegalVerdict
    work: Work
    estimate: Estimate | None
    rounds: int | None
    """How often its blocks run; None where that, or which of them runs, depends on an input."""
    dynamic: bool
    """Does it read or return a value of dynamic shape?"""


@dataclass(eq=False)
class Known:
    """A cache of verdicts for trial edits: ops that an edit left unchanged in a copy are not judged again."""

    origins: dict[Any, Any] = field(default_factory=dict)
    """Op or value of a copy -> the original of it, also through copies of copies."""
    verdicts: dict[tuple[Any, ...], Verdict] = field(default_factory=dict)
    judged: int = 0
    """The number of ops that were not in the cache."""

    @contextmanager
    def within(self) -> Iterator[None]:
        """Use this cache inside a `with` block, and record the copies that are made there."""
        token = _KNOWN.set(self)
        try:
            with recording_originals(self.origins):
                yield
        finally:
            _KNOWN.reset(token)

    def verdict(self, op: Operation, legality: Legality) -> Verdict:
        """Return the verdict of an op, cached if the op, its operands and its consumers are unchanged."""
        key = legality.target, *self._cache_key_parts(op)
        verdict = self.verdicts.get(key)
        if verdict is None:
            self.judged += 1
            verdict = _verdict(op, legality)
            if not legality.may_look_beyond(op):
                self.verdicts[key] = verdict
        return verdict

    def _cache_key_parts(self, op: Operation) -> Iterator[Any]:
        """Yield all that a verdict depends on; an edit may keep a value and change its name or type."""
        original_of = self.origins.get
        yield original_of(op, op)
        for v in (*op.outputs, *(v for one in (op, *weight_decoders(op)) for _, v in operands(one))):
            yield from (original_of(v, v), v.name, v.sym_type)
        for v in op.outputs:
            yield bool(v.consuming_blocks)
            yield from (original_of(reader, reader) for reader in v.child_ops)


_KNOWN: ContextVar[Known | None] = ContextVar("known", default=None)


def _verdict(op: Operation, legality: Legality) -> Verdict:
    work = work_of(op)
    rounds = loop_rounds(op) if op.op_type == "while_loop" else None if op.op_type == "cond" else 1
    return Verdict(
        legality.verdict(op), work, cost.estimate(op, work, legality.target), rounds, _is_dynamic(op)
    )


def judge(function: Function, target: Target, rules: Iterable[Rule] = ()) -> list[Judged]:
    """Judge every op in file order, without constants, with nested blocks.

    The work and cost of an op in a loop are multiplied by the number of rounds, where that is known.
    """
    legality, asked = Legality(target), _RulesByType((r for r in rules if r.test is not None), target)
    verdict_of = _verdict if (known := _KNOWN.get()) is None else known.verdict
    rows: list[Judged] = []

    def walk(block: Block, depth: int, rounds: int) -> None:
        fixed = fixed_ops(block)
        for op in block.operations:
            if is_weight(op):
                continue
            verdict = verdict_of(op, legality)
            legal, reason = verdict.legality
            if depth and legal is not False:
                legal, reason = False, _nesting_finding(op, target)
            findings = [reason] if reason else []
            findings += _findings_about(op, asked, target)
            if op in fixed and not any(is_output(v) for v in op.outputs):
                name = op.outputs[0].name
                findings.append(FIXED_VALUES.finding(f"%{name} is the same in every run", name))
            estimate = verdict.estimate and verdict.estimate.times(rounds)
            work = verdict.work.times(rounds)
            rows.append(
                Judged(
                    op,
                    depth=depth,
                    legal=legal,
                    findings=tuple(findings),
                    work=work,
                    estimate=estimate,
                    rounds=rounds,
                    decided=verdict.rounds is not None,
                    dynamic=verdict.dynamic,
                )
            )
            for nested in op.blocks:
                walk(nested, depth + 1, rounds * (verdict.rounds or 1))

    with caching():
        walk(function, depth=0, rounds=1)
    return rows


def _findings_about(op: Operation, rules: _RulesByType, target: Target) -> Iterator[Finding]:
    """Yield what rules with a test find in an op."""
    for rule in rules.about(op):
        if rule.test is not None and (words := rule.test(op, target)):
            yield rule.finding_about(op, op.outputs[0].name, words, target)


def longest_chain(judged: Iterable[Judged]) -> int:
    """Return the number of ops on the longest chain of dependent ops; ops of a loop count in each round."""
    ends: dict[Var, int] = {}
    for one in judged:
        end = one.rounds + max((ends.get(v, 0) for v in runtime(one.op)), default=0)
        ends |= dict.fromkeys((*one.op.outputs, *(v for b in one.op.blocks for v in b.inputs)), end)
        for outer in _enclosing_ops(one.op):
            ends |= {v: max(ends[v], end) for v in outer.outputs}
    return max(ends.values(), default=0)


def _enclosing_ops(op: Operation) -> Iterator[Operation]:
    """Yield the control flow ops around an op, the innermost first."""
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
    advice=UNROLL,
)


def _nesting_finding(op: Operation, target: Target) -> Finding:
    outer = next(_enclosing_ops(op))
    kind = f"the loop of {network}" if (network := recurrent_step(outer)) else outer.op_type
    finding = NESTED.finding(f"inside {kind} %{outer.name}", op.outputs[0].name)
    return replace(finding, remedy=remedy_for_control(outer, target))


# The units of all ops.


@dataclass(frozen=True)
class View:
    """The assumptions about uncertain ops under which a path is found."""

    hopeful: bool | None
    """True: doubtful ops are legal, and estimates are off in favour of the ANE. False: doubtful ops are
    illegal, and estimates are off against it. None: doubtful ops are illegal, and estimates are right."""
    gpu: str = ""
    """What the GPU costs: "guess" (by estimate), "free", or "" where it may not be used."""
    ane: bool = True
    """May the ANE run anything at all?"""


def views(target: Target, doubts: Sequence[Finding] = (), judged: Sequence[Judged] = ()) -> tuple[View, ...]:
    """Return the extreme assumptions; an op has a known unit only if all of them give the same one.

    Args:
        target: chips, OS and compute units.
        doubts: why the ANE may run nothing of the model (`rules.whole_model`).
        judged: the ops of the model.
    """
    gpu = "guess" if target.gpu_fitted else ""
    extremes = [View(hopeful=True, gpu=gpu), View(hopeful=False, gpu=gpu)]
    if target.uses_gpu and (not gpu or gpu_may_take_all(judged)):
        extremes.append(View(hopeful=True, gpu="free"))
    if doubts:
        extremes.append(View(hopeful=False, gpu=gpu, ane=False))
    return tuple(extremes)


PRODUCTS = cost.WEIGHT_PRODUCTS | {"matmul"}

FEW_SUMS = 3e9
"""On an M4 (macOS 26.6.2, ALL) decoders of 0.1 and 2.4 GFLOP ran on the GPU as a whole, one of 30 on the ANE
(Thiruloksundar/llm-inference-macOS). On an M4 Pro, so did the linear ops of DistilBERT; and MobileNetV2 of 0.6
GFLOP, whose sums are convolutions."""


def gpu_may_take_all(judged: Sequence[Judged]) -> bool:
    """May the GPU run a model as a whole, against the fit: one of few sums without conv, or of int4 weights?

    With int4 weights, 125 of 1004 ops of the same decoder ran on the ANE, although it may run all of them.
    """
    products = [j for j in judged if j.work.flop and j.op.op_type in PRODUCTS]
    if not any(j.op.op_type in ("linear", "matmul") for j in products):
        return False
    has_conv = any(j.op.op_type in ("conv", "conv_transpose") for j in products)
    is_small = not has_conv and sum(j.work.flop for j in judged) <= FEW_SUMS
    return is_small or any(_has_int4_weight(j.op) for j in products if j.legal)


def _has_int4_weight(op: Operation) -> bool:
    scaled = (d for d in weight_decoders(op) if d.op_type == "constexpr_blockwise_shift_scale")
    return any(kind_of(d.data).itemsize < 1 for d in scaled)


class Choice(NamedTuple):
    """Where the ops of a function run."""

    units: list[str | None]
    """The unit that each op prefers; None if it is unknown."""
    cost: float
    """The likeliest cost of all ops in microseconds."""


def choose(judged: Sequence[Judged], target: Target, doubts: Sequence[Finding] = ()) -> Choice:
    """Choose the units of all ops together."""
    paths = [cheapest_path([_costs(j, target, view) for j in judged]) for view in views(target, doubts, judged)]
    units: list[str | None] = []
    for j, *in_views in zip(judged, *paths, strict=True):
        has_unit = j.legal is False or j.estimate is not None  # without estimate only if the ANE cannot run it
        units.append(UNITS[in_views[0]] if has_unit and len(set(in_views)) == 1 else None)
    return Choice(units, likeliest_cost(judged, target))


def likeliest_cost(judged: Sequence[Judged], target: Target) -> float:
    """Return the cost of the path without pessimism or optimism, in microseconds."""
    view = View(hopeful=None, gpu="guess" if target.gpu_fitted else "")
    costs = [_costs(j, target, view) for j in judged]
    return path_cost(costs, cheapest_path(costs))


def _costs(judged: Judged, target: Target, view: View) -> tuple[float, float, float]:
    """Return the microseconds of an op on (CPU, ANE, GPU); infinite where it cannot run."""
    estimate = judged.estimate or Estimate(0.0, 0.0)
    ane, cpu = _estimated_times(estimate, view.hopeful)
    is_legal = bool(view.hopeful) if judged.legal is None else judged.legal
    on_ane = target.uses_ane and view.ane and is_legal
    return cpu, ane if on_ane else math.inf, _gpu_cost(judged, estimate, view, on_ane)


def _estimated_times(estimate: Estimate, hopeful: bool | None) -> tuple[float, float]:
    """Return the microseconds on (ANE, CPU) as estimated, or off in favour of the ANE or against it."""
    estimated = (estimate.ane or 0.0, estimate.cpu or 0.0)
    if hopeful is None:
        return estimated
    extreme = max if hopeful else min
    estimates = [estimated, *estimate.or_else]
    ane, cpu = extreme(estimates, key=lambda ane_and_cpu: ane_and_cpu[1] - ane_and_cpu[0])
    off_ane, off_cpu = estimate.off
    return (ane / off_ane, cpu * off_cpu) if hopeful else (ane * off_ane, cpu / off_cpu)


def _gpu_cost(judged: Judged, estimate: Estimate, view: View, on_ane: bool) -> float:
    """Return the microseconds on the GPU; infinite for `cost.WEIGHT_PRODUCTS` that the ANE may run."""
    if view.gpu == "free":
        return 0.0
    stays_on_ane = on_ane and judged.op.op_type in cost.WEIGHT_PRODUCTS  # never seen on the GPU then
    return math.inf if not view.gpu or estimate.gpu is None or stays_on_ane else estimate.gpu


# Segments.


def segments_of(
    judged: Sequence[Judged], units: Sequence[str | None], function: Function
) -> tuple[tuple[Segment, ...], list[int]]:
    """Return the segments in file order, and for each op the number of its segment."""
    changes = [old != new for old, new in itertools.pairwise(units)]
    numbers = list(itertools.accumulate(changes, initial=0))[: len(units)]  # none for a function without ops
    segment_of = {v: n for j, n in zip(judged, numbers, strict=True) for v in j.op.outputs}
    members: dict[int, list[Judged]] = {}
    for j, n in zip(judged, numbers, strict=True):
        members.setdefault(n, []).append(j)
    unit = dict(zip(numbers, units, strict=True))
    results = set(function.outputs)
    segments = [_segment(n, ops, unit[n], segment_of, results) for n, ops in members.items()]
    return tuple(segments), numbers


def with_times(
    segments: Iterable[Segment], numbers: Sequence[int], each: Sequence[float]
) -> tuple[Segment, ...]:
    """Return the segments with the milliseconds of their ops.

    Args:
        segments: without times.
        numbers: the number of the segment of each op.
        each: milliseconds of each op; if empty, the segments stay without times.
    """
    if not each:
        return tuple(segments)
    spent: defaultdict[int, float] = defaultdict(float)
    for number, ms in zip(numbers, each, strict=True):
        spent[number] += ms
    return tuple(replace(segment, ms=spent[segment.index]) for segment in segments)


def _segment(
    number: int, members: Sequence[Judged], unit: str | None, segment_of: dict[Var, int], results: set[Var]
) -> Segment:
    """Return the segment of some ops; `segment_of` gives the segment that computes each value."""
    read = dict.fromkeys(v for j in members for _, v in operands(j.op) if not is_stored(v))
    readers = {
        v: {segment_of[out] for op in v.child_ops for out in op.outputs if out in segment_of} - {number}
        for j in members
        for v in j.op.outputs
    }
    outside = [v for v, others in readers.items() if others or v in results]
    return Segment(
        index=number,
        unit=unit,
        ops=tuple(j.name for j in members),
        inputs={v.name: shape_of(v) for v in read if segment_of.get(v) != number},
        outputs={v.name: shape_of(v) for v in outside},
        readers=tuple(sorted({n for v in outside for n in readers[v]})),
    )


# Flexible shapes: ops are judged at the default shape, and counted at each enumerated one.

MOST_SHAPES = 16
"""The most enumerated shapes that are judged; Core ML takes up to 128. A choice: each costs as much as an
inspection of the whole model."""
AT_DEFAULT = "shapes, estimates and units are those of the default shape, {}"
IN_RANGE = "other shapes of a range are not known"
SOME_SHAPES = "{} of {} enumerated shapes are estimated, the default first"
AT_ALL_PLACES = "shapes that depend on values are judged as if every mask were true everywhere"
NO_DEFAULT = (
    "the default shape of {} is not known: dynamic lengths count as 1, and what reads them has no unit; a MIL "
    "program does not tell it, so give the path of the model, or what `load` gives, as it is"
)


@dataclass(frozen=True)
class Shaped:
    """A function whose ops were judged, at its default shape if its inputs are flexible."""

    function: Function
    """The function that was judged; its inputs are fixed if a default shape is known."""
    judged: list[Judged]
    """Its ops."""
    flexible: Flexible | None = None
    """The shapes that its inputs allow; None if all are fixed."""
    notes: tuple[str, ...] = ()
    """Notes for the report: at which shape the ops were judged, and what is unknown at others."""


def judge_shaped(loaded: Loaded, name: str | None, target: Target, rules: Iterable[Rule]) -> Shaped:
    """Judge a function as it is, or at its default shape."""
    function, rules = function_of(loaded.program, name), tuple(rules)
    judged = judge(function, target, rules)
    shapes = flexible_shapes(function, description_of(loaded.description, name))
    if shapes is None:
        return _judged_at_all_places(loaded, function, judged, target, rules)
    fixed = _judged_at(loaded, name, shapes.default, target, rules)
    if fixed is not None:
        both = [_merge_verdicts(a, b) for a, b in zip(judged, fixed.judged, strict=True)]
        return Shaped(fixed.function, both, shapes, _shape_notes(shapes))
    if shapes.default and _are_all_one(function, shapes.default):
        return Shaped(function, judged, shapes, _shape_notes(shapes))
    dynamic = ", ".join(f"%{n}" for n, v in function.inputs.items() if any_symbolic(v.shape or ()))
    without_estimates = list(map(_without_dynamic_estimate, judged))
    return Shaped(function, without_estimates, shapes, (NO_DEFAULT.format(dynamic),))


def _judged_at_all_places(
    loaded: Loaded, function: Function, judged: list[Judged], target: Target, rules: tuple[Rule, ...]
) -> Shaped:
    """Judge a function whose inputs are fixed where every mask is true, so that no shape depends on values."""
    if not any(one.dynamic for one in judged):
        return Shaped(function, judged)
    name = next(n for n, f in loaded.program.functions.items() if f is function)
    full = function_at_all_places(loaded.program, name)
    if full is None:
        return Shaped(function, list(map(_without_dynamic_estimate, judged)))
    both = [_merge_verdicts(a, b) for a, b in zip(judged, judge(full, target, rules), strict=True)]
    return Shaped(full, both, notes=(AT_ALL_PLACES,))


def found_by(loaded: Loaded, target: Target, rules: Sequence[Rule]) -> Iterator[Finding]:
    """Yield the findings of some rules only, about the ops of all functions."""
    asked = {rule.id for rule in rules}
    shaped = (judge_shaped(loaded, name, target, rules) for name in loaded.program.functions)
    yield from (f for one in shaped for judged in one.judged for f in judged.findings if f.rule in asked)


def _shape_notes(shapes: Flexible) -> tuple[str, ...]:
    """Return notes on the shape at which the ops were judged, and on shapes that were not."""
    notes = [AT_DEFAULT.format(in_words(shapes.default))]
    if not shapes.listed:
        notes.append(IN_RANGE)
    elif len(shapes.listed) > MOST_SHAPES:
        notes.append(SOME_SHAPES.format(MOST_SHAPES, len(shapes.listed)))
    return tuple(notes)


def units_at_each_shape(
    loaded: Loaded,
    name: str | None,
    declared: Flexible | None,
    target: Target,
    rules: Iterable[Rule],
    doubts: Sequence[Finding] = (),
) -> tuple[AtShape, ...]:
    """Count the ops on each unit at each enumerated shape, for at most `MOST_SHAPES` of them.

    Doubts about the whole model count at each shape.
    """
    rules, counts = tuple(rules), []
    for shapes in [] if declared is None else declared.listed[:MOST_SHAPES]:
        fixed = _judged_at(loaded, name, shapes, target, rules)
        # ops that cannot be judged at a shape count as one of unknown unit
        units = [None] if fixed is None else choose(fixed.judged, target, doubts).units
        counts.append(AtShape(in_words(shapes), dict(Counter(unit or "unknown" for unit in units))))
    return tuple(counts)


def _judged_at(
    loaded: Loaded, name: str | None, shapes: Shapes, target: Target, rules: tuple[Rule, ...]
) -> Shaped | None:
    """Judge a copy of the function with inputs fixed to one shape; None if its ops would not be the same."""
    if not shapes:
        return None
    function = function_of(loaded.program, name)
    key = next(n for n, f in loaded.program.functions.items() if f is function)
    fixed = function_at(loaded.program, key, shapes)
    return None if fixed is None else Shaped(fixed, judge(fixed, target, rules))


def _are_all_one(function: Function, shapes: Shapes) -> bool:
    """Are all dynamic lengths 1 at a shape? Verdicts on dynamic lengths count them as 1, so they hold there."""
    return all(
        length == 1
        for name, shape in shapes.items()
        for declared, length in zip(function.inputs[name].shape, shape, strict=True)
        if is_symbolic(declared)
    )


def _merge_verdicts(dynamic: Judged, fixed: Judged) -> Judged:
    """Return the verdict at the default shape, with what holds only because lengths are dynamic."""
    legal = True if dynamic.legal and fixed.legal else None
    if dynamic.legal is False or fixed.legal is False:
        legal = False
    # shapes become constants where lengths are fixed only for judging
    own = [f for f in fixed.findings if f.rule != FIXED_VALUES.id]
    # a mask whose places are listed is a constant there, so only the dynamic form tells what reads it
    remedies = {f.rule: f.remedy for f in dynamic.findings}
    own = [replace(f, remedy=remedies.get(f.rule) or f.remedy) for f in own]
    own_rules = {f.rule for f in own}
    more = [f for f in dynamic.findings if f.rule not in own_rules]
    return replace(fixed, legal=legal, findings=(*own, *more))


def _without_dynamic_estimate(judged: Judged) -> Judged:
    """Drop the estimate of an op that reads or returns a value of dynamic shape."""
    return replace(judged, estimate=None) if judged.dynamic else judged


def _is_dynamic(op: Operation) -> bool:
    """Does an op read or return a value of dynamic shape?"""
    values = [*op.outputs, *(v for _, v in operands(op))]
    return any(any_symbolic(v.shape or ()) for v in values if kind_of(v).is_tensor)
