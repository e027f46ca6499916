"""What passes that find their own places do to a function: ops and ports in or out, types inferred anew.

A `Rewrite` returns what replaces what, and its driver does the rest. Other passes edit through here, so that
for them too the engine owns where new ops stand, names, scopes, types, dead ops, the comparison, the record::

    with an.GraphEdits(self, session, function) as edits:
        clipped = edits.after(value).clip(x=value, alpha=-9.0, beta=9.0)
        edits.compare(value.name, (value, clipped))
        edits.replace(value, clipped)
        edits.record(value.name)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from anesurgery import mil
from anesurgery.checking.grades import Grade, SiteCheck
from anesurgery.checking.lengths import drawn_shape
from anesurgery.errors import PassError, Refusal
from anesurgery.mil import (
    Array,
    Block,
    Function,
    Operation,
    Var,
    dtype_name,
    is_output,
    is_symbolic,
    np_dtype,
    operands,
    types,
)
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.driver import Built, alike, proof_of, remove_dead
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.session import ROUNDED, Change, Session
from anesurgery.semantics.reading import shape_in_words
from anesurgery.text import type_text

if TYPE_CHECKING:
    from typing_extensions import Self


def widen_choices(function: Function) -> None:
    """Choices between two scalars are as wide as what decides, which coremltools types as scalars."""
    for op in function.operations:
        widen_choice(op)


def widen_choice(op: Operation) -> None:
    """The same for one op; not for one that is kept, which coremltools would not read back."""
    if _chooses_numbers(op) and not op.outputs[0].rank:
        set_type(op.outputs[0], types.tensor(op.outputs[0].dtype, op.cond.shape))


def _chooses_numbers(op: Operation) -> bool:
    """Is it a choice between two scalars by what is none?"""
    return bool(op.op_type == "select" and op.cond.rank and not op.a.rank and not op.b.rank)


def set_type(var: Var, sym_type: Any) -> None:
    """The type of a value, which coremltools sets once."""
    setattr(var, "_sym_type", sym_type)  # noqa: B010 - the stub has no private members


def infer(op: Operation) -> None:
    """The types and values of the results, from those of the operands.

    Raises:
        PassError: the shapes do not fit.
    """
    if _chooses_numbers(op) and all(v.val is not None for v in (op.cond, op.a, op.b)):  # coremltools fails
        widen_choice(op)
        chosen = np.where(op.cond.val, op.a.val, op.b.val).astype(np_dtype(op.outputs[0]))
        setattr(op.outputs[0], "_sym_val", types.numpy_val_to_builtin_val(chosen)[0])  # noqa: B010
        return
    held = [np_dtype(v) if types.is_tensor(v.sym_type) else None for v in op.outputs]
    for block in op.blocks:
        _infer_block(op, block)
    try:
        with _ends_kept(op):
            op.type_value_inference(overwrite_output=True)
    except Exception as error:
        words = f"the shapes do not fit {op.op_type} {op.name}: {error}"
        raise PassError(words) from error
    for var, kind in zip(op.outputs, held, strict=True):
        if kind is not None and types.is_tensor(var.sym_type) and np_dtype(var) != kind:
            raise PassError(f"%{var.name} would become {dtype_name(var)}")


@contextmanager
def _ends_kept(op: Operation) -> Iterator[None]:
    """Keep the ends of a slice: coremltools overwrites negative ones with what they mean at one length."""
    names = ("begin", "end") if op.op_type == "slice_by_index" else ()
    arrays = [op.inputs[n].val for n in names if op.inputs[n].val is not None]
    held = [(array, array.copy()) for array in arrays if array.flags.writeable]
    try:
        yield
    finally:
        for array, before in held:
            array[...] = before


def _infer_block(op: Operation, block: Block) -> None:
    """The same for what stands in a block of an op, from the values that it begins with.

    Raises:
        PassError: the shapes do not fit, or a value has another one after a round.
    """
    begins = op.loop_vars if block.inputs else ()
    for var, value in zip(block.inputs, begins, strict=True):
        set_type(var, value.sym_type)
    with block:
        for inner in block.operations:
            if inner.op_type != "const":
                infer(inner)
    after = block.outputs if len(block.outputs) == len(begins) and block is op.blocks[-1] else begins
    for var, value in zip(after, begins, strict=True):
        if types.is_tensor(value.sym_type) and tuple(var.shape) != tuple(value.shape):
            shapes = (
                f"{shape_in_words(value.shape)} before a round of {op.name} and {shape_in_words(var.shape)}"
            )
            raise PassError(f"%{var.name} is {shapes} after it")


def infer_readers(function: Function, values: Iterable[Var]) -> None:
    """Infer all that is computed from some values, as far as shapes change; not what stands in blocks.

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
                keep_sizes(var, shape, sizes)
            changed |= {v for v, shape in before.items() if v.shape != shape}


