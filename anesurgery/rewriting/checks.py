"""Judge the steps of a plan by the outputs of the model.

Outputs are computed in fp16 and in the engine's arithmetic, on the inputs given or on random ones, and compared
with the exact outputs of the model as given (`Outputs`). `repairs_of` finds the repairs that wrong outputs
need, `without_losses_of_digits` takes back steps, and `why_too_far` refuses a step that rounds too much.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from anesurgery.checking.comparison import compare
from anesurgery.checking.exactness import MOST_FLOP, Near, Yardstick, less_exact
from anesurgery.files.package import Loaded
from anesurgery.mil import Program, walk_ops
from anesurgery.placement.certifying import arithmetic_of
from anesurgery.placement.rules import faulty_ops
from anesurgery.placement.rules.faulty_ops import CLAIMS
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.session import Session
from anesurgery.rewriting.step_trials import Trial, Trials
from anesurgery.semantics.reading import in_decibels

WRONG = 40.0
"""The PSNR in dB below which outputs count as wrong: the gate of `certify`."""
HALVES = 6.0
"""The dB by which a repair must improve outputs: it halves the error. A choice: less is rounding."""
RIGHT = 60.0
"""The PSNR in dB from which outputs need no repair, and which they keep where a step rounds: what recipes
promise of outputs."""
FLOP = 32 * MOST_FLOP
"""Programs with more flop are not run for this: it takes three runs, and each would take many seconds."""


@dataclass
class Outputs:
    """The exact outputs of a model, by which edited copies of it are judged."""

    measures: Sequence[Yardstick]
    """Measures for each program of the model, one for each part of a pipeline, how near outputs are."""
    wrong_below: float = WRONG
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
            self.measured[trial.steps] = Near.worst(each)
        return self.measured[trial.steps]

    def known(self, trial: Trial) -> Near:
        """Return `near` of a trial that can be measured for certain."""
        near = self.near(trial)
        assert near is not None
        return near

    def before_and_after(self, start: Trial, end: Trial) -> tuple[Near | None, Near | None]:
        """Return how near the outputs are before and after a plan; only those that the end still has count."""
        result_changes = [change for change in end.contract if not change.retypes]
        if not result_changes:
            return self.near(start), self.near(end)
        if len(self.measures) != 1:  # the members of a pipeline keep their outputs
            return None, None
        ((measure, before),), ((_, after),) = self._pairs(start), self._pairs(end)
        return measure.seen_as(before, contract=(), later=result_changes), measure.seen_as(after, end.contract)

    def undefined(self, trial: Trial) -> int:
        """Count the inputs, each filled with one number, for which outputs in fp16 are not finite."""
        return sum(measure.undefined(program, trial.contract) for measure, program in self._pairs(trial))

    def _pairs(self, trial: Trial) -> list[tuple[Yardstick, Any]]:
        """Return the programs of a trial, each with what measures it."""
        return list(zip(self.measures, trial.subject.chosen, strict=True)) if self.measures else []

    def wrong_words(self, near: Near | None) -> str:
        """Return how wrong outputs are and why, in words; "" where they are right, or nobody knows."""
        low = [f"{in_decibels(v)} in {name}" for name, v in (near or {}).items() if v < self.wrong_below]
        words = [f"outputs are wrong still on the inputs at hand, {', '.join(low)}"] if low else []
        why = next(filter(None, (measure.why_far() for measure in self.measures if low)), "")
        return "; ".join(filter(None, [*words, *(near.notes if near else ()), why]))

    def loss_words(self, old: Trial, new: Trial) -> str:
        """Return how outputs become less exact, in words; "" if not, or if wrong ones become right by it."""
        was, now = self.near(old), self.near(new)
        return "" if was is None or now is None or self._are_mended(was, now) else less_exact(was, now)

    def repaired(self, old: Trial, new: Trial) -> bool:
        """Are outputs clearly nearer in an arithmetic in which they were wrong, and nowhere further off?"""
        was, now = self.near(old) or Near(), self.near(new)
        if now is None or min(now.values()) == -float("inf"):
            return False
        wrong = {name: decibels for name, decibels in was.items() if decibels < self.wrong_below}
        nearer = any(decibels < now[name] >= decibels + HALVES for name, decibels in wrong.items())
        return nearer and not self.loss_words(old, new)

    def _are_mended(self, was: Near, now: Near) -> bool:
        """Are all outputs right now, and was one of them wrong?"""
        return min(now.values()) >= RIGHT and any(
            old < self.wrong_below <= now[name] for name, old in was.items()
        )


def why_too_far(old: Trial, new: Trial) -> str:
    """Return how far rounding moves outputs on a random input, in words; "" where they stay `RIGHT`.

    The description of the model before says which inputs are images: their pixels go from 0 to 255.
    """
    if not any(step.rounds for step in new.steps[len(old.steps) :]):
        return ""
    for graph, other in zip(old.subject.chosen, new.subject.chosen, strict=True):
        before = Loaded(graph, old.subject.spec_of(graph))
        for name in graph.functions:
            result = compare(before, other, function=name, precision="fp16", contract=new.contract, gate=RIGHT)
            if not result.ok:
                undefined = next((o.failure for o in result.outputs if o.failure), "")
                return f"{undefined or f'it keeps {result.psnr:.1f} dB of {RIGHT:g}'} on a sampled input"
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
    if before is None or min(before.values()) >= outputs.wrong_below:
        return None
    for step in steps:
        new = trials.after(end, step)
        end = new if isinstance(new, Trial) and not new.session.contract else end
    if not outputs.repaired(start, end):
        words = f"{outputs.wrong_words(before)}, and no single repair helps"
        return Repairs((), f"{words}: certify says where errors enter")
    for step in reversed(end.steps):
        other = trials.without(start, end, step)
        near = None if other is None else outputs.near(other)
        enough = {name: min(value, RIGHT) for name, value in outputs.known(end).items()}
        if other and near is not None and not less_exact(enough, near) and not other.score.loss(end.score):
            end = other
    after = outputs.known(end)
    wrong = {name: old for name, old in before.items() if old < outputs.wrong_below}
    gains = ", ".join(f"{in_decibels(v)} -> {in_decibels(after[name])} in {name}" for name, v in wrong.items())
    words = f"without it outputs are wrong on the inputs at hand, {gains} of what the model means"
    return Repairs(end.steps, words)


@dataclass
class Exact:
    """What stays after the steps that cost digits are left out, and why."""

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
        loss, gentler = outputs.loss_words(result.end, new), step.gentler()
        gentle = trials.after(result.end, gentler) if loss and gentler is not None else None
        if isinstance(gentle, Trial) and not outputs.loss_words(result.end, gentle):
            new, loss = gentle, ""
        if loss and not step.rounds:  # a step that rounds has a gate of its own, `why_too_far`
            repaired = "" if trials.session.samples else hazards_of(new)
            if not repaired or min(outputs.known(new).values()) < RIGHT:
                result.losses[step.name] = loss
                continue
            result.notes.append(f"{step.name}: {loss}; kept, as it repairs what may go wrong: {repaired}")
        result.end = new
    return result


def hazards_of(new: Trial) -> str:
    """Return the numeric rules that name the last step, or an op that it removes: "num-a, num-b"."""
    assert new.before is not None
    findings = [finding for finding in new.before.findings if finding.kind == "numeric"]
    names = {op.partition(" ")[2] for change in new.session.changes for op in change.before}  # "type name"
    ops = [op for graph in new.before.subject.chosen for op in walk_ops(graph) if op.name in names]
    edited = names.union(v.name for op in ops for v in op.outputs)  # a finding names an op by its output
    remedied = [f.rule for f in findings if f.remedy == new.steps[-1].name or f.op in edited]
    return ", ".join(dict.fromkeys(remedied))
