"""Prove a whole model against another, op by op (`prove_models`), and report what was proved (`ModelProof`).

`comparison` calls it for `compare(prove=True)`. Both functions run in step, the reference as far as the
candidate asks for. `pairs_of_values` proposes which values to compare, `matching` compares them, and from a
match on they count as one value. Besides its numbers, each element has a hash of how it is computed: equal
hashes mean equal bits. The report gives the grade, where the proof ends, and how many ops reached which grade.
The last section says which elements of the reference an output with a changed interface should have
(`_expected_outputs`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from anesurgery.checking.divergence import PAIRINGS
from anesurgery.checking.grades import Grade, length_words
from anesurgery.checking.matching import (
    LARGEST_VALUE,
    FunctionRun,
    HashedValue,
    Match,
    Move,
    ValueTable,
    match,
    still,
)
from anesurgery.checking.proofs import bound_words
from anesurgery.checking.trials import TrialResult
from anesurgery.files.interface import InterfaceChange, adapt_inputs, adapt_outputs
from anesurgery.interpret.arithmetic import field
from anesurgery.interpret.arithmetic.bitwise import Bitwise
from anesurgery.interpret.sampling import bind
from anesurgery.mil import Array, Function, Operation, Var, is_weight, np_dtype, reads, types
from anesurgery.text import to_text

SHOWN = 3
"""The most unproved ops that a report names: about what fits on a terminal."""


@dataclass(frozen=True)
class Seam:
    """A place where the proof ends: an op of the second model, an output, or how the models are called.

    Unmatched ops that read an unmatched op are left out: the first one upstream stands for them.
    """

    op: str
    """The op as text, or what else it is in words."""
    other: str
    """The op of the first model that it was compared with; empty if there is none."""
    grade: str
    """ "checked", or "not matched"."""
    note: str = ""

    def __str__(self) -> str:
        other = f" against {self.other}" if self.other else ""
        return f"{self.grade}: {self.op}{other}{f' ({self.note})' if self.note else ''}"


@dataclass(frozen=True)
class ModelProof:
    """How sure it is that two models compute the same."""

    grade: Grade | None
    """The weakest grade on any path to the outputs; None where an output could not be matched."""
    bound: float
    """Bound on the probability that a match, bit for bit or proved, is wrong."""
    outputs: Mapping[str, str]
    """The grade of each output in words, or "not matched"."""
    counts: Mapping[str, int]
    """Ops of the second model by grade; those inside a rewritten part have no counterpart."""
    seams: tuple[Seam, ...]
    """The places where the proof ends: ops in file order, then outputs, then how the models are called."""
    seed: int
    trial: TrialResult | None = None
    """What adversarial inputs showed."""
    lengths: tuple[int, ...] = ()
    """(least, largest) length of dynamic axes that was tried; () where the proof holds for all lengths."""
    gap: str = ""
    """Why nothing is known about other lengths."""

    def on_lengths(self, least: int, most: int, gap: str) -> ModelProof:
        """Return the proof with a grade for the lengths tried only; `gap` says why others are unknown."""
        grade = None if self.grade is None else min(self.grade, Grade.NUMBERS)
        return replace(self, grade=grade, lengths=(least, most), gap=gap)

    def weaker(self, other: ModelProof) -> ModelProof:
        """Return the weaker of two proofs of the same models at different lengths, with both bounds."""
        order = [-1 if p.grade is None else p.grade for p in (self, other)]
        return replace(self if order[0] <= order[1] else other, bound=self.bound + other.bound)

    def with_trial(self, trial: TrialResult) -> ModelProof:
        """Return the proof with what adversarial inputs showed; without a grade where they differ."""
        return replace(self, trial=trial, grade=None if trial.failure else self.grade)

    def with_differences(self, differences: Sequence[str]) -> ModelProof:
        """Return the proof without a grade where the models are called differently."""
        seams = (Seam(words, "", "not matched") for words in differences)
        return replace(self, grade=None, seams=(*self.seams, *seams)) if differences else self

    def with_function(self, name: str, other: ModelProof) -> ModelProof:
        """Return the proof of this function and another together: the weaker grade, and the results of both."""
        grades = [p.grade for p in (self, other) if p.grade is not None]
        lengths = [p.lengths for p in (self, other) if p.lengths]
        failed = other.trial is not None and bool(other.trial.failure)
        return replace(
            self,
            grade=min(grades) if len(grades) == 2 else None,
            bound=self.bound + other.bound,
            outputs={**self.outputs, **{f"{name}: {n}": words for n, words in other.outputs.items()}},
            counts=Counter(self.counts) + Counter(other.counts),
            seams=(*self.seams, *(replace(s, op=f"{name}: {s.op}") for s in other.seams)),
            trial=other.trial if failed else self.trial,
            lengths=min(lengths, key=max, default=()),  # the range that ends first holds for all functions
            gap=self.gap or other.gap,
        )

    @property
    def proved(self) -> bool:
        """Whether every output is proved, or bit for bit the same."""
        return self.grade is not None and self.grade >= Grade.PROVED

    @property
    def words(self) -> str:
        """The grade, the bound, and how many ops reached which grade."""
        ops = ", ".join(f"{n} {what}" for what, n in self.counts.items() if n)
        if self.trial is not None and self.trial.failure:
            return f"not proved: {self.trial.failure} ({ops})"
        if self.grade is None:
            return f"not proved ({ops})"
        if self.grade < Grade.PROVED:
            return f"not proved, but {self._grade_words} ({ops})"
        return f"{self.grade.words}, probability of error below {bound_words(self.bound)} ({ops})"

    @property
    def _grade_words(self) -> str:
        """The grade in words, with the lengths on which it was reached."""
        if self.grade is None or not self.lengths:
            return "" if self.grade is None else self.grade.words
        return length_words(self.lengths)

    @property
    def lines(self) -> list[str]:
        """The report: the grade, what adversarial inputs showed, and where the proof ends."""
        places = "one place" if len(self.seams) == 1 else f"{len(self.seams)} places"
        ends = [f"not proved in {places}:"] if self.seams else []
        more = len(self.seams) - SHOWN
        rest = [f"... and {more} more"] if more > 0 else []
        shown = [] if self.trial is None else [self.trial.words, *self.trial.counterexample.splitlines()]
        others = [f"other lengths are not proved: {self.gap}"] if self.gap else []
        return [self.words, *others, *shown, *ends, *(f"  {s}" for s in self.seams[:SHOWN]), *rest]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "grade": self._grade_words or None,
            "proved": self.proved,
            "bound": self.bound,
            "outputs": dict(self.outputs),
            "ops": dict(self.counts),
            "seams": [vars(s) for s in self.seams],
            "seed": self.seed,
            **({"lengths": list(self.lengths), "gap": self.gap} if self.lengths else {}),
            **({} if self.trial is None else {"trial": vars(self.trial)}),
        }


def prove_models(
    old: Function,
    new: Function,
    inputs: Mapping[str, Array],
    *,
    contract: Sequence[InterfaceChange] = (),
    gate: float = 60.0,
    seed: int = 0,
    last: bool = False,
) -> ModelProof:
    """Prove one function against another.

    Args:
        old: the reference.
        new: the candidate.
        inputs: inputs of `old`, by name; what is not proved is compared on these.
        contract: declared interface changes.
        gate: PSNR in dB from which numbers count as equal.
        seed: the seed of hashes and points.
        last: where an output has one position, compare it with the last of several.
    """
    with torch.inference_mode():
        return _Lockstep(old, new, inputs, contract, gate, seed, last).proof()


class _Lockstep:
    """Two functions that run in step: `a` is the run of the first, `b` of the second."""

    def __init__(
        self,
        old: Function,
        new: Function,
        inputs: Mapping[str, Array],
        contract: Sequence[InterfaceChange],
        gate: float,
        seed: int,
        last: bool,
    ) -> None:
        self.old, self.new, self.gate, self.seed, self.last = old, new, gate, seed, last
        self.inputs, self.contract = inputs, contract
        self.hashing = Bitwise(seed, LARGEST_VALUE)
        self.pairs = pairs_of_values(old, new)
        self.uses = Counter(self.pairs.values())
        table = ValueTable()
        first, second = self._hashed_inputs()
        self.a = FunctionRun(old, first, set(self.pairs.values()), self.hashing, table, first=True)
        self.b = FunctionRun(new, second, set(self.pairs), self.hashing, table, first=False)
        self.matches: dict[Operation, Match | None] = {}
        """Compared op of the second program -> the weakest match of its values; None if one has none."""
        self.others: dict[Operation, Operation | None] = {}
        """The same op -> the op of the first program that it was compared with."""

    def _hashed_inputs(self) -> tuple[dict[Var, HashedValue], dict[Var, HashedValue]]:
        """Return the inputs of both sides with random hashes; equal inputs with one MIL name get the same."""
        first = self._with_hashes(self.old, self.inputs, "first")
        second = self._with_hashes(self.new, adapt_inputs(self.contract, self.inputs), "second")
        by_name = {v.name: value for v, value in first.items()}
        for var, value in second.items():
            same_name = by_name.get(var.name)
            is_same = same_name is not None and np_dtype(same_name.var) == np_dtype(var)
            if same_name is not None and is_same and torch.equal(same_name.numbers, value.numbers):
                value.count_as(same_name)
        return first, second

    def _with_hashes(
        self, function: Function, inputs: Mapping[str, Array], side: str
    ) -> dict[Var, HashedValue]:
        values = {}
        for var, held in bind(function, inputs, None).items():
            numbers = held.value if types.is_state(var.sym_type) else held
            seed = field.hash_of(self.seed, side, var.name) % 2**62  # a hash may be negative
            generator = torch.Generator().manual_seed(seed)
            values[var] = HashedValue(
                var, numbers, field.random_image(self.hashing.primes, numbers.shape, generator)
            )
        return values

    def proof(self) -> ModelProof:
        """Run both to the end, and compare the outputs."""
        while (op := self.b.next) is not None:
            self._step(op)
        while self.a.next is not None:
            self.a.step()
        outputs = self._outputs()
        grades = {name: value.grade if same else None for name, (value, same) in outputs.items()}
        reached = [g for g in grades.values() if g is not None]
        bound = field.collision_bound(len(self.a.ops) + len(self.b.ops))  # a false match needs a collision
        bound += sum(m.bound for m in self.matches.values() if m is not None)
        return ModelProof(
            min(reached) if reached and len(reached) == len(grades) else None,
            bound,
            {n: "not matched" if g is None else g.words for n, g in grades.items()},
            self._counts(),
            self._seams([v for v, same in outputs.values() if not same]) + _reordered_outputs(outputs),
            self.seed,
        )

    def _step(self, op: Operation) -> None:
        """Run the next op of the second program, and look for its values in the first."""
        others = [self.pairs.get(var) for var in op.outputs]
        for other in others:
            if other is not None:
                self.a.reach(other)  # before the op runs: what both compute is computed once
        values = self.b.step()
        for b, other in zip(values, others, strict=True):
            if other is None:
                continue
            a = self.a.reach(other)
            matched = None if a is None else match(a, b, self.hashing, self.gate)
            self._keep_weakest(op, matched, other)
            self.uses[other] -= 1
            self.b.release(b.var)
            if not self.uses[other]:
                self.a.release(other)

    def _keep_weakest(self, op: Operation, matched: Match | None, other: Var) -> None:
        """Keep the weakest match of an op's values."""
        before = self.matches.get(op)
        if op not in self.matches or (before and (matched is None or matched.grade < before.grade)):
            self.matches[op], self.others[op] = matched, other.op

    def _outputs(self) -> dict[str, tuple[HashedValue, bool]]:
        """Return each output and state of the second program, and whether it matches the first program's."""
        of_old = {v.name: self.a.output_value(v) for v in self.old.outputs}
        expected = _expected_outputs(self.contract, of_old, self.inputs)
        outputs = {}
        for var in self.new.outputs:
            b = self.b.output_value(var)
            a, move = expected.get(var.name, (None, still))
            outputs[var.name] = (b, a is not None and self._matches(a, b, move))
        states = {v.name: value for v, value in self.a.states.items()}
        for var, b in self.b.states.items():
            a = states.get(var.name)
            outputs[f"state {var.name}"] = (b, a is not None and self._matches(a, b, still))
        return outputs

    def _matches(self, a: HashedValue, b: HashedValue, move: Move) -> bool:
        if self.last and move is still:
            move = _last_of(a, b)
        return match(a, b, self.hashing, self.gate, layout=move) is not None

    def _counts(self) -> dict[str, int]:
        """Return grade in words -> how many ops of the second program reached it."""
        counts = Counter[str]()
        for op in self.b.ops:
            matched = self.matches.get(op)
            counts["without a counterpart" if matched is None else matched.grade.words] += 1
        order = [*(g.words for g in sorted(Grade, reverse=True)), "without a counterpart"]
        return {what: counts[what] for what in order if counts[what]}

    def _seams(self, lost: Sequence[HashedValue]) -> tuple[Seam, ...]:
        """Return the ops that were only checked, and the first unmatched ones upstream of a lost output.

        Example: `a` has no match, `b` and `c` read `a`, and `d` reads `c`. If `b` was checked on numbers, and
        `c` and `d` have no match either, the seams are `a` and `b`. Ops that were never compared are seams only
        if nothing upstream of the lost outputs was.
        """
        lost_ops = {op for value in lost for op in _unmatched_upstream(value)}
        named = {op for op in lost_ops if op in self.matches} or lost_ops
        seams, reported_upstream = [], set[Operation]()
        for op in self.b.ops:
            matched, other = self.matches.get(op), _line(self.others.get(op))
            if matched is not None:
                if matched.grade < Grade.PROVED:
                    seams.append(Seam(_line(op), other, matched.grade.words, matched.note))
            elif op in lost_ops and any(v.op in reported_upstream for v in reads(op)):
                reported_upstream.add(op)
            elif op in named:
                reported_upstream.add(op)
                seams.append(Seam(_line(op), other, "not matched"))
        return tuple(seams)


