"""The search for steps that improve how a program stands on a target: on copies, singly and in pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from anesurgery.checking.comparison import compare
from anesurgery.errors import Refusal, SurgeryError
from anesurgery.files.copying import copied
from anesurgery.files.package import Loaded
from anesurgery.mil import Operation, Program, walk_ops
from anesurgery.placement.evidence import Finding
from anesurgery.placement.expected import CLEARLY
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.runs_on_engine import Legality
from anesurgery.placement.standing import Standing, placed
from anesurgery.placement.target import Target
from anesurgery.rewriting.passes import Pass, run_pass
from anesurgery.rewriting.session import Session

GATE = 60.0
"""PSNR in dB that the outputs must keep where a step rounds: what recipes promise."""

LEAST = 100
"""A smaller program counts as one of so many ops: what does not grow takes as long. Chosen, not measured."""

Remedies = Callable[[Sequence[Finding]], Sequence[Pass]]
"""The passes that findings name, with their options, in the order in which they are tried."""

Objection = Callable[[Session, Program], "Refusal | None"]
"""Why what a pass did to a program is not wanted, whatever it gains; None where it is."""


@dataclass(frozen=True)
class State:
    """A program, the steps that led there, and how it stands: looked at when somebody asks."""

    program: Program
    target: Target
    steps: tuple[Pass, ...] = ()
    retyped: int = 0
    """Inputs and outputs of which callers give or take another type since the first step."""
    spec: Any = None
    """The specification of the model as given, if there is one."""
    changing: tuple[Pass, ...] = ()
    """The steps that change what the model takes or gives, beyond the type."""

    @property
    def model(self) -> Loaded:
        """The program with the shapes that its model describes."""
        return Loaded(self.program, self.spec)

    @cached_property
    def size(self) -> int:
        """How many ops the program has; constants do not count."""
        functions = self.program.functions.values()
        return sum(op.op_type != "const" for function in functions for op in walk_ops(function))

    @cached_property
    def standing(self) -> Standing:
        """What is legal and where it runs: all that most trials are judged by."""
        inspections = self.__dict__.get("inspections")
        return Standing.of(inspections or placed(self.model, self.target))

    @cached_property
    def advised(self) -> Standing:
        """The standing with every finding counted."""
        return Standing.of(self.inspections)

    @cached_property
    def inspections(self) -> list[Inspection]:
        """The inspection of each function, with advice."""
        return placed(self.model, self.target, advice=True)

    @property
    def findings(self) -> list[Finding]:
        """The findings of all functions."""
        return [f for part in self.inspections for f in part.all_findings]


@dataclass
class Search:
    """What was tried, what was kept, and what was not, with why."""

    target: Target
    session: Session
    remedies: Remedies
    objection: Objection
    trials: int
    """Most steps that are tried, on programs of the size of the one as given; on larger ones as many fewer."""
    kept: list[str] = field(default_factory=list)
    rejected: dict[str, tuple[str, Refusal]] = field(default_factory=dict)
    """By the words for the step."""
    refused: dict[str, tuple[str, Refusal]] = field(default_factory=dict)
    """By op of the program as given: what a remedy says of an op that names it."""
    barred: tuple[Pass, ...] = ()
    """Steps that are not tried for now."""
    dearer: list[State] = field(default_factory=list)
    """The states after single steps that did not pay."""
    given: Standing | None = None
    """How the program stands before the first step."""
    reached: dict[tuple[Pass, ...], State | None] = field(default_factory=dict)
    """What was tried from the program as given: the same steps lead to the same place."""
    scratch: tuple[Program, Program] | None = None
    """A program, and a copy of it that no step has changed."""
    ops: float = math.inf
    """Ops of the programs that may still be tried, all together."""

    @property
    def exhausted(self) -> bool:
        """Did the trials run out, or the ops of the programs that may be tried?"""
        return self.trials <= 0 or self.ops <= 0

    def improve(self, state: State) -> State:
        """The best state that single steps, and then pairs of them, lead to; results change only if it pays."""
        self.given, self.ops = state.standing, self.trials * max(state.size, LEAST)
        end = self.pruned(state, self.climb(state))
        changing = tuple(step for step in end.steps if step in end.changing)
        return self.without(state, end, changing) if changing else end

    def pruned(self, start: State, end: State) -> State:
        """The end without the steps that the others made useless: each is left out once, the first one first.

        Of two ends that stand equally well the one with fewer steps is preferred; what was measured stays.
        """
        if len(end.steps) < 2 or not end.standing.growth(start.standing):
            return end
        for step in end.steps[:-1]:
            if step.known_gain(start.program, self.target):
                continue
            left = tuple(one for one in end.steps if one != step)
            if (other := self.led(start, left)) is None or other.standing.loss(end.standing):
                continue
            if (other.retyped, len(other.changing)) > (end.retyped, len(end.changing)):
                continue
            if self.failure(start, left) is None:
                better = other.standing.gain(end.standing)
                why = f": {better}" if better else ""
                self.reject((step,), f"kept first, and undone: the other steps do as well without it{why}")
                self.kept = [words for words in self.kept if not words.startswith(f"kept {step}:")]
                end = other
        return end

    def led(self, start: State, steps: Sequence[Pass]) -> State | None:
        """The state after some steps; None where one does nothing or fails."""
        state: State | None = start
        for step in steps:
            state = None if state is None else self.attempt(state, step)
        return state

    def climb(self, state: State) -> State:
        """As far as single steps, and then pairs of them, lead up."""
        better: State | None = state
        while better is not None:
            state = better
            better = self.single(state) or self.pair(state)
        return state

    def without(self, start: State, end: State, changing: tuple[Pass, ...]) -> State:
        """The end that is reached without the steps that change results, where it stands as well or better."""
        kept, rejected = self.kept, dict(self.rejected)
        self.kept, self.barred = [], changing
        other = self.climb(start)
        self.barred = ()
        loss, clear = end.standing.loss(other.standing), end.standing.over(other.standing).best <= CLEARLY
        if other.steps and (loss or not clear) and not other.standing.barred_by(end.standing):
            for step in changing:
                self.reject(
                    (step,), f"tried and not kept: as much is gained without it{loss and f', and {loss}'}"
                )
            return other
        self.kept, self.rejected = kept, rejected
        return end

    def single(self, state: State) -> State | None:
        """Each remedy by itself; all that help, one after another."""
        best, self.dearer = state, []
        for step in self.remedies(state.findings):
            trial = self.attempt(best, step) if step not in self.barred else None
            if trial is not None and self.accept(best, trial):
                best = trial
            elif trial is not None:
                self.dearer.append(trial)
        return best if best is not state else None

    def pair(self, state: State) -> State | None:
        """A remedy that does not pay by itself, and then one that is named after it; small programs first."""
        for middle in (*sorted(self.dearer, key=lambda one: one.size), *self.shadowed(state)):
            first = middle.steps[-1]
            for step in self.remedies(middle.findings) if self.ops > 0 else ():
                if step in (first, *self.barred) or self.reached.get((*state.steps, step, first)):
                    continue  # the same two the other way round did not pay
                trial = self.attempt(middle, step)
                if trial is not None and self.accept(state, trial):
                    return trial
        return None

    def shadowed(self, state: State) -> Iterator[State]:
        """The states after remedies of what else speaks against ops off the ANE, of which findings name one."""
        legality, illegal = Legality(self.target), {name for _, name in state.standing.illegal}
        ops = (op for function in state.program.functions.values() for op in walk_ops(function))
        findings = [
            f for op in ops if op.outputs and op.outputs[0].name in illegal for f in legality.speaking(op)
        ]
        tried = self.remedies(state.findings)
        for step in self.remedies(findings) if findings else ():
            trial = None if step in (*tried, *self.barred) else self.attempt(state, step)
            if trial is not None:
                yield trial

    def attempt(self, state: State, step: Pass) -> State | None:
        """The state after a step; None where it does nothing, fails, or changes results that it must not."""
        if (steps := (*state.steps, step)) not in self.reached and self.trials > 0 and self.ops > 0:
            trial = self.reached[steps] = self._tried(state, step)
            self.trials -= 1
            self.ops -= (trial or state).size
        return self.reached.get(steps)

    def _tried(self, state: State, step: Pass) -> State | None:
        program, own = self.copy(state.program), self.session.again(prove_sites=False)
        try:
            run_pass(step, program, own)
        except SurgeryError as error:
            self.scratch = None
            self.reject((step,), f"tried, and it failed: {error}")
            return None
        if not own.changes:
            self.told(step, state, own.refusals)
            return None
        self.scratch = None
        if (objection := self.objection(own, state.program)) is not None:
            self.reject((step,), objection.reason)
            return None
        retyped = sum(change.retypes for change in own.contract)
        changing = (*state.changing, *(step for change in own.contract if not change.retypes))
        steps, types = (*state.steps, step), state.retyped + retyped
        return State(program, self.target, steps, types, state.spec, changing)

    def copy(self, program: Program) -> Program:
        """A copy to try a step on; the last one again while no step has changed it."""
        if self.scratch is None or self.scratch[0] is not program:
            self.scratch = program, copied(program)
        return self.scratch[1]

    def told(self, step: Pass, state: State, refusals: Sequence[tuple[str, Refusal]]) -> None:
        """Note what a step that changed nothing says of the ops at which it is named."""
        named = {f.op for f in state.findings if f.remedy == step.name}
        for name, refusal in refusals:
            where = refusal.where
            if isinstance(where, Operation) and where.outputs[0].name in named:
                self.refused[where.outputs[0].name] = name, refusal

    def accept(self, old: State, new: State) -> bool:
        """Is it better, and do the proofs of its sites hold?"""
        steps = new.steps[len(old.steps) :]
        measured = next(filter(None, (step.known_gain(old.program, self.target) for step in steps)), "")
        loss, gain = new.standing.loss(old.standing), new.standing.gain(old.standing)
        if not loss and self.given is not None:
            loss = new.standing.dearer(self.given)
        if measured:
            measured = overruled(measured, loss) if loss else measured
            loss = new.standing.leaves(old.standing)
        if not (loss or gain) and new.advised.tidier(old.advised):
            gain = f"findings {old.advised.findings} -> {new.advised.findings}"
        gain = measured or gain
        if gain:
            loss = loss or _for_nothing(old, new, steps)
        if loss or not gain:
            self.reject(steps, f"tried and not kept: {loss or 'it gains nothing on this target'}")
            return False
        if (failure := self.failure(old, steps)) is not None:
            self.reject(steps, f"tried, and it failed: {failure}")
            return False
        self.kept.append(f"kept {' and then '.join(map(str, steps))}: {gain}")
        for step in steps:
            self.rejected.pop(str(step), None)
        return True

    def failure(self, old: State, steps: tuple[Pass, ...]) -> Refusal | None:
        """What the check of a site, or of the whole model where a step rounds, says against these steps."""
        rounds = any(step.rounds for step in steps)
        if not (self.session.prove_sites or rounds):
            return None
        program, own = copied(old.program), self.session.again(prove_sites=self.session.prove_sites)
        try:
            for step in steps:
                run_pass(step, program, own)
            return _too_far(old.model, program, own) if rounds else None
        except SurgeryError as error:
            return Refusal(str(error))

    def reject(self, steps: tuple[Pass, ...], reason: str) -> None:
        """Note why a step was not kept; a pair says no more than its steps."""
        if len(steps) == 1:
            self.rejected[str(steps[0])] = steps[0].name, Refusal(reason)


def _for_nothing(old: State, new: State, steps: Sequence[Pass]) -> str:
    """What steps give away without a gain that is worth it, in words; "" for nothing.

    Other results are worth a clear gain in time; other types at the ends more on the ANE too; digits, also what
    may run there.
    """
    before, after = old.standing, new.standing
    clear, times = after.over(before).best <= CLEARLY, f"the time {after.times(before)} is no clear gain"
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


def _too_far(before: Loaded, after: Program, session: Session) -> Refusal | None:
    """What rounding does to the outputs on a sampled input, where it is more than the gate allows.

    Args:
        before: the model, whose description says which inputs are images: their pixels go from 0 to 255.
        after: its program after the steps.
        session: in which they ran.
    """
    for function in before.program.functions:
        comparison = compare(
            before, after, precision="fp16", contract=session.contract, gate=GATE, function=function
        )
        if not comparison.ok:
            keeps = f"it keeps {comparison.psnr:.1f} dB of {GATE:g}"
            undefined = next((o.failure for o in comparison.outputs if o.failure), "")
            return Refusal(f"{undefined or keeps} on a sampled input")
    return None
