"""Search the steps of a plan (`Search.best`): which steps of the recipe stay, and which remedies are added.

A *step* is a pass of the recipe; each is tried on a copy of the model. A *remedy* is a pass that a finding of
`inspect` names: a `Searching` step, as in `auto`, stands for the remedies that its search keeps, and these are
looked up again after each one. Rules 1 to 3 are applied to the remedies, in this order, and then rules 1, 2 and
4 to the steps:

1. A step of a recipe stays unless it loses something. A remedy has to gain something, alone or in a pair.
2. Each step that may be useless now is left out once: a later step may have made it so.
3. Steps that change results must gain clearly more than the best plan without them.
4. Each step of the recipe that was left out is tried once more at the end, and then has to gain something. A
   step without which the others gain more (rule 2) is not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from anesurgery.errors import Refusal
from anesurgery.mil import Operation, walk_ops
from anesurgery.placement.evidence import Finding
from anesurgery.placement.score import CLEARLY, OFF, Score
from anesurgery.placement.target import Target
from anesurgery.placement.verdicts import Legality
from anesurgery.rewriting.checks import why_too_far
from anesurgery.rewriting.ml_program import Subject
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.session import Session
from anesurgery.rewriting.step_trials import LEAST, Idle, Trial, Trials

NOTHING = "it gains nothing on this target"
"""Why a step is left out that neither gains nor loses."""
MOST_GROWTH = 4
"""A remedy that does not pay alone, and makes the model larger by more than this factor, is not tried again
after another one: unrolled loops take longer to try than all other remedies together. Chosen, not measured."""
USELESS = "the other steps do as well without it"
"""Why a step is left out that later steps made useless."""


class Searching(Pass, abstract=True):
    """A pass in a recipe that is replaced by the remedies that a search finds."""

    trials: int
    """The most passes that are tried."""

    def judged_on(self, session: Session) -> Target:
        """Return the target by which trials are scored."""
        raise NotImplementedError

    def remedies(self, findings: Sequence[Finding], target: Target) -> Sequence[Pass]:
        """Return the passes that findings name, with their options, in the order in which they are tried."""
        raise NotImplementedError

    def objection(self, attempt: Session, model: Subject) -> Refusal | None:
        """Return why an edit is unacceptable whatever it gains; None where it is acceptable."""
        return None

    def last(self, model: Subject, session: Session) -> Iterator[tuple[Pass, str]]:
        """Yield passes that are needed after the search, each with the reason."""
        yield from ()

    def report(self, search: Search, end: Trial) -> tuple[list[str], list[tuple[str, Refusal]]]:
        """Return notes about the search, and (name, refusal) pairs of what was not kept or not repaired."""
        return [], []


@dataclass
class SearchResults:
    """What a search found out about steps and remedies."""

    remedy_gains: dict[tuple[Pass, ...], str] = field(default_factory=dict)
    """Remedies that are kept, one or a pair -> what they gain, in words."""
    remedies_rejected: dict[str, tuple[str, Refusal]] = field(default_factory=dict)
    """Remedy that is not kept, as text -> (its name, why)."""
    remedies_refused: dict[str, tuple[str, Refusal]] = field(default_factory=dict)
    """Name of an op -> (name of the remedy that a finding names there, why the remedy refuses it)."""
    step_losses: dict[Pass, str] = field(default_factory=dict)
    """Step of the recipe that is left out -> what it would lose."""
    steps_needed: dict[Pass, str] = field(default_factory=dict)
    """Step that gains nothing by itself -> what would be lost without it."""
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    steps_idle: list[tuple[str, Refusal]] = field(default_factory=list)
    """(name, refusal) pairs of steps of the recipe that changed nothing."""
    trials_ran_out: bool = False
    """Did the search end because its trials ran out?"""


@dataclass
class Search:
    """The search for one plan."""

    start: Trial
    """The model as given."""
    tried: Trials
    required: dict[Pass, str] = field(default_factory=dict)
    """Step that stays whatever it costs -> why, as words that follow its name."""
    results: SearchResults = field(default_factory=SearchResults)
    searching_step: Searching | None = None
    """The step of the recipe that asked for a search for remedies."""
    better_without: set[Pass] = field(default_factory=set)
    """Steps of the recipe that are left out, since the others gain more without them."""
    before_remedies: Trial = field(init=False)
    """The model where the search for remedies began; the model as given before that."""

    def __post_init__(self) -> None:
        self.before_remedies = self.start

    def best(self, steps: Sequence[Pass]) -> Trial:
        """Return the trial after the steps that stay.

        Raises:
            SurgeryError: a step of the recipe fails.
        """
        everything = self.run_all(steps)  # for remedies, rules 1 to 3 are applied here
        if self.start.score_if_any is None or everything is self.start:
            return everything
        end, losses = self.start, self.results.step_losses
        for step in everything.steps:  # rule 1
            end = self.add_step(end, step)
        loses_something = self.loss(self.start, everything) or self.loss(end, everything)
        if losses and not loses_something and everything.score.gain(end.score):
            end = everything  # together they gain, though one of them alone loses something
            losses.clear()
        end = self.without_useless_steps(end)  # rule 2
        for step in steps if losses else ():  # rule 4
            if step not in end.steps and step not in self.better_without and not isinstance(step, Searching):
                end = self.add_step(end, step, must_gain=True)
        return end

    def run_all(self, steps: Sequence[Pass]) -> Trial:
        """Run all steps one after the other, with the remedies that a search finds in its place."""
        end = self.start
        for step in steps:
            if isinstance(step, Searching):
                end = self.search_remedies(step, end)
                continue
            new = self.tried.after(end, step)
            if isinstance(new, Trial):
                end = new
            elif new.error is not None:
                raise new.error
            else:
                self.results.steps_idle += new.refusals
        return end

    def add_step(self, old: Trial, step: Pass, *, must_gain: bool = False) -> Trial:
        """Return the trial with one step of the recipe more if it loses nothing, else the old trial.

        Of a step that is left out, the first loss is noted.
        """
        new, losses = self.tried.after(old, step), self.results.step_losses
        if isinstance(new, Idle):
            if new.error is not None:
                losses.setdefault(step, f"on what the steps before it left, it failed: {new.error}")
            return old
        loss = "" if step.essential or self.is_remedy(step) else self.loss(old, new)
        if loss and not new.score.loss(old.score, OFF) and (gain := self.measured_gain([step], old)):
            self.results.notes.append(f"{step.name}: {_overruled(gain, loss)}")
        elif loss and step in self.required:
            self.warn_of_loss(old, new, loss)
        elif loss:
            losses.setdefault(step, loss)
            return old
        elif must_gain and not new.score.gain(old.score):
            return old
        losses.pop(step, None)
        return new

    def warn_of_loss(self, old: Trial, new: Trial, loss: str) -> None:
        """Warn that the last step of a trial is kept although it loses something."""
        step = new.steps[-1]
        slower = new.score.loss(old.score, ["time"]) or new.score.loss(old.score, ["whole"])
        losses = " and ".join(dict.fromkeys(filter(None, (loss, slower))))
        words = f"{step.name} {self.required[step]}, and is kept although {losses}"
        if words not in self.results.warnings:
            self.results.warnings.append(words)

    def loss(self, old: Trial, new: Trial) -> str:
        """Return what a trial loses against an older one, in words; "" for nothing.

        A rise in time that is too small to matter by itself counts once the model is slower than at the start
        of the search, so that rises do not add up.
        """
        if loss := new.score.loss(old.score):
            return loss
        if new.score.loss(old.score, ["whole"]):
            return new.score.loss(self.before_remedies.score, ["whole"])
        return ""

    def measured_gain(self, steps: Iterable[Pass], trial: Trial) -> str:
        """Return the gain that somebody measured of one of some steps on the target, in words; "" for none."""
        graphs = trial.subject.chosen
        gains = (step.known_gain(graph, self.start.target) for step in steps for graph in graphs)
        return next(filter(None, gains), "")

    def is_remedy(self, step: Pass) -> bool:
        """Is a step a remedy that the search added?"""
        return any(step in steps for steps in self.results.remedy_gains)

    def without_useless_steps(self, end: Trial) -> Trial:
        """Return the trial without the steps of the recipe without which the model loses nothing."""
        for trial in end.path:
            step = trial.steps[-1]
            if self.is_remedy(step) or not self.may_be_useless(trial, end):
                continue
            if (other := self.without(end, step)) is None:
                continue
            better = _better_without(end, other)
            if not better and (needed := end.score.gain(other.score) or _fewer_findings(end, other)):
                self.results.steps_needed[step] = needed
                continue
            self.results.step_losses[step] = f"{USELESS} ({better})" if better else NOTHING
            self.better_without |= {step} if better else set()
            end = other
        return end

    def without(self, end: Trial, step: Pass) -> Trial | None:
        """Return the trial without a step; None where the model then loses something."""
        other = self.tried.without(self.start, end, step)
        return None if other is None or other.score.loss(end.score) else other

    def without_useless_remedies(self, end: Trial) -> Trial:
        """Return the trial without the remedies without which the model loses nothing.

        Each must be the only step that then goes, and callers and rounding must be no worse off without it.
        """
        for trial in end.path:
            step = trial.steps[-1]
            if not self.is_remedy(step) or self.measured_gain([step], self.start):
                continue
            if step is end.steps[-1] or not end.score.grows(self.before_remedies.score):
                continue
            other = self.without(end, step)
            if other is None or len(other.steps) != len(end.steps) - 1:
                continue
            if other.cost_to_callers > end.cost_to_callers or why_too_far(self.before_remedies, other):
                continue
            better = _better_without(end, other)
            why = f"{USELESS} ({better})" if better else USELESS
            self.reject((step,), f"kept first, and undone: {why}")
            gains = self.results.remedy_gains.items()
            self.results.remedy_gains = {steps: words for steps, words in gains if step not in steps}
            end = other
        return end

    def may_be_useless(self, trial: Trial, end: Trial) -> bool:
        """Is it worth trying to leave out the last step of a trial, one of the recipe, now that others follow?

        Yes for one that gained nothing, that made the model much larger, or that made it larger and had its ops
        replaced later.
        """
        step, old = trial.steps[-1], trial.before
        if old is None or step.essential or step in self.required or self.measured_gain([step], self.start):
            return False
        new = trial.score
        new_ops = {name for change in trial.session.changes for name in change.after}
        later = [change for after in end.path[len(trial.steps) :] for change in after.session.changes]
        are_replaced = any(name in new_ops for change in later for name in change.before)
        gains_cheaply = new.gain(old.score) and not new.over_bounds(old.score)
        return not gains_cheaply or (are_replaced and new.grows(old.score))

    def search_remedies(self, step: Searching, start: Trial) -> Trial:
        """Add single remedies, and pairs where no single one helps, until nothing is gained."""
        self.searching_step = step
        self.before_remedies = end = start
        self.tried.limit(step.trials, step.trials * max(start.size, LEAST))
        better: Trial | None = start
        while better is not None:  # rule 1, for remedies
            end = better
            better, unprofitable = self.add_single_remedies(end)
            if better is None:
                better = self.add_pair(end, unprofitable)
        end = self.without_changed_results(self.without_useless_remedies(end))  # rules 2 and 3
        self.results.trials_ran_out = self.tried.exhausted
        self.tried.limit(math.inf, math.inf)
        return end

    def remedies(self, findings: Sequence[Finding]) -> Sequence[Pass]:
        """Return the passes that findings name."""
        assert self.searching_step is not None
        return self.searching_step.remedies(findings, self.start.target)

    def add_single_remedies(
        self, trial: Trial, excluded: Collection[Pass] = ()
    ) -> tuple[Trial | None, list[Trial]]:
        """Try each remedy but those that are excluded.

        Returns:
            The trial after all that helped, None where none did; and the trials after single remedies that did
            not pay: a second remedy may make up for them.
        """
        best, unprofitable = trial, list[Trial]()
        for step in self.remedies(trial.findings):
            new = None if step in excluded else self.try_remedy(best, step)
            if new is not None and self.keep_if_it_gains(best, new):
                best = new
            elif new is not None:
                unprofitable.append(new)
        return (best if best is not trial else None), unprofitable

    def without_changed_results(self, end: Trial) -> Trial:
        """Return the best trial without steps that change results, unless these gain clearly more."""
        start = self.before_remedies
        changing = {t.steps[-1] for t in end.path[len(start.steps) :] if t.changes_results}
        if not changing:
            return end
        with_changes = self.results  # the second search writes to a copy, kept only if its plan is as good
        self.results = replace(
            with_changes, remedy_gains={}, remedies_rejected=dict(with_changes.remedies_rejected)
        )
        other, _ = self.add_single_remedies(start, excluded=changing)
        if other is not None and not other.score.loss(end.score, ["legal"]):
            loss = end.score.loss(other.score)
            if loss or end.score.over(other.score).best > CLEARLY:
                words = "tried and undone: as much is gained without it" + (f", and {loss}" if loss else "")
                for step in changing:
                    self.reject((step,), words)
                return other
        self.results = with_changes
        return end

    def add_pair(self, trial: Trial, unprofitable: Sequence[Trial]) -> Trial | None:
        """Return a trial after two remedies that pay only together; None where no pair does.

        Args:
            trial: the trial before both.
            unprofitable: trials after one remedy more, which does not pay alone; small models are tried first.
        """
        by_size = sorted(unprofitable, key=lambda trial: trial.size)
        for after_first in (*by_size, *self.hidden_remedies(trial)):
            first = after_first.steps[-1]
            if self.tried.exhausted:
                break
            for second in self.remedies(after_first.findings):
                if second == first or self.tried.earlier((*trial.steps, second, first)) is not None:
                    continue  # the pair in the other order was tried, and did not pay
                alone = self.tried.earlier((*trial.steps, second))
                if alone is not None and alone.size > MOST_GROWTH * trial.size:
                    continue
                new = self.try_remedy(after_first, second)
                if new is not None and self.keep_if_it_gains(trial, new):
                    return new
        return None

    def hidden_remedies(self, trial: Trial) -> Iterator[Trial]:
        """Yield trials after remedies that no finding names yet: an op off the ANE may have several causes."""
        legality, names = Legality(self.start.target), {name for _, name in trial.score.illegal}
        ops = (op for graph in trial.subject.chosen for op in walk_ops(graph))
        illegal = [op for op in ops if op.outputs and op.outputs[0].name in names]
        findings = [finding for op in illegal for finding in legality.speaking(op)]
        tried = self.remedies(trial.findings)
        for step in self.remedies(findings) if findings else ():
            new = None if step in tried else self.try_remedy(trial, step)
            if new is not None:
                yield new

    def try_remedy(self, trial: Trial, step: Pass) -> Trial | None:
        """Return the trial after a remedy; or note why there is none and return None."""
        new = self.tried.after(trial, step)
        if isinstance(new, Idle):
            if new.error is not None:
                self.reject((step,), f"tried, and it failed: {new.error}")
            named_ops = {finding.op for finding in trial.findings if finding.remedy == step.name}
            for name, refusal in new.refusals:
                if isinstance(refusal.where, Operation) and (op := refusal.where.outputs[0].name) in named_ops:
                    self.results.remedies_refused[op] = name, refusal
            return None
        assert self.searching_step is not None
        if (objection := self.searching_step.objection(new.session, trial.subject)) is not None:
            self.reject((step,), objection.reason)
            return None
        return new

    def keep_if_it_gains(self, old: Trial, new: Trial) -> bool:
        """Note whether the remedies of a trial are kept: it gains, loses nothing, and its outputs stay near."""
        steps = new.steps[len(old.steps) :]
        gain, objection = self.gain_and_objection(old, new)
        if objection:
            self.reject(steps, objection)
            return False
        self.results.remedy_gains[steps] = gain
        for step in steps:
            self.results.remedies_rejected.pop(str(step), None)
        return True

    def gain_and_objection(self, old: Trial, new: Trial) -> tuple[str, str]:
        """Return what a trial gains over an older one, and why it is not kept nevertheless; "" for nothing.

        A gain that was measured overrules a loss by the estimate, but not ops that leave the ANE.
        """
        score, loss = new.score, self.loss(old, new)
        gain = "" if score.on_cpu else self.measured_gain(new.steps[len(old.steps) :], old)
        if loss and gain and _may_run_on_ane(score):
            gain, loss = _overruled(gain, loss), score.loss(old.score, OFF)
        if loss:
            return gain, f"tried and undone: {loss}"
        gain = gain or score.gain(old.score) or _fewer_findings(new, old)
        if price := _unpaid_price(old, new) if gain else NOTHING:
            return gain, f"tried and undone: {price}"
        error = why_too_far(old, new)
        return gain, f"tried, and it failed: {error}" if error else ""

    def reject(self, steps: tuple[Pass, ...], reason: str) -> None:
        """Note why a remedy was not kept; of a pair nothing is noted."""
        if len(steps) == 1:
            self.results.remedies_rejected[str(steps[0])] = steps[0].name, Refusal(reason)


def _better_without(end: Trial, other: Trial) -> str:
    """Return what a trial gains that lacks one step of another, in words; "" for nothing."""
    return other.score.gain(end.score) or other.score.worth(end.score, ["size"])


def _fewer_findings(new: Trial, old: Trial) -> str:
    """Return by how many findings a trial has fewer than another, in words; "" for none."""
    return new.score_with_findings.worth(old.score_with_findings, ["findings"])


def _may_run_on_ane(score: Score) -> bool:
    """May ops with products run on the ANE, where gains are measured?"""
    return bool(score.on_flop or score.perhaps_flop)


def _overruled(measured: str, loss: str) -> str:
    """Return words for a measured gain that overrules a loss by the estimate."""
    return f"{measured}; measured, which counts more than that {loss}"


def _unpaid_price(old: Trial, new: Trial) -> str:
    """Return the price that steps ask without a gain that is worth it, in words; "" if the price is fair.

    Changed results need a clear gain in time. Changed types of inputs and outputs need that, or more on the
    ANE. Rounded values need either, or more that may run there.
    """
    before, after = old.score, new.score
    is_clear, no_gain = after.over(before).best <= CLEARLY, f"the {after.takes(before)} is no clear gain"
    now, was = new.cost_to_callers, old.cost_to_callers
    if now.changed_results > was.changed_results and not is_clear:
        return f"the results would change, and {no_gain}"
    # What Core ML counts for an op chooses its unit and is no run time: it pays for no digit.
    is_timed = after.expected.times(before.expected) is not None
    more = ["on the ANE"]
    if len(new.target.chips) > 1:  # no score says what runs on the ANE of all chips
        more.append("legal")
    changes_types = now.changed_types > was.changed_types
    rounds = any(step.rounds for step in new.steps[len(old.steps) :]) and not after.worth(before, ["perhaps"])
    if not (changes_types or rounds) or after.worth(before, more) or (is_timed and is_clear):
        return ""
    price = "callers would have to give other types" if changes_types else "values would be rounded"
    return f"{price}, no more would run on the ANE, and {no_gain if is_timed else 'no run time is known'}"
