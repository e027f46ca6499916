"""Run functions op by op, and decide whether a value of one equals a value of another.

`lockstep` runs two whole models this way, side by side (`FunctionRun`), and calls `match` for pairs of values.
Each element of a value has a hash of how it is computed. Equal hashes mean equal bits. Both models
share one table, so an op of the second model on the same operands as an op of the first is not computed again.
A value is dropped after its last reader; one without a counterpart yet keeps the op and the operands that made
it.

If hashes differ, the ops since the last matched values are evaluated over a prime field, with the hashes as
variables. If that fails too, the numbers are compared. After a match both values have the same hashes, whatever
its grade.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from anesurgery.checking.grades import Grade
from anesurgery.checking.output_comparison import psnr
from anesurgery.checking.proofs import APART, NoProof, Proof, at_points, reason_of, seed_of
from anesurgery.errors import InterpretError
from anesurgery.interpret import Evaluator
from anesurgery.interpret.arithmetic import field
from anesurgery.interpret.arithmetic.algebraic import Algebraic
from anesurgery.interpret.arithmetic.bitwise import Bitwise
from anesurgery.interpret.arithmetic.field import Image
from anesurgery.interpret.arithmetic.symbolic import RANDOM
from anesurgery.mil import (
    Function,
    Operation,
    Var,
    array_digest,
    constant,
    is_constexpr,
    is_weight,
    operands,
    reads,
    types,
)

LARGEST_VALUE = 1 << 27
"""The most elements of a value or constant of a whole model: hashing takes 64 bits for each, 1.1 GB in all."""

_serials = itertools.count()


class HashedValue:
    """A value of one program: its numbers on the sampled inputs, and the hashes of its elements."""

    __slots__ = ("__weakref__", "grade", "hashes", "numbers", "op", "operands", "reason", "serial", "var")

    def __init__(
        self,
        var: Var,
        numbers: Any,
        hashes: Image | torch.Tensor | None,
        *,
        op: Operation | None = None,
        operands: Sequence[HashedValue] = (),
        reason: str = "",
    ) -> None:
        self.var, self.numbers, self.hashes, self.reason = var, numbers, hashes, reason
        self.op, self.operands = op, tuple(operands)
        """What it is made of, as long as no value of the other program is known to be the same."""
        self.serial = next(_serials)
        """The same for values whose hashes and layout are the same."""
        self.grade: Grade = min((v.grade for v in operands), default=Grade.BITS)
        """The weakest grade by which anything upstream was matched."""

    def count_as(self, other: HashedValue) -> None:
        """Take the hashes and the layout of an equal value."""
        self.hashes, self.serial = other.hashes, other.serial

    @property
    def is_matched(self) -> bool:
        """Whether it is known to be a value of the other program, or comes from outside."""
        return self.op is None

    def forget(self) -> None:
        """Drop what made it: from here on its elements are known by their hashes."""
        self.op, self.operands = None, ()


class ValueTable:
    """Values of the first program by op, attributes, constants and operands."""

    def __init__(self) -> None:
        self._made: weakref.WeakValueDictionary[Hashable, HashedValue] = weakref.WeakValueDictionary()
        self._contents: dict[Var, Hashable] = {}

    def key(self, op: Operation, values: Mapping[Var, HashedValue]) -> Hashable | None:
        """Equal for ops that compute the same; None for an op with nested blocks, or that is no function."""
        if op.blocks or op.op_type in RANDOM:
            return None
        operands = tuple((name, self._known(var, values)) for name, var in op.inputs.items() if var is not None)
        return op.op_type, str(op.opset_version), operands, tuple(str(v.sym_type) for v in op.outputs)

    def _known(self, var: Any, values: Mapping[Var, HashedValue]) -> Hashable:
        if isinstance(var, (list, tuple)):
            return tuple(self._known(v, values) for v in var)
        if var in values:
            return values[var].serial
        return self._content(var)

    def _content(self, var: Var) -> Hashable:
        """A constant by what it holds."""
        if var not in self._contents:
            made_by = var.op
            if made_by is not None and made_by.op_type != "const":
                rest = tuple((k, self._content(v)) for k, v in made_by.inputs.items() if isinstance(v, Var))
                self._contents[var] = (made_by.op_type, rest)
            else:
                self._contents[var] = _content_digest(constant(var))
        return self._contents[var]

    def enter(self, key: Hashable | None, results: Sequence[HashedValue]) -> None:
        """Remember what an op of the first program made."""
        if key is not None:
            self._made.update({(key, i): value for i, value in enumerate(results)})

    def find(self, key: Hashable | None, count: int) -> list[HashedValue] | None:
        """What the same op made in the first program, if that is still alive."""
        results = [self._made.get((key, i)) for i in range(count)] if key is not None else []
        return [v for v in results if v is not None] if results and None not in results else None


def _content_digest(value: Any) -> Hashable:
    if isinstance(value, (str, bool)) or not hasattr(value, "dtype"):
        return repr(value)
    array = np.ascontiguousarray(value)
    return array.dtype.str, array.shape, array_digest(array)


class FunctionRun:
    """One function, run as far as it is asked for."""

    def __init__(
        self,
        function: Function,
        inputs: Mapping[Var, HashedValue],
        kept: set[Var],
        hashing: Bitwise,
        table: ValueTable,
        *,
        first: bool,
    ) -> None:
        self.ops = [op for op in function.operations if not is_weight(op)]
        self.place = {v: i for i, op in enumerate(self.ops) for v in op.outputs}
        self.values: dict[Var, HashedValue] = dict(inputs)
        self.states = {v: value for v, value in inputs.items() if types.is_state(v.sym_type)}
        self._hashing, self._table, self._first = hashing, table, first
        self._kept, self._outputs = kept, set(function.outputs)
        self._readers = Counter(v for op in self.ops for v in set(reads(op)))
        self._at = 0

    @property
    def next(self) -> Operation | None:
        """The op that runs next; None at the end."""
        return self.ops[self._at] if self._at < len(self.ops) else None

    def step(self) -> list[HashedValue]:
        """Run the next op."""
        op = self.ops[self._at]
        self._at += 1
        results = self._make(op)
        self.values |= zip(op.outputs, results, strict=True)
        for var in set(reads(op)):
            self._readers[var] -= 1
        for var in {*reads(op), *op.outputs}:
            self._drop(var)
        return results

    def reach(self, var: Var) -> HashedValue | None:
        """Run until a value is there, and return it; None if it was dropped."""
        while var not in self.values and self.place.get(var, -1) >= self._at:
            self.step()
        return self.values.get(var)

    def output_value(self, var: Var) -> HashedValue:
        """Return an output, which may be a constant."""
        return self.values[var] if var in self.values else self.constant(var)

    def release(self, var: Var) -> None:
        """Note that nobody needs this value any more."""
        self._kept.discard(var)
        self._drop(var)

    def constant(self, var: Var) -> HashedValue:
        """Return a constant as a value."""
        numbers = Evaluator(_decoding_ops([var]), [var])({})[0]
        return HashedValue(var, numbers, numbers)

    def _drop(self, var: Var) -> None:
        wanted = var in self._kept or var in self._outputs or var in self.states
        if self._readers[var] <= 0 and not wanted:
            self.values.pop(var, None)

    def _make(self, op: Operation) -> list[HashedValue]:
        if op.op_type in ("read_state", "coreml_update_state"):
            return [self._of_state(op)]
        key = self._table.key(op, self.values)
        remembered = None if self._first else self._table.find(key, len(op.outputs))
        used = [self.values[v] for v in dict.fromkeys(reads(op)) if v in self.values]
        if remembered is not None:
            results = [
                _same_elements(var, value, used) for var, value in zip(op.outputs, remembered, strict=True)
            ]
            for value in remembered:
                value.forget()
            return results
        numbers = self._evaluate(op, {v.var: v.numbers for v in used}, "fp32")
        results = [
            HashedValue(v, n, None, op=op, operands=used) for v, n in zip(op.outputs, numbers, strict=True)
        ]
        self._hash(op, used, results)
        if self._first:
            self._table.enter(key, results)
        return results

    def _hash(self, op: Operation, used: Sequence[HashedValue], results: Sequence[HashedValue]) -> None:
        without_hashes = next((v for v in used if v.hashes is None), None)
        if without_hashes is not None:
            for value in results:
                value.reason = without_hashes.reason
            return
        try:
            hashed = self._evaluate(op, {v.var: v.hashes for v in used}, self._hashing)
        except InterpretError as error:
            for value in results:
                value.reason = reason_of(error)
            return
        for value, own in zip(results, hashed, strict=True):
            value.hashes = own

    def _of_state(self, op: Operation) -> HashedValue:
        """Reading a state gives what was written to it last."""
        state = op.inputs["input" if op.op_type == "read_state" else "state"]
        if op.op_type != "read_state":
            var = op.inputs["value"]
            self.states[state] = self.values[var] if var in self.values else self.constant(var)
        return _same_elements(op.outputs[0], self.states[state], [self.states[state]])

    def _evaluate(self, op: Operation, bound: Mapping[Var, Any], arithmetic: Any) -> list[Any]:
        ops = [*_constants_of_ops([op]), op]
        return Evaluator(ops, op.outputs, arithmetic)(bound)


def _same_elements(var: Var, value: HashedValue, used: Sequence[HashedValue]) -> HashedValue:
    """Return another var that holds the same elements in the same layout."""
    twin = HashedValue(var, value.numbers, value.hashes, reason=value.reason)
    twin.serial = value.serial
    twin.grade = min((v.grade for v in used), default=Grade.BITS)
    return twin


def _constants_of_ops(ops: Sequence[Operation]) -> list[Operation]:
    """Return the compressed constants that some ops read."""
    return _decoding_ops([v for op in ops for v in reads(op)])


def _decoding_ops(vars_: Sequence[Var]) -> list[Operation]:
    """Return the ops that decode the compressed constants among some values, in an order in which they run."""
    decoders: dict[Operation, None] = {}
    for var in vars_:
        if var.op is not None and is_constexpr(var.op):
            decoders |= dict.fromkeys(_decoding_ops([v for _, v in operands(var.op)]))
            decoders[var.op] = None
    return list(decoders)


Move = Callable[[torch.Tensor], torch.Tensor]
"""Brings the elements of a value of the first program into the layout of one of the second."""

LARGEST_SLICE = 64
"""The most ops since matched values, on either side, for which the field is tried: a choice, since a try that
fails has cost all of them.
"""
MOST_AXES = 5
"""The most axes longer than 1 of which every order is tried: 120 orders."""


def still(values: torch.Tensor) -> torch.Tensor:
    """Return values in their own layout."""
    return values


@dataclass(frozen=True)
class Match:
    """Two values are the same, with a grade."""

    grade: Grade
    bound: float = 0.0
    note: str = ""
    """What was tried on numbers, and why there is no proof."""


def match(
    a: HashedValue, b: HashedValue, hashing: Bitwise, gate: float, *, layout: Move | None = None
) -> Match | None:
    """Return how sure it is that `b` is `a` in some layout, and give both the same hashes; None if it is not.

    Args:
        a: a value of the first program.
        b: a value of the second.
        hashing: the arithmetic that computes hashes.
        gate: PSNR in dB from which on numbers count as equal.
        layout: the only layout that counts; any by default.
    """
    if layout in (None, still) and a.serial == b.serial:
        return Match(Grade.BITS)
    if not all(isinstance(v.numbers, torch.Tensor) for v in (a, b)):
        return None
    moves = list(layouts(a.numbers.shape, b.numbers.shape)) if layout is None else [layout]
    for move in moves:
        if same_hashes(a, b, hashing, move):
            return _settle(a, b, move, Match(Grade.BITS))
    near = [(move, ratio) for move in moves if (ratio := closeness(move(a.numbers), b.numbers)) >= gate]
    reason = b.reason or a.reason
    if near:
        proof, move, why = _over_points(a, b, [move for move, _ in near], hashing.seed)
        reason = reason or why
        if proof is not None:
            return _settle(a, b, move, Match(proof.grade, proof.bound))
    for move, ratio in near:
        count = compared(move(a.numbers), b.numbers)
        if count == 0 and b.numbers.numel():
            continue  # all are NaN on both sides, which shows nothing
        words = "equal" if math.isinf(ratio) else f"PSNR {ratio:.1f} dB"
        note = f"{words} on {count} numbers" + (f"; {reason}" if reason else "")
        return _settle(a, b, move, Match(Grade.NUMBERS, note=note))
    return None


def _over_points(
    a: HashedValue, b: HashedValue, moves: Sequence[Move], seed: int
) -> tuple[Proof | None, Move, str]:
    """Return a proof over the field, the layout in which it holds, and why there is none."""
    reason = ""
    try:
        seed = seed_of(seed, [op for value in (a, b) for op in upstream(value)[0]])
        # first with the known values upstream as variables, then with hashes that both sides have as well
        for shared in (None, _shared(a, b)):
            for move in moves:

                def agree(arithmetic: Algebraic, move: Move = move, hashes: Any = shared) -> int | NoProof:
                    return _agree(a, b, move, arithmetic, hashes)

                if isinstance(proof := at_points(agree, seed), Proof):
                    return proof, move, ""
                reason = proof.reason
    except InterpretError as error:
        reason = reason_of(error)
    return None, moves[0], reason


def same_hashes(a: HashedValue, b: HashedValue, hashing: Bitwise, move: Move) -> bool:
    """Return whether two values have the same hashes, once the first one's are moved to the other's layout."""
    if a.hashes is None or b.hashes is None:
        return False
    return hashing.image(a.hashes).map(move).same(hashing.image(b.hashes))


def layouts(old: Sequence[int], new: Sequence[int]) -> Iterator[Move]:
    """Yield how elements of one shape may lie in another: axes reordered, and axes of length 1 put in."""
    if math.prod(old) != math.prod(new):
        return
    wanted, long = list(new), [n for n in old if n > 1]
    if list(old) == wanted:
        yield still
    elif long == [n for n in new if n > 1]:
        yield lambda t: t.reshape(wanted)
    if len(long) > MOST_AXES:
        return
    for order in itertools.permutations(range(len(long))):
        if order != tuple(range(len(long))) and [long[i] for i in order] == [n for n in new if n > 1]:
            yield lambda t, order=order: t.reshape(long).permute(order).reshape(wanted)  # type: ignore[misc]


def closeness(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the PSNR; infinite for equal numbers.

    Minus infinite for other shapes, for integers that differ, and where an element is NaN or infinite on one
    side only. NaN on both sides is no difference; `compared` says how many elements are left.
    """
    if a.shape != b.shape:
        return -math.inf
    same = (a == b) | ((a != a) & (b != b))
    if bool(same.all()):
        return math.inf
    finite = torch.isfinite(a) & torch.isfinite(b)
    if not a.is_floating_point() or bool((~same & ~finite).any()):
        return -math.inf
    zero = torch.zeros((), dtype=torch.float64)
    apart = torch.where(same, zero, a.double() - b.double())
    peak = float(torch.where(finite, a.double().abs(), zero).max())
    return psnr(peak, float(apart.square().mean().sqrt()))


