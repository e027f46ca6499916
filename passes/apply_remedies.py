"""Run the passes that an inspection suggests, singly and in pairs, and keep those that help.

The candidates are the passes that findings of the inspection name, with the options that suit the target, and
`group_by_unit`, which needs no finding. Each candidate is tried on a copy of the program, and the copy is
inspected again. If no single pass helps, pairs are tried: a pass and one that is listed after it, or one that
removes a second reason why an op is off the ANE. If the model grew, each pass is left out once, since a later
one may make it unnecessary. If a pass changes results, single passes are tried again without it, and an equally
good outcome without it is preferred.

A trial is kept only if no supported op becomes unsupported, the expected time does not rise, and weights, flop,
bytes moved and number of ops do not grow much without a clear gain in time. It must also improve something:
less time; or, at equal time, less work that cannot run on the ANE at all, fewer switches between units, or
fewer findings. A gain that was measured on the target counts more than the estimate, and the notes name it
(`sequence_layout`).

Some passes have conditions of their own. A pass that changes the outputs (`select_last_token`) is kept only for
a decoder, in which each position sees earlier ones only. A pass that makes inputs and outputs fp16 is kept only
where the target loses time with the casts. `keep_interface` rules out both. A pass that rounds values
(`compute_fp16`) is kept only if more work runs on the ANE with it, or the time falls by a tenth. A pass that
makes the outputs less exact on sampled inputs, in fp16 or in the arithmetic of the chip, is undone. Finally, a
model of up to 2^29 stored numbers with norms over a root runs once in fp16 on the inputs given, or on sampled
ones: `rms_norm` and `group_norm` change the norms whose squares exceed a quarter of 65504, whatever that costs.

The notes of the surgery say what was gained. Its refusals say what was not kept, what still keeps ops off the
ANE, and what a conversion lost or reports call wrong; other passes repair the latter when you name them.

Refuses when no candidate improves the model.

Why it helps: it repairs what is wrong and nothing else. The estimate is Core ML's own formula as far as it is
known (M4, macOS 27.0.1), not a run time; so it may leave out a pass that only numbers or alignment call for.

Grade: none: the shape changes on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery import registry
from anesurgery.authoring import Pass, Program, Refusal, Session, Var, mb
from anesurgery.checking import exactness
from anesurgery.facts import masks
from anesurgery.files.package import Loaded
from anesurgery.mil import any_symbolic, walk_ops
from anesurgery.passes.group_norm import GroupNorm
from anesurgery.passes.rms_norm import RmsNorm
from anesurgery.placement import findings_in_words
from anesurgery.placement.evidence import Finding
from anesurgery.rewriting.choosing import Wish, choose
from anesurgery.rewriting.ml_program import MLProgram, Subject
from anesurgery.rewriting.passes import in_order, run_pass
from anesurgery.rewriting.search import Search, Searching
from anesurgery.rewriting.step_trials import Trial

FIRST = ("fold_constants", "gather_to_moves", "select_last_token", "causal_mask_tensor", "embedding_matmul")
"""Passes without which others gain nothing, so that they are tried first; the others follow by name. The order
that passes declare comes before both."""
ALWAYS = ("group_by_unit",)
"""Passes that are tried without a finding: no rule looks at the order of the ops."""


@dataclass(frozen=True)
class ApplyRemedies(Searching):
    """The remedies of an inspection, one after another and in pairs, while they help."""

    name = "apply_remedies"
    essential = True
    target: str | None = None
    """Chips and OS, as "M1/macOS 14"; that of the surgery by default, else any."""
    compute_units: str | None = None
    """CPU_AND_NE by default."""
    trials: int = 60
    """Most sequences of passes that are tried."""
    keep_interface: bool = False
    """Leave out passes that change an input or output on purpose."""

    def judged_on(self, session: Session) -> an.Target:
        """Return its own target, else that of the surgery."""
        return an.Target.parse(self.target or session.target, self.compute_units)

    def run(self, program: Program, session: Session) -> None:
        """Search on copies, then apply what was found: where no plan was made before."""
        model = MLProgram(Loaded(program, session.spec))
        plan = choose(model, Wish(self.name, (self,)), session).plan
        for step in plan.passes:
            run_pass(step, program, session)
        session.refusals += plan.left_out
        session.notes += plan.notes

    def remedies(self, findings: Sequence[Finding], target: an.Target) -> Sequence[Pass]:
        """Return the passes over ops that findings name, with the options that suit the target."""
        named = {f.remedy for f in findings if f.remedy} & set(registry.op_pass_names())
        order = sorted(named, key=lambda n: (FIRST.index(n) if n in FIRST else len(FIRST), n))
        classes = [registry.pass_class(name) for name in (*order, *ALWAYS)]
        return in_order([step for cls in classes for step in cls.variants(target)])

    def objection(self, attempt: Session, model: Subject) -> Refusal | None:
        """Why a trial that changes the interface is not kept; None where it may be."""
        changes = attempt.contract
        if not changes:
            return None
        if attempt.wired:
            return Refusal("the interface would change, which other models of the pipeline depend on")
        words = "; ".join(change.words for change in changes)
        if self.keep_interface:
            return Refusal(f"the interface would change ({words}), and keep_interface is set")
        functions = [f for program in model.chosen for f in program.functions.values()]
        if all(change.retypes for change in changes) or all(map(masks.is_decoder, functions)):
            return None
        return Refusal(
            f"the result would change ({words}), and no causal mask shows that it may; run it by name"
        )

    def last(self, model: Subject, session: Session) -> Iterator[tuple[Pass, str]]:
        """Yield forms of norms that cannot overflow, for norms whose squares overflow on sampled inputs."""
        for program in model.chosen:
            squares = exactness.large_squares(program, session.seed, session.samples)
            inputs = "the inputs" if session.samples else "sampled inputs"
            why = (
                f"norms in a form that fp16 holds: squares reach {max(squares.values(), default=0):.3g} on "
                f"{inputs}, and more than {an.fp16.LARGEST:g} is infinite"
            )
            for step in (RmsNorm(only=tuple(squares)), GroupNorm(only=tuple(squares))) if squares else ():
                yield step, why

    def report(self, search: Search, end: Trial) -> tuple[list[str], list[tuple[str, Refusal]]]:
        """What was gained, what was not kept, what keeps ops off the ANE still, and what is wrong still."""
        refusals = [
            *search.results.rejected.values(),
            *_refused(search, end),
            *_still_off(search.before_remedies, end),
            *(("apply_remedies", Refusal(words)) for words in findings_in_words.unrepaired(end.findings)),
        ]
        stay = {
            steps: gain
            for steps, gain in search.results.gains.items()
            if all(step in end.steps for step in steps)
        }
        kept = [f"kept {' and then '.join(map(str, steps))}: {gain}" for steps, gain in stay.items()]
        scores = [f"before: {search.before_remedies.score}", *kept, f"after: {end.score}"] if kept else []
        return [*scores, *_advice(end, search)], refusals


def _advice(end: Trial, search: Search) -> Iterator[str]:
    """Yield what the caller can do: fix sizes that vary, or allow more trials."""
    functions = [f for program in end.subject.chosen for f in program.functions.values()]
    inputs = [v for function in functions for v in function.inputs.values()]
    if varying := [f"%{v.name}" for v in inputs if any_symbolic(getattr(v, "shape", ()) or ())]:
        yield (
            f"the sizes of {', '.join(varying)} vary, and most steps need fixed ones: fix them first "
            "(fix_shapes), and apply auto to the result"
        )
    if search.results.trials_ran_out:
        yield "not every step was tried, nor every pair: the trials ran out; a larger `trials` tries more"


def _refused(search: Search, end: Trial) -> Iterator[tuple[str, Refusal]]:
    """Yield refusals of passes that did not run, at ops that the given model had and the new one still has."""
    stay = {row.name for part in search.before_remedies.inspections for row in part.ops}
    stay &= {row.name for part in end.inspections for row in part.ops}
    ran = {step.name for step in end.steps}
    for op, (step_name, refusal) in search.results.refused.items():
        if op in stay and step_name not in ran:
            yield step_name, refusal


def _still_off(start: Trial, end: Trial) -> Iterator[tuple[str, Refusal]]:
    """Yield why ops of the given model are still off the ANE."""
    before = {(i, row.name, row.op_type) for i, part in enumerate(start.inspections) for row in part.ops}
    functions = [f for program in end.subject.graphs for f in program.functions.values()]
    chosen = {f for program in end.subject.chosen for f in program.functions.values()}
    for i, (part, function) in enumerate(zip(end.inspections, functions, strict=True)):
        if function not in chosen:
            continue
        ops: dict[str, an.Operation] = {v.name: op for op in walk_ops(function) for v in op.outputs}
        for row in part.ops:
            if row.legal is not False or (i, row.name, row.op_type) not in before:
                continue
            for finding in (f for f in row.findings if f.kind == "legality"):
                help_ = finding.remedy or finding.advice or "no pass repairs it"
                reason = f"{row.op_type} stays off the ANE: {finding.because} ({help_})"
                yield "apply_remedies", Refusal(reason, ops.get(row.name))


@an.example((1, 4, 2), dtype="fp16")
def example(x: Var) -> Var:
    """A decoder with a head of 4096 words over 4 positions, of which the last is wanted."""
    weight = np.linspace(-1, 1, 8192).reshape(4096, 2).astype(np.float16)
    ahead = np.triu(np.full((4, 4), -1e4, np.float16), 1)
    products = mb.matmul(x=x, y=x, transpose_y=True, name="products")
    shares = mb.softmax(x=mb.add(x=products, y=ahead, name="scores"), axis=-1, name="shares")
    seen = mb.matmul(x=shares, y=x, name="seen")
    return mb.linear(x=seen, weight=weight, name="logits")