def _reordered_outputs(outputs: Mapping[str, tuple[HashedValue, bool]]) -> tuple[Seam, ...]:
    """Return seams for outputs that do not match although the result of their op does."""
    lost = [name for name, (value, same) in outputs.items() if not same and value.is_matched]
    note = "the reference gives other elements here, or the same in another order"
    return tuple(Seam(f"output %{name}", "", "not matched", note) for name in lost)


FEWEST_SHARED_NAMES = 0.3
"""Share of values whose name exists in the other program below which values are paired by position too. A
choice: rewrites keep most names, another conversion few."""


def pairs_of_values(old: Function, new: Function) -> dict[Var, Var]:
    """Return value of the second program -> the value of the first that it may equal.

    Values of the same name are paired, and results of ops of the same type on paired operands. Where few names
    are common, ops of the same type and shape are also paired in order.
    """
    named = PAIRINGS["name"](old, new)
    values = [v for op in new.operations if op.op_type != "const" for v in op.outputs]
    pairs = {} if len(named) >= FEWEST_SHARED_NAMES * len(values) else PAIRINGS["position"](old, new)
    outputs = {v.name: v for v in old.outputs}
    pairs |= named | {v: outputs[v.name] for v in new.outputs if v.name in outputs}
    _pair_by_operands(old, new, pairs)
    # Inputs and weights were needed to pair by operands; they are not compared.
    computed = {v: w for v, w in pairs.items() if not any(x.op is None or is_weight(x.op) for x in (v, w))}
    return {v: w for v, w in computed.items() if np_dtype(v).kind == np_dtype(w).kind}


