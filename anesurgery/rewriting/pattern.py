"""Say what a rewrite looks for, and match it backward from the last op.

A pattern is built from `op`, `var` and `any_of`::

    op.mul(x=op.reduce_sum(x=var("x"), as_="sum"), y=var("factor"), commutes=True)

In MIL every value has exactly one producer, so matching backward needs no search; only `any_of` and
`commutes` (an op whose `x` and `y` may be exchanged) branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from anesurgery.errors import PatternError, Refusal
from anesurgery.mil import Block, Operation, Var


@dataclass(frozen=True)
class Match:
    """The ops and values that a pattern was found to stand for; names of the pattern are attributes."""

    root: Operation
    ops: tuple[Operation, ...]
    """Every matched op, the root first. A check that finds more of them binds a longer `ops`."""
    bindings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def block(self) -> Block:
        """The block of the root op."""
        block = self.root.enclosing_block
        assert block is not None
        return block

    def bind(self, *, ops: tuple[Operation, ...] | None = None, **extra: Any) -> Match:
        """The same match with more names (what `check` found and `rewrite` needs)."""
        return replace(self, ops=self.ops if ops is None else ops, bindings={**self.bindings, **extra})

    def __getattr__(self, name: str) -> Any:
        try:
            return self.bindings[name]
        except KeyError:
            raise AttributeError(f"the match has no {name!r}; it has {sorted(self.bindings)}") from None


@dataclass(frozen=True)
class AnyVar:
    """Matches every value and gives it a name; the same name twice must be the same value."""

    name: str


@dataclass(frozen=True)
class OpPattern:
    """Matches a value made by an op of one of the given types."""

    op_types: tuple[str, ...]
    inputs: Mapping[str, Pattern]
    as_: str | None = None
    commutes: bool = False


@dataclass(frozen=True)
class AnyOf:
    """Matches when one of the alternatives does; the first that does wins."""

    alternatives: tuple[Pattern, ...]


Pattern: TypeAlias = "AnyVar | OpPattern | AnyOf"


def var(name: str) -> AnyVar:
    """Any value, to be known as `name` in the match."""
    return AnyVar(name)


def any_of(*alternatives: Pattern) -> AnyOf:
    """One of several patterns, tried in order."""
    return AnyOf(alternatives)


class Ops:
    """`op.matmul(x=..., y=..., as_="product", commutes=False)` makes a pattern; `op.any("a", "b")(...)` too."""

    def __getattr__(self, op_type: str) -> Callable[..., OpPattern]:
        return self.any(op_type)

    def any(self, *op_types: str) -> Callable[..., OpPattern]:
        """A pattern maker for several op types at once."""

        def make(as_: str | None = None, commutes: bool = False, **inputs: Pattern) -> OpPattern:
            for name, value in inputs.items():
                if not isinstance(value, (AnyVar, OpPattern, AnyOf)):
                    raise PatternError(
                        f"{op_types[0]}({name}=...) needs a pattern, got {value!r}; check constants in `check`"
                    )
            if commutes and set(inputs) != {"x", "y"}:
                raise PatternError(f"{op_types[0]}: commutes=True exchanges x and y, so both must be given")
            return OpPattern(op_types, inputs, as_, commutes)

        return make


op = Ops()


def match(pattern: OpPattern, root: Operation) -> Match | Refusal | None:
    """Match at `root`: a `Match`, a near miss as a `Refusal`, or None when the op is of another kind."""
    if root.op_type not in pattern.op_types:
        return None
    trail: list[tuple[int, str]] = []
    for bindings, ops in _match_op(pattern, root, {}, (), trail):
        return Match(root, ops, bindings)
    depth, reason = max(trail, default=(0, "the inputs differ"))
    return Refusal(reason, root) if depth > 1 else None


_State = tuple[dict[str, Any], tuple[Operation, ...]]


def _match_op(
    pattern: OpPattern,
    found: Operation,
    bindings: dict[str, Any],
    ops: tuple[Operation, ...],
    trail: list[tuple[int, str]],
) -> Iterator[_State]:
    """Every way in which `found` and what stands before it fit; near misses go to `trail`, deepest wins."""
    ops = (*ops, found)
    if pattern.as_ is not None:
        bindings = {**bindings, pattern.as_: found}
    orders = [dict(pattern.inputs)]
    if pattern.commutes:
        orders.append({"x": pattern.inputs["y"], "y": pattern.inputs["x"]})
    for order in orders:
        yield from _match_inputs(list(order.items()), found, bindings, ops, trail)


def _match_inputs(
    wanted: list[tuple[str, Pattern]],
    found: Operation,
    bindings: dict[str, Any],
    ops: tuple[Operation, ...],
    trail: list[tuple[int, str]],
) -> Iterator[_State]:
    if not wanted:
        yield bindings, ops
        return
    (name, pattern), rest = wanted[0], wanted[1:]
    value = found.inputs.get(name)
    if not isinstance(value, Var):
        trail.append((len(ops), f"{found.op_type} has no single {name}"))
        return
    for inner_bindings, inner_ops in _match_value(pattern, value, bindings, ops, trail):
        yield from _match_inputs(rest, found, inner_bindings, inner_ops, trail)


def _match_value(
    pattern: Pattern,
    value: Var,
    bindings: dict[str, Any],
    ops: tuple[Operation, ...],
    trail: list[tuple[int, str]],
) -> Iterator[_State]:
    if isinstance(pattern, AnyVar):
        if bindings.get(pattern.name, value) is value:
            yield {**bindings, pattern.name: value}, ops
        else:
            trail.append((len(ops), f"{pattern.name} is %{bindings[pattern.name].name} and %{value.name}"))
    elif isinstance(pattern, AnyOf):
        for alternative in pattern.alternatives:
            yield from _match_value(alternative, value, bindings, ops, trail)
    elif value.op is not None and value.op.op_type in pattern.op_types:
        yield from _match_op(pattern, value.op, bindings, ops, trail)
    else:
        made_by = "an input" if value.op is None else value.op.op_type
        trail.append((len(ops), f"%{value.name} comes from {made_by}, not {' or '.join(pattern.op_types)}"))