def keep_sizes(var: Var, shape: Sequence[Any], alive: Collection[Any]) -> None:
    """A size that inference makes up anew keeps the symbol it had: of two dynamic sizes that are added, say."""
    if len(shape) == len(var.shape):
        kept = [o if is_symbolic(n) and n not in alive else n for o, n in zip(shape, var.shape, strict=True)]
        set_type(var, types.tensor(var.dtype, kept))


def substitute(function: Function, old: Var, new: Var, after: Operation | None = None) -> None:
    """Let all that reads a value read another; no type is inferred again.

    Args:
        function: the one of the values.
        old: the value that is read.
        new: what is read in its place.
        after: the op after which; by default the one that makes `old`.
    """
    block = old.op.enclosing_block if old.op is not None else function
    assert block is not None
    mil.replace_uses(
        block, anchor_op=after or old.op, old_var=old, new_var=new, no_check_var_types=True, force_replace=True
    )


def hand_name(old: Var, new: Var) -> None:
    """Give a value the name of the one that it stands for; its op that of the op, if each makes one value."""
    if new.op is not None and len(new.op.outputs) == 1 and old.op is not None:
        new.op.name = old.op.name if len(old.op.outputs) == 1 else old.name
    new.name = old.name


def op_words(ops: Iterable[Operation]) -> tuple[str, ...]:
    """Ops by type and name, as a `Change` has them; constants are left out."""
    return tuple(f"{op.op_type} {op.name}" for op in ops if op.op_type != "const")