def _pair_by_operands(old: Function, new: Function, pairs: dict[Var, Var]) -> None:
    """Pair the results of ops of the same type on paired operands."""
    pairs |= {v: old.inputs[name] for name, v in new.inputs.items() if name in old.inputs}
    by_operands: dict[Any, list[Operation]] = {}  # the last op first, so that `pop` takes them in file order
    taken = {v.op for v in pairs.values()}
    for op in reversed(old.operations):
        if op not in taken:
            by_operands.setdefault((op.op_type, tuple(_variable_operands(op))), []).append(op)
    for op in new.operations:
        read = _variable_operands(op)
        if any(v in pairs for v in op.outputs) or not all(v in pairs for v in read):
            continue
        if read and (twins := by_operands.get((op.op_type, tuple(pairs[v] for v in read)))):
            pairs |= zip(op.outputs, twins.pop().outputs, strict=False)


def _variable_operands(op: Operation) -> list[Var]:
    """Return the operands of an op that are not constants."""
    return [v for v in reads(op) if v.op is None or not is_weight(v.op)]


def _unmatched_upstream(value: HashedValue) -> set[Operation]:
    """Return the ops upstream of a value that have no counterpart, up to values that have one."""
    lost: set[Operation] = set()
    stack = [value]
    while stack:
        here = stack.pop()
        if here.op is not None and here.op not in lost:  # a matched value has no op
            lost.add(here.op)
            stack += here.operands
    return lost


