"""Choose the plan for a model: which repairs it needs, which steps pay, and whether the whole gains anything.

`surgery.plan` and `apply` call `choose`. Repairs of wrong outputs come first and stay whatever they cost; so do
the steps that the caller named. Then `Search.best` adds the steps that pay, and `checks` takes back those that
cost digits. If the plan as a whole gains nothing, it has no steps. Without a target, steps are judged by what
holds on all chips, and the newest chips decide whether the whole gains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

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
    """Repairs of which the plan begins with the fewest that make outputs right, on given or random inputs.

    They need not be among the steps; one that is needed replaces the step of its name."""
    exact: bool = False
    """Are steps left out that make outputs less exact?"""

    @property
    def costly(self) -> list[Pass]:
        """The steps that cost too much to be tried; they end the plan."""
        return [step for step in self.steps if step.costly]


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
    # a `Searching` step stands for the passes that a search finds; the first one names the target of the plan
    targets = (step.judged_on(session) for step in wish.steps if isinstance(step, Searching))
    target = next(targets, None) or Target.parse(session.target)
    trials, start = Trials(session), Trial(given, target, session)
    # repairs are worth long runs: larger models are run than for digits below, but on one set of inputs
    outputs = Outputs.of(start, session, gate, seeds=1, most_flop=FLOP, constant_inputs=(0.0, 1.0))
    repairs = list(repairs_of(wish.repairs, start, trials, outputs))
    repairing = {step.name: step for repair in repairs for step in repair.steps}  # these come first
    others = [step for step in wish.steps if step.name not in repairing and not step.costly]
    search, less_exact = Search(start, trials, _required(wish, repairs)), dict[str, str]()
    end = searched = search.best(in_order((*repairing.values(), *others)))
    gain = _gain(wish, search, outputs, end)
    # a search only adds what gains, so without a gain of the whole its steps are not judged
    if wish.exact or repairing or (search.searching_step is not None and gain):
        exact = without_losses_of_digits(start, end, trials, Outputs.of(start, session, gate))
        search.results.notes += exact.notes
        end, less_exact = exact.end, exact.losses
    end = _with_last_steps(search, end)
    near = outputs.before_and_after(start, end) if session.samples or repairing else (None, None)
    gain = gain if end is searched else _gain(wish, search, outputs, end)
    refusals = list[tuple[str, Refusal]]()  # of the recipe
    if not gain:  # then the plan has no steps
        gain = why = _no_gain(search, end)
        end, near = start, (near[0], near[0])
        refusals += [(wish.name, Refusal(why))] if given.was_network else []
    composer = _Composer(wish, search, outputs, end, repairs, less_exact, near)
    return Chosen(composer.plan(gain, refusals), start, None if wish.costly else end)


def _required(wish: Wish, repairs: Sequence[Repairs]) -> dict[Pass, str]:
    """Return the steps that stay whatever they cost, and their gentler forms (more digits) -> why they stay."""
    required = {step: ASKED for step in wish.steps if step.name in wish.asked}
    required |= {step: repair.needed for repair in repairs for step in repair.steps}
    forms = ((form, why) for step, why in required.items() for form in (step, step.gentler()))
    return {form: why for form, why in forms if form is not None}


def _with_last_steps(search: Search, end: Trial) -> Trial:
    """Return the trial after the steps needed after a search; a step that fails or changes nothing is skipped.

    From then on `search` requires all of these steps.
    """
    searching, session = search.searching_step, search.tried.session
    for step, why in () if searching is None else searching.last(end.subject, session):
        search.required[step] = why
        new = search.tried.after(end, step)
        if isinstance(new, Trial):
            end = new
            search.results.notes.append(why)
    return end


def _targets(search: Search) -> Sequence[Target]:
    """Return the targets on which the whole is judged: the newest chips unless the caller named a target."""
    return [search.start.target] if search.tried.session.target else Target.newest()


NOTHING_FOUND = "no pass found anything to change"
FINITE = "inputs that are all 0 or all 1 no longer give NaN or infinity"


def _no_gain(search: Search, end: Trial) -> str:
    """Return why the model stays as it is."""
    targets = _targets(search)
    if worse := next(filter(None, map(end.subject.worse_than_layers, targets)), ""):
        return f"the neural network stays as it is: {worse}"
    if search.searching_step is None and not (end.steps or search.results.step_losses):
        return NOTHING_FOUND
    return f"nothing to gain on {targets[0].words if search.tried.session.target else _chips(targets)}"


def _gain(wish: Wish, search: Search, outputs: Outputs, end: Trial) -> Words:
    """Return what the whole gains, or why it is done without a known gain; "" for nothing.

    The first of these decides: no steps, a slower format, steps that were asked for, a new format that is not
    clearly faster on the target, no known score, an OS that cannot load the model, the gain by the score.
    """
    start, was_network = search.start, search.start.subject.was_network
    if end is start and not wish.costly:
        return ""
    if was_network and all(map(end.subject.worse_than_layers, _targets(search))):
        return ""
    named = [step for step in end.steps if step in search.required or step.essential]
    if named or wish.costly:
        return ", ".join(dict.fromkeys(f"{step.name} {search.required.get(step, ASKED)}" for step in named))
    if was_network and search.tried.session.target:  # rounding and another format must be worth it
        after, before = end.subject.score(start.target), start.subject.as_given(start.target)
        if is_clearly_faster(after, before) is False:
            return ""
    if start.score_if_any is None or end.score_if_any is None:
        return "nothing is known of how it scores"
    if end.score.refused:
        return ""
    return _gain_in_score(search, outputs, end)


def _gain_in_score(search: Search, outputs: Outputs, end: Trial) -> Words:
    """Return a measured gain, else an estimated one, else `FINITE`; "" for nothing.

    Without a target, it is a function: what is gained on each chip is computed only if somebody asks.
    """
    start, has_target = search.start, bool(search.tried.session.target)
    if not end.score.on_cpu and search.measured_gain(end.steps, start):
        return "a gain was measured"
    if has_target and not start.subject.was_network:
        gain = end.score.worth(start.score)
    else:
        with start.known.within():  # verdicts on unchanged ops are not computed again
            changes = (_change_on(target, start.subject, end.subject) for target in _targets(search))
            gain = next(filter(None, (change.gain for change in changes)), "")
    if not gain and any(finding.kind == "numeric" for finding in start.findings):
        now, was = outputs.undefined(end), outputs.undefined(start)
        return FINITE if now < was else ""
    if has_target or not gain:
        return gain
    return partial(_on_chips, _targets(search), start.subject.clone(), end.subject.clone())  # as they are now


@dataclass
class _Composer:
    """Composes a plan from the results of the search."""

    wish: Wish
    search: Search
    outputs: Outputs
    end: Trial
    """The trial after all steps of the plan that are tried."""
    repairs: Sequence[Repairs]
    less_exact: Mapping[str, str]
    """Name of a step that is left out since it costs digits -> by how much outputs would be less exact."""
    near: tuple[Near | None, Near | None]
    """How near the outputs are to the exact ones before and after the plan."""

    def plan(self, gain: Words, recipe_refusals: Sequence[tuple[str, Refusal]]) -> Plan:
        """Return the plan; `gain` says what it gains, `recipe_refusals` why it has no steps, by name."""
        start, results, target = self.search.start, self.search.results, self.search.tried.session.target
        step = self.search.searching_step
        notes, refusals = ([], []) if step is None else step.report(self.search, self.end)
        wrong = [repairs.headline for repairs in self.repairs if self.stays(repairs.steps)]
        return Plan(
            recipe=self.wish.name,
            target=target,
            steps=tuple(self.planned()),
            left_out=(*recipe_refusals, *refusals, *self.left_out()),
            notes=(*notes, *self.notes()),
            warnings=tuple(results.warnings) if self.end is not start else (),
            judged=gain,
            wrong="; ".join(filter(None, [*wrong, self.outputs.wrong_words(self.near[1])])),
            outputs=self.near,
            figures=figures(start.score_if_any, self.end.score_if_any) if target else {},
        )

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
            # where losses of digits are judged, a step that was asked for is told as the repair that it may be
            if why == ASKED and self.wish.exact and (rules := hazards_of(trial)):
                why = MAY + rules
            if not why and search.tried.session.target and trial.score_if_any is not None and old is not None:
                why = trial.score.gain(old.score) or search.results.steps_needed.get(step, "")
            yield Planned(step, why or f"a step of {self.wish.name}", step in remedies or step in repairing)
        yield from (Planned(step, f"a step of {self.wish.name}") for step in self.wish.costly)

    def left_out(self) -> Iterator[tuple[str, Refusal]]:
        """Yield (name, refusal) of what was tried and is not in the plan, and of steps that found nothing."""
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
        yield from self.search.results.notes
        start = self.search.start
        if self.search.tried.session.target and start.score_if_any is not None and self.end is not start:
            yield from self.end.score.paid(start.score)
        yield from (str(repair) for repair in self.repairs if not repair.steps or self.stays(repair.steps))


def is_clearly_faster(after: Score | None, before: Score | None) -> bool | None:
    """Return whether the time falls by a tenth; None if a time is unknown."""
    if after is None or before is None or after.expected.times(before.expected) is None:
        return None
    return after.over(before).best <= CLEARLY


class _Change(NamedTuple):
    """What a plan changes on one target against the file as given, in words; "" for nothing."""

    gain: str = ""
    slower: str = ""
    is_timed: bool = False
    """Is it faster, in milliseconds?"""


def _change_on(target: Target, before: Subject, after: Subject) -> _Change:
    """Return what a model gains on a target over the file as given, and by how much it is slower."""
    if worse := after.worse_than_layers(target):
        return _Change(slower=worse)
    was, now = before.as_given(target), after.score(target)
    if was is None or now is None:
        return _Change()
    is_timed = now.worth(was, ["enough time"]) != "" and now.expected.shown_times(was.expected) is not None
    return _Change(now.worth(was), now.loss(was, ["time"]), is_timed)


def _on_chips(targets: Sequence[Target], before: Subject, after: Subject) -> str:
    """Return on which chips a model gains something, how much on one of them, and on which it is slower."""
    changes = {target: _change_on(target, before, after) for target in targets}
    gains = {target: change for target, change in changes.items() if change.gain}
    slower = [target for target, change in changes.items() if change.slower and not change.gain]
    others = [target for target in targets if target not in gains and target not in slower]
    example = next((target for target, change in gains.items() if change.is_timed), next(iter(gains)))
    rest = f"; nothing to gain on {_chips(others)}" if others else ""
    rest += f"; slower on {_chips(slower)}" if slower else ""
    device = f"{example.device}, {example.chips[0]}" if example.device else example.chips[0]
    return f"gains on {_chips([*gains])} ({device}: {gains[example].gain}){rest}"


def _chips(targets: Sequence[Target]) -> str:
    """Return the chips of some targets in words: "M1 to M4"."""
    return spans([family for target in targets for family in target.families])
