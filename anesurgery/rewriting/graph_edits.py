"""Edit a function from a pass that finds its own places: add and remove ops, inputs, outputs, and infer types.

A `Rewrite` returns which values replace which, and its driver does the rest. Other passes edit through
`GraphEdits`, so that the engine also owns their insertion points, names, scopes, types, dead ops, comparison
and record::

    with an.GraphEdits(self, session, function) as edits:
        clipped = edits.after(value).clip(x=value, alpha=-9.0, beta=9.0)
        edits.compare(value.name, (value, clipped))
        edits.replace(value, clipped)
        edits.record(value.name)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from anesurgery import mil
from anesurgery.checking.grades import Grade, SiteCheck
from anesurgery.checking.lengths import drawn_shape
from anesurgery.errors import PassError, Refusal
from anesurgery.mil import Array, Function, Operation, Var, dtype_name, is_output, is_symbolic, operands, types
from anesurgery.ops import BROADCASTING
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.driver import Built, alike, proof_of, remove_dead
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.session import ROUNDED, Change, Session
from anesurgery.semantics.inference import infer, set_type
from anesurgery.text import type_text

if TYPE_CHECKING:
    from typing_extensions import Self


def infer_readers(function: Function, values: Iterable[Var]) -> None:
    """Infer the types of all ops that read some values, and on downstream while shapes change.

    Ops with nested blocks stay as they are.

    Raises:
        PassError: the shapes do not fit.
    """
    changed = set(values)
    if not changed:  # nearly every edit: leaving a function walks all its ops
        return
    with function:  # some ops build others to infer their shapes
        for op in function.operations:
            if op.blocks or changed.isdisjoint(v for _, v in operands(op)):
                continue
            before = {v: v.shape for v in op.outputs if types.is_tensor(v.sym_type)}
            infer(op)
            tensors = [v for _, v in operands(op) if types.is_tensor(v.sym_type)]
            sizes = {size for v in tensors for size in v.shape}
            for var, shape in before.items():
                keep_symbols(var, shape, sizes)
            changed |= {v for v, shape in before.items() if v.shape != shape}


def keep_symbols(var: Var, shape: Sequence[Any], alive: Collection[Any]) -> None:
    """Give a value its old symbols where inference invents new ones, as for a sum of two dynamic sizes.

    Args:
        var: the value, after inference.
        shape: its shape before.
        alive: the sizes that the operands have; a symbol among them is not new.
    """
    if len(shape) == len(var.shape):
        sizes = zip(shape, var.shape, strict=True)
        set_type(
            var, types.tensor(var.dtype, [o if is_symbolic(n) and n not in alive else n for o, n in sizes])
        )


def take_sizes(new: Var, old: Var) -> None:
    """Give a new tensor the dynamic sizes of an old one, if both are broadcast from the same sizes.

    Inference invents a symbol for each broadcast of two dynamic sizes.
    """
    if types.is_tensor(new.sym_type) and types.is_tensor(old.sym_type) and new.shape != old.shape:
        sources = [[_sources(var, axis) for axis in range(var.rank)] for var in (new, old)]
        if sources[0] == sources[1]:
            set_type(new, types.tensor(new.dtype, old.shape))


def _sources(var: Var, axis: int) -> frozenset[Any]:
    """Return the sizes that the size of an axis is broadcast from."""
    found, seen, pending = set[Any](), set[tuple[Var, int]](), [(var, axis)]
    while pending:
        place = pending.pop()
        if place not in seen:
            seen.add(place)
            earlier = _earlier_sizes(*place)
            pending += earlier
            found |= set() if earlier else {place[0].shape[place[1]]}
    return frozenset(found)


def _earlier_sizes(var: Var, axis: int) -> list[tuple[Var, int]]:
    """Return an operand's axis of the same dynamic size, or the axes that it is broadcast from; [] for none."""
    size, op = var.shape[axis], var.op
    if op is None or not is_symbolic(size):
        return []
    tensors = [v for _, v in operands(op) if types.is_tensor(v.sym_type)]
    same = [(v, a) for v in tensors for a, length in enumerate(v.shape) if length == size]
    if same or op.op_type not in BROADCASTING:
        return same[:1]
    placed = ((v, axis - var.rank + v.rank) for v in tensors)
    return [(v, a) for v, a in placed if a >= 0 and v.shape[a] != 1]


