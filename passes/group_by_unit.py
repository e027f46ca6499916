"""Reorder ops so that those off the Neural Engine stand together, and the others form longer runs.

Before::

    main(%x: 1x64x64x64xfp16, %counts: 1x64x64x64xfp16) {
      %first: 1x64x64x64xfp16 = conv(x=%x, weight=const<64x64x3x3xfp16>, pad_type="same")
      %sums: 1x64x64x64xfp16 = cumsum(x=%counts, axis=1)
      %second: 1x64x64x64xfp16 = conv(x=%first, weight=const<64x64x3x3xfp16>, pad_type="same")
      %y: 1x64x64x64xfp16 = add(x=%second, y=%sums)
      return %y
    }

After::

    main(%x: 1x64x64x64xfp16, %counts: 1x64x64x64xfp16) {
      %first: 1x64x64x64xfp16 = conv(x=%x, weight=const<64x64x3x3xfp16>, pad_type="same")
      %second: 1x64x64x64xfp16 = conv(x=%first, weight=const<64x64x3x3xfp16>, pad_type="same")
      %sums: 1x64x64x64xfp16 = cumsum(x=%counts, axis=1)
      %y: 1x64x64x64xfp16 = add(x=%second, y=%sums)
      return %y
    }

Core ML places ops in file order, and each change of the unit costs time: one lookup between two runs splits the
Neural Engine's work, and small ops before it stay on the CPU with it. The pass tries several orders in which
each op still comes after everything that it reads. It moves ops off the engine as early or as late as possible,
alone or with the short chains of legal ops that lead to them. It moves small legal ops, which Core ML leaves
off the engine at the start of a run, behind larger ones. The order with the lowest estimate is taken; among
equal ones, the one with the least flop and the fewest ops off the engine. No order is taken that puts more of
either off it. Random numbers, states, lists and control flow keep their order among each other.

Refuses when no other order is better on the target.

Why it helps: a launch, and each change of the unit, counts 0.125 ms in Core ML's own choice (measured, M4,
macOS 27.0.1, by 751K/Apple-Neural-Engine-Microarchitecture-Study-M6). What an order gains was not measured.

Grade: bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import NamedTuple

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Pass, Program, Session, Var, mb
from anesurgery.mil import is_weight, reads
from anesurgery.placement.verdicts import Judged, choose, judge, likeliest_cost

IN_TURN = an.ops.IMPURE | an.ops.STATEFUL | an.ops.LISTS
"""Ops that keep their order among each other."""
CHAINS = 8
"""Most sets of short chains that are tried: a choice, as each is one more plan."""


@dataclass(frozen=True)
class GroupByUnit(Pass):
    """Ops that stay off the Neural Engine stand together."""

    name = "group_by_unit"
    target: str | None = None
    """Chips and OS, as "M1/macOS 14"; that of the surgery by default, else any."""

    @classmethod
    def variants(cls, target: an.Target) -> tuple[Pass, ...]:
        """Return the pass for the target of the inspection."""
        return (cls(target.label),)

    def run(self, program: Program, session: Session) -> None:
        """Put the ops of each function into the best order that is found."""
        target = an.Target.parse(self.target or session.target)
        for function in program.functions.values():
            plan = _Plan.of(function, target)
            while (order := plan.better()) is not None:
                self.rearrange(function, order, session)
                plan = _Plan.of(function, target)

    def rearrange(self, function: an.Function, order: Sequence[an.Operation], session: Session) -> None:
        """Put the ops into an order, and the constants before what reads them."""
        old = [op for op in function.operations if not is_weight(op)]
        neighbours = set(pairwise([None, *old]))
        moved = [b for a, b in pairwise([None, *order]) if (a, b) not in neighbours and b is not None]
        edits = an.GraphEdits(self, session, function)
        edits.reorder(list(_with_constants(function, order)), moved)


OFF, ON, LEFT_OFF = range(3)
"""Phases of an order: ops off the engine, ops on it, and legal ops that Core ML leaves off it."""


class _Worth(NamedTuple):
    """What an order costs, the most important first: less is better."""

    microseconds: int
    flop_off: int
    """Flop off the engine."""
    ops_off: int
    """Ops off the engine."""
    changes: int
    """Changes of the unit."""


@dataclass
class _Plan:
    """The ops of a function, the verdicts of each, and the ops that each must come after."""

    target: an.Target
    judged: dict[an.Operation, list[Judged]]
    """Op -> its verdict, and those of the ops nested in it."""
    needs: dict[an.Operation, set[an.Operation]]

    @classmethod
    def of(cls, function: an.Function, target: an.Target) -> _Plan:
        """Judge each op, and collect the ops that it reads from."""
        judged: dict[an.Operation, list[Judged]] = {}
        for row in judge(function, target):
            if row.depth == 0:
                rows = judged.setdefault(row.op, [])
            rows.append(row)  # a nested row belongs to the outer op before it
        needs, last = dict[an.Operation, set[an.Operation]](), None
        for op in judged:
            needs[op] = {v.op for v in reads(op) if v.op in judged}
            if op.op_type in IN_TURN:
                needs[op] |= {last} if last is not None else set()
                last = op
        return cls(target, judged, needs)

    def better(self) -> Sequence[an.Operation] | None:
        """Return the best order if it is better than the present one, and leaves no more off the engine."""
        present = tuple(self.judged)
        now, others = self.worth(present), dict.fromkeys(map(tuple, self.orders()))
        others.pop(present, None)
        # the cost alone is found faster than the whole worth
        cheap = [o for o in others if round(likeliest_cost(self.rows(o), self.target)) <= now.microseconds]
        rated = [(self.worth(order), order) for order in cheap]
        fit = [
            (worth, order)
            for worth, order in rated
            if worth < now and worth.flop_off <= now.flop_off and worth.ops_off <= now.ops_off
        ]
        return min(fit, key=lambda pair: pair[0])[1] if fit else None

    def rows(self, order: Sequence[an.Operation]) -> list[Judged]:
        """Return the verdicts of the ops in an order."""
        return [row for op in order for row in self.judged[op]]

    def worth(self, order: Sequence[an.Operation]) -> _Worth:
        """Return what an order is worth."""
        rows = self.rows(order)
        units, estimate = choose(rows, self.target)
        off = [row for row, unit in zip(rows, units, strict=True) if unit != "ane"]
        changes = sum(a != b for a, b in pairwise(units))
        return _Worth(round(estimate), sum(row.work.flop for row in off), len(off), changes)

    def orders(self) -> Iterator[list[an.Operation]]:
        """Yield orders to try: each set of ops is kept off the engine, and either unit may begin."""
        left_off = self.left_off()
        for off in self.sets_off():
            for off_first in (True, False):
                yield self.in_phases(off, off_first)
                if left_off:
                    yield self.in_phases(off, off_first, left_off)

    def left_off(self) -> set[an.Operation]:
        """Return the legal ops that the present order leaves off the engine: mostly small ones before a run."""
        rows = [(op, row) for op, judged in self.judged.items() for row in judged]
        units, _ = choose([row for _, row in rows], self.target)
        return {op for (op, row), unit in zip(rows, units, strict=True) if row.legal and unit != "ane"}

    def sets_off(self) -> list[set[an.Operation]]:
        """Return the illegal ops alone, and then with more and more of the legal chains that lead to them.

        The shortest chains come first. A chain of more than half of the ops is no small detour from the engine.
        """
        illegal = {op for op, rows in self.judged.items() if rows[0].legal is False}
        upstream: dict[an.Operation, set[an.Operation]] = {}
        for op, needed in self.needs.items():
            upstream[op] = needed.union(*(upstream[n] for n in needed))
        chains = sorted((upstream[op] - illegal for op in illegal), key=len)
        sets = [illegal]
        for chain in chains:
            if len(sets) <= CHAINS and len(chain) <= len(self.judged) // 2 and not chain <= sets[-1]:
                sets.append(sets[-1] | chain)
        return sets if illegal else []

    def in_phases(
        self, off: set[an.Operation], off_first: bool, left_off: AbstractSet[an.Operation] = frozenset()
    ) -> list[an.Operation]:
        """Order all ops in turns: those off the engine that can run now, those on it, those left off."""
        done: dict[an.Operation, None] = {}
        phase = {op: OFF if op in off else LEFT_OFF if op in left_off else ON for op in self.judged}
        phases = [OFF, ON, LEFT_OFF] if off_first else [ON, LEFT_OFF, OFF]
        left, turns = list(self.judged), cycle(phases)
        while left:
            turn, later = next(turns), []
            for op in left:
                if phase[op] == turn and self.needs[op] <= done.keys():
                    done[op] = None
                else:
                    later.append(op)
            left = later
        return list(done)


def _with_constants(function: an.Function, order: Sequence[an.Operation]) -> Iterator[an.Operation]:
    """Yield the ops, each after the constants that it reads first; unread constants come last."""
    stored = dict.fromkeys(op for op in function.operations if is_weight(op))

    def placed(op: an.Operation) -> Iterator[an.Operation]:
        for source in (v.op for v in reads(op)):
            if source in stored:
                del stored[source]
                yield from placed(source)
        yield op

    for op in order:
        yield from placed(op)
    yield from stored


@an.example((1, 64, 64, 64), (1, 64, 64, 64), dtype="fp16", opset="iOS17")
def example(x: Var, counts: Var) -> Var:
    """A running sum between two convolutions that do not need it."""
    weight = np.full((64, 64, 3, 3), 0.125, np.float16)
    first = mb.conv(x=x, weight=weight, pad_type="same", name="first")
    sums = mb.cumsum(x=counts, axis=1, name="sums")
    second = mb.conv(x=first, weight=weight, pad_type="same", name="second")
    return mb.add(x=second, y=sums, name="y")
