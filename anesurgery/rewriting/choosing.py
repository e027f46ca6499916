"""Choose the plan for a model: which repairs it needs, which steps pay, and whether the whole gains anything.

`surgery.plan` and `apply` call `choose`. Repairs of wrong outputs come first and stay whatever they cost; so do
the steps that the caller named. Then `Search.best` adds the steps that pay, and `checks` takes back those that
cost digits. If the plan as a whole gains nothing, it has no steps. Without a target, steps are judged by what
holds on all chips, and the newest chips decide whether the whole gains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from anesurgery.checking.exactness import Near
from anesurgery.errors import Refusal
from anesurgery.placement.score import CLEARLY, Score
from anesurgery.placement.target import Target, spans
from anesurgery.rewriting.checks import (
    FLOP,
    WRONG,
    Outputs,
    Repairs,
    hazards_of,
    repairs_of,
    without_losses_of_digits,
)
from anesurgery.rewriting.edit_plan import MAY, Plan, Planned, Words, figures
from anesurgery.rewriting.ml_program import Subject
from anesurgery.rewriting.passes import Pass, in_order
from anesurgery.rewriting.search import Search, Searching
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
    outputs = Outputs.of(start, session, gate, seeds=1, most_flop=FLOP, constant_inputs=(0.0, 1.0))
    repairs = list(repairs_of(wish.repairs, start, trials, outputs))
    repairing = {step.name: step for repair in repairs for step in repair.steps}  # these come first
    # costly steps are not tried, and end the plan
    others = [step for step in wish.steps if step.name not in repairing and not step.costly]
    required = {step: ASKED for step in wish.steps if step.name in wish.asked}
    required |= {step: repair.needed for repair in repairs for step in repair.steps}
    forms = ((form, why) for step, why in required.items() for form in (step, step.gentler()))
    required = {form: why for form, why in forms if form is not None}
    search, less_exact = Search(start, trials, required), dict[str, str]()
    end = search.best(in_order((*repairing.values(), *others)))
    composer = _Composer(wish, session, search, repairs, start, end, outputs)
    # a search only adds what gains, so without a gain of the whole its steps are not judged
    if wish.exact or repairing or (search.searching_step is not None and composer.gain):
        judged = without_losses_of_digits(start, end, trials, Outputs.of(start, session, gate))
        search.results.notes += judged.notes
        end, less_exact = judged.end, judged.losses
    end = _with_last_steps(search, end)
    if end is not composer.end:  # a new one, since the gain and the report that it keeps depend on the end
        composer = replace(composer, end=end, less_exact=less_exact)
    if session.samples or repairing:
        composer.near = outputs.before_and_after(start, end)
    return composer.chosen()


def _with_last_steps(search: Search, end: Trial) -> Trial:
    """Return the trial after the steps that are needed after a search; note in `search` why they are."""
    searching = search.searching_step
    last = () if searching is None else searching.last(end.subject, search.tried.session)
    for step, why in last:
        search.required[step] = why
        new = search.tried.after(end, step)
        if isinstance(new, Trial):
            end = new
            search.results.notes.append(why)
    return end


@dataclass
class _Composer:
    """Composes a plan from the results of the search."""

    wish: Wish
    session: Session
    search: Search
    repairs: Sequence[Repairs]
    start: Trial
    """The model as given."""
    end: Trial
    """The trial after all steps of the plan that are tried."""
    outputs: Outputs
    less_exact: Mapping[str, str] = field(default_factory=dict)
    """Name of a step that is left out since it costs digits -> by how much outputs would be less exact."""
    near: tuple[Near | None, Near | None] = (None, None)
    """How near the outputs are to the exact ones before and after the plan."""

    @property
    def has_target(self) -> bool:
        """Did the caller name a target?"""
        return bool(self.session.target)

    @property
    def costly(self) -> list[Pass]:
        """The steps that cost too much to be tried."""
        return [step for step in self.wish.steps if step.costly]

    @cached_property
    def targets(self) -> Sequence[Target]:
        """The targets on which the whole is judged."""
        return [self.start.target] if self.has_target else Target.newest()

    @cached_property
    def report(self) -> tuple[list[str], list[tuple[str, Refusal]]]:
        """Notes about the search for remedies, and (name, refusal) pairs of what was not kept."""
        step = self.search.searching_step
        return ([], []) if step is None else step.report(self.search, self.end)

    def chosen(self) -> Chosen:
        """Return the plan; it has no steps if the whole gains nothing."""
        if self.gain:
            return self.composed(self.gain)
        worse = next(filter(None, map(self.end.subject.worse_than_layers, self.targets)), "")
        where = self.targets[0].words if self.has_target else _chips(self.targets)
        why = f"the neural network stays as it is: {worse}" if worse else f"nothing to gain on {where}"
        left_out_recipe = [(self.wish.name, Refusal(why))] if self.start.subject.was_network else []
        return replace(self, end=self.start, near=(self.near[0], self.near[0])).composed(why, left_out_recipe)

    def composed(self, gain: Words, left_out_recipe: Sequence[tuple[str, Refusal]] = ()) -> Chosen:
        """Return the plan with all steps up to the end, and what they gain."""
        start, session = self.start, self.session
        wrong = [repairs.headline for repairs in self.repairs if self.stays(repairs.steps)]
        plan = Plan(
            recipe=self.wish.name,
            target=session.target,
            steps=tuple(self.planned()),
            left_out=(*left_out_recipe, *self.left_out()),
            notes=tuple(self.notes()),
            warnings=tuple(self.search.results.warnings) if self.end is not start else (),
            judged=gain,
            wrong="; ".join(filter(None, [*wrong, self.outputs.wrong(self.near[1])])),
            outputs=self.near,
            figures=figures(start.score_if_any, self.end.score_if_any) if session.target else {},
        )
        return Chosen(plan, start, None if self.costly else self.end)

    @cached_property
    def gain(self) -> Words:
        """What the whole gains, or why it is done without a known gain; "" for nothing.

        The first of these decides: no steps, a slower format, steps that were asked for, a new format that is
        not clearly faster on the target, no known score, the gain by the score.
        """
        start, end, required = self.start, self.end, self.search.required
        was_network = start.subject.was_network
        if end is start and not self.costly:
            return ""
        if was_network and all(map(end.subject.worse_than_layers, self.targets)):
            return ""
        named = [step for step in end.steps if step in required or step.essential]
        if named or self.costly:
            return ", ".join(dict.fromkeys(f"{step.name} {required.get(step, ASKED)}" for step in named))
        if was_network and self.has_target and not all(map(self.pays_for_the_format, self.targets)):
            return ""
        if start.score_if_any is None or end.score_if_any is None:
            return "nothing is known of how it scores"
        return self.gain_in_score()

    def gain_in_score(self) -> Words:
        """Return a measured gain, else an estimated one, else that outputs are finite; "" for nothing.

        Without a target, what is gained on each chip is computed only if somebody asks.
        """
        start, end = self.start, self.end
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
        if self.has_target and not self.start.subject.was_network:
            return self.end.score.worth(self.start.score)
        with self.start.known.within():
            before, after = self.start.subject, self.end.subject
            gains = (_gain_and_loss(target, before, after)[0] for target in self.targets)
            return next(filter(None, gains), "")

    def pays_for_the_format(self, target: Target) -> bool:
        """Is the ML Program clearly faster than the layers, in exchange for rounding and another format?

        Where no time is known, it may pay.
        """
        after, before = self.end.subject.score(target), self.start.subject.as_given(target)
        return is_clearly_faster(after, before) is not False

    def stays(self, steps: Sequence[Pass]) -> bool:
        """Are all of these steps in the plan?"""
        return bool(steps) and all(step in self.end.steps for step in steps)

    def planned(self) -> Iterator[Planned]:
        """Yield the steps of the plan, each with the reason why it is there."""
        search, repairing = self.search, {step for repairs in self.repairs for step in repairs.steps}
        remedies = {step: words for steps, words in search.results.remedy_gains.items() for step in steps}
        for trial in self.end.path:
            step, old = trial.steps[-1], trial.before
            why = remedies.get(step) or search.required.get(step, "")
            if why == ASKED and self.wish.exact and (rules := hazards_of(trial)):
                why = MAY + rules
            if not why and self.has_target and trial.score_if_any is not None and old is not None:
                why = trial.score.gain(old.score) or search.results.steps_needed.get(step, "")
            yield Planned(step, why or f"a step of {self.wish.name}", step in remedies or step in repairing)
        yield from (Planned(step, f"a step of {self.wish.name}") for step in self.costly)

    def left_out(self) -> Iterator[tuple[str, Refusal]]:
        """Yield (name, refusal) of what was tried and is not in the plan, and of steps that found nothing."""
        yield from self.report[1]
        losses = [(step.name, loss) for step, loss in self.search.results.step_losses.items()]
        losses += self.less_exact.items()
        yield from ((n, Refusal(f"undone: {loss}; name it to keep it")) for n, loss in losses)
        ran = {part.name for step in self.end.steps for part in (step, *step.parts())}
        ran |= {name for name, _ in losses}
        for name, refusal in self.search.results.steps_idle:
            if name not in ran and (not refusal.idle or name in self.wish.asked):
                yield name, refusal

    def notes(self) -> Iterator[str]:
        """Yield sentences about what was gained, what grows, and what stays wrong."""
        yield from self.report[0]
        yield from self.search.results.notes
        if self.has_target and self.start.score_if_any is not None and self.end is not self.start:
            yield from self.end.score.paid(self.start.score)
        yield from (str(repair) for repair in self.repairs if not repair.steps or self.stays(repair.steps))


def is_clearly_faster(after: Score | None, before: Score | None) -> bool | None:
    """Return whether the time falls by a tenth; None if a time is unknown."""
    if after is None or before is None or after.expected.times(before.expected) is None:
        return None
    return after.over(before).best <= CLEARLY


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
