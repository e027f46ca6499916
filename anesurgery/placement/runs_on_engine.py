"""Can the ANE run an op? The rows of `rules.legality` that concern a target, asked in their order."""

from __future__ import annotations

from collections.abc import Iterator

from anesurgery.mil import Operation, constant
from anesurgery.placement.evidence import Finding, Rule
from anesurgery.placement.rules import conditions
from anesurgery.placement.rules.legality import (
    FORBIDDEN,
    INDEXED,
    LEGAL,
    READS_BYTES,
    SPLIT_ATTENTION,
    WITH_STATE,
)
from anesurgery.placement.target import Target
from anesurgery.semantics.work import runtime


class Legality:
    """The rows that concern a target, by op type."""

    def __init__(self, target: Target) -> None:
        self.target = target
        speaking = [r for r in FORBIDDEN if r.scope.concerns(target)]
        self._any = [r for r in speaking if not r.ops]
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

    def speaking(self, op: Operation) -> Iterator[Finding]:
        """Every row that forbids an op or makes it doubtful, of which a verdict names the first."""
        for rule in (*self._own.get(op.op_type, ()), *self._any):
            if value := self._found(rule, op):
                yield rule.finding(value, op.outputs[0].name)

    def verdict(self, op: Operation) -> tuple[bool | None, Finding | None]:
        """Can the ANE run the op? True; False with the reason; or None, with what makes it doubtful.

        None without a finding: no row knows the op, or the integers that it works on.
        """
        doubt: Finding | None = None
        for rule in (*self._own.get(op.op_type, ()), *self._any):
            value = self._found(rule, op)
            if value and self.forbids(rule):
                return False, rule.finding(value, op.outputs[0].name)
            if value and doubt is None:
                doubt = rule.finding(value, op.outputs[0].name)
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
