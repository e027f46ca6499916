"""Choose the steps of a plan: of those of a recipe, and of what a search finds, the ones that pay.

A step of a recipe is left out if something is lost by it: an op that was legal on the ANE, time, or size
without a clear gain in time. Then each of those that stay and made something larger is left out once, as long
as trials last, since a later step may do without it; and each that was left out, or did nothing, is tried
once more after the others. Without a target there is no time, and legality counts, and the share of the flop
on all chips at once. Repairs of wrong outputs stay whatever they cost, and so does what the caller asked for
by name. Last, the whole has to gain something; else nothing is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from anesurgery.errors import Refusal
from anesurgery.placement.standing import Standing
from anesurgery.placement.target import Target, spans
from anesurgery.rewriting.edit_plan import Plan, Planned, figures
from anesurgery.rewriting.ml_program import Subject
from anesurgery.rewriting.outputs import FLOP, WRONG, Near, Outputs, Repairs, exact, repairs_of
from anesurgery.rewriting.passes import Pass, in_order
from anesurgery.rewriting.searching import Search, Searching, measured_gain, overruled
from anesurgery.rewriting.session import Session
from anesurgery.rewriting.step_trials import Idle, Trial, Trials

ASKED = "was asked for"
"""Why a step stays that the caller named, after its name."""


@dataclass
class Choice:
    """The choice of the steps of one plan.

    Args:
        start: the model as given.
        trials: on copies of it.
        timed: is a target named, so that time counts?
        wanted: name of a step that stays whatever it costs -> why, in words that follow its name.
    """

    start: Trial
    trials: Trials
    timed: bool
    wanted: dict[str, str]
    searches: list[Search] = field(default_factory=list)
    losses: dict[str, str] = field(default_factory=dict)
    """What speaks against each step that is left out, by name."""
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    idle: list[tuple[str, Refusal]] = field(default_factory=list)
    """What steps say that changed nothing."""
    needed: dict[Pass, str] = field(default_factory=dict)
    """What would be lost without a step that gains nothing by itself."""
    whole: Trial = field(init=False)
    """All steps that edit the model."""
    strict: bool = False
    """May no step leave a model that is slower than the one as given, whatever later ones gain?"""

    def best(self, steps: Sequence[Pass]) -> Trial:
        """The model after the steps that stay.

        Raises:
            SurgeryError: a step of the recipe fails.
        """
        self.whole = self.straight(steps)
        unjudged = self.start.standing is None or self.whole is self.start
        if unjudged or (not self.timed and not self.whole.stands.leaves(self.start.stands)):
            return self.whole
        self.left = len(self.whole.steps) + 4  # steps that may still be left out, or put last
        end = self.chosen(steps)
        slower = self.notes or self.warnings  # measured, or wanted: it may take longer
        if self.timed and not slower and end.stands.dearer(self.start.stands):
            self.strict, self.losses = True, {}
            end = self.chosen(steps)
        return end

    def chosen(self, steps: Sequence[Pass]) -> Trial:
        """The set of steps that stays."""
        end = self.greedy()
        whole = self.whole
        if self.losses and not self.loss(self.start, whole) and whole.stands.gain(end.stands):
            end, self.losses = whole, {}
        return self.later(self.pruned(end) if self.timed else end, steps)

    def straight(self, steps: Sequence[Pass]) -> Trial:
        """All steps one after the other, and in the place of a search what it finds."""
        end = self.start
        for step in steps:
            if isinstance(step, Searching):
                search = Search(self.trials, step, end)
                end = search.improve()
                self.searches.append(search)
                self.trials.left = self.trials.ops = float("inf")
                continue
            new = self.trials.after(end, step)
            if isinstance(new, Trial):
                end = new
            elif new.error is not None:
                raise new.error
            else:
                self.idle += new.refusals
        return end

    @property
    def found(self) -> set[Pass]:
        """The steps that a search found, which it has judged."""
        return {step for search in self.searches for steps in search.kept for step in steps}

    def greedy(self) -> Trial:
        """Each step in turn, if it loses nothing; what was run already is not run again."""
        end, found = self.start, self.found
        for step in self.whole.steps:
            new = self.further(end, step)
            if new is None:
                continue
            if step not in found and (loss := self.held_against(step, end, new)):
                self.losses[step.name] = loss
            else:
                end = new
        return end

    def further(self, old: Trial, step: Pass) -> Trial | None:
        """One step more; None where it changes nothing, or fails, which is noted."""
        new = self.trials.after(old, step)
        if isinstance(new, Idle) and new.error is not None:
            self.losses[step.name] = f"on what the steps before it left, it failed: {new.error}"
        return new if isinstance(new, Trial) else None

    def held_against(self, step: Pass, old: Trial, new: Trial) -> str:
        """Why a step is left out; "" where it stays, which is said where the estimate speaks against it."""
        loss = "" if step.essential else self.loss(old, new)
        if loss and not new.stands.leaves(old.stands) and (gain := self.measured(step, old)):
            self.notes.append(f"{step.name}: {overruled(gain, loss)}")
            return ""
        if loss and step.name in self.wanted:
            words = f"{step.name} {self.wanted[step.name]}, and is kept although {loss}"
            self.warnings += [] if words in self.warnings else [words]
            return ""
        return loss

    def loss(self, old: Trial, new: Trial) -> str:
        """Without a chip there is no time: then the rules of all chips, and the flop, are all that counts."""
        if not self.timed:
            return new.stands.leaves(old.stands)
        return new.stands.loss(old.stands) or (new.stands.dearer(self.start.stands) if self.strict else "")

    def measured(self, step: Pass, trial: Trial) -> str:
        """A gain by a step that was measured on the target, for what others make of the model; "" for none."""
        return measured_gain(step, trial.held, trial.target) if self.timed else ""

    def pruned(self, end: Trial) -> Trial:
        """Without the steps that later ones made useless: the model stands better, or is smaller, without."""
        found = self.found
        for trial in end.way:
            step = trial.steps[-1]
            bound = step.essential or step.name in self.wanted or step in found or self.left <= 0
            if bound or not self.doubtful(trial) or self.measured(step, self.start):
                continue
            self.left -= 1
            other = self.trials.led(self.start, [one for one in end.steps if one is not step])
            if isinstance(other, Idle) or other.stands.loss(end.stands):
                continue
            if better := other.stands.gain(end.stands) or other.stands.smaller(end.stands):
                self.losses[step.name] = f"the steps after it do as well without it ({better})"
                end = other
            elif better := end.stands.gain(other.stands):
                self.needed[step] = better
            elif end.advised.tidier(other.advised):
                self.needed[step] = f"findings {other.advised.findings} -> {end.advised.findings}"
            else:
                self.losses[step.name] = "it gains nothing on this target"
                end = other
        return end

    def doubtful(self, trial: Trial) -> bool:
        """May the model stand as well without the last step, after those that follow it?

        Where it gained nothing, or made something much larger, or larger in any way and a later step replaced
        something that it made.
        """
        assert trial.before is not None
        new, old = trial.stands, trial.before.stands
        grown = new.growth(old)
        made = {name for change in trial.session.changes for name in change.after}
        later = [one for one in self.whole.way if len(one.steps) > len(trial.steps)]
        replaced = {name for one in later for change in one.session.changes for name in change.before}
        return (
            not new.gain(old)
            or any(new.outgrows(old, what) for what in grown)
            or (bool(grown) and not made.isdisjoint(replaced))
        )

    def later(self, end: Trial, steps: Sequence[Pass]) -> Trial:
        """With those steps that pay after the others: left out before, or without effect on what was left."""
        for step in steps if self.losses else ():
            useless = self.losses.get(step.name, "").startswith("the steps after")
            if step in end.steps or useless or self.left <= 0 or isinstance(step, Searching):
                continue
            new = self.further(end, step)
            self.left -= new is not None
            if new is None or self.held_against(step, end, new):
                continue
            if not self.timed or new.stands.gain(end.stands):
                end = new
                self.losses.pop(step.name, None)
        return end


GAIN = 0.98
"""Of the expected time before, the most that a plan may leave: less of a gain is none."""


def worth(before: Standing, after: Standing) -> str:
    """What a plan as a whole gains on a target, in words; "" for nothing that counts."""
    if before.refused and not after.refused:
        return f"it loads, where {before.refused}"
    if after.over(before).best <= GAIN and after.unknown <= before.unknown:
        return after.takes(before)
    if after.switches < before.switches:
        return f"switches between units {before.switches} -> {after.switches}"
    if after.weights < GAIN * before.weights and after.unknown <= before.unknown:
        return after.smaller(before)
    return "" if before.estimate else _freed_layers(before, after)


def _freed_layers(before: Standing, after: Standing) -> str:
    """How many layers of a network, which has no cost, can run on the ANE now; "" where it takes longer."""
    times = before.time, after.time
    slower = times[0] is not None and times[1] is not None and times[1].ms > times[0].ms
    fewer = len(after.illegal) < len(before.illegal)
    if not fewer or slower or after.barred_by(before):
        return ""
    return f"layers that cannot run on the ANE {len(before.illegal)} -> {len(after.illegal)}"


@dataclass(frozen=True)
class Wish:
    """What is asked for, before any model is looked at."""

    name: str
    steps: tuple[Pass, ...]
    asked: frozenset[str] = frozenset()
    """Names of the steps that the caller named: what they lose is said, and they are done."""
    repairs: tuple[Pass, ...] = ()
    """Of these, the fewest come first without which outputs are wrong on the inputs given or drawn."""
    exact: bool = False
    """Is a step left out after which outputs are further from what the model means?"""

    def without_repairs(self) -> Wish:
        """For a model that the recipe is not for."""
        return replace(self, repairs=())


@dataclass(frozen=True)
class Chosen:
    """What was chosen: the plan, and the model before and after its steps, without proofs."""

    plan: Plan
    start: Trial | None = None
    end: Trial | None = None
    """None where the steps were not tried."""


def as_asked(wish: Wish, target: str | None) -> Chosen:
    """Passes that were asked for by name: there is nothing to choose."""
    return Chosen(Plan(wish.name, target, tuple(Planned(step, ASKED) for step in wish.steps)))


def choose(given: Subject, wish: Wish, session: Session, gate: float = WRONG) -> Chosen:
    """The steps for a model, of those that are wished for.

    Args:
        given: the model; it is not changed.
        wish: the steps, and how they are judged.
        session: for this model; it collects nothing here.
        gate: PSNR in dB below which outputs on the inputs at hand are wrong.

    Raises:
        SurgeryError: a step fails.
    """
    aim = next((s.aim(session) for s in wish.steps if isinstance(s, Searching)), None)
    trials = Trials(session)
    start = Trial(given, aim or Target.parse(session.target), (), session)
    outputs = Outputs.of(start, session, gate, seeds=1, most_flop=FLOP, flat=(0.0, 1.0))
    repairs = list(repairs_of(wish.repairs, start, trials, outputs))
    first = {step.name: step for one in repairs for step in one.steps}
    others = [step for step in wish.steps if step.name not in first and not step.costly]
    steps = in_order((*first.values(), *others))
    wanted = dict.fromkeys(wish.asked, ASKED) | {s.name: one.needed for one in repairs for s in one.steps}
    choice = Choice(start, trials, bool(session.target), wanted)
    end, losses = choice.best(steps), dict[str, str]()
    if wish.exact or choice.searches or first:
        judged = exact(start, end, trials, Outputs.of(start, session, gate))
        end, losses = judged.end, judged.losses
        choice.notes += judged.notes
    for search in choice.searches:
        for step, why in search.step.last(end.held, session):
            new = trials.after(end, step)
            end = new if isinstance(new, Trial) else end
            choice.notes += [why] if isinstance(new, Trial) else []
            choice.wanted[step.name] = why
    near = outputs.before_and_after(start, end) if session.samples or first else (None, None)
    return _Composed(wish, choice, repairs, losses, end, outputs, near).chosen()


@dataclass
class _Composed:
    """The parts of a plan, put together."""

    wish: Wish
    choice: Choice
    repairs: Sequence[Repairs]
    losses: Mapping[str, str]
    """By how much outputs would be less exact, by name of a step that is taken back for it."""
    end: Trial
    outputs: Outputs
    near: tuple[Near | None, Near | None]

    @property
    def costly(self) -> list[Pass]:
        """The steps that are not tried."""
        return [step for step in self.wish.steps if step.costly]

    @property
    def repairing(self) -> set[Pass]:
        """The steps that inputs or reports ask for."""
        return {step for one in self.repairs for step in one.steps}

    def chosen(self) -> Chosen:
        """The plan; without steps where the whole gains nothing."""
        start, session = self.choice.start, self.choice.trials.session
        gain, idle = self.gain(), list[tuple[str, Refusal]]()
        if not gain:
            gain = self.nothing()
            idle = [(self.wish.name, Refusal(gain))] if start.held.was_layers else []
            self.end, self.near = start, (self.near[0], self.near[0])
        wrong = [one.headline for one in self.repairs if self.stays(one.steps)]
        wrong.append(self.outputs.wrong(self.near[1]))
        plan = Plan(
            recipe=self.wish.name,
            target=session.target,
            steps=tuple(self.planned()),
            left_out=(*idle, *self.left_out()),
            notes=tuple(self.notes()),
            warnings=tuple(self.choice.warnings) if self.end is not start else (),
            judged=gain,
            wrong="; ".join(filter(None, wrong)),
            outputs=self.near,
            figures=figures(start.standing, self.end.standing) if session.target else {},
        )
        return Chosen(plan, start, None if self.costly else self.end)

    def aims(self) -> Sequence[Target]:
        """Where the whole has to gain something: the target, or the newest chips."""
        return [self.choice.start.target] if self.choice.timed else Target.newest()

    def nothing(self) -> str:
        """That the whole gains nothing, and where it would lose."""
        aims = self.aims()
        worse = next(filter(None, (self.end.held.worse_than_layers(aim) for aim in aims)), "")
        return (
            f"the neural network stays as it is: {worse}"
            if worse
            else f"nothing to gain on {aims[0].words if self.choice.timed else _chips(aims)}"
        )

    def gain(self) -> str | Callable[[], str]:
        """What the whole gains, or why it is done though nobody knows, in words; "" for nothing."""
        start, end = self.choice.start, self.end
        if end is start and not self.costly:
            return ""
        if start.held.was_layers and all(end.held.worse_than_layers(aim) for aim in self.aims()):
            return ""
        named = [step for step in end.steps if step.name in self.choice.wanted or step.essential]
        if named or self.costly:
            return ", ".join(dict.fromkeys(f"{s.name} {self.choice.wanted.get(s.name, ASKED)}" for s in named))
        if start.standing is None or end.standing is None:
            return "nothing is known of how it stands"
        if any(self.choice.measured(step, start) for step in end.steps):
            return "a gain was measured"
        if self.choice.timed and not start.held.was_layers:
            gain = worth(start.stands, end.stands)
        else:
            gain = next(filter(None, (worth_on(aim, start.held, end.held) for aim in self.aims())), "")
        if not gain and any(finding.kind == "numeric" for finding in start.findings):
            now, was = self.outputs.undefined(end), self.outputs.undefined(start)
            return "outputs that are NaN or infinite on inputs of 0 or 1 are finite" if now < was else ""
        if self.choice.timed or not gain:
            return gain
        return partial(_on_chips, self.aims(), start.held.clone(), end.held.clone())  # as they are now

    def stays(self, steps: Sequence[Pass]) -> bool:
        """Are all of these in the plan?"""
        return bool(steps) and all(step in self.end.steps for step in steps)

    def planned(self) -> Iterator[Planned]:
        """The steps, each with why it is there."""
        kept = {s: words for search in self.choice.searches for ss, words in search.kept.items() for s in ss}
        for trial in self.end.way:
            step, old = trial.steps[-1], trial.before
            assert old is not None
            why = kept.get(step) or self.choice.wanted.get(step.name, "")
            if not why and self.choice.timed and trial.standing is not None:
                why = trial.stands.gain(old.stands) or self.choice.needed.get(step, "")
            yield Planned(step, why or f"a step of {self.wish.name}", step in kept or step in self.repairing)
        yield from (Planned(step, f"a step of {self.wish.name}") for step in self.costly)

    def left_out(self) -> Iterator[tuple[str, Refusal]]:
        """What was tried and is not in the plan, and what steps say that found nothing."""
        ask = "ask for it by name to have it"
        for search in self.choice.searches:
            yield from search.step.report(search, self.end)[1]
        yield from ((n, Refusal(f"undone: {loss}; {ask}")) for n, loss in self.choice.losses.items())
        yield from ((n, Refusal(f"undone: {loss}; {ask}")) for n, loss in self.losses.items())
        ran = {part.name for step in self.end.steps for part in (step, *step.parts())}
        ran |= {*self.choice.losses, *self.losses}
        for name, refusal in self.choice.idle:
            if name not in ran and (not refusal.idle or name in self.wish.asked):
                yield name, refusal

    def notes(self) -> Iterator[str]:
        """What was gained, what grows, and what is open."""
        start, end = self.choice.start, self.end
        for search in self.choice.searches:
            yield from search.step.report(search, end)[0]
        yield from self.choice.notes
        if self.choice.timed and start.standing is not None and end is not start:
            yield from end.stands.paid(start.stands)
        yield from (str(one) for one in self.repairs if not one.steps or self.stays(one.steps))


def worth_on(aim: Target, before: Subject, after: Subject) -> str:
    """What a model gains on a target over the file as given, in words; "" for nothing."""
    if after.worse_than_layers(aim):
        return ""
    stood, stands = before.as_given(aim), after.standing(aim)
    return worth(stood, stands) if stood is not None and stands is not None else ""


def _on_chips(aims: Sequence[Target], before: Subject, after: Subject) -> str:
    """On which chips a model gains something, and how much on one of them, in a sentence."""
    said = {aim: worth_on(aim, before, after) for aim in aims}
    gains, others = ([aim for aim in aims if bool(said[aim]) == gains] for gains in (True, False))
    first = next((aim for aim in gains if said[aim].endswith("ms")), gains[0])
    rest = f"; nothing to gain on {_chips(others)}" if others else ""
    return f"gains on {_chips(gains)} ({first.chips[0]}: {said[first]}){rest}"


def _chips(aims: Sequence[Target]) -> str:
    """The chips of the generations of some targets, in words."""
    return spans([family for aim in aims for family in aim.families])
