"""The search for the steps of a plan: on copies of the model, each step is tried, and stays where it pays.

Candidates are the steps of a recipe, in order, or the remedies that findings name, which are asked for again
after each that is kept. A step of a recipe stays unless it loses something; one that was only found has to gain
something, alone or in a pair. Then each step that may be useless is left out once, since a later one may do
without it. What changes results has to gain clearly more than what is reached without it. Last, each step of
the recipe that was left out is tried once more after the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from anesurgery.errors import Refusal
from anesurgery.mil import Operation, walk_ops
from anesurgery.placement.evidence import Finding
from anesurgery.placement.expected import CLEARLY
from anesurgery.placement.score import OFF
from anesurgery.placement.target import Target
from anesurgery.placement.verdicts import Legality
from anesurgery.rewriting.ml_program import Subject
from anesurgery.rewriting.outputs import too_far
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.session import Session
from anesurgery.rewriting.step_trials import LEAST, Idle, Trial, Trials

NOTHING = "it gains nothing on this target"
ALL = float("inf")


class Searching(Pass, abstract=True):
    """A pass that stands for a search: a plan has the steps that it finds in its place."""

    trials: int
    """Most sequences of passes that are tried."""

    def judged_on(self, session: Session) -> Target:
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
    """What was tried for one plan, what was kept, and what was not, with why."""

    start: Trial
    """The model as given."""
    trials: Trials
    timed: bool = True
    """Is a target named, so that time counts?"""
    wanted: dict[str, str] = field(default_factory=dict)
    """Name of a step that stays whatever it costs -> why, in words that follow its name."""
    sought: Searching | None = None
    """The step that stands for a search for remedies."""
    kept: dict[tuple[Pass, ...], str] = field(default_factory=dict)
    """What was gained, by the steps that were found and gained it."""
    rejected: dict[str, tuple[str, Refusal]] = field(default_factory=dict)
    """What was found and is not kept, by the words for the step."""
    refused: dict[str, tuple[str, Refusal]] = field(default_factory=dict)
    """By op of the model as given: what a remedy says of an op that names it."""
    losses: dict[str, str] = field(default_factory=dict)
    """What speaks against each step of the recipe that is left out, by name."""
    less_exact: dict[str, str] = field(default_factory=dict)
    """By how much outputs would be less exact, by name of a step that is left out for it."""
    needed: dict[Pass, str] = field(default_factory=dict)
    """What would be lost without a step that gains nothing by itself."""
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    idle: list[tuple[str, Refusal]] = field(default_factory=list)
    """What steps of the recipe say that changed nothing."""
    dearer: list[Trial] = field(default_factory=list)
    """The trials after single remedies that did not pay."""
    barred: set[Pass] = field(default_factory=set)
    """Remedies that are not tried for now."""
    ended: bool = False
    """Did the trials run out?"""

    def __post_init__(self) -> None:
        self.begun, self.target = self.start, self.start.target

    def best(self, steps: Sequence[Pass]) -> Trial:
        """The model after the steps that stay.

        Raises:
            SurgeryError: a step of the recipe fails.
        """
        whole = self.straight(steps)
        if self.start.scored is None or whole is self.start:
            return whole
        loses, end = self.loss(self.start, whole), whole
        if loses or self.timed:
            end = self.start
            for step in whole.steps:
                end = self.further(end, step)
        if self.losses and not loses and whole.score.gain(end.score):
            end, self.losses = whole, {}
        end = self.pruned(end, found=False)
        for step in steps if self.losses else ():
            if step not in end.steps and not self.losses.get(step.name, "").startswith(USELESS):
                end = self.further(end, step, again=True)
        return end

    def straight(self, steps: Sequence[Pass]) -> Trial:
        """All steps one after the other, and in the place of a search what it finds."""
        end = self.start
        for step in steps:
            if isinstance(step, Searching):
                end = self.seek(step, end)
                continue
            new = self.trials.after(end, step, in_place=not self.timed)  # else each is scored
            if isinstance(new, Trial):
                end = new
            elif new.error is not None:
                raise new.error
            else:
                self.idle += new.refusals
        return end

    def further(self, old: Trial, step: Pass, *, again: bool = False) -> Trial:
        """One step of the recipe more, if it loses nothing; if it is tried again, where it gains something."""
        if isinstance(step, Searching):
            return old
        new = self.trials.after(old, step)
        if isinstance(new, Idle):
            if new.error is not None:
                self.losses[step.name] = f"on what the steps before it left, it failed: {new.error}"
            return old
        loss = "" if step.essential or step in self.found else self.loss(old, new)
        if loss and not new.score.loss(old.score, OFF) and (gain := self.measured([step], old)):
            self.notes.append(f"{step.name}: {_overruled(gain, loss)}")
        elif loss and step.name in self.wanted:
            slower = new.score.loss(old.score, ["time"]) or new.score.loss(old.score, ["whole"])
            losses = " and ".join(dict.fromkeys(filter(None, (loss, slower))))
            words = f"{step.name} {self.wanted[step.name]}, and is kept although {losses}"
            self.warnings += [] if words in self.warnings else [words]
        elif loss:
            self.losses.setdefault(step.name, loss)
            return old
        elif again and self.timed and not new.score.gain(old.score):
            return old
        self.losses.pop(step.name, None)
        return new

    def loss(self, old: Trial, new: Trial, *, found: bool = False) -> str:
        """What steps lose; for those of a recipe, where no chip is named, there is no time.

        So that rises too small to tell do not add up, none may leave a model that is slower than at the start.
        """
        if not (self.timed or found):
            return new.score.loss(old.score, OFF)
        rises = new.score.loss(old.score, ["whole"])
        return new.score.loss(old.score) or (rises and new.score.loss(self.begun.score, ["whole"]))

    def measured(self, steps: Iterable[Pass], trial: Trial) -> str:
        """What was measured to be gained on the target by one of some steps, in words; "" for nothing."""
        own = [s for s in steps if type(s).known_gain is not Pass.known_gain] if self.timed else []
        each = (step.known_gain(graph, self.target) for step in own for graph in trial.held.chosen)
        return next(filter(None, each), "")

    @property
    def found(self) -> set[Pass]:
        """The steps that the search added."""
        return {step for steps in self.kept for step in steps}

    def pruned(self, end: Trial, *, found: bool) -> Trial:
        """Without the steps that others made useless, of those that were found or of the others."""
        for trial in end.way:
            step = trial.steps[-1]
            if (step in self.found) != found or not self.doubtful(trial, end):
                continue
            other = self.trials.without(self.start, end, step)
            if other is None or other.score.loss(end.score):
                continue
            alone = len(other.steps) == len(end.steps) - 1 and other.cost_to_callers <= end.cost_to_callers
            if found and (not alone or too_far(self.begun, other)):
                continue
            better = other.score.gain(end.score) or other.score.worth(end.score, ["size"])
            needed = end.score.gain(other.score) or end.advised.worth(other.advised, ["findings"])
            if needed and not (better or found):
                self.needed[step] = needed
                continue
            useless = f"{USELESS}{better and f' ({better})'}"
            self.leave_out(step, useless if found or better else NOTHING)
            end = other
        return end

    def doubtful(self, trial: Trial, end: Trial) -> bool:
        """May the model score as well without the last step of a trial, after those that follow it?

        Of those found, each but the last, where the model grew. Of the others one that gained nothing, or made
        something much larger, or larger in any way where a later step replaced something that it made.
        """
        step, old = trial.steps[-1], trial.before
        if old is None or self.measured([step], self.start):
            return False
        if step in self.found:
            return step is not end.steps[-1] and end.score.grows(self.begun.score)
        if step.essential or step.name in self.wanted or not self.timed:
            return False
        new = trial.score
        made = {name for change in trial.session.changes for name in change.after}
        later = [change for one in end.way[len(trial.steps) :] for change in one.session.changes]
        replaced = any(name in made for change in later for name in change.before)
        lean = new.gain(old.score) and not new.outgrown(old.score)
        return not lean or (replaced and new.grows(old.score))

    def leave_out(self, step: Pass, why: str) -> None:
        """Take back a step that was kept."""
        if step not in self.found:
            self.losses[step.name] = why
            return
        self.reject((step,), f"kept first, and undone: {why}")
        self.kept = {steps: words for steps, words in self.kept.items() if step not in steps}

    def seek(self, step: Searching, start: Trial) -> Trial:
        """As far as single remedies, and then pairs of them, lead."""
        self.sought = step
        self.begun = end = start
        self.trials.left, self.trials.ops = step.trials, step.trials * max(start.size, LEAST)
        while (better := self.single(end) or self.pair(end)) is not None:
            end = better
        end = self.unchanged(self.pruned(end, found=True))
        self.ended, self.trials.left, self.trials.ops = self.trials.exhausted, ALL, ALL
        return end

    def remedies(self, findings: Sequence[Finding]) -> Sequence[Pass]:
        """The passes that findings name."""
        return self.sought.remedies(findings, self.target) if self.sought is not None else ()

    def single(self, trial: Trial) -> Trial | None:
        """Each remedy by itself, and all that help one after another."""
        best, self.dearer = trial, []
        for step in self.remedies(trial.findings):
            new = None if step in self.barred else self.attempt(best, step)
            if new is not None and self.accept(best, new):
                best = new
            elif new is not None:
                self.dearer.append(new)
        return best if best is not trial else None

    def unchanged(self, end: Trial) -> Trial:
        """Where single remedies lead without the steps that change results, if those gain nothing clear."""
        self.barred = {t.steps[-1] for t in end.way[len(self.begun.steps) :] if t.changes_results}
        if not self.barred:
            return end
        kept, rejected = self.kept, dict(self.rejected)
        self.kept = {}
        other, changing, self.barred = self.single(self.begun), self.barred, set()
        if other is not None and not other.score.loss(end.score, ["legal"]):
            loss = end.score.loss(other.score)
            if loss or end.score.over(other.score).best > CLEARLY:
                words = f"tried and not kept: as much is gained without it{loss and f', and {loss}'}"
                for step in changing:
                    self.reject((step,), words)
                return other
        self.kept, self.rejected = kept, rejected
        return end

    def pair(self, trial: Trial) -> Trial | None:
        """A remedy that does not pay by itself, and then one that is named after it; small programs first."""
        for middle in (*sorted(self.dearer, key=lambda one: one.size), *self.shadowed(trial)):
            first = middle.steps[-1]
            for step in self.remedies(middle.findings) if self.trials.ops > 0 else ():
                other_way = self.trials.reached.get((*trial.steps, step, first))
                if step == first or isinstance(other_way, Trial):
                    continue  # the same two the other way round did not pay
                new = self.attempt(middle, step)
                if new is not None and self.accept(trial, new):
                    return new
        return None

    def shadowed(self, trial: Trial) -> Iterator[Trial]:
        """The trials after remedies of what else speaks against ops off the ANE, of which findings name one."""
        legality, illegal = Legality(self.target), {name for _, name in trial.score.illegal}
        ops = (op for graph in trial.held.chosen for op in walk_ops(graph))
        against = [op for op in ops if op.outputs and op.outputs[0].name in illegal]
        findings = [finding for op in against for finding in legality.speaking(op)]
        tried = self.remedies(trial.findings)
        for step in self.remedies(findings) if findings else ():
            new = None if step in tried else self.attempt(trial, step)
            if new is not None:
                yield new

    def attempt(self, trial: Trial, step: Pass) -> Trial | None:
        """The model after a remedy; None where it does nothing, fails, or changes results that it must not."""
        new = self.trials.after(trial, step)
        if isinstance(new, Idle):
            if new.error is not None:
                self.reject((step,), f"tried, and it failed: {new.error}")
            at = {r.where.outputs[0].name: (n, r) for n, r in new.refusals if isinstance(r.where, Operation)}
            named = {f.op for f in trial.findings if f.remedy == step.name} if at else ()
            self.refused |= {op: why for op, why in at.items() if op in named}
            return None
        assert self.sought is not None
        if (objection := self.sought.objection(new.session, trial.held)) is not None:
            self.reject((step,), objection.reason)
            return None
        return new

    def accept(self, old: Trial, new: Trial) -> bool:
        """Does it gain something by remedies, lose nothing, and stay near enough where one rounds?"""
        steps = new.steps[len(old.steps) :]
        measured = self.measured(steps, old)
        loss = self.loss(old, new, found=True)
        if loss and measured:
            loss, measured = new.score.loss(old.score, OFF), _overruled(measured, loss)
        gain = measured or loss or new.score.gain(old.score)
        gain = gain or new.advised.worth(old.advised, ["findings"])
        loss = loss or (_for_nothing(old, new) if gain else NOTHING)
        if loss:
            self.reject(steps, f"tried and not kept: {loss}")
            return False
        if far := too_far(old, new):
            self.reject(steps, f"tried, and it failed: {far}")
            return False
        self.kept[steps] = gain
        for step in steps:
            self.rejected.pop(str(step), None)
        return True

    def reject(self, steps: tuple[Pass, ...], reason: str) -> None:
        """Note why a remedy was not kept; a pair says no more than its steps."""
        if len(steps) == 1:
            self.rejected[str(steps[0])] = steps[0].name, Refusal(reason)


USELESS = "the other steps do as well without it"


def _overruled(measured: str, loss: str) -> str:
    """A gain that was measured, and what the estimate says against it."""
    return f"{measured}; measured, which counts more than that {loss}"


def _for_nothing(old: Trial, new: Trial) -> str:
    """What steps give away without a gain that is worth it, in words; "" for nothing.

    Other results are worth a clear gain in time; other types at the ends more on the ANE too; digits, also what
    may run there.
    """
    before, after = old.score, new.score
    clear, times = after.over(before).best <= CLEARLY, f"the {after.takes(before)} is no clear gain"
    types, results = (now > was for now, was in zip(new.cost_to_callers, old.cost_to_callers, strict=True))
    if results and not clear:
        return f"the results would change, and {times}"
    # What Core ML counts for an op chooses its unit and is no run time: it pays for no digit.
    timed = after.expected.times(before.expected) is not None
    more = ["on the ANE", *(["legal"] if len(new.target.chips) > 1 else [])]  # nobody says what is on all chips
    rounds = any(step.rounds for step in new.steps[len(old.steps) :]) and not after.worth(before, ["perhaps"])
    if not (types or rounds) or after.worth(before, more) or (timed and clear):
        return ""
    what = "callers would have to give other types" if types else "values would be rounded"
    return f"{what}, no more would run on the ANE, and {times if timed else 'no run time is known'}"