@dataclass
class GraphEdits:
    """One function, and the pass that edits it; to be used in a `with`, in which new ops go to the function."""

    step: Pass
    session: Session
    function: Function
    made: list[Operation] = field(default_factory=list)
    """The ops that came since the last record."""
    removed: list[Operation] = field(default_factory=list)
    """The ops that went since."""
    shown: Mapping[str, Any] = field(default_factory=dict)
    """What was seen of the numbers since: fields of a `Change`."""

    def __enter__(self) -> Self:
        self.function.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.function.__exit__(*error)

    def before(self, op: Operation) -> Builder:
        """What makes ops right before another."""
        builder = Builder(self.session, self.function, self.step.name, op)
        builder.made = self.made
        return builder

    def first(self) -> Builder:
        """What makes ops before all others of the function."""
        return self.before(self.function.operations[0])

    def last(self) -> Builder:
        """What makes ops after all others of the function."""
        return self.before(self.function.operations[-1]).behind()

    def after(self, var: Var) -> Builder:
        """What makes ops right after the one that makes a value; of an input, before all others."""
        return self.first() if var.op is None else self.before(var.op).behind()

    def new_input(self, name: str, shape: Sequence[Any], dtype: Any, state: bool = False) -> Var:
        """A tensor or a state that the caller gives, after the others; one with its name goes.

        Args:
            name: as the caller gives it.
            shape: its sizes, symbols for dynamic ones.
            dtype: one of `types` (`types.fp16`).
            state: is it kept from call to call?
        """
        return mil.add_input(self.function, name, shape, dtype, state)

    def drop_input(self, name: str) -> None:
        """Take an input away.

        Raises:
            PassError: it is still read.
        """
        try:
            mil.remove_input(self.function, name)
        except ValueError as error:
            raise PassError(f"pass {self.step.name}: the input %{name} cannot go: {error}") from error

    def replace(self, old: Var, new: Var) -> None:
        """Let all that reads a value read another of the same type, but what that is made of.

        As an output it takes the name of the old one.

        Raises:
            PassError: the types differ; or it is an input that is an output too, whose name must stay.
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
        """Is a value made of another, by ops that came since the last record?"""
        new_ops, left = set(self.made), [new]
        while left:
            if (var := left.pop()) is old:
                return True
            if var.op in new_ops:
                left += mil.reads(var.op)
        return False

    def replace_output(self, old: Var, *news: Var) -> None:
        """Give other values in the place of an output, under their own names; its op stays."""
        outputs = [(each,) if each is not old else news for each in self.function.outputs]
        self.function.set_outputs([v for each in outputs for v in each])

    def take_name(self, old: Var, new: Var) -> None:
        """Give a value the name of another, which gets a fresh one where it stays."""
        hand_name(old, new)
        if old.op is not None and old.op.enclosing_block is not None:
            old.name = self.session.fresh_name(self.function, f"{old.name}_replaced")
            old.op.name = old.name if len(old.op.outputs) == 1 else old.op.name

    def new_output(self, name: str, var: Var) -> None:
        """Give a value to the caller too, under a name; of an input, an output or a constant an identity."""
        if var.op is None or is_output(var) or var.op.op_type == "const":
            var = self.last().identity(x=var, name=name)
        var.name = name
        self.function.set_outputs([*self.function.outputs, var])

    def remove(self, ops: Sequence[Operation] | None = None) -> list[Operation]:
        """Remove those of some ops that nobody reads, and what only they read; of all ops by default."""
        gone = remove_dead(list(self.function.operations) if ops is None else ops)
        self.removed += gone
        return gone

    def remove_unread(self) -> None:
        """Remove all that no output depends on, writes to states too."""
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
            ops: all of them, in the new order.
            moved: those that stand behind another op than before.

        Raises:
            PassError: they are others, or one comes before what it reads.
        """
        left, readable = set(self.function.operations), set(self.function.inputs.values())
        for op in ops:
            late = [v.name for v in mil.reads(op) if v not in readable]
            if op not in left or late:
                raise PassError(f"{op.name} is out of order: {', '.join(late) or 'it stands there twice'}")
            left.discard(op)
            readable.update(op.outputs)
        if left:
            raise PassError(f"{len(left)} ops are left out of the order")
        self.function.operations = type(self.function.operations)(list(ops))  # type: ignore[call-arg]
        proof, names = None, op_words(moved)
        if self.session.prove_sites:
            elements = sum(math.prod(drawn_shape(v)) for v in self.function.outputs)
            proof = SiteCheck(0.0, 0.0, elements, Grade.BITS, 0.0, self.session.seed)
        self.session.changes.append(Change(self.step.name, moved[0].name, names, names, proof=proof))

    def compare(self, where: str, *pairs: tuple[Var, Var]) -> None:
        """Compare values with those that replace them, while the ops of both are there, for the next record.

        Args:
            where: the op, value or input at which it is done.
            pairs: old values, each with the one that replaces it.

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
        """Write down what was done since the last record.

        Args:
            where: the op, value or input at which it was done.
            words: what else the record says.
            unchecked: why numbers cannot be compared.
            after: what came, in words; by default the ops that were made, without constants.
        """
        new_ops = [op for op in self.made if op.enclosing_block is not None]
        came = op_words(new_ops) if after is None else tuple(after)
        change = Change(self.step.name, where, op_words(self.removed), came, words, None, unchecked)
        self.session.changes.append(replace(change, **self.shown))
        self.made.clear()
        self.removed.clear()
        self.shown = {}

    def sample(self, var: Var, rng: np.random.Generator) -> Array | None:
        """Values for a value that both sides read: the default."""
        return None