def _line(op: Operation | None) -> str:
    """Return an op as one line of text."""
    return "" if op is None else to_text(op).splitlines()[0].strip()


# -- outputs with a changed interface ---------------------------------------------------------------------
#
# A declared change computes new outputs from old ones by a function of arrays. Where it only selects or moves
# elements, two probes with distinct numbers show which ones; otherwise its result is compared by numbers only.


def _expected_outputs(
    contract: Sequence[InterfaceChange], outputs: Mapping[str, HashedValue], inputs: Mapping[str, Array]
) -> dict[str, tuple[HashedValue, Move]]:
    """Return output of the second program -> the first program's value that it should be, in its layout.

    Args:
        contract: the declared changes.
        outputs: the outputs of the first program, by name.
        inputs: the inputs of the first program, by name.
    """
    if not contract:
        return {name: (value, still) for name, value in outputs.items()}
    arrays = adapt_outputs(contract, {name: v.numbers.numpy() for name, v in outputs.items()}, inputs)
    reason = "a declared change computes with this output"
    some_var = next(iter(outputs.values())).var  # any will do: without hashes, numbers alone are compared
    expected: dict[str, tuple[HashedValue, Move]] = {
        name: (HashedValue(some_var, torch.from_numpy(np.asarray(array)), None, reason=reason), still)
        for name, array in arrays.items()
    }
    first, second = (_sources_of_elements(contract, outputs, inputs, seed) for seed in (0, 1))
    for name, (source, at) in first.items():
        if name in second and second[name][0] == source and torch.equal(second[name][1], at):
            expected[name] = outputs[source], partial(_elements_at, at)
    return expected


