"""Choose the plan for a model: which repairs it needs, which steps pay, and whether the whole gains anything.

`surgery.plan` and `apply` call `choose`. Repairs of wrong outputs come first and stay whatever they cost; so do
the steps that the caller named. Then `Search.best` adds the steps that pay, each tried on a copy of the model,
and `checks` takes back those that cost digits. If the plan as a whole gains nothing, it has no steps. Without a
target, steps are judged by what holds on all chips, and the newest chips decide whether the whole gains.

A step may be a `Searching` pass, as in `auto`: it stands for the remedies that findings of `inspect` name, and
these are looked up again after each one that is kept. The rules of the search, in the order in which they are
applied:

1. A step of a recipe stays unless it loses something. A remedy has to gain something, alone or in a pair.
2. Steps that change results must gain clearly more than the best plan without them.
3. Each step that may be useless now is left out once: a later step may have made it so.
4. Each step of the recipe that was left out is tried once more at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from anesurgery.checking.exactness import Near
from anesurgery.errors import Refusal
from anesurgery.mil import Operation, walk_ops
from anesurgery.placement.evidence import Finding
from anesurgery.placement.score import CLEARLY, OFF, Score
from anesurgery.placement.target import Target, spans
from anesurgery.placement.verdicts import Legality
from anesurgery.rewriting.checks import FLOP, WRONG, Outputs, Repairs, exact, hazards_of, repairs_of, too_far
from anesurgery.rewriting.edit_plan import MAY, Plan, Planned, figures
from anesurgery.rewriting.ml_program import Subject
from anesurgery.rewriting.passes import Pass, in_order
from anesurgery.rewriting.session import Session
from anesurgery.rewriting.step_trials import LEAST, Idle, Trial, Trials

NOTHING = "it gains nothing on this target"
"""Why a step is left out that neither gains nor loses."""
USELESS = "the other steps do as well without it"
"""Why a step is left out that later steps made useless."""
ASKED = "was asked for"
"""Why a step stays that the caller named; the words follow its name."""


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
class Search:
    """The search for one plan: which steps stay in it, and why the others do not.

    A *step* is a pass of the recipe. A *remedy* is a pass that a finding of `inspect` names, and that a
    `Searching` step lets the search try.
    """

    start: Trial
    """The model as given."""
    trials: Trials
    required: dict[str, str] = field(default_factory=dict)
    """Name of a step that stays whatever it costs -> why, as words that follow its name."""
    searching_step: Searching | None = None
    """The step of the recipe that asked for a search for remedies."""
    gains: dict[tuple[Pass, ...], str] = field(default_factory=dict)
    """Remedies that are kept, one or a pair -> what they gain, in words."""
    rejected: dict[str, tuple[str, Refusal]] = field(default_factory=dict)
    """Remedy that is not kept, as text -> (its name, why)."""
    refused: dict[str, tuple[str, Refusal]] = field(default_factory=dict)
    """Name of an op -> (name of the remedy that a finding names there, why the remedy refuses it)."""
    losses: dict[str, str] = field(default_factory=dict)
    """Name of a step of the recipe that is left out -> what it would lose."""
    less_exact: dict[str, str] = field(default_factory=dict)
    """Name of a step that is left out since it costs digits -> by how much outputs would be less exact."""
    needed: dict[Pass, str] = field(default_factory=dict)
    """Step that gains nothing by itself -> what would be lost without it."""
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    idle: list[tuple[str, Refusal]] = field(default_factory=list)
    """(name, refusal) pairs of steps of the recipe that changed nothing."""
    unprofitable: list[Trial] = field(default_factory=list)
    """The trials after single remedies that did not pay: a second remedy may make up for them."""
    excluded: set[Pass] = field(default_factory=set)
    """Remedies that are not tried at the moment."""
    ended: bool = False
    """Did the search end because its trials ran out?"""

    def __post_init__(self) -> None:
        self.search_start, self.target = self.start, self.start.target

    def best(self, steps: Sequence[Pass]) -> Trial:
        """Return the trial after the steps that stay.

        Raises:
            SurgeryError: a step of the recipe fails.
        """
        everything = self.run_all(steps)
        if self.start.score_if_any is None or everything is self.start:
            return everything
        end = self.start
        for step in everything.steps:
            end = self.add_step(end, step)
        loses_nothing = not (self.loss(self.start, everything) or self.loss(end, everything))
        if self.losses and loses_nothing and everything.score.gain(end.score):
            end, self.losses = everything, {}
        end = self.without_useless_steps(end, among_remedies=False)
        for step in steps if self.losses else ():
            if step not in end.steps and not self.losses.get(step.name, "").startswith(USELESS):
                end = self.add_step(end, step, again=True)
        return end

    def run_all(self, steps: Sequence[Pass]) -> Trial:
        """Run all steps one after the other, with the remedies that a search finds in its place."""
        end = self.start
        for step in steps:
            if isinstance(step, Searching):
                end = self.search_remedies(step, end)
                continue
            new = self.trials.after(end, step)
            if isinstance(new, Trial):
                end = new
            elif new.error is not None:
                raise new.error
            else:
                self.idle += new.refusals
        return end

    def add_step(self, old: Trial, step: Pass, *, again: bool = False) -> Trial:
        """Return the trial with one step of the recipe more if it loses nothing, else the old trial.

        A step that is tried `again` has to gain something.
        """
        if isinstance(step, Searching):
            return old
        new = self.trials.after(old, step)
        if isinstance(new, Idle):
            if new.error is not None:
                self.losses[step.name] = f"on what the steps before it left, it failed: {new.error}"
            return old
        loss = "" if step.essential or step in self.remedies_kept else self.loss(old, new)
        if loss and not new.score.loss(old.score, OFF) and (gain := self.measured_gain([step], old)):
            self.notes.append(f"{step.name}: {_overruled(gain, loss)}")
        elif loss and step.name in self.required:
            slower = new.score.loss(old.score, ["time"]) or new.score.loss(old.score, ["whole"])
            losses = " and ".join(dict.fromkeys(filter(None, (loss, slower))))
            words = f"{step.name} {self.required[step.name]}, and is kept although {losses}"
            if words not in self.warnings:
                self.warnings.append(words)
        elif loss:
            self.losses.setdefault(step.name, loss)
            return old
        elif again and not new.score.gain(old.score):
            return old
        self.losses.pop(step.name, None)
        return new

    def loss(self, old: Trial, new: Trial) -> str:
        """Return what a trial loses against an older one, in words; "" for nothing.

        A rise in time that is too small to matter by itself counts once the model is slower than at the start
        of the search, so that rises do not add up.
        """
        rises = new.score.loss(old.score, ["whole"])
        return new.score.loss(old.score) or (rises and new.score.loss(self.search_start.score, ["whole"]))

    def measured_gain(self, steps: Iterable[Pass], trial: Trial) -> str:
        """Return the gain that somebody measured of one of some steps on the target, in words; "" for none."""
        with_gains = [s for s in steps if type(s).known_gain is not Pass.known_gain]
        gains = (step.known_gain(graph, self.target) for step in with_gains for graph in trial.subject.chosen)
        return next(filter(None, gains), "")

    @property
    def remedies_kept(self) -> set[Pass]:
        """The remedies that the search added."""
        return {step for steps in self.gains for step in steps}

    def without_useless_steps(self, end: Trial, *, among_remedies: bool) -> Trial:
        """Return the trial without useless steps, either among the remedies or among the other steps.

        A step is useless if the model loses nothing without it. A remedy must also be the only step that then
        goes, and callers and rounding must be no worse off without it.
        """
        for trial in end.path:
            step = trial.steps[-1]
            if (step in self.remedies_kept) != among_remedies or not self.may_be_useless(trial, end):
                continue
            other = self.trials.without(self.start, end, step)
            if other is None or other.score.loss(end.score):
                continue
            if among_remedies and not self.may_replace(end, other):
                continue
            better = other.score.gain(end.score) or other.score.worth(end.score, ["size"])
            needed = end.score.gain(other.score) or _fewer_findings(end, other)
            if needed and not (better or among_remedies):
                self.needed[step] = needed
                continue
            useless = f"{USELESS} ({better})" if better else USELESS
            self.leave_out(step, useless if among_remedies or better else NOTHING)
            end = other
        return end

    def may_replace(self, end: Trial, other: Trial) -> bool:
        """Does a trial lack one remedy only, without harm to callers and without more rounding?"""
        only_one_goes = len(other.steps) == len(end.steps) - 1
        is_harmless = only_one_goes and other.cost_to_callers <= end.cost_to_callers
        return is_harmless and not too_far(self.search_start, other)

    def may_be_useless(self, trial: Trial, end: Trial) -> bool:
        """Is it worth trying to leave out the last step of a trial, now that others follow it?

        Yes for each remedy but the last one, if the model grew. Yes for a step of the recipe that gained
        nothing, that made the model much larger, or that made it larger and had its ops replaced later.
        """
        step, old = trial.steps[-1], trial.before
        if old is None or self.measured_gain([step], self.start):
            return False
        if step in self.remedies_kept:
            return step is not end.steps[-1] and end.score.grows(self.search_start.score)
        if step.essential or step.name in self.required:
            return False
        new = trial.score
        new_ops = {name for change in trial.session.changes for name in change.after}
        later = [change for each in end.path[len(trial.steps) :] for change in each.session.changes]
        are_replaced = any(name in new_ops for change in later for name in change.before)
        gains_cheaply = new.gain(old.score) and not new.over_bounds(old.score)
        return not gains_cheaply or (are_replaced and new.grows(old.score))

    def leave_out(self, step: Pass, why: str) -> None:
        """Note that a step which was kept at first does not stay."""
        if step not in self.remedies_kept:
            self.losses[step.name] = why
            return
        self.reject((step,), f"kept first, and undone: {why}")
        self.gains = {steps: words for steps, words in self.gains.items() if step not in steps}

    def search_remedies(self, step: Searching, start: Trial) -> Trial:
        """Add single remedies, and pairs where no single one helps, until nothing is gained."""
        self.searching_step = step
        self.search_start = end = start
        self.trials.limit(step.trials, step.trials * max(start.size, LEAST))
        while (better := self.add_single_remedies(end) or self.add_pair(end)) is not None:
            end = better
        end = self.without_changed_results(self.without_useless_steps(end, among_remedies=True))
        self.ended = self.trials.exhausted
        self.trials.limit(math.inf, math.inf)
        return end

    def remedies(self, findings: Sequence[Finding]) -> Sequence[Pass]:
        """Return the passes that findings name."""
        return self.searching_step.remedies(findings, self.target) if self.searching_step is not None else ()

    def add_single_remedies(self, trial: Trial) -> Trial | None:
        """Try each remedy, and return the trial after all that helped; None where none did."""
        best, self.unprofitable = trial, []
        for step in self.remedies(trial.findings):
            new = None if step in self.excluded else self.try_remedy(best, step)
            if new is not None and self.accepts(best, new):
                best = new
            elif new is not None:
                self.unprofitable.append(new)
        return best if best is not trial else None

    def without_changed_results(self, end: Trial) -> Trial:
        """Return the best trial without steps that change results, unless these gain clearly more."""
        changing = {t.steps[-1] for t in end.path[len(self.search_start.steps) :] if t.changes_results}
        if not changing:
            return end
        gains, rejected = self.gains, dict(self.rejected)
        self.gains, self.excluded = {}, changing
        other = self.add_single_remedies(self.search_start)
        self.excluded = set()
        if other is not None and not other.score.loss(end.score, ["legal"]):
            loss = end.score.loss(other.score)
            if loss or end.score.over(other.score).best > CLEARLY:
                words = "tried and undone: as much is gained without it" + (f", and {loss}" if loss else "")
                for step in changing:
                    self.reject((step,), words)
                return other
        self.gains, self.rejected = gains, rejected
        return end

    def add_pair(self, trial: Trial) -> Trial | None:
        """Return a trial after two remedies that pay only together; small programs are tried first."""
        by_size = sorted(self.unprofitable, key=lambda trial: trial.size)
        for middle in (*by_size, *self.hidden_remedies(trial)):
            first = middle.steps[-1]
            for step in self.remedies(middle.findings) if self.trials.ops > 0 else ():
                in_other_order = self.trials.reached.get((*trial.steps, step, first))
                if step == first or isinstance(in_other_order, Trial):
                    continue  # that did not pay
                new = self.try_remedy(middle, step)
                if new is not None and self.accepts(trial, new):
                    return new
        return None

    def hidden_remedies(self, trial: Trial) -> Iterator[Trial]:
        """Yield trials after remedies that no finding names yet: an op off the ANE may have several causes."""
        legality, names = Legality(self.target), {name for _, name in trial.score.illegal}
        ops = (op for graph in trial.subject.chosen for op in walk_ops(graph))
        illegal = [op for op in ops if op.outputs and op.outputs[0].name in names]
        findings = [finding for op in illegal for finding in legality.speaking(op)]
        tried = self.remedies(trial.findings)
        for step in self.remedies(findings) if findings else ():
            new = None if step in tried else self.try_remedy(trial, step)
            if new is not None:
                yield new

    def try_remedy(self, trial: Trial, step: Pass) -> Trial | None:
        """Return the trial after a remedy; None where it changes nothing, fails, or is not acceptable."""
        new = self.trials.after(trial, step)
        if isinstance(new, Idle):
            if new.error is not None:
                self.reject((step,), f"tried, and it failed: {new.error}")
            refused_ops = {
                refusal.where.outputs[0].name: (name, refusal)
                for name, refusal in new.refusals
                if isinstance(refusal.where, Operation)
            }
            named_ops = {f.op for f in trial.findings if f.remedy == step.name} if refused_ops else set()
            self.refused |= {op: refused for op, refused in refused_ops.items() if op in named_ops}
            return None
        assert self.searching_step is not None
        if (objection := self.searching_step.objection(new.session, trial.subject)) is not None:
            self.reject((step,), objection.reason)
            return None
        return new

    def accepts(self, old: Trial, new: Trial) -> bool:
        """Does a trial gain something by remedies, lose nothing, and keep its outputs near enough?

        A gain that was measured overrules a loss by the estimate, but not ops that leave the ANE.
        """
        steps = new.steps[len(old.steps) :]
        loss, score = self.loss(old, new), new.score
        gain = "" if score.on_cpu else self.measured_gain(steps, old)
        if loss and gain and _may_run_on_ane(score):
            loss, gain = score.loss(old.score, OFF), _overruled(gain, loss)
        if not loss:
            gain = gain or score.gain(old.score) or _fewer_findings(new, old)
            loss = _unpaid_price(old, new) if gain else NOTHING
        if loss:
            self.reject(steps, f"tried and undone: {loss}")
            return False
        if error := too_far(old, new):
            self.reject(steps, f"tried, and it failed: {error}")
            return False
        self.gains[steps] = gain
        for step in steps:
            self.rejected.pop(str(step), None)
        return True

    def reject(self, steps: tuple[Pass, ...], reason: str) -> None:
        """Note why a remedy was not kept; of a pair nothing is noted."""
        if len(steps) == 1:
            self.rejected[str(steps[0])] = steps[0].name, Refusal(reason)


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
    types, results = (now > was for now, was in zip(new.cost_to_callers, old.cost_to_callers, strict=True))
    if results and not is_clear:
        return f"the results would change, and {no_gain}"
    # What Core ML counts for an op chooses its unit and is no run time: it pays for no digit.
    is_timed = after.expected.times(before.expected) is not None
    more = ["on the ANE"]
    if len(new.target.chips) > 1:  # no score says what runs on the ANE of all chips
        more.append("legal")
    rounds = any(step.rounds for step in new.steps[len(old.steps) :]) and not after.worth(before, ["perhaps"])
    if not (types or rounds) or after.worth(before, more) or (is_timed and is_clear):
        return ""
    price = "callers would have to give other types" if types else "values would be rounded"
    return f"{price}, no more would run on the ANE, and {no_gain if is_timed else 'no run time is known'}"


@dataclass(frozen=True)
class Wish:
    """What the caller asks for, before any model is looked at."""

    name: str
    steps: tuple[Pass, ...]
    asked: frozenset[str] = frozenset()
    """Names of the steps that the caller named: they are run, with a warning if they lose something."""
    repairs: tuple[Pass, ...] = ()
    """Repairs of which the plan begins with the fewest that make outputs right, on given or random inputs."""
    exact: bool = False
    """Are steps left out that make outputs less exact?"""


@dataclass(frozen=True)
class Chosen:
    """The plan, and the model before and after its steps, without proofs."""

    plan: Plan
    start: Trial | None = None
    end: Trial | None = None
    """None where the steps were not tried."""


def as_asked(wish: Wish, target: str | None) -> Chosen:
    """Return the plan of passes that were all asked for by name: there is nothing to choose."""
    return Chosen(Plan(wish.name, target, tuple(Planned(step, ASKED) for step in wish.steps)))


def choose(given: Subject, wish: Wish, session: Session, gate: float = WRONG) -> Chosen:
    """Choose the steps for a model among those that the caller wishes for.

    Args:
        given: the model; it is not changed.
        wish: the steps, and how they are judged.
        session: the session of this model; nothing is collected in it here.
        gate: PSNR in dB below which outputs on the inputs at hand are wrong.

    Raises:
        SurgeryError: a step fails.
    """
    targets = [step.judged_on(session) for step in wish.steps if isinstance(step, Searching)]
    target = targets[0] if targets else Target.parse(session.target)
    trials, start = Trials(session), Trial(given, target, session)
    outputs = Outputs.of(start, session, gate, seeds=1, most_flop=FLOP, flat=(0.0, 1.0))
    repairs = list(repairs_of(wish.repairs, start, trials, outputs))
    first = {step.name: step for each in repairs for step in each.steps}
    others = [step for step in wish.steps if step.name not in first and not step.costly]
    required = dict.fromkeys(wish.asked, ASKED) | {s.name: each.needed for each in repairs for s in each.steps}
    search = Search(start, trials, required)
    end = search.best(in_order((*first.values(), *others)))
    if wish.exact or search.searching_step is not None or first:
        judged = exact(start, end, trials, Outputs.of(start, session, gate))
        end, search.less_exact = judged.end, judged.losses
        search.notes += judged.notes
    if search.searching_step is not None:
        end = _with_last_steps(search, search.searching_step, end)
    near = outputs.before_and_after(start, end) if session.samples or first else (None, None)
    return _Composer(wish, search, repairs, end, outputs, near).chosen()


def _with_last_steps(search: Search, searching_step: Searching, end: Trial) -> Trial:
    """Return the trial after the steps that are needed after a search."""
    for step, why in searching_step.last(end.subject, search.trials.session):
        search.required[step.name] = why
        new = search.trials.after(end, step)
        if isinstance(new, Trial):
            end = new
            search.notes.append(why)
    return end


@dataclass
class _Composer:
    """Composes a plan from the results of the search."""

    wish: Wish
    search: Search
    repairs: Sequence[Repairs]
    end: Trial
    """The trial after all steps of the plan that are tried."""
    outputs: Outputs
    near: tuple[Near | None, Near | None]
    """How near the outputs are to the exact ones before and after the plan."""

    def __post_init__(self) -> None:
        self.start, self.has_target = self.search.start, bool(self.search.trials.session.target)
        self.costly = [step for step in self.wish.steps if step.costly]  # these are not tried
        self.targets = [self.start.target] if self.has_target else Target.newest()

    def chosen(self) -> Chosen:
        """Return the plan; it has no steps if the whole gains nothing."""
        start, session = self.start, self.search.trials.session
        gain, idle = self.gain(), list[tuple[str, Refusal]]()
        if not gain:
            gain = self.nothing()
            idle = [(self.wish.name, Refusal(gain))] if start.subject.was_layers else []
            self.end, self.near = start, (self.near[0], self.near[0])
        wrong = [repairs.headline for repairs in self.repairs if self.stays(repairs.steps)]
        plan = Plan(
            recipe=self.wish.name,
            target=session.target,
            steps=tuple(self.planned()),
            left_out=(*idle, *self.left_out()),
            notes=tuple(self.notes()),
            warnings=tuple(self.search.warnings) if self.end is not start else (),
            judged=gain,
            wrong="; ".join(filter(None, [*wrong, self.outputs.wrong(self.near[1])])),
            outputs=self.near,
            figures=figures(start.score_if_any, self.end.score_if_any) if session.target else {},
        )
        return Chosen(plan, start, None if self.costly else self.end)

    def nothing(self) -> str:
        """Return words that say that the whole gains nothing, and where it would lose."""
        worse = next(filter(None, map(self.end.subject.worse_than_layers, self.targets)), "")
        where = self.targets[0].words if self.has_target else _chips(self.targets)
        return f"the neural network stays as it is: {worse}" if worse else f"nothing to gain on {where}"

    def gain(self) -> str | Callable[[], str]:
        """Return what the whole gains, or why it is done without a known gain, in words; "" for nothing.

        Without a target, what it gains on each chip is computed only if somebody asks: then a function is
        returned that gives the words.
        """
        start, end, required = self.start, self.end, self.search.required
        if end is start and not self.costly:
            return ""
        if start.subject.was_layers and all(map(end.subject.worse_than_layers, self.targets)):
            return ""
        named = [step for step in end.steps if step.name in required or step.essential]
        if named or self.costly:
            return ", ".join(dict.fromkeys(f"{s.name} {required.get(s.name, ASKED)}" for s in named))
        needs_speed = start.subject.was_layers and self.has_target
        if needs_speed and not all(map(self.pays_for_the_format, self.targets)):
            return ""
        if start.score_if_any is None or end.score_if_any is None:
            return "nothing is known of how it scores"
        if not end.score.on_cpu and self.search.measured_gain(end.steps, start):
            return "a gain was measured"
        gain = self.estimated_gain()
        if not gain and any(finding.kind == "numeric" for finding in start.findings):
            now, was = self.outputs.undefined(end), self.outputs.undefined(start)
            return "outputs that are NaN or infinite on inputs of 0 or 1 are finite" if now < was else ""
        if self.has_target or not gain:
            return gain
        return partial(_on_chips, self.targets, start.subject.clone(), end.subject.clone())  # as they are now

    def estimated_gain(self) -> str:
        """Return what the whole gains by the estimate on the first target where it does, in words."""
        if self.has_target and not self.start.subject.was_layers:
            return self.end.score.worth(self.start.score)
        with self.start.known.within():
            gains = (worth_on(target, self.start.subject, self.end.subject) for target in self.targets)
            return next(filter(None, gains), "")

    def pays_for_the_format(self, target: Target) -> bool:
        """Is the ML Program clearly faster than the layers, in exchange for rounding and another format?"""
        after, before = self.end.subject.score(target), self.start.subject.as_given(target)
        return is_clearly_faster(after, before) is not False

    def stays(self, steps: Sequence[Pass]) -> bool:
        """Are all of these steps in the plan?"""
        return bool(steps) and all(step in self.end.steps for step in steps)

    def planned(self) -> Iterator[Planned]:
        """Yield the steps of the plan, each with the reason why it is there."""
        search, repairing = self.search, {step for repairs in self.repairs for step in repairs.steps}
        remedies = {step: words for steps, words in search.gains.items() for step in steps}
        for trial in self.end.path:
            step, old = trial.steps[-1], trial.before
            why = remedies.get(step) or search.required.get(step.name, "")
            if why == ASKED and self.wish.exact and (rules := hazards_of(trial)):
                why = MAY + rules
            if not why and self.has_target and trial.score_if_any is not None and old is not None:
                why = trial.score.gain(old.score) or search.needed.get(step, "")
            yield Planned(step, why or f"a step of {self.wish.name}", step in remedies or step in repairing)
        yield from (Planned(step, f"a step of {self.wish.name}") for step in self.costly)

    def left_out(self) -> Iterator[tuple[str, Refusal]]:
        """Yield (name, refusal) of what was tried and is not in the plan, and of steps that found nothing."""
        search = self.search
        if search.searching_step is not None:
            yield from search.searching_step.report(search, self.end)[1]
        losses = [*search.losses.items(), *search.less_exact.items()]
        yield from ((n, Refusal(f"undone: {loss}; name it to keep it")) for n, loss in losses)
        ran = {part.name for step in self.end.steps for part in (step, *step.parts())}
        ran |= {name for name, _ in losses}
        for name, refusal in search.idle:
            if name not in ran and (not refusal.idle or name in self.wish.asked):
                yield name, refusal

    def notes(self) -> Iterator[str]:
        """Yield sentences about what was gained, what grows, and what stays wrong."""
        if self.search.searching_step is not None:
            yield from self.search.searching_step.report(self.search, self.end)[0]
        yield from self.search.notes
        if self.has_target and self.start.score_if_any is not None and self.end is not self.start:
            yield from self.end.score.paid(self.start.score)
        yield from (str(each) for each in self.repairs if not each.steps or self.stays(each.steps))


def is_clearly_faster(after: Score | None, before: Score | None) -> bool | None:
    """Return whether the time falls by a tenth; None if a time is unknown."""
    if after is None or before is None or after.expected.times(before.expected) is None:
        return None
    return after.over(before).best <= CLEARLY


def worth_on(target: Target, before: Subject, after: Subject) -> str:
    """Return what a model gains on a target over the file as given, in words; "" for nothing."""
    return _gain_and_loss(target, before, after)[0]


def _gain_and_loss(target: Target, before: Subject, after: Subject) -> tuple[str, str]:
    """Return what a model gains on a target over the file as given, and by how much it is slower; "" for no."""
    if worse := after.worse_than_layers(target):
        return "", worse
    was, now = before.as_given(target), after.score(target)
    if was is None or now is None:
        return "", ""
    return now.worth(was), now.loss(was, ["time"])


def _on_chips(targets: Sequence[Target], before: Subject, after: Subject) -> str:
    """Return on which chips a model gains something, how much on one of them, and on which it is slower."""
    results = {target: _gain_and_loss(target, before, after) for target in targets}
    gains = {target: gain for target, (gain, _) in results.items() if gain}
    slower = [target for target, (gain, loss) in results.items() if loss and not gain]
    others = [target for target in targets if target not in gains and target not in slower]
    example = next((target for target, gain in gains.items() if gain.endswith("ms")), next(iter(gains)))
    rest = f"; nothing to gain on {_chips(others)}" if others else ""
    rest += f"; slower on {_chips(slower)}" if slower else ""
    device = f"{example.device}, {example.chips[0]}" if example.device else example.chips[0]
    return f"gains on {_chips([*gains])} ({device}: {gains[example]}){rest}"


def _chips(targets: Sequence[Target]) -> str:
    """Return the chips of some targets in words: "M1 to M4"."""
    return spans([family for target in targets for family in target.families])
