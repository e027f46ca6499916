"""Judge steps by the outputs of the model: in a plan, and after a surgery.

For a plan, outputs are computed in fp16 and in the engine's arithmetic, on the inputs given or on random ones,
and compared with the exact outputs of the model as given (`Outputs`). `repairs_of` finds the repairs that wrong
outputs need, `exact` takes back the steps that cost digits, and `too_far` refuses a step that rounds too much.

After a surgery the functions `check_...` and `prove_model` check the interface, the grade of every edit, and
the numbers of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from anesurgery.checking.comparison import Comparison, compare
from anesurgery.checking.exactness import MOST_FLOP, Near, Yardstick, less_exact
from anesurgery.checking.grades import REQUIRED
from anesurgery.errors import InterfaceError, ProofError, Refusal, SurgeryError, UnknownName
from anesurgery.files.interface import Interface
from anesurgery.files.package import Loaded
from anesurgery.mil import Program, walk_ops
from anesurgery.placement.certifying import arithmetic_of
from anesurgery.placement.rules import faulty_ops
from anesurgery.placement.rules.faulty_ops import CLAIMS
from anesurgery.rewriting.ml_program import Comparing, Graph, Subject
from anesurgery.rewriting.passes import Pass, run_on
from anesurgery.rewriting.session import Change, Session
from anesurgery.rewriting.step_trials import Trial, Trials
from anesurgery.semantics.reading import in_decibels

WRONG = 40.0
"""The PSNR in dB below which outputs count as wrong: the gate of `certify`."""
HALVES = 6.0
"""The dB by which a repair must improve outputs: it halves the error. A choice: less is rounding."""
RIGHT = 60.0
"""The PSNR in dB from which no further repair is needed: what recipes promise of outputs."""
GATE = RIGHT
"""The PSNR in dB that outputs must keep where a step rounds: likewise."""
FLOP = 32 * MOST_FLOP
"""Programs with more flop are not run for this: it takes three runs, and each would take many seconds."""


def check_requirement(require: str | None, prove: str | None) -> None:
    """Check that a required grade exists, and that sites are compared, without which no edit has a grade.

    Raises:
        SurgeryError: otherwise.
    """
    if require is not None and (require not in REQUIRED or prove not in ("sites", "both")):
        raise SurgeryError(
            f'require={require!r}; it may be {", ".join(REQUIRED)}, with prove="sites" or "both"'
        )


def check_grades(changes: Sequence[Change], require: str | None) -> None:
    """Check that every edit has the grade that is asked for.

    Raises:
        ProofError: one has not; the first is named.
    """
    if require is None:
        return
    lower = [c for c in changes if c.proof is None or c.proof.grade < REQUIRED[require]]
    if lower:
        first = lower[0]
        grade = f"not checked: {first.unchecked}" if first.proof is None else first.proof.words
        words = f"{len(lower)} of {len(changes)} edits have a lower grade than {require!r}"
        raise ProofError(f"{words}; first {first.pass_name} at {first.where} ({grade})")


def check_interface(before: Interface, after: Interface, session: Session) -> None:
    """Check that the interface changed only as passes declared.

    Raises:
        InterfaceError: an undeclared difference, in words.
    """
    declared = {name for change in session.contract for name in change.names}
    if difference := before.difference(after, ignore=declared):
        raise InterfaceError(f"the interface changed without being declared: {difference}")


def check_assumed(assume: Mapping[str, tuple[int, int]], graphs: Sequence[Graph]) -> None:
    """Refuse assumptions about inputs that do not exist, and empty ranges.

    Raises:
        UnknownName: no such input.
        SurgeryError: a range that ends before it begins.
    """
    functions = [f for graph in graphs for f in getattr(graph, "functions", {}).values()]
    inputs = {name for function in functions for name in function.inputs}
    for name, (low, high) in assume.items():
        if name not in inputs:
            raise UnknownName("input", name, inputs)
        if low > high:
            raise SurgeryError(f"assume: the range of {name} ends at {high}, before it begins at {low}")


def check_inputs(inputs: Any, given: Subject) -> None:
    """Refuse inputs that a model does not take; otherwise random ones would silently replace them.

    Args:
        inputs: arrays by input name, a list of such, or None.
        given: the model.

    Raises:
        InterpretError: they are no dictionary of arrays, one is missing, or has another shape.
        UnknownName: no such input.
    """
    for values in [inputs] if isinstance(inputs, Mapping) else inputs or ():
        given.check_inputs(values)


def prove_model(
    original: Subject, edited: Subject, session: Session, how: Comparing
) -> tuple[Comparison | None, list[str]]:
    """Compare the models as a whole; a gate of minus infinity only measures.

    Args:
        original: the model as given.
        edited: the model after the steps.
        session: in which these ran.
        how: what is promised.

    Returns:
        The worst comparison, None where there is none; and what a report notes of it.

    Raises:
        ProofError: the outputs differ by more than promised.
    """
    inputs = session.inputs[0] if isinstance(session.inputs, list) else session.inputs
    compared = partial(edited.compare, inputs=inputs, how=how)
    results, notes = compared(original), list[str]()
    if not all(r.ok for r in results if isinstance(r, Comparison)):
        results, notes = _beside_repairs(original, session, compared, results)
    notes += [f"not compared as a whole: {r}" for r in results if isinstance(r, Refusal)]
    comparisons = [r for r in results if isinstance(r, Comparison)]
    if failed := [r for r in comparisons if not r.ok]:
        raise ProofError(f"the outputs are not shown to agree: {failed[0].verdict}")
    notes += [r.instead for r in comparisons if r.instead]
    proof = min(comparisons, key=lambda r: r.psnr, default=None)
    if how.gate == -float("inf") and proof is not None:
        notes.append(f"outputs with the weights stored anew: {in_decibels(proof.psnr)}")
    return proof, notes


def _beside_repairs(
    original: Subject,
    session: Session,
    compared: Callable[[Subject], Sequence[Comparison | Refusal]],
    results: Sequence[Comparison | Refusal],
) -> tuple[Sequence[Comparison | Refusal], list[str]]:
    """Compare the end with the model after the numeric repairs alone, to judge the other steps.

    A repair changes outputs where the model before it is wrong, so that comparison may fail. The edits of the
    repairs were checked one by one, and notes name the inputs on which they changed outputs.

    Args:
        original: the model before.
        session: in which the steps ran.
        compared: compares the end with another model.
        results: of the comparison with the model before.

    Returns:
        The new results, and notes. The old results where an edit of the repairs was not checked, where the
        repairs alone do not account for the failure, or where finite outputs differ on plain inputs too.
    """
    repairs = list(dict.fromkeys(session.repairs))
    names = list(dict.fromkeys(step.name for step in repairs))
    edits = [change for change in session.changes if change.pass_name in names]
    failures = [r for r in results if isinstance(r, Comparison) and not r.ok]
    if not edits or any(change.proof is None for change in edits):
        return results, []
    if any(row.psnr < failure.gate for failure in failures for row in failure.outputs):
        return results, []
    repaired = original.clone()
    try:
        for step in repairs:
            run_on(step, repaired, session.again(prove_sites=False))
        repaired.finish()
        beside = compared(repaired)
    except SurgeryError:
        return results, []
    if not all(r.ok for r in beside if isinstance(r, Comparison)):
        return results, []
    words = f"the outputs agree except for the repairs by {', '.join(names)}, which are checked one by one"
    measured = [_with_first_figures(was, now) for was, now in zip(results, beside, strict=True)]
    return measured, [f"{words}: {failure.verdict}" for failure in failures]


def _with_first_figures(was: Comparison | Refusal, now: Comparison | Refusal) -> Comparison | Refusal:
    """Return the comparison with the repaired model, but with finite figures against the given model."""
    if isinstance(was, Comparison) and isinstance(now, Comparison):
        return now if any(output.failure for output in was.outputs) else replace(was, proof=now.proof)
    return now


@dataclass
class Outputs:
    """The exact outputs of a model, by which edited copies of it are judged."""

    measures: Sequence[Yardstick]
    """Measures for each program of the model, one for each part of a pipeline, how near outputs are."""
    gate: float = WRONG
    """The PSNR in dB below which outputs are wrong."""
    measured: dict[tuple[Pass, ...], Near | None] = field(default_factory=dict)
    """Steps -> the result of `near` for the model after them."""

    @classmethod
    def of(cls, start: Trial, session: Session, gate: float, **options: Any) -> Outputs:
        """Return the outputs on the inputs of a session, else (and for a pipeline) on random ones.

        Args:
            start: the model.
            session: has the inputs and the target.
            gate: the PSNR in dB below which outputs are wrong.
            options: of `Yardstick`.
        """
        programs = [graph for graph in start.subject.chosen if isinstance(graph, Program)]
        inputs = session.samples if len(programs) == 1 else []
        engine = arithmetic_of(session.target)
        measures = [Yardstick(p, engine, inputs, session.images, session.seed, **options) for p in programs]
        return cls(measures, gate)

    @property
    def can_run(self) -> bool:
        """Are all programs small enough to be run for this?"""
        return all(measure.is_small for measure in self.measures)

    def near(self, trial: Trial) -> Near | None:
        """Return how near the outputs of a trial are to the exact ones, in each arithmetic.

        Of several programs, the worst counts. None where a program cannot be measured.
        """
        if trial.steps not in self.measured:
            each = [measure.measure(program, trial.contract) for measure, program in self._pairs(trial)]
            known = [part for part in each if part is not None]
            arithmetics = known[0] if known and len(known) == len(each) else ()
            near = Near({name: min(part[name] for part in known) for name in arithmetics})
            near.notes = tuple(note for part in known for note in part.notes)
            near.blank = bool(known) and all(part.blank for part in known)
            self.measured[trial.steps] = near or None
        return self.measured[trial.steps]

    def before_and_after(self, start: Trial, end: Trial) -> tuple[Near | None, Near | None]:
        """Return how near the outputs are before and after a plan; only those that the end still has count."""
        result_changes = [change for change in end.contract if not change.retypes]
        if not result_changes:
            return self.near(start), self.near(end)
        if len(self.measures) != 1:  # the members of a pipeline keep their outputs
            return None, None
        ((measure, before),), ((_, after),) = self._pairs(start), self._pairs(end)
        return measure.seen_as(before, (), result_changes), measure.seen_as(after, end.contract)

    def undefined(self, trial: Trial) -> int:
        """Count the inputs, each filled with one number, for which outputs in fp16 are not finite."""
        return sum(measure.undefined(program, trial.contract) for measure, program in self._pairs(trial))

    def _pairs(self, trial: Trial) -> list[tuple[Yardstick, Any]]:
        """Return the programs of a trial, each with what measures it."""
        return list(zip(self.measures, trial.subject.chosen, strict=True)) if self.measures else []

    def wrong(self, near: Near | None) -> str:
        """Return how wrong outputs are and why, in words; "" where they are right, or nobody knows."""
        low = [f"{in_decibels(v)} in {name}" for name, v in (near or {}).items() if v < self.gate]
        words = [f"outputs are wrong still on the inputs at hand, {', '.join(low)}"] if low else []
        why = next(filter(None, (measure.why_far() for measure in self.measures if low)), "")
        return "; ".join(filter(None, [*words, *(near.notes if near else ()), why]))

    def loss(self, old: Trial, new: Trial) -> str:
        """Return how outputs become less exact, in words; "" if not, or if wrong ones become right by it."""
        was, now = self.near(old), self.near(new)
        return "" if was is None or now is None or self._are_mended(was, now) else less_exact(was, now)

    def repaired(self, old: Trial, new: Trial) -> bool:
        """Are outputs clearly nearer in an arithmetic in which they were wrong, and nowhere further off?"""
        was, now = self.near(old) or Near(), self.near(new)
        if now is None or min(now.values()) == -float("inf"):
            return False
        wrong = {name: decibels for name, decibels in was.items() if decibels < self.gate}
        nearer = any(decibels < now[name] >= decibels + HALVES for name, decibels in wrong.items())
        return nearer and not self.loss(old, new)

    def _are_mended(self, was: Near, now: Near) -> bool:
        """Are all outputs right now, and was one of them wrong?"""
        return min(now.values()) >= RIGHT and any(old < self.gate <= now[name] for name, old in was.items())


def too_far(old: Trial, new: Trial) -> str:
    """Return how far rounding moves outputs on a random input, in words; "" where `GATE` allows it.

    The description of the model before says which inputs are images: their pixels go from 0 to 255.
    """
    if not any(step.rounds for step in new.steps[len(old.steps) :]):
        return ""
    for graph, other in zip(old.subject.chosen, new.subject.chosen, strict=True):
        before = Loaded(graph, old.subject.spec_of(graph))
        for name in graph.functions:
            result = compare(before, other, function=name, precision="fp16", contract=new.contract, gate=GATE)
            if not result.ok:
                undefined = next((o.failure for o in result.outputs if o.failure), "")
                return f"{undefined or f'it keeps {result.psnr:.1f} dB of {GATE:g}'} on a sampled input"
    return ""


@dataclass(frozen=True)
class Repairs:
    """Repairs that a model needs, and why they stay whatever they cost."""

    steps: tuple[Pass, ...]
    why: str
    """What goes wrong without them; if no step helps, what is wrong."""
    needed: str = "repairs what goes wrong on the inputs at hand"
    """Why a step is in the plan; the words follow its name."""
    faults: tuple[str, ...] = ()
    """Rules by which an op is reported wrong on the target, although no run here shows it."""

    def __str__(self) -> str:
        names = ", ".join(step.name for step in self.steps)
        return f"{names}: {self.why}" if names else self.why

    @property
    def headline(self) -> str:
        """The reason for a slower model, for the first line; "" where the outputs are the reason."""
        return f"repaired, as reported of this target: {', '.join(self.faults)}" if self.faults else ""


def repairs_of(steps: Sequence[Pass], start: Trial, trials: Trials, outputs: Outputs) -> Iterator[Repairs]:
    """Yield the repairs that a model needs, in the order in which they run.

    First come the fewest repairs that make wrong outputs right. Without inputs, a model is only run if a
    finding speaks of its numbers. Then come repairs of ops that were reported wrong on the target (`CLAIMS`),
    if no arithmetic here simulates the fault, or if no inputs are given: random numbers are small, and would
    not reach it.
    """
    samples = trials.session.samples
    if not steps or not outputs.measures:
        return
    judged = samples or outputs.can_run
    found = start.findings if judged else start.found_by(faulty_ops.RULES)
    if not samples and not any(finding.kind == "numeric" for finding in found):
        return
    claims = {f.rule: f.remedy for f in found if f.rule in CLAIMS}
    own = [_restricted_to_claims(step, claims) for step in steps]
    needed = _fewest_repairs(own, start, trials, outputs)
    if needed is not None:
        yield needed
    simulated = {rule for rule in claims if CLAIMS[rule].simulate is not None}
    unseen = {rule: remedy for rule, remedy in claims.items() if not (samples and rule in simulated)}
    done = () if needed is None else needed.steps
    if others := tuple(step for step in own if step.name in unseen.values() and step not in done):
        names = {step.name for step in others}
        rules = tuple(rule for rule, remedy in unseen.items() if remedy in names)
        advice = "" if simulated.isdisjoint(rules) else "; give inputs to see whether they reach it"
        why = f"{', '.join(rules)} was reported on this target{advice}"
        yield Repairs(others, why, "repairs what was reported wrong on the target", rules)


def _restricted_to_claims(step: Pass, claims: Mapping[str, str | None]) -> Pass:
    """Restrict a step that repairs several faults to those that are reported of the target."""
    names = tuple(CLAIMS[rule].name for rule, remedy in claims.items() if remedy == step.name)
    return replace(step, **{"only": names}) if names and "only" in step.options() else step


def _fewest_repairs(steps: Sequence[Pass], start: Trial, trials: Trials, outputs: Outputs) -> Repairs | None:
    """Find the fewest repairs that bring wrong outputs nearer to what the model means.

    All run at first, since one hazard may hide another. Then each is left out once, the last one first, and
    stays out if the outputs are as near without it, or right, and the score is no worse.

    Returns:
        None if the outputs are right as they are, or cannot be computed; no steps if none helps.
    """
    before, end = outputs.near(start), start
    if before is None or min(before.values()) >= outputs.gate:
        return None
    for step in steps:
        new = trials.after(end, step)
        end = new if isinstance(new, Trial) and not new.session.contract else end
    if not outputs.repaired(start, end):
        words = f"{outputs.wrong(before)}, and no single repair helps"
        return Repairs((), f"{words}: certify says where errors enter")
    for step in reversed(end.steps):
        other = trials.without(start, end, step)
        near = None if other is None else outputs.near(other)
        enough = {name: min(value, RIGHT) for name, value in (outputs.near(end) or {}).items()}
        if other and near is not None and not less_exact(enough, near) and not other.score.loss(end.score):
            end = other
    after = outputs.near(end) or Near()
    wrong = {name: old for name, old in before.items() if old < outputs.gate}
    gains = ", ".join(f"{in_decibels(v)} -> {in_decibels(after[name])} in {name}" for name, v in wrong.items())
    words = f"without it outputs are wrong on the inputs at hand, {gains} of what the model means"
    return Repairs(end.steps, words)


@dataclass
class Exact:
    """The result of `exact`: the trial without the steps that cost digits, and what was decided."""

    end: Trial
    losses: dict[str, str] = field(default_factory=dict)
    """Name of a step that was taken back -> by how much outputs would be less exact."""
    notes: list[str] = field(default_factory=list)
    """Sentences about steps that stay although they cost digits."""


def without_losses_of_digits(start: Trial, end: Trial, trials: Trials, outputs: Outputs) -> Exact:
    """Take back the steps that make outputs less exact, in fp16 or in the engine's arithmetic.

    If the outputs at the end are as exact as at the start, no step is judged. Else each step is judged beside
    the model right before it. One that costs digits is tried in its gentler form, if it has one, or taken back.
    Without inputs, a repair that leaves outputs right stays: random numbers are small and show no hazard.
    """
    was, now = outputs.near(start), outputs.near(end)
    if was is None or now is None or not less_exact(was, now):
        return Exact(end)
    result = Exact(start)
    for step in end.steps[len(start.steps) :]:
        if not isinstance(new := trials.after(result.end, step), Trial):
            continue
        loss, gentler = outputs.loss(result.end, new), step.gentler()
        gentle = trials.after(result.end, gentler) if loss and gentler is not None else None
        if isinstance(gentle, Trial) and not outputs.loss(result.end, gentle):
            new, loss = gentle, ""
        if loss and not step.rounds:  # a step that rounds has a gate of its own, `too_far`
            repaired = "" if trials.session.samples else hazards_of(new)
            if not repaired or min((outputs.near(new) or {"": 0.0}).values()) < RIGHT:
                result.losses[step.name] = loss
                continue
            result.notes.append(f"{step.name}: {loss}; kept, as it repairs what may go wrong: {repaired}")
        result.end = new
    return result


def hazards_of(new: Trial) -> str:
    """Return the numeric rules that name the last step, or an op that it removes: "num-a, num-b"."""
    assert new.before is not None
    findings = [finding for finding in new.before.findings if finding.kind == "numeric"]
    names = {words.split()[-1] for change in new.session.changes for words in change.before}
    ops = [op for graph in new.before.subject.chosen for op in walk_ops(graph) if op.name in names]
    edited = names.union(v.name for op in ops for v in op.outputs)  # a finding names an op by its output
    remedied = [f.rule for f in findings if f.remedy == new.steps[-1].name or f.op in edited]
    return ", ".join(dict.fromkeys(remedied))