def compared(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return how many elements are not NaN on both sides."""
    return a.numel() - int(((a != a) & (b != b)).sum())


def _settle(a: HashedValue, b: HashedValue, move: Move, matched: Match) -> Match:
    """Give both values the same hashes, and `b` the numbers of `a`, so that differences do not add up."""
    if a.hashes is None:
        generator = torch.Generator().manual_seed(a.serial)
        a.hashes = field.random_image(field.PRIMES, a.numbers.shape, generator)
    x, numbers = a.hashes, move(a.numbers)
    b.hashes = x.map(move) if isinstance(x, Image) else move(x)
    b.reason = a.reason = ""
    b.numbers, b.grade = numbers, min(b.grade, matched.grade)
    if move is still:
        b.serial, b.hashes = a.serial, x
    a.forget()
    b.forget()
    return matched


def _agree(
    a: HashedValue, b: HashedValue, move: Move, arithmetic: Algebraic, shared: torch.Tensor | None
) -> int | NoProof:
    """How many elements agree over the field, or that they do not.

    Raises:
        Unsupported: an op that the field does not know.
        Zero: the point has to be drawn again.
    """
    arithmetic.largest = LARGEST_VALUE
    x, y = _over_field(a, arithmetic, shared).map(move), _over_field(b, arithmetic, shared)
    arithmetic.degree = max(arithmetic.degree, x.degree, y.degree)
    return y.numel() if x.same(y) else APART


def _over_field(value: HashedValue, arithmetic: Algebraic, shared: torch.Tensor | None) -> Image:
    """Return a value over the field, with variables for the hashes of known values and the given hashes."""
    makers, edges = upstream(value)
    bound: dict[Var, Any] = {v.var: _variables(v, arithmetic) for v in edges}
    for op, values in makers.items():
        images = Evaluator([*_constants_of_ops([op]), op], list(values), arithmetic)(bound)
        for (var, held), image in zip(values.items(), images, strict=True):
            bound[var] = image if shared is None or held is value else _known(held, image, arithmetic, shared)
    return arithmetic.image(bound[value.var])


def _known(value: HashedValue, image: Any, arithmetic: Algebraic, shared: torch.Tensor) -> Any:
    """Return an image in which elements with certain hashes are replaced by variables."""
    if not isinstance(value.hashes, Image):
        return image
    there = torch.isin(_key_of(value.hashes), shared)
    variables, image = _variables(value, arithmetic), arithmetic.image(image)
    assert isinstance(variables, Image)
    return field.where(there, variables, image)


def _shared(a: HashedValue, b: HashedValue) -> torch.Tensor:
    """Return the hashes that occur on both sides since the last known values."""
    sides = []
    for value in (a, b):
        makers, edges = upstream(value)
        inner = [v for values in makers.values() for v in values.values() if v is not value]
        keys = [_key_of(v.hashes).reshape(-1) for v in (*inner, *edges) if isinstance(v.hashes, Image)]
        sides.append(torch.unique(torch.cat(keys)) if keys else torch.zeros(0, dtype=torch.int64))
    return sides[0][torch.isin(sides[0], sides[1])]


def _key_of(hashes: Image) -> torch.Tensor:
    """Return one number for each hash, the same for its negative."""
    return field.packed(field.signed(hashes)[0])


def _variables(value: HashedValue, arithmetic: Algebraic) -> Any:
    """Return a variable for each hash; the negative of a hash gets the negative variable."""
    if value.hashes is None:
        raise Unhashed(f"the elements of {value.var.name} have no hashes: {value.reason}")
    if isinstance(value.hashes, list):
        return [_variable(hashes, arithmetic) for hashes in value.hashes]
    return _variable(value.hashes, arithmetic)


def _variable(hashes: Any, arithmetic: Algebraic) -> Any:
    if not isinstance(hashes, Image):
        return hashes
    even, turned = field.signed(hashes)
    name = field.hash_of(arithmetic.seed, "variable")
    return field.with_sign(field.opaque(arithmetic.primes, name, field.packed(even)), turned)


class Unhashed(InterpretError):  # noqa: N818 - says what is missing
    """A value whose elements could not be hashed."""


def upstream(value: HashedValue) -> tuple[dict[Operation, dict[Var, HashedValue]], list[HashedValue]]:
    """Return the ops that computed a value from known values, with their results, and the known values.

    Raises:
        Unhashed: there are too many ops.
    """
    ops: dict[Operation, dict[Var, HashedValue]] = {}
    edges: dict[Var, HashedValue] = {}
    stack = [(value, False)]
    while stack:
        here, ready = stack.pop()
        if here.op is None:
            edges[here.var] = here
        elif ready or here.op in ops:
            ops.setdefault(here.op, {})[here.var] = here
        else:
            stack.append((here, True))
            stack += [(v, False) for v in here.operands]
        if len(ops) > LARGEST_SLICE:
            raise Unhashed(f"more than {LARGEST_SLICE} ops since the last values that are known")
    return ops, list(edges.values())
