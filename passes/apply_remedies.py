"""Run the passes that an inspection names, as long as its own estimate gets no worse.

Before::

    main(%x: 1x4x2xfp16) {
      %products: 1x4x4xfp16 = matmul(x=%x, y=%x, transpose_y=True)
      %scores: 1x4x4xfp16 = add(x=%products, y=const<4x4xfp16>)
      %shares: 1x4x4xfp16 = softmax(x=%scores)
      %seen: 1x4x2xfp16 = matmul(x=%shares, y=%x)
      %logits: 1x4x6xfp16 = linear(x=%seen, weight=const<6x2xfp16>)
      return %logits
    }

After::

    main(%x: 1x4x2xfp16) {
      %products: 1x4x4xfp16 = matmul(x=%x, y=%x, transpose_y=True)
      %scores: 1x4x4xfp16 = add(x=%products, y=const<4x4xfp16>)
      %shares: 1x4x4xfp16 = softmax(x=%scores)
      %seen: 1x4x2xfp16 = matmul(x=%shares, y=%x)
      %seen_last: 1x1x2xfp16 = slice_by_index(x=%seen, begin=[0, 3, 0], end=[1, 4, 2])
      %logits: 1x1x6xfp16 = linear(x=%seen_last, weight=const<6x2xfp16>)
      return %logits
    }

Each round inspects all functions of the program for the target, takes the remedies of the findings in a fixed
order, tries each on a copy, inspects that, and keeps it if the estimated cost is not higher, no more ops are
without an estimate, and something is better: the cost, or the number of findings. A pass that changes what the
model gives back (`select_last_token`) is kept only for a decoder, where each position sees those before it
alone; others, such as masked language models, read every position. It ends when no remedy is kept. What is left
is reported as refusals: findings about legality that no pass repairs, and passes that were not kept, with why.

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
from anesurgery.errors import Refusal
from anesurgery.loading import clone, load
from anesurgery.mil import Operation, Program, Var, mb, types, walk_ops
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.inspector import inspect_program
from anesurgery.placement.rules.mask_fills import is_decoder
from anesurgery.placement.target import Target
from anesurgery.rewriting.passes import Pass, run_pass
from anesurgery.rewriting.session import Session

ORDER = (
    "select_last_token",
    "causal_mask_tensor",
    "embedding_matmul",
    "rerank",
    "pad_last_axis",
    "negate_subtract",
    "explicit_broadcast",
)
"""Remedies in the order in which they do not stand in each other's way; others come behind them."""


@dataclass(frozen=True)
class ApplyRemedies(Pass):
    """The remedies of an inspection, while they help."""

    name: ClassVar[str] = "apply_remedies"
    target: str | None = None
    """Chips and OS, as "M1/macOS 14"; that of the surgery by default, else any."""
    compute_units: str | None = None
    """CPU_AND_NE by default."""
    rounds: int = 4
    """Inspections after which it ends in any case."""

    def run(self, program: Program, session: Session) -> None:
        """Inspect, repair, inspect again."""
        target = Target.parse(self.target or session.target, self.compute_units)
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
                against = (_changes_results(attempt, program), _worse(found, after))
                refusal = next((r for r in against if r is not None), None)
                if refusal is not None:
                    costly[name] = refusal
                    continue
                run_pass(step, program, session)
                costly.pop(name, None)
                found, kept = after, True
            if not kept:
                break
        session.refusals += [*costly.items(), *_left(found, program)]


def _inspected(program: Program, target: Target) -> list[Inspection]:
    """An inspection of each function."""
    loaded = load(program)
    return [inspect_program(loaded, target, function=name) for name in program.functions]


def _remedies(found: list[Inspection]) -> list[str]:
    named = {f.remedy for part in found for f in part.all_findings if f.remedy is not None}
    return sorted(named, key=lambda n: (ORDER.index(n) if n in ORDER else len(ORDER), n))


def _changes_results(attempt: Session, program: Program) -> Refusal | None:
    """Why a trial that changes what the model gives back is not kept."""
    if not attempt.contract or all(is_decoder(f) for f in program.functions.values()):
        return None
    words = "; ".join(change.words for change in attempt.contract)
    return Refusal(f"the result would change ({words}), and no causal mask shows that it may; run it by name")


def _worse(before: list[Inspection], after: list[Inspection]) -> Refusal | None:
    """Why a trial is not kept."""
    old, new = (sum(part.cost or 0.0 for part in found) for found in (before, after))
    if new > old * (1 + 1e-9):
        return Refusal(f"the estimate would rise from {old:.4g} to {new:.4g} microseconds")
    if (count := _unknown(after)) > (known := _unknown(before)):
        return Refusal(f"ops without an estimate or verdict: {count}, {known} now")
    findings, fewer = (sum(len(part.all_findings) for part in found) for found in (before, after))
    if new < old * (1 - 1e-9) or fewer < findings or _share(after) > _share(before):
        return None
    return Refusal("the inspection would find as much as before")


def _unknown(found: list[Inspection]) -> int:
    rows = [row for part in found for row in part.ops]
    return sum(row.legal is None or (row.legal and row.estimate is None) for row in rows)


def _share(found: list[Inspection]) -> float:
    """Of the ops on the ANE, added up over functions."""
    return sum(part.residency["ops"] for part in found)


def _left(found: list[Inspection], program: Program) -> Iterator[tuple[str, Refusal]]:
    """What keeps ops off the ANE now, by op."""
    for part, function in zip(found, program.functions.values(), strict=True):
        ops: dict[str, Operation] = {v.name: op for op in walk_ops(function) for v in op.outputs}
        for row in (r for r in part.ops if r.legal is False):
            for finding in (f for f in row.findings if f.kind == "legality"):
                help_ = finding.remedy or finding.advice or "no pass repairs it"
                reason = f"{row.op_type} stays off the ANE: {finding.because} ({help_})"
                yield "apply_remedies", Refusal(reason, ops.get(row.name))


def example() -> Program:
    """A decoder with a head of 6 words over 4 positions, of which the last is wanted."""
    weight = np.arange(12, dtype=np.float16).reshape(6, 2)
    ahead = np.triu(np.full((4, 4), -1e4, np.float16), 1)

    @mb.program(input_specs=[mb.TensorSpec((1, 4, 2), dtype=types.fp16)])
    def program(x: Var) -> Var:
        products = mb.matmul(x=x, y=x, transpose_y=True, name="products")
        shares = mb.softmax(x=mb.add(x=products, y=ahead, name="scores"), axis=-1, name="shares")
        seen = mb.matmul(x=shares, y=x, name="seen")
        return mb.linear(x=seen, weight=weight, name="logits")

    return program
