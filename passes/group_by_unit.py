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
        """The pass for the target of the inspection."""
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


@dataclass
class _Plan:
    """The ops of a function that run, what each must come after, and what was judged of it."""

    target: an.Target
    judged: dict[an.Operation, list[Judged]]
    """The units of the op itself, and of those nested in it."""
    needs: dict[an.Operation, set[an.Operation]]

    @classmethod
    def of(cls, function: an.Function, target: an.Target) -> _Plan:
        """Judge each op, and see what it reads."""
        judged: dict[an.Operation, list[Judged]] = {}
        for row in judge(function, target):
            judged.setdefault(row.op, []) if not row.depth else None
            next(reversed(judged.values())).append(row)
        needs, last = dict[an.Operation, set[an.Operation]](), None
        for op in judged:
            needs[op] = {v.op for v in reads(op) if v.op in judged}
            if op.op_type in IN_TURN:
                needs[op] |= {last} if last is not None else set()
                last = op
        return cls(target, judged, needs)

    def better(self) -> Sequence[an.Operation] | None:
        """The best order, where it is better than the present one."""
        present = tuple(self.judged)
        now, others = self.worth(present), dict.fromkeys(map(tuple, self.orders()))
        others.pop(present, None)
        cheap = [order for order in others if round(likeliest_cost(self.rows(order), self.target)) <= now[0]]
        rated = [(self.worth(order), order) for order in cheap]
        fit = [
            (worth, order)
            for worth, order in rated
            if worth < now and all(a <= b for a, b in zip(worth[1:3], now[1:3], strict=True))
        ]
        return min(fit, key=lambda pair: pair[0])[1] if fit else None

    def rows(self, order: Sequence[an.Operation]) -> list[Judged]:
        """What was judged of the ops in an order."""
        return [row for op in order for row in self.judged[op]]

    def worth(self, order: Sequence[an.Operation]) -> tuple[int, int, int, int]:
        """The estimate in microseconds, flop and ops off the engine, changes of the unit: less is better."""
        rows = self.rows(order)
        units, estimate = choose(rows, self.target)
        off = [row for row, unit in zip(rows, units, strict=True) if unit != "ane"]
        changes = sum(a != b for a, b in pairwise(units))
        return round(estimate), sum(row.work.flop for row in off), len(off), changes

    def orders(self) -> Iterator[list[an.Operation]]:
        """Orders worth a try: each set of ops is kept off the engine, and either unit may begin."""
        small = self.small()
        for off in self.sets_off():
            for first in (True, False):
                yield self.in_phases(off, first)
                if small:
                    yield self.in_phases(off, first, small)

    def small(self) -> set[an.Operation]:
        """The legal ops that the present order leaves off the engine."""
        rows = [(op, row) for op, judged in self.judged.items() for row in judged]
        units, _ = choose([row for _, row in rows], self.target)
        return {op for (op, row), unit in zip(rows, units, strict=True) if row.legal and unit != "ane"}

    def sets_off(self) -> list[set[an.Operation]]:
        """The ops that are not legal, alone and with the shortest chains that lead to them."""
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
        self, off: set[an.Operation], first: bool, small: AbstractSet[an.Operation] = frozenset()
    ) -> list[an.Operation]:
        """All ops in turns: what can run off the engine, what can run on it, the small ones, and so on."""
        done: dict[an.Operation, None] = {}
        phase = {op: 0 if op in off else 1 + (op in small) for op in self.judged}
        phases = [0, 1, 2] if first else [1, 2, 0]
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
    """The ops, each after the constants that it reads first; constants that nobody reads come last."""
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
