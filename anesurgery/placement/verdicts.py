"""Judge the ops of a function one by one, then choose their units together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from anesurgery.facts.fixed_values import fixed_ops
from anesurgery.facts.work import Work, is_weight, work_of
from anesurgery.mil import Block, Function, Operation, is_output
from anesurgery.placement import cost, partition
from anesurgery.placement.evidence import Finding, Grade, Rule
from anesurgery.placement.inspection import Estimate
from anesurgery.placement.legal import Legality
from anesurgery.placement.rules.slow import FIXED
from anesurgery.placement.target import Target

UNITS = {partition.CPU: "cpu", partition.ANE: "ane", partition.GPU: "gpu"}


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
        return tuple(r.finding(value, op.outputs[0].name) for r, value in said if value)


def judge(function: Function, target: Target, rules: Iterable[Rule] = ()) -> list[Judged]:
    """Every op in file order, constants left out, nested blocks included."""
    legality, notes = Legality(target), Findings(rules, target)
    found: list[Judged] = []

    def walk(block: Block, depth: int) -> None:
        fixed = fixed_ops(block)
        for op in block.operations:
            if is_weight(op):
                continue
            legal, why = legality.verdict(op)
            if depth and legal is not False:
                legal, why = False, _nested(op)
            findings = ((why,) if why else ()) + notes.about(op)
            if op in fixed and not any(is_output(v) for v in op.outputs):
                name = op.outputs[0].name
                findings += (FIXED.finding(f"%{name} is the same in every run", name),)
            work = work_of(op)
            found.append(Judged(op, depth, legal, findings, work, cost.estimate(op, work)))
            for nested in op.blocks:
                walk(nested, depth + 1)

    walk(function, 0)
    return found


def _nested(op: Operation) -> Finding:
    return Finding(
        "control-flow",
        "legality",
        "inside control flow",
        "blocks of control flow stay on the CPU",
        "smpanaro/more-ane-transformers",
        Grade.REPORTED,
        advice="unroll it, or use select",
        op=op.outputs[0].name,
    )


def choose(judged: Sequence[Judged], target: Target) -> tuple[list[str | None], float]:
    """The unit that each op prefers, None where it hangs on what is not known; and what the path costs."""
    hopes = [[_costs(j, target, hopeful) for j in judged] for hopeful in (True, False)]
    likely, unlikely = map(partition.shortest, hopes)
    units = [
        UNITS[a] if a == b and _is_known(j) else None for j, a, b in zip(judged, likely, unlikely, strict=True)
    ]
    return units, partition.total(hopes[1], unlikely)


def _is_known(judged: Judged) -> bool:
    """An op without an estimate has a place only where the ANE is out of the question."""
    return judged.legal is False or (judged.legal is True and judged.estimate is not None)


def _costs(judged: Judged, target: Target, hopeful: bool) -> tuple[float, float, float]:
    """Of the op on each unit; what is not known of legality is taken for the best, or for the worst."""
    guess, kind = judged.estimate or Estimate(0.0, 0.0), judged.op.op_type
    legal = target.uses_ane and (judged.legal or (judged.legal is None and hopeful))
    ane = (guess.ane or 0.0) if legal else math.inf
    gpu = guess.gpu if target.uses_gpu and not (legal and kind in cost.SUMS) else None
    return guess.cpu or 0.0, ane, math.inf if gpu is None else gpu
