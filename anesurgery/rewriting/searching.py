"""The search for steps that improve how a model stands on a target: on copies, singly and in pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from anesurgery.checking.comparison import compare
from anesurgery.errors import Refusal
from anesurgery.files.interface import InterfaceChange
from anesurgery.files.package import Loaded
from anesurgery.mil import Operation, Program, walk_ops
from anesurgery.placement.evidence import Finding
from anesurgery.placement.standing import CLEARLY
from anesurgery.placement.target import Target
from anesurgery.placement.verdicts import Legality
from anesurgery.rewriting.ml_program import Subject
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.session import Session
from anesurgery.rewriting.step_trials import LEAST, Idle, Trial, Trials

GATE = 60.0
"""PSNR in dB that the outputs must keep where a step rounds: what recipes promise."""


class Searching(Pass, abstract=True):
    """A pass that stands for a search: a plan has the steps that it finds in its place."""

    trials: int
    """Most sequences of passes that are tried."""

    def aim(self, session: Session) -> Target:
        """Where the model is to run."""
        raise NotImplementedError

    def remedies(self, findings: Sequence[Finding], target: Target) -> Sequence[Pass]:
        """The passes that findings name, with their options, in the order in which they are tried."""
        raise NotImplementedError

    def objection(self, attempt: Session, model: Subject) -> Refusal | None:
        """Why what a pass did to a model is not wanted, whatever it gains; None where it is."""
        return None

    def last(self, model: Subject, session: Session) -> Iterator[tuple[Pass, str]]:
        """What a run of the model asks for beside what was found, each with the reason."""
        yield from ()

    def report(self, search: Search, end: Trial) -> tuple[list[str], list[tuple[str, Refusal]]]:
        """What is said of the search: notes, and what was not kept or is left as it is."""
        return [], []


@dataclass
class Search:
    """What was tried, what was kept, and what was not, with why."""

    trials: Trials
    step: Searching
    start: Trial
    kept: dict[tuple[Pass, ...], str] = field(default_factory=dict)
    """What was gained, by the steps that gained it."""
    rejected: dict[str, tuple[str, Refusal]] = field(default_factory=dict)
    """By the words for the step."""
    refused: dict[str, tuple[str, Refusal]] = field(default_factory=dict)
    """By op of the model as given: what a remedy says of an op that names it."""
    barred: tuple[Pass, ...] = ()
    """Steps that are not tried for now."""
    dearer: list[Trial] = field(default_factory=list)
    """The states after single steps that did not pay."""
    ended: bool = False
    """Did the trials run out?"""

    def __post_init__(self) -> None:
        self.target = self.start.target

    def improve(self) -> Trial:
        """The best state that single steps, and then pairs of them, lead to; results change only if it pays."""
        self.trials.left = self.step.trials
        self.trials.ops = self.step.trials * max(self.start.size, LEAST)
        end = self.pruned(self.climb(self.start))
        earlier = len(self.start.steps)
        changing = tuple(step for step in end.steps[earlier:] if step in end.changing)
        end = self.without(end, changing) if changing else end
        self.ended = self.trials.exhausted
        return end

    def remedies(self, findings: Sequence[Finding]) -> Sequence[Pass]:
        """The passes that findings name."""
        return self.step.remedies(findings, self.target)

    def pruned(self, end: Trial) -> Trial:
        """The end without the steps that the others made useless: each is left out once, the first one first.

        Of two ends that stand equally well the one with fewer steps is preferred; what was measured stays.
        """
        start, found = self.start, end.steps[len(self.start.steps) :]
        if len(found) < 2 or not end.stands.growth(start.stands):
            return end
        for step in found[:-1]:
            if self.measured(step, start):
                continue
            left = [one for one in end.steps[len(start.steps) :] if one != step]
            other = self.trials.led(start, left)
            if isinstance(other, Idle) or len(other.steps) < len(start.steps) + len(left):
                continue
            if other.stands.loss(end.stands) or self.too_far(start, left):
                continue
            if (other.retyped, len(other.changing)) > (end.retyped, len(end.changing)):
                continue
            better = other.stands.gain(end.stands)
            self.drop(step, f"the other steps do as well without it{f': {better}' if better else ''}")
            end = other
        return end

    def drop(self, step: Pass, why: str) -> None:
        """Take back a step that was kept."""
        self.reject((step,), f"kept first, and undone: {why}")
        self.kept = {steps: words for steps, words in self.kept.items() if step not in steps}

    def climb(self, trial: Trial) -> Trial:
        """As far as single steps, and then pairs of them, lead up."""
        better: Trial | None = trial
        while better is not None:
            trial = better
            better = self.single(trial) or self.pair(trial)
        return trial

    def without(self, end: Trial, changing: tuple[Pass, ...]) -> Trial:
        """The end that is reached without the steps that change results, where it stands as well or better."""
        kept, rejected = self.kept, dict(self.rejected)
        self.kept, self.barred = {}, changing
        other = self.climb(self.start)
        self.barred = ()
        loss, clear = end.stands.loss(other.stands), end.stands.over(other.stands).best <= CLEARLY
        if other is not self.start and (loss or not clear) and not other.stands.barred_by(end.stands):
            for step in changing:
                words = f"as much is gained without it{loss and f', and {loss}'}"
                self.reject((step,), f"tried and not kept: {words}")
            return other
        self.kept, self.rejected = kept, rejected
        return end

    def single(self, trial: Trial) -> Trial | None:
        """Each remedy by itself; all that help, one after another."""
        best, self.dearer = trial, []
        for step in self.remedies(trial.findings):
            new = None if step in self.barred else self.attempt(best, step)
            if new is not None and self.accept(best, new):
                best = new
            elif new is not None:
                self.dearer.append(new)
        return best if best is not trial else None

    def pair(self, trial: Trial) -> Trial | None:
        """A remedy that does not pay by itself, and then one that is named after it; small programs first."""
        reached = self.trials.reached
        for middle in (*sorted(self.dearer, key=lambda one: one.size), *self.shadowed(trial)):
            first = middle.steps[-1]
            for step in self.remedies(middle.findings) if self.trials.ops > 0 else ():
                other_way = reached.get((*trial.steps, step, first))
                if step in (first, *self.barred) or isinstance(other_way, Trial):
                    continue  # the same two the other way round did not pay
                new = self.attempt(middle, step)
                if new is not None and self.accept(trial, new):
                    return new
        return None

    def shadowed(self, trial: Trial) -> Iterator[Trial]:
        """The states after remedies of what else speaks against ops off the ANE, of which findings name one."""
        legality, illegal = Legality(self.target), {name for _, name in trial.stands.illegal}
        ops = (op for graph in trial.held.chosen for op in walk_ops(graph))
        against = [op for op in ops if op.outputs and op.outputs[0].name in illegal]
        findings = [finding for op in against for finding in legality.speaking(op)]
        tried = self.remedies(trial.findings)
        for step in self.remedies(findings) if findings else ():
            new = None if step in (*tried, *self.barred) else self.attempt(trial, step)
            if new is not None:
                yield new

    def attempt(self, trial: Trial, step: Pass) -> Trial | None:
        """The state after a step; None where it does nothing, fails, or changes results that it must not."""
        new = self.trials.after(trial, step)
        if isinstance(new, Idle):
            if new.error is not None:
                self.reject((step,), f"tried, and it failed: {new.error}")
            self.told(step, trial, new.refusals)
            return None
        if (objection := self.step.objection(new.session, trial.held)) is not None:
            self.reject((step,), objection.reason)
            return None
        return new

    def told(self, step: Pass, trial: Trial, refusals: Sequence[tuple[str, Refusal]]) -> None:
        """Note what a step that changed nothing says of the ops at which it is named."""
        at = {r.where.outputs[0].name: (n, r) for n, r in refusals if isinstance(r.where, Operation)}
        named = {f.op for f in trial.findings if f.remedy == step.name} if at else ()
        self.refused |= {op: why for op, why in at.items() if op in named}

    def measured(self, step: Pass, trial: Trial) -> str:
        """What was measured to be gained by a step on the target, in words; "" for nothing."""
        return measured_gain(step, trial.held, self.target)

    def accept(self, old: Trial, new: Trial) -> bool:
        """Is it better, and near enough where a step rounds?"""
        steps = new.steps[len(old.steps) :]
        measured = next(filter(None, (self.measured(step, old) for step in steps)), "")
        loss, gain = new.stands.loss(old.stands), new.stands.gain(old.stands)
        loss = loss or new.stands.dearer(self.start.stands)
        if measured:
            measured = overruled(measured, loss) if loss else measured
            loss = new.stands.leaves(old.stands)
        if not (loss or gain) and new.advised.tidier(old.advised):
            gain = f"findings {old.advised.findings} -> {new.advised.findings}"
        gain = measured or gain
        if gain:
            loss = loss or _for_nothing(old, new, steps)
        if loss or not gain:
            self.reject(steps, f"tried and not kept: {loss or 'it gains nothing on this target'}")
            return False
        if far := self.too_far(old, steps):
            self.reject(steps, f"tried, and it failed: {far}")
            return False
        self.kept[steps] = gain
        for step in steps:
            self.rejected.pop(str(step), None)
        return True

    def too_far(self, old: Trial, steps: Sequence[Pass]) -> str:
        """What rounding does to the outputs, where it is more than the gate allows; "" where no step rounds."""
        new = self.trials.led(old, steps) if any(step.rounds for step in steps) else None
        if not isinstance(new, Trial):
            return ""
        return next(
            filter(None, map(_too_far, _parts(old), _parts(new), [new.contract] * len(_parts(new)))), ""
        )

    def reject(self, steps: tuple[Pass, ...], reason: str) -> None:
        """Note why a step was not kept; a pair says no more than its steps."""
        if len(steps) == 1:
            self.rejected[str(steps[0])] = steps[0].name, Refusal(reason)


def measured_gain(step: Pass, model: Subject, target: Target) -> str:
    """What was measured to be gained by a step on a target, in words; "" for nothing."""
    if type(step).known_gain is Pass.known_gain:
        return ""
    return next(filter(None, (step.known_gain(graph, target) for graph in model.chosen)), "")


def _parts(trial: Trial) -> list[Loaded]:
    """The programs of a model, with the shapes that it describes."""
    return [
        Loaded(graph, trial.held.spec_of(graph)) for graph in trial.held.chosen if isinstance(graph, Program)
    ]


def _for_nothing(old: Trial, new: Trial, steps: Sequence[Pass]) -> str:
    """What steps give away without a gain that is worth it, in words; "" for nothing.

    Other results are worth a clear gain in time; other types at the ends more on the ANE too; digits, also what
    may run there.
    """
    before, after = old.stands, new.stands
    clear, times = after.over(before).best <= CLEARLY, f"the {after.takes(before)} is no clear gain"
    if len(new.changing) > len(old.changing) and not clear:
        return f"the results would change, and {times}"
    # What Core ML counts for an op chooses its unit and is no run time: it pays for no digit.
    timed = after.expected.times(before.expected) is not None
    one_chip = len(new.target.chips) == 1  # else nobody says what is on the ANE
    pays = after.brings(before) or (timed and clear) or (not one_chip and after.frees(before))
    retyped, rounds = new.retyped > old.retyped, any(step.rounds for step in steps)
    if pays or not (retyped or (rounds and not after.may_bring(before))):
        return ""
    what = "callers would have to give other types" if retyped else "values would be rounded"
    return f"{what}, no more would run on the ANE, and {times if timed else 'no run time is known'}"


def overruled(measured: str, loss: str) -> str:
    """A gain that was measured, and what the estimate says against it."""
    return f"{measured}; measured, which counts more than that {loss}"


def _too_far(before: Loaded, after: Loaded, contract: Sequence[InterfaceChange]) -> str:
    """What rounding does to the outputs on a sampled input, where it is more than the gate allows.

    Args:
        before: the model, whose description says which inputs are images: their pixels go from 0 to 255.
        after: the model after the steps.
        contract: how they change the interface.
    """
    for function in before.program.functions:
        comparison = compare(
            before, after.program, precision="fp16", contract=contract, gate=GATE, function=function
        )
        if not comparison.ok:
            keeps = f"it keeps {comparison.psnr:.1f} dB of {GATE:g}"
            undefined = next((o.failure for o in comparison.outputs if o.failure), "")
            return f"{undefined or keeps} on a sampled input"
    return ""