def substitute(function: Function, old: Var, new: Var, after: Operation | None = None) -> None:
    """Let all readers of a value read another one; no type is inferred again.

    Args:
        function: the function of the values.
        old: the value that is read.
        new: what is read in its place.
        after: only ops after this one are changed; by default the op that makes `old`.
    """
    block = old.op.enclosing_block if old.op is not None else function
    assert block is not None
    mil.replace_uses(
        block, anchor_op=after or old.op, old_var=old, new_var=new, no_check_var_types=True, force_replace=True
    )


def hand_name(old: Var, new: Var) -> None:
    """Give a value the name of the one that it replaces, and its op that of the op if each makes one value."""
    if new.op is not None and len(new.op.outputs) == 1 and old.op is not None:
        new.op.name = old.op.name if len(old.op.outputs) == 1 else old.name
    new.name = old.name


def op_words(ops: Iterable[Operation]) -> tuple[str, ...]:
    """Return ops by type and name, as a `Change` has them; constants are left out."""
    return tuple(f"{op.op_type} {op.name}" for op in ops if op.op_type != "const")


@dataclass
class GraphEdits:
    """One function, and the pass that edits it. Within a `with`, new ops go to the function."""

    step: Pass
    session: Session
    function: Function
    made: dict[Operation, None] = field(default_factory=dict)
    """The ops that were built since the last `record`."""
    removed: list[Operation] = field(default_factory=list)
    """The ops that were removed since then."""
    shown: Mapping[str, Any] = field(default_factory=dict)
    """The result of `compare` since then: fields of a `Change`."""

    def __enter__(self) -> Self:
        self.function.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.function.__exit__(*error)

    def before(self, op: Operation) -> Builder:
        """Return a builder that inserts ops right before another one."""
        builder = Builder(self.session, self.function, self.step.name, op)
        builder.made = self.made
        return builder

    def first(self) -> Builder:
        """Return a builder that inserts ops before all others of the function."""
        return self.before(self.function.operations[0])

    def last(self) -> Builder:
        """Return a builder that appends ops to the function."""
        return self.before(self.function.operations[-1]).behind()

    def after(self, var: Var) -> Builder:
        """Return a builder that inserts ops right after a value is computed; of an input, before all others."""
        return self.first() if var.op is None else self.before(var.op).behind()

    def new_input(self, name: str, shape: Sequence[Any], dtype: Any, state: bool = False) -> Var:
        """Add a tensor or a state as the last input; an input of that name is replaced.

        Args:
            name: of the input.
            shape: its sizes, symbols for dynamic ones.
            dtype: one of `types` (`types.fp16`).
            state: is it kept from call to call?
        """
        return mil.add_input(self.function, name, shape, dtype, state)

    def drop_input(self, name: str) -> None:
        """Remove an input.

        Raises:
            PassError: it is still read.
        """
        try:
            mil.remove_input(self.function, name)
        except ValueError as error:
            raise PassError(f"pass {self.step.name}: the input %{name} cannot go: {error}") from error

    def replace(self, old: Var, new: Var) -> None:
        """Let all readers of a value read another one of the same type, except the ops that it is computed by.

        If the old value is an output, the new one takes its name.

        Raises:
            PassError: the types differ; or the old value is an input and an output, whose name must stay.
        """
        if not alike(old, new, self.step.refines) or dtype_name(old) != dtype_name(new):
            words = f"%{old.name} is {type_text(old)}, its replacement {type_text(new)}"
            raise PassError(f"pass {self.step.name} at {old.name}: {words}")
        output = is_output(old)
        if output and old.op is None:
            raise PassError(f"pass {self.step.name}: %{old.name} is an input and an output, and must stay")
        substitute(self.function, old, new, new.op if self.rests_on(new, old) else None)
        if output:
            self.take_name(old, new)

    def rests_on(self, new: Var, old: Var) -> bool:
        """Is a value computed from another by ops that were built since the last record?"""
        new_ops, pending = set(self.made), [new]
        while pending:
            if (var := pending.pop()) is old:
                return True
            if var.op in new_ops:
                pending += mil.reads(var.op)
        return False

    def replace_output(self, old: Var, *news: Var) -> None:
        """Return other values in the place of an output, under their own names; its op stays."""
        outputs = [(each,) if each is not old else news for each in self.function.outputs]
        self.function.set_outputs([v for each in outputs for v in each])

    def take_name(self, old: Var, new: Var) -> None:
        """Give a value the name of another, which gets a fresh name if its op is still there."""
        hand_name(old, new)
        if old.op is not None and old.op.enclosing_block is not None:
            old.name = self.session.fresh_name(self.function, f"{old.name}_replaced")
            old.op.name = old.name if len(old.op.outputs) == 1 else old.op.name

    def new_output(self, name: str, var: Var) -> None:
        """Return a value to the caller too, under a name; an input, output or constant through an identity."""
        if var.op is None or is_output(var) or var.op.op_type == "const":
            var = self.last().identity(x=var, name=name)
        var.name = name
        self.function.set_outputs([*self.function.outputs, var])

    def remove(self, ops: Sequence[Operation] | None = None) -> list[Operation]:
        """Remove the dead ops among some, all by default, and what only these read; return what was removed."""
        gone = remove_dead(list(self.function.operations) if ops is None else ops)
        self.removed += gone
        return gone

    def remove_unread(self) -> None:
        """Remove all ops that no output depends on, also writes to states."""
        wanted = set(self.function.outputs)
        for op in reversed(list(self.function.operations)):
            if wanted.isdisjoint(op.outputs):
                self.function.remove_ops([op])
                self.removed.append(op)
            else:
                wanted.update(mil.reads(op))

    def reorder(self, ops: Sequence[Operation], moved: Sequence[Operation]) -> None:
        """Put the ops of the function into another order, and record it: the same is computed, bit for bit.

        Args:
            ops: all ops of the function, in the new order.
            moved: those that follow another op than before.

        Raises:
            PassError: the ops are not those of the function, or one comes before what it reads.
        """
        missing, readable = set(self.function.operations), set(self.function.inputs.values())
        for op in ops:
            late = [v.name for v in mil.reads(op) if v not in readable]
            if op not in missing or late:
                raise PassError(f"{op.name} is out of order: {', '.join(late) or 'it stands there twice'}")
            missing.discard(op)
            readable.update(op.outputs)
        if missing:
            raise PassError(f"{len(missing)} ops are left out of the order")
        self.function.operations = type(self.function.operations)(list(ops))  # type: ignore[call-arg]
        proof, names = None, op_words(moved)
        if self.session.prove_sites:
            elements = sum(math.prod(drawn_shape(v)) for v in self.function.outputs)
            proof = SiteCheck(
                max_abs=0.0, max_rel=0.0, values=elements, grade=Grade.BITS, bound=0.0, seed=self.session.seed
            )
        self.session.changes.append(Change(self.step.name, moved[0].name, names, names, proof=proof))

    def compare(self, where: str, *pairs: tuple[Var, Var]) -> None:
        """Compare values with their replacements, while the ops of both exist, for the next `record`.

        Args:
            where: the op, value or input that is edited, for errors.
            pairs: old values, each with its replacement.

        Raises:
            ProofError: they differ by more than the pass promises.
        """
        new_ops = [op for op in self.made if op.enclosing_block is not None]
        rounded = Refusal(ROUNDED) if self.first().rounded() else None
        built = Built(pairs, new_ops, uncompared=rounded)
        self.shown = proof_of(self.step, self.session, built, self.sample, where)

    def record(
        self, where: str, words: str = "", unchecked: str = "", after: Sequence[str] | None = None
    ) -> None:
        """Add a `Change` to the session, for what was done since the last one.

        Args:
            where: the op, value or input that was edited.
            words: for `Change.bindings`.
            unchecked: why numbers cannot be compared.
            after: the names of what is new; by default the ops that were built, without constants.
        """
        new_ops = [op for op in self.made if op.enclosing_block is not None]
        change = Change(
            pass_name=self.step.name,
            where=where,
            before=op_words(self.removed),
            after=op_words(new_ops) if after is None else tuple(after),
            bindings=words,
            unchecked=unchecked,
        )
        self.session.changes.append(replace(change, **self.shown))
        self.made.clear()
        self.removed.clear()
        self.shown = {}

    def sample(self, var: Var, rng: np.random.Generator) -> Array | None:
        """Return None: values that both sides read are drawn as by default."""
        return None
