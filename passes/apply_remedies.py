"""Run the passes that an inspection names, as long as its own estimate gets no worse.

Before::

    main(%x: 1x4x2xfp16) {
      %normed: 1x4x2xfp16 = layer_norm(x=%x, axes=[-1], epsilon=1e-05)
      %logits: 1x4x6xfp16 = linear(x=%normed, weight=const<6x2xfp16>)
      return %logits
    }

After::

    main(%x: 1x4x2xfp16) {
      %x_last: 1x1x2xfp16 = slice_by_index(x=%x, begin=[0, 3, 0], end=[1, 4, 2])
      %normed_row: 1x1x2xfp16 = layer_norm(x=%x_last, axes=[-1], epsilon=1e-05)
      %logits: 1x1x6xfp16 = linear(x=%normed_row, weight=const<6x2xfp16>)
      return %logits
    }

Each round inspects the program for the target, takes the remedies of its findings in a fixed order, tries each
on a copy, inspects that, and keeps it if the estimated cost is not higher and something is better: the cost, or
the number of findings. It ends when no remedy is kept. What is left is reported as refusals: findings about
legality that no pass repairs, and passes whose result would cost more.

Refuses when the inspection names no pass.

Why it helps: it repairs what is wrong and nothing else. The estimate is Core ML's own formula as far as it was
found (M4, macOS 27.0.1) and no run time; a pass that only numbers or alignment ask for may be left out for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from anesurgery import registry
from anesurgery.mil import Operation, Program, Var, mb, types, walk_ops
from anesurgery.pattern import Refusal
from anesurgery.placement.analysis import inspect_program
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.target import Target
from anesurgery.program import clone, load
from anesurgery.surgery import Pass, Session, run_pass

ORDER = (
    "select_last_token", "causal_mask_tensor", "embedding_matmul", "rerank", "pad_last_axis", "negate_subtract",
    "explicit_broadcast",
)  # fmt: skip
"""Remedies in the order in which they do not stand in each other's way; others come behind them."""


@dataclass(frozen=True)
class ApplyRemedies(Pass):
    """The remedies of an inspection, while they help."""

    name: ClassVar[str] = "apply_remedies"
    target: str | None = None
    """Chips and OS, as "M1/macOS 14"; that of the surgery by default, else any."""
    rounds: int = 4
    """Inspections after which it ends in any case."""

    def run(self, program: Program, session: Session) -> None:
        """Inspect, repair, inspect again."""
        target = Target.parse(self.target or session.target)
        found, costly = _inspected(program, target), dict[str, Refusal]()
        for _ in range(self.rounds):
            kept = False
            for name in _remedies(found):
                step, trial = registry.make_pass(name), clone(program).program
                attempt = Session(target=session.target, seed=session.seed)
                run_pass(step, trial, attempt)
                if not attempt.changes:
                    continue
                after = _inspected(trial, target)
                if (refusal := _worse(found, after)) is not None:
                    costly[name] = refusal
                    continue
                run_pass(step, program, session)
                costly.pop(name, None)
                found, kept = after, True
            if not kept:
                break
        session.refusals += [*costly.items(), *_left(found, program)]


def _inspected(program: Program, target: Target) -> Inspection:
    return inspect_program(load(program), target)


def _remedies(found: Inspection) -> list[str]:
    named = {f.remedy for f in found.all_findings if f.remedy is not None}
    return sorted(named, key=lambda n: (ORDER.index(n) if n in ORDER else len(ORDER), n))


def _worse(before: Inspection, after: Inspection) -> Refusal | None:
    """Why a trial is not kept."""
    old, new = before.cost or 0.0, after.cost or 0.0
    if new > old * (1 + 1e-9):
        return Refusal(f"the estimate would rise from {old:.4g} to {new:.4g} microseconds")
    fewer = len(after.all_findings) < len(before.all_findings)
    if new < old * (1 - 1e-9) or fewer or after.residency["ops"] > before.residency["ops"]:
        return None
    return Refusal("the inspection would find as much as before")


def _left(found: Inspection, program: Program) -> Iterator[tuple[str, Refusal]]:
    """What keeps ops off the ANE now, by op."""
    ops: dict[str, Operation] = {v.name: op for op in walk_ops(program) for v in op.outputs}
    for row in (r for r in found.ops if r.legal is False):
        for finding in row.findings:
            if finding.kind == "legality":
                help_ = finding.remedy or finding.advice or "no pass repairs it"
                reason = f"{row.op_type} stays off the ANE: {finding.because} ({help_})"
                yield "apply_remedies", Refusal(reason, ops.get(row.name))


def example() -> Program:
    """A head of 6 words over 4 positions, of which the last is wanted."""
    weight = np.arange(12, dtype=np.float16).reshape(6, 2)

    @mb.program(input_specs=[mb.TensorSpec((1, 4, 2), dtype=types.fp16)])
    def program(x: Var) -> Var:
        normed = mb.layer_norm(x=x, axes=[-1], name="normed")
        return mb.linear(x=normed, weight=weight, name="logits")

    return program