def _elements_at(at: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the elements of some indices, which count through all axes, in the shape of the indices."""
    return values.reshape(-1)[at.reshape(-1)].reshape(at.shape)


def _sources_of_elements(
    contract: Sequence[InterfaceChange],
    outputs: Mapping[str, HashedValue],
    inputs: Mapping[str, Array],
    seed: int,
) -> dict[str, tuple[str, torch.Tensor]]:
    """Return new output that only moves elements -> (the old output, the index there of each element).

    The old outputs are drawn as distinct numbers. Signs are random, so that abs or relu is no move; a second
    seed rules out what holds for one by chance. Example: an old output of three elements, with the order
    [2, 0, 1] and begin = 1, is drawn as 3, -1, 2. The inverse is [1, 2, 0]: a 2 in a new output has the rank
    2 - 1 = 1, so it is element inverse[1] = 2.
    """
    rng = np.random.default_rng(seed)
    drawn, draws, begin = {}, {}, 1
    for name, value in outputs.items():
        count = value.numbers.numel()
        order = rng.permutation(count)
        numbers = (order + begin) * np.where(rng.random(count) < 0.5, -1.0, 1.0)
        drawn[name] = numbers.reshape(tuple(value.numbers.shape))
        draws[name] = begin, np.argsort(order), numbers
        begin += count
    sources = {}
    for name, array in adapt_outputs(contract, drawn, inputs).items():
        moved = np.asarray(array, np.float64)
        for source, (begin, inverse, numbers) in draws.items():
            rank = np.abs(moved) - begin
            inside = (rank >= 0) & (rank < len(inverse))  # NaN and infinities are not
            if not inside.all() or (rank % 1 != 0).any():
                continue
            at = inverse[rank.astype(np.int64)]
            if np.array_equal(numbers[at], moved):
                sources[name] = (source, torch.from_numpy(at))
    return sources


def _last_of(a: HashedValue, b: HashedValue) -> Move:
    """Return a move to the last position of the reference, where the other has a single position on an axis."""
    apart = [i for i, (m, n) in enumerate(zip(a.numbers.shape, b.numbers.shape, strict=False)) if m != n]
    if a.numbers.ndim != b.numbers.ndim or len(apart) != 1 or b.numbers.shape[apart[0]] != 1:
        return still
    axis = apart[0]
    return lambda t: t.narrow(axis, t.shape[axis] - 1, 1)
