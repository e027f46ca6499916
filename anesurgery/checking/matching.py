"""Decide whether a value of one program equals a value of another: by names, over a prime field, or by numbers.

`lockstep` calls `match` for pairs of values while both programs run. Names are hashes of how each element is
computed: equal names mean equal bits. If names differ, the ops since the last matched values are evaluated over
the field, with the names as variables. If that fails too, the numbers are compared. After a match both values
have the same names, whatever its grade.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anesurgery.checking.grades import Grade, psnr
from anesurgery.checking.numbered_values import LARGEST_VALUE, NamedValue, constants_of_ops
from anesurgery.checking.proofs import APART, NoProof, Proof, at_points, reason_of, seed_of
from anesurgery.errors import InterpretError
from anesurgery.interpret import Evaluator
from anesurgery.interpret.arithmetic import field
from anesurgery.interpret.arithmetic.algebraic import Algebraic
from anesurgery.interpret.arithmetic.bitwise import Bitwise
from anesurgery.interpret.arithmetic.field import Image
from anesurgery.mil import Operation, Var

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
    a: NamedValue, b: NamedValue, names: Bitwise, gate: float, *, exact: Move | None = None
) -> Match | None:
    """Return how sure it is that `b` is `a` in some layout, and give both the same names; None if it is not.

    Args:
        a: a value of the first program.
        b: a value of the second.
        names: the arithmetic of the names.
        gate: PSNR in dB from which on numbers count as equal.
        exact: the only layout that counts; any by default.
    """
    if exact is None and a.serial == b.serial:
        return Match(Grade.BITS)
    if not all(isinstance(v.numbers, torch.Tensor) for v in (a, b)):
        return None
    moves = list(layouts(a.numbers.shape, b.numbers.shape)) if exact is None else [exact]
    for move in moves:
        if same_names(a, b, names, move):
            return _settle(a, b, move, Match(Grade.BITS))
    near = [(move, ratio) for move in moves if (ratio := closeness(move(a.numbers), b.numbers)) >= gate]
    reason = b.reason or a.reason
    if near:
        proof, move, why = _over_points(a, b, [move for move, _ in near], names.seed)
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
    a: NamedValue, b: NamedValue, moves: Sequence[Move], seed: int
) -> tuple[Proof | None, Move, str]:
    """Return a proof over the field, the layout in which it holds, and why there is none."""
    reason = ""
    try:
        seed = seed_of(seed, [op for value in (a, b) for op in upstream(value)[0]])
        # first with the known values upstream as variables, then with what both sides name alike as well
        for shared in (None, _shared(a, b)):
            for move in moves:

                def agree(arithmetic: Algebraic, move: Move = move, names: Any = shared) -> int | NoProof:
                    return _agree(a, b, move, arithmetic, names)

                if isinstance(proof := at_points(agree, seed), Proof):
                    return proof, move, ""
                reason = proof.reason
    except InterpretError as error:
        reason = reason_of(error)
    return None, moves[0], reason


def same_names(a: NamedValue, b: NamedValue, names: Bitwise, move: Move) -> bool:
    """Do two values have the same names in a layout?"""
    if a.names is None or b.names is None:
        return False
    return names.image(a.names).map(move).same(names.image(b.names))


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


def _settle(a: NamedValue, b: NamedValue, move: Move, matched: Match) -> Match:
    """Give both values the same names, and `b` the numbers of `a`, so that differences do not add up."""
    if a.names is None:
        generator = torch.Generator().manual_seed(a.serial)
        a.names = field.random(field.PRIMES, a.numbers.shape, generator)
    x, numbers = a.names, move(a.numbers)
    b.names = x.map(move) if isinstance(x, Image) else move(x)
    b.reason = a.reason = ""
    b.numbers, b.grade = numbers, min(b.grade, matched.grade)
    if move is still:
        b.serial, b.names = a.serial, x
    a.forget()
    b.forget()
    return matched


def _agree(
    a: NamedValue, b: NamedValue, move: Move, arithmetic: Algebraic, shared: torch.Tensor | None
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


def _over_field(value: NamedValue, arithmetic: Algebraic, shared: torch.Tensor | None) -> Image:
    """Return a value over the field, with variables for the names of known values and the given names."""
    makers, edges = upstream(value)
    bound: dict[Var, Any] = {v.var: _variables(v, arithmetic) for v in edges}
    for op, values in makers.items():
        images = Evaluator([*constants_of_ops([op]), op], list(values), arithmetic)(bound)
        for (var, held), image in zip(values.items(), images, strict=True):
            bound[var] = image if shared is None or held is value else _known(held, image, arithmetic, shared)
    return arithmetic.image(bound[value.var])


def _known(value: NamedValue, image: Any, arithmetic: Algebraic, shared: torch.Tensor) -> Any:
    """Return an image in which elements with certain names are replaced by variables."""
    if not isinstance(value.names, Image):
        return image
    there = torch.isin(_key_of(value.names), shared)
    variables, image = _variables(value, arithmetic), arithmetic.image(image)
    assert isinstance(variables, Image)
    return field.together([variables, image], lambda each: torch.where(there, each[0], each[1]))


def _shared(a: NamedValue, b: NamedValue) -> torch.Tensor:
    """Return the names that occur on both sides since the last known values."""
    sides = []
    for value in (a, b):
        makers, edges = upstream(value)
        inner = [v for values in makers.values() for v in values.values() if v is not value]
        keys = [_key_of(v.names).reshape(-1) for v in (*inner, *edges) if isinstance(v.names, Image)]
        sides.append(torch.unique(torch.cat(keys)) if keys else torch.zeros(0, dtype=torch.int64))
    return sides[0][torch.isin(sides[0], sides[1])]


def _key_of(names: Image) -> torch.Tensor:
    """Return one number for each name, the same for its negative."""
    return field.packed(field.signed(names)[0])


def _variables(value: NamedValue, arithmetic: Algebraic) -> Any:
    """Return a variable for each name; the negative of a name gets the negative variable."""
    if value.names is None:
        raise Unnamed(f"the elements of {value.var.name} have no names: {value.reason}")
    if isinstance(value.names, list):
        return [_variable(names, arithmetic) for names in value.names]
    return _variable(value.names, arithmetic)


def _variable(names: Any, arithmetic: Algebraic) -> Any:
    if not isinstance(names, Image):
        return names
    even, turned = field.signed(names)
    name = field.key(arithmetic.seed, "variable")
    return field.with_sign(field.opaque(arithmetic.primes, name, field.packed(even)), turned)


class Unnamed(InterpretError):  # noqa: N818 - says what is missing
    """A value whose elements could not be named."""


def upstream(value: NamedValue) -> tuple[dict[Operation, dict[Var, NamedValue]], list[NamedValue]]:
    """Return the ops that computed a value from known values, with their results, and the known values.

    Raises:
        Unnamed: there are too many ops.
    """
    ops: dict[Operation, dict[Var, NamedValue]] = {}
    edges: dict[Var, NamedValue] = {}
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
            raise Unnamed(f"more than {LARGEST_SLICE} ops since the last values that are known")
    return ops, list(edges.values())
