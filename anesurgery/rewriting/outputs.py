"""What steps do to the outputs of a model: which repairs it needs, and which steps cost digits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from anesurgery.checking.exactness import MOST_FLOP, Yardstick, in_decibels, less_exact
from anesurgery.mil import Program, walk_ops
from anesurgery.placement.certifying import arithmetic_of
from anesurgery.placement.rules.faulty_ops import CLAIMS
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.session import Session
from anesurgery.rewriting.step_trials import Trial, Trials

WRONG = 40.0
"""PSNR in dB below which outputs count as wrong: the gate of a certificate."""
HALVES = 6.0
"""dB by which a repair must bring outputs nearer: half the error is left. A choice: less is rounding."""
RIGHT = 60.0
"""PSNR in dB from which one repair needs no other beside it: what recipes promise of outputs."""
FLOP = 32 * MOST_FLOP
"""A program of more is not run for this: three runs tell that outputs are right, each of some seconds."""

Near = Mapping[str, float]
"""How near outputs are to what the model means: arithmetic -> dB of the least exact one."""


@dataclass
class Outputs:
    """The outputs of a model, by which others made of it are judged."""

    measures: Sequence[Yardstick]
    """What each program of it means."""
    gate: float = WRONG
    """PSNR in dB below which they are wrong."""
    seen: dict[tuple[Pass, ...], Near | None] = field(default_factory=dict)

    @classmethod
    def of(cls, start: Trial, session: Session, gate: float, **how: Any) -> Outputs:
        """On the inputs of a session, or on drawn ones; for each program of a pipeline on drawn ones."""
        programs = [graph for graph in start.held.chosen if isinstance(graph, Program)]
        inputs = session.samples if len(programs) == 1 else []
        engine = arithmetic_of(session.target)
        made = [Yardstick(one, engine, inputs, session.images, session.seed, **how) for one in programs]
        return cls(made, gate)

    def near(self, trial: Trial) -> Near | None:
        """How near the outputs of a trial are to what the model means; None where that cannot be told."""
        if trial.steps not in self.seen:
            pairs = zip(self.measures, trial.held.chosen, strict=True) if self.measures else ()
            each = [one.measure(program, trial.contract) for one, program in pairs]
            told = [one for one in each if one is not None]
            names = told[0] if told and len(told) == len(each) else ()
            self.seen[trial.steps] = {n: min(one[n] for one in told) for n in names} or None
        return self.seen[trial.steps]

    def before_and_after(self, start: Trial, end: Trial) -> tuple[Near | None, Near | None]:
        """How near outputs are at both ends of a plan, of the results that are left at the end."""
        later = [change for change in end.contract if not change.retypes]
        if not later:
            return self.near(start), self.near(end)
        each = [
            (one.seen_as(before, (), later), one.seen_as(after, end.contract))
            for one, before, after in zip(self.measures, start.held.chosen, end.held.chosen, strict=True)
        ]
        was, now = each[0] if len(each) == 1 else (None, None)  # a pipeline keeps its results
        return was, now

    def undefined(self, trial: Trial) -> int:
        """On how many inputs of one number everywhere outputs in fp16 are not finite."""
        pairs = zip(self.measures, trial.held.chosen, strict=True) if self.measures else ()
        return sum(one.undefined(program, trial.contract) for one, program in pairs)

    def wrong(self, near: Near | None) -> str:
        """How wrong outputs are, in words; "" where they are right, or nobody knows."""
        low = [f"{in_decibels(v)} in {name}" for name, v in (near or {}).items() if v < self.gate]
        return f"outputs are wrong still on the inputs at hand, {', '.join(low)}" if low else ""


@dataclass(frozen=True)
class Repairs:
    """Steps that repair numbers, and why they stay whatever they cost."""

    steps: tuple[Pass, ...]
    why: str
    """What goes wrong without them; or, where no step helps, what is wrong."""
    needed: str = "repairs what goes wrong on the inputs at hand"
    """After the name of a step."""
    faults: tuple[str, ...] = ()
    """The rules that report an op wrong on the target, where no run here shows it to be so."""

    def __str__(self) -> str:
        names = ", ".join(step.name for step in self.steps)
        return f"{names}: {self.why}" if names else self.why

    @property
    def headline(self) -> str:
        """Why the first line may say that the model is slower; "" where outputs tell it themselves."""
        return f"repaired, as reported wrong on this target: {', '.join(self.faults)}" if self.faults else ""


def repairs_of(steps: Sequence[Pass], start: Trial, trials: Trials, outputs: Outputs) -> Iterator[Repairs]:
    """What a model needs of some repairs, in the order in which they run.

    Nothing is run of a model without a finding about its numbers, unless inputs are given. Ops that reports
    call wrong on the target are repaired as well where no arithmetic computes what they give, or where no
    inputs are
    given: random numbers are small, and show nothing of it.
    """
    session = trials.session
    if not steps or not outputs.measures:
        return
    findings = start.findings
    if not session.samples and not any(finding.kind == "numeric" for finding in findings):
        return
    claims = {f.rule: f.remedy for f in findings if f.rule in CLAIMS}
    own = [_of_claims(step, claims) for step in steps]
    reached = _reached(own, start, trials, outputs)
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
) -> Iterator[Repairs]:
    """The steps that claims name, but for those that inputs reach."""
    named = tuple(step for step in steps if step.name in claims.values() and step not in reached)
    if named:
        rules = tuple(rule for rule, remedy in claims.items() if any(step.name == remedy for step in named))
        reachable = any(CLAIMS[rule].wrong is not None for rule in rules)
        unless = "; give inputs to see whether they reach it" if reachable else ""
        why = f"{', '.join(rules)} was reported on this target{unless}"
        yield Repairs(named, why, "repairs what was reported wrong on the target", rules)


def _reached(steps: Sequence[Pass], start: Trial, trials: Trials, outputs: Outputs) -> Repairs | None:
    """The fewest of some repairs that bring wrong outputs nearer to what the model means.

    All run at first, as two hazards of one model hide each other; then each is left out once, the last one
    first, and stays away where the outputs are as near without it, or right, and the model stands no worse:
    what one repair keeps on the engine another may take off it. What leaves outputs that are not finite repairs
    nothing.

    Returns:
        None where the outputs are right as they are, or cannot be told; no steps where none helps.
    """
    before = outputs.near(start)
    if before is None or min(before.values()) >= outputs.gate:
        return None
    end = _led(start, steps, trials)
    after = outputs.near(end)
    if after is None or not _nearer(before, after, outputs.gate):
        left = outputs.wrong(before)
        words = f"{left}, and no repair that is tried by itself helps: certify says where errors enter"
        return Repairs((), words)
    for step in reversed(end.steps):
        other = _led(start, [one for one in end.steps if one is not step], trials)
        enough = {name: min(value, RIGHT) for name, value in after.items()}
        near = outputs.near(other)
        if near is not None and not less_exact(enough, near) and not other.stands.loss(end.stands):
            end, after = other, near
    gains = ", ".join(
        f"{in_decibels(old)} -> {in_decibels(after[name])} in {name}"
        for name, old in before.items()
        if old < outputs.gate
    )
    words = f"without it outputs are wrong on the inputs at hand, {gains} of what the model means"
    return Repairs(end.steps, words)


def _nearer(before: Near, after: Near, gate: float) -> bool:
    """Are outputs clearly nearer in an arithmetic in which they were wrong, finite, and nowhere further off?"""
    gains = [old < after[name] >= old + HALVES for name, old in before.items() if old < gate]
    return any(gains) and min(after.values()) > -float("inf") and not _loss(before, after, gate)


def _loss(before: Near, after: Near, gate: float) -> str:
    """How outputs are less exact, in words; "" too where wrong ones become right, and all are right then."""
    mended = any(old < gate <= after[name] for name, old in before.items()) and min(after.values()) >= RIGHT
    return "" if mended else less_exact(before, after)


def _led(start: Trial, steps: Sequence[Pass], trials: Trials) -> Trial:
    """A model after those steps that change it, and leave its interface."""
    end = start
    for step in steps:
        new = trials.after(end, step)
        end = new if isinstance(new, Trial) and not new.session.contract else end
    return end


@dataclass
class Exact:
    """What is left of some steps where those that cost digits are taken back."""

    end: Trial
    losses: dict[str, str] = field(default_factory=dict)
    """Name of a step that does not stay -> by how much outputs would be less exact."""
    notes: list[str] = field(default_factory=list)
    """What stays although it costs digits."""


def exact(start: Trial, end: Trial, trials: Trials, outputs: Outputs) -> Exact:
    """The steps after which outputs are as exact in fp16 and in the engine's arithmetic.

    Each is judged beside the model right before it; nothing is run step by step where the end is as exact as
    the beginning. One that costs more than rounding is tried in its gentler form, if it has one; else it
    goes. Where no inputs are given, a repair stays that leaves outputs right: drawn numbers are small, and show
    no hazard.
    """
    was, now = outputs.near(start), outputs.near(end)
    if was is None or now is None or not less_exact(was, now):
        return Exact(end)
    left = Exact(start)
    for step in end.steps[len(start.steps) :]:
        if not (loss := _step(left, step, trials, outputs)):
            continue
        gentler = step.gentler()
        if gentler is not None and not _step(left, gentler, trials, outputs):
            continue
        new = trials.after(left.end, step)
        assert isinstance(new, Trial)
        repaired = "" if trials.session.samples else _repaired(new)
        if step.rounds:  # it has a gate of its own
            left.end = new
        elif repaired and min((outputs.near(new) or {"": 0.0}).values()) >= RIGHT:
            left.end = new
            left.notes.append(f"{step.name}: {loss}; kept, as it repairs what may go wrong: {repaired}")
        else:
            left.losses[step.name] = loss
    return left


def _repaired(new: Trial) -> str:
    """The rules by which numbers may go wrong in ops that a step takes away, or that name it as the remedy."""
    assert new.before is not None
    findings = [finding for finding in new.before.findings if finding.kind == "numeric"]
    names = {words.split()[-1] for change in new.session.changes for words in change.before}
    ops = [op for graph in new.before.held.chosen for op in walk_ops(graph) if op.name in names]
    edited = names.union(v.name for op in ops for v in op.outputs)  # a finding names an op by what it makes
    remedied = [f.rule for f in findings if f.remedy == new.steps[-1].name or f.op in edited]
    return ", ".join(dict.fromkeys(remedied))


def _step(left: Exact, step: Pass, trials: Trials, outputs: Outputs) -> str:
    """Take a step where outputs stay as exact; else by how much they would not, in words."""
    new = trials.after(left.end, step)
    if not isinstance(new, Trial):
        return ""
    was, now = outputs.near(left.end), outputs.near(new)
    loss = "" if was is None or now is None else _loss(was, now, outputs.gate)
    if not loss:
        left.end = new
    return loss
