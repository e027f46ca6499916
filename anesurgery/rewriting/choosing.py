"""Choose the plan for a model: which repairs it needs, which steps pay, and whether the whole gains anything.

`surgery.plan` and `apply` call `choose`. Repairs of wrong outputs come first and stay whatever they cost; so do
the steps that the caller named. Then `searching` adds the steps that pay, and `outputs` takes back those that
cost digits. If the plan as a whole gains nothing, it has no steps. Without a target, steps are not judged by
time, and the newest chips decide whether the whole gains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from anesurgery.checking.exactness import Near
from anesurgery.errors import Refusal
from anesurgery.placement.target import Target, spans
from anesurgery.rewriting.edit_plan import MAY, Plan, Planned, figures
from anesurgery.rewriting.ml_program import Subject
from anesurgery.rewriting.outputs import FLOP, WRONG, Outputs, Repairs, exact, hazards_of, repairs_of
from anesurgery.rewriting.passes import Pass, in_order
from anesurgery.rewriting.searching import Search, Searching
from anesurgery.rewriting.session import Session
from anesurgery.rewriting.step_trials import Trial, Trials

ASKED = "was asked for"
"""Why a step stays that the caller named; the words follow its name."""


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
    sought = next((s.judged_on(session) for s in wish.steps if isinstance(s, Searching)), None)
    trials, start = Trials(session), Trial(given, sought or Target.parse(session.target), session)
    outputs = Outputs.of(start, session, gate, seeds=1, most_flop=FLOP, flat=(0.0, 1.0))
    repairs = list(repairs_of(wish.repairs, start, trials, outputs))
    first = {step.name: step for one in repairs for step in one.steps}
    others = [step for step in wish.steps if step.name not in first and not step.costly]
    wanted = dict.fromkeys(wish.asked, ASKED) | {s.name: one.needed for one in repairs for s in one.steps}
    search = Search(start, trials, bool(session.target), wanted)
    end = search.best(in_order((*first.values(), *others)))
    if wish.exact or search.searching_step is not None or first:
        judged = exact(start, end, trials, Outputs.of(start, session, gate))
        end, search.less_exact = judged.end, judged.losses
        search.notes += judged.notes
    for step, why in (
        search.searching_step.last(end.subject, session) if search.searching_step is not None else ()
    ):
        new = trials.after(end, step)
        end = new if isinstance(new, Trial) else end
        search.notes += [why] if isinstance(new, Trial) else []
        wanted[step.name] = why
    near = outputs.before_and_after(start, end) if session.samples or first else (None, None)
    return _Composer(wish, search, repairs, end, outputs, near).chosen()


@dataclass
class _Composer:
    """Composes a plan from the results of the search."""

    wish: Wish
    search: Search
    repairs: Sequence[Repairs]
    end: Trial
    outputs: Outputs
    near: tuple[Near | None, Near | None]

    def __post_init__(self) -> None:
        self.start, self.timed = self.search.start, self.search.timed
        self.costly = [step for step in self.wish.steps if step.costly]  # these are not tried
        self.targets = [self.start.target] if self.timed else Target.newest()

    def chosen(self) -> Chosen:
        """Return the plan; it has no steps if the whole gains nothing."""
        start, session = self.start, self.search.trials.session
        gain, idle = self.gain(), list[tuple[str, Refusal]]()
        if not gain:
            gain = self.nothing()
            idle = [(self.wish.name, Refusal(gain))] if start.subject.was_layers else []
            self.end, self.near = start, (self.near[0], self.near[0])
        wrong = [one.headline for one in self.repairs if self.stays(one.steps)]
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
        worse = next(filter(None, (self.end.subject.worse_than_layers(target) for target in self.targets)), "")
        where = self.targets[0].words if self.timed else _chips(self.targets)
        return f"the neural network stays as it is: {worse}" if worse else f"nothing to gain on {where}"

    def gain(self) -> str | Callable[[], str]:
        """Return what the whole gains, or why it is done without a known gain, in words; "" for nothing."""
        start, end, wanted = self.start, self.end, self.search.required
        if end is start and not self.costly:
            return ""
        if start.subject.was_layers and all(end.subject.worse_than_layers(target) for target in self.targets):
            return ""
        named = [step for step in end.steps if step.name in wanted or step.essential]
        if named or self.costly:
            return ", ".join(dict.fromkeys(f"{s.name} {wanted.get(s.name, ASKED)}" for s in named))
        if start.score_if_any is None or end.score_if_any is None:
            return "nothing is known of how it scores"
        if self.search.measured_gain(end.steps, start):
            return "a gain was measured"
        if self.timed and not start.subject.was_layers:
            gain = end.score.worth(start.score)
        else:
            with start.known.within():
                gain = next(
                    filter(None, (worth_on(target, start.subject, end.subject) for target in self.targets)), ""
                )
        if not gain and any(finding.kind == "numeric" for finding in start.findings):
            now, was = self.outputs.undefined(end), self.outputs.undefined(start)
            return "outputs that are NaN or infinite on inputs of 0 or 1 are finite" if now < was else ""
        if self.timed or not gain:
            return gain
        return partial(_on_chips, self.targets, start.subject.clone(), end.subject.clone())  # as they are now

    def stays(self, steps: Sequence[Pass]) -> bool:
        """Are all of these steps in the plan?"""
        return bool(steps) and all(step in self.end.steps for step in steps)

    def planned(self) -> Iterator[Planned]:
        """Yield the steps of the plan, each with the reason why it is there."""
        search, repairing = self.search, {step for one in self.repairs for step in one.steps}
        kept = {step: words for steps, words in search.gains.items() for step in steps}
        for trial in self.end.path:
            step, old = trial.steps[-1], trial.before
            why = kept.get(step) or search.required.get(step.name, "")
            if why == ASKED and self.wish.exact and (rules := hazards_of(trial)):
                why = MAY + rules
            if not why and self.timed and trial.score_if_any is not None and old is not None:
                why = trial.score.gain(old.score) or search.needed.get(step, "")
            yield Planned(step, why or f"a step of {self.wish.name}", step in kept or step in repairing)
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
        if self.timed and self.start.score_if_any is not None and self.end is not self.start:
            yield from self.end.score.paid(self.start.score)
        yield from (str(one) for one in self.repairs if not one.steps or self.stays(one.steps))


def worth_on(target: Target, before: Subject, after: Subject) -> str:
    """Return what a model gains on a target over the file as given, in words; "" for nothing."""
    if after.worse_than_layers(target):
        return ""
    was, now = before.as_given(target), after.score(target)
    return now.worth(was) if was is not None and now is not None else ""


def _on_chips(targets: Sequence[Target], before: Subject, after: Subject) -> str:
    """Return on which chips a model gains something, and how much on one of them, in a sentence."""
    said = {target: worth_on(target, before, after) for target in targets}
    gains, others = ([target for target in targets if bool(said[target]) == gains] for gains in (True, False))
    first = next((target for target in gains if said[target].endswith("ms")), gains[0])
    rest = f"; nothing to gain on {_chips(others)}" if others else ""
    device = f"{first.device}, " * bool(first.device) + first.chips[0]
    return f"gains on {_chips(gains)} ({device}: {said[first]}){rest}"


def _chips(targets: Sequence[Target]) -> str:
    """Return the chips of some targets in words: "M1 to M4"."""
    return spans([family for target in targets for family in target.families])
