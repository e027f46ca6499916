"""Repairs of numbers without which outputs are wrong on the inputs at hand, found by running the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from anesurgery.checking.exactness import MOST_FLOP, Yardstick, in_decibels, less_exact
from anesurgery.errors import SurgeryError
from anesurgery.files.copying import copied
from anesurgery.mil import Program
from anesurgery.placement.rules.faulty_ops import CLAIMS
from anesurgery.placement.standing import Standing, placed
from anesurgery.placement.target import Target
from anesurgery.rewriting.exact_steps import yardstick
from anesurgery.rewriting.passes import Pass, run_pass
from anesurgery.rewriting.session import Change, Session
from anesurgery.rewriting.subject import Subject

WRONG = 40.0
"""PSNR in dB below which outputs count as wrong: the gate of a certificate."""
HALVES = 6.0
"""dB by which a repair must bring outputs nearer: half the error is left. A choice: less is rounding."""
RIGHT = 60.0
"""PSNR in dB from which one repair needs no other beside it: what recipes promise of outputs."""
FLOP = 32 * MOST_FLOP
"""A program of more is not run for this: three runs tell that outputs are right, each of some seconds."""


@dataclass(frozen=True)
class Reached:
    """Repairs, and how near the outputs are before and after them: arithmetic -> dB."""

    steps: tuple[Pass, ...]
    before: Mapping[str, float]
    after: Mapping[str, float]
    program: Program
    """After them."""
    needed = "repairs what goes wrong on the inputs at hand"
    """Why they stay whatever they cost, after their name."""

    @property
    def left(self) -> str:
        """How wrong outputs still are, in words; "" where they are right."""
        wrong = [f"{in_decibels(now)} in {name}" for name, now in self.after.items() if now < WRONG]
        return f"outputs are wrong still on the inputs at hand, {', '.join(wrong)}" if wrong else ""

    def headline(self, changes: Sequence[Change]) -> str:
        """What the first line of the report says of it."""
        return self.left

    def __str__(self) -> str:
        if not self.steps:
            return f"{self.left}, and no repair that is tried by itself helps: certify says where errors enter"
        names = ", ".join(step.name for step in self.steps)
        gains = ", ".join(
            f"{in_decibels(old)} -> {in_decibels(self.after[name])} in {name}"
            for name, old in self.before.items()
            if old < WRONG
        )
        return f"{names}: without it outputs are wrong on the inputs at hand, {gains} of what the model means"


@dataclass(frozen=True)
class Reported:
    """Repairs of ops that reports call wrong on the target, and that no run here shows to be so."""

    steps: tuple[Pass, ...]
    faults: tuple[str, ...]
    """The rules that say so."""
    unless: str
    """What would show that they are not needed, in words."""
    needed = "repairs what was reported wrong on the target"

    def headline(self, changes: Sequence[Change]) -> str:
        """Why the first line may say that the model is slower; "" where nothing was repaired."""
        repaired = {change.pass_name for change in changes} & {step.name for step in self.steps}
        return f"repaired, as reported wrong on this target: {', '.join(self.faults)}" if repaired else ""

    def __str__(self) -> str:
        names, rules = (", ".join(some) for some in ([step.name for step in self.steps], self.faults))
        return f"{names}: {rules} was reported on this target{self.unless}"


Repairs = Reached | Reported


def repairs_of(steps: Sequence[Pass], model: Subject, session: Session) -> Iterator[Repairs]:
    """What each program of a model needs of some repairs, on the inputs of a session or on sampled ones.

    Nothing is run of a program without a finding about its numbers. Ops that reports call wrong on the target
    are repaired as well where no arithmetic computes what they give, or where no inputs are given: random
    numbers are small, and show nothing of it.

    Args:
        steps: in the order in which they run.
        model: as it was given; it is not changed.
        session: in which they will run.
    """
    target = Target.parse(session.target or "any")
    for program in model.chosen if steps else ():
        if not isinstance(program, Program):
            continue
        findings = [f for one in placed(program, target, advice=True) for f in one.all_findings]
        if any(finding.kind == "numeric" for finding in findings):
            claims = {f.rule: f.remedy for f in findings if f.rule in CLAIMS}
            own = [_of_claims(step, claims) for step in steps]
            session.spec = model.spec_of(program)
            measured = replace(yardstick(program, session), seeds=1, most_flop=FLOP)
            reached = reached_repairs(own, program, session, measured)
            yield from () if reached is None else (reached,)
            shown = {rule for rule in claims if session.samples and CLAIMS[rule].wrong is not None}
            left = {rule: remedy for rule, remedy in claims.items() if rule not in shown}
            yield from _reported(own, left, () if reached is None else reached.steps)


def _of_claims(step: Pass, claims: Mapping[str, str | None]) -> Pass:
    """A step that repairs faults by name, of those alone that are claimed of the target."""
    names = tuple(CLAIMS[rule].name for rule, remedy in claims.items() if remedy == step.name)
    return replace(step, **{"only": names}) if names and "only" in step.options() else step


def _reported(
    steps: Sequence[Pass], claims: Mapping[str, str | None], reached: Sequence[Pass]
) -> Iterator[Reported]:
    """The steps that claims name, but for those that inputs reach."""
    named = tuple(step for step in steps if step.name in claims.values() and step not in reached)
    if named:
        rules = tuple(rule for rule, remedy in claims.items() if any(step.name == remedy for step in named))
        reachable = any(CLAIMS[rule].wrong is not None for rule in rules)
        yield Reported(named, rules, "; give inputs to see whether they reach it" if reachable else "")


def reached_repairs(
    steps: Sequence[Pass], program: Program, session: Session, measured: Yardstick
) -> Reached | None:
    """The fewest of some repairs that bring wrong outputs nearer to what the model means.

    All run at first, as two hazards of one model hide each other; then each is left out once, the last one
    first, and stays away where the outputs are as near without it, or right, and the model stands no worse:
    what one repair keeps on the engine another may take off it.

    Args:
        steps: in the order in which they run.
        program: as it is before them; it is not changed.
        session: in which they will run.
        measured: what the program means.

    Returns:
        None where the outputs are right as they are, or cannot be told; no steps where none helps.
    """
    before = measured.measure(program)
    if before is None or min(before.values()) >= WRONG:
        return None
    target = Target.parse(session.target or "any")
    repaired = _after(steps, program, session, measured)
    if repaired is None or not _nearer(before, repaired.after):
        return Reached((), before, before, program)
    for step in reversed(repaired.steps):
        others = _after([s for s in repaired.steps if s is not step], program, session, measured)
        enough = {name: min(value, RIGHT) for name, value in repaired.after.items()}
        if others is None or less_exact(enough, others.after):
            continue
        stands, stood = (Standing.of(placed(one.program, target)) for one in (others, repaired))
        repaired = repaired if stands.loss(stood) else others
    return replace(repaired, before=before)


def _nearer(before: Mapping[str, float], after: Mapping[str, float]) -> bool:
    """Are outputs clearly nearer in an arithmetic in which they were wrong, and nowhere further away?"""
    gains = [old < after[name] >= old + HALVES for name, old in before.items() if old < WRONG]
    return any(gains) and not less_exact(before, after)


def _after(steps: Sequence[Pass], program: Program, session: Session, measured: Yardstick) -> Reached | None:
    """Those of the steps that change a copy of the program, and how near its outputs are then.

    One whose check of a site fails is left out, and so is one that changes the interface.
    """
    latest, ran = program, list[Pass]()
    for step in steps:
        edited, own = copied(latest), session.again(prove_sites=session.prove_sites)
        try:
            run_pass(step, edited, own)
        except SurgeryError:
            continue
        if own.changes and not own.contract:
            latest = edited
            ran.append(step)
    after = measured.measure(latest)
    return None if after is None else Reached(tuple(ran), {}, after, latest)
