"""Dynamic shapes become static, and what is known then is computed once.

Before::

    main(%ids: ?x4xfp16) {
      %sizes: 2xint32 = shape(x=%ids)
      %rows: int32 = gather(x=%sizes, indices=0)
      %form: 3xint32 = concat(values=(%rows, 2, 2), axis=0)
      %y: ?x2x2xfp16 = reshape(x=%ids, shape=%form)
      return %y
    }

After::

    main(%ids: 1x4xfp16) {
      %y: 1x2x2xfp16 = reshape(x=%ids, shape=[1, 2, 2])
      return %y
    }

`shapes` gives the shapes of inputs: `FixShapes(shapes={"ids": (1, 128)})`, on the command line `--set
'shapes={"ids": [1, 128]}'`. A dynamic axis of which nothing is said takes the size that was given for the
same axis of another input, else 1 where it is the first one (the batch), else `length`. Types are inferred
anew from the inputs on, and `fold_constants` computes the arithmetic of shapes. The inputs and outputs that
change are declared.

Refuses when no shape is dynamic, for images, and when control flow or lists hang on the shape.

Why it helps: the arithmetic of shapes is int32, which stays on the CPU (measured, M4, macOS 27.0.1, by
751K/Apple-Neural-Engine-Microarchitecture-Study-M6); passes that need lengths (`unroll_recurrent`, masks,
lookups) apply to static shapes only. What it gains in time was not measured.

Grade: none: the interface changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from anesurgery.errors import PassError, Refusal, UnknownName
from anesurgery.facts.reading import shape_in_words
from anesurgery.files.interface_change import InterfaceChange
from anesurgery.mil import (
    Function,
    Operation,
    Program,
    Var,
    any_symbolic,
    ct,
    dtype_name,
    is_symbolic,
    mb,
    np_dtype,
    types,
    walk_ops,
)
from anesurgery.ops import LISTS
from anesurgery.passes.fold_constants import FoldConstants
from anesurgery.placement.target import Target
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.session import Change, Session

LENGTH = 128
"""What a dynamic size becomes where nothing else is known."""
UNCHECKED = "the interface changes; compare whole models at the new shapes"


@dataclass(frozen=True)
class FixShapes(Pass):
    """Inputs of dynamic shape get a static one."""

    name: ClassVar[str] = "fix_shapes"
    precedes: ClassVar[tuple[str, ...]] = ("*",)
    shapes: Mapping[str, Sequence[int]] | None = None
    """Input -> its shape; of inputs that are left out, each axis by the rule above."""
    length: int = LENGTH
    """Of dynamic axes of which nothing else is known, but the first."""

    @classmethod
    def variants(cls, target: Target) -> tuple[Pass, ...]:
        """None: the caller must choose the shapes."""
        return ()

    def requires(self, program: Program) -> Refusal | None:
        """There is something to fix, and only inputs that exist are given a shape.

        Raises:
            UnknownName: an input that does not exist.
        """
        inputs = {name: var for f in program.functions.values() for name, var in f.inputs.items()}
        for name in self.shapes or {}:
            if name not in inputs:
                raise UnknownName("input", name, inputs)
        dynamic = any(any_symbolic(var.shape or ()) for var in inputs.values())
        return None if dynamic else Refusal("no input has a dynamic shape")

    def run(self, program: Program, session: Session) -> None:
        """Fix the inputs of each function, infer all types anew, and fold."""
        edits = len(session.changes)
        for function in program.functions.values():
            refusal = _barred(function, session)
            if refusal is None:
                refusal = self.tried(function, session)
            if refusal is not None:
                session.refusals.append((self.name, refusal))
        if len(session.changes) > edits:
            FoldConstants().run(program, session)

    def tried(self, function: Function, session: Session) -> Refusal | None:
        """Fix the shapes; where none were given and the likely ones do not fit, leave the function as it was.

        Raises:
            PassError: a shape that was given does not fit.
        """
        values = [*function.inputs.values(), *(v for op in walk_ops(function) for v in op.outputs)]
        held = [(v, v.sym_type, getattr(v, "_sym_val", None)) for v in values]
        changes, contract = len(session.changes), len(session.contract)
        try:
            with function:  # some ops build others to infer their shapes
                self.fix(function, session)
        except PassError as error:
            if self.shapes or self.length != LENGTH:
                raise
            for var, kind, value in held:
                _set_type(var, kind)
                setattr(var, "_sym_val", value)  # noqa: B010
            del session.changes[changes:], session.contract[contract:]
            return Refusal(f"{error}; give the shapes (shapes=, length=)")
        return None

    def fix(self, function: Function, session: Session) -> None:
        """Give the inputs of a function their shapes.

        Raises:
            PassError: a shape does not fit the input, another input or an op.
        """
        before = {v: shape_in_words(v.shape) for v in (*function.inputs.values(), *function.outputs)}
        sizes = self.sizes(function)
        for var in function.inputs.values():
            if any_symbolic(var.shape or ()):
                fixed = [sizes[d] if is_symbolic(d) else int(d) for d in var.shape]
                _set_type(var, types.tensor(var.dtype, fixed))
                words = f"give {var.name} as {shape_in_words(fixed)}, which was {before[var]}"
                session.contract.append(InterfaceChange(words, (var.name,)))
                session.changes.append(Change(self.name, var.name, (), (), words, None, UNCHECKED))
        for op in function.operations:
            if op.op_type != "const":
                _infer(op)
        for var in function.outputs:
            if (now := shape_in_words(var.shape)) != before[var]:
                session.contract.append(
                    InterfaceChange(f"{var.name} is {now}, it was {before[var]}", (var.name,))
                )

    def sizes(self, function: Function) -> dict[Any, int]:
        """What each dynamic size of the inputs becomes.

        Raises:
            PassError: a shape that is given does not fit.
        """
        found: dict[Any, int] = {}
        for name, var in function.inputs.items():
            given = (self.shapes or {}).get(name)
            if given is None:
                continue
            if len(given) != len(var.shape):
                raise PassError(f"{self.name}: {name} has {len(var.shape)} axes, the shape given {len(given)}")
            for size, wanted in zip(var.shape, given, strict=True):
                known = found.setdefault(size, int(wanted)) if is_symbolic(size) else int(size)
                if known != wanted or wanted < 1:
                    words = f"{shape_in_words(var.shape)}, not {shape_in_words(given)}"
                    raise PassError(f"{self.name}: the shape of {name} is {words}")
        given_sizes = [(a, int(n)) for given in (self.shapes or {}).values() for a, n in enumerate(given)]
        likely = {0: 1, **dict(reversed(given_sizes))}
        for var in function.inputs.values():
            for axis, size in enumerate(var.shape or ()):
                if is_symbolic(size):
                    found.setdefault(size, likely.get(axis, self.length))
        return found


def _barred(function: Function, session: Session) -> Refusal | None:
    """Why the shapes of a function cannot be fixed."""
    for op in function.operations:
        if op.blocks or op.op_type in LISTS:
            return Refusal(f"{op.op_type} hangs on the shapes; unroll it first", op)
    dynamic = [name for name, var in function.inputs.items() if any_symbolic(var.shape or ())]
    images = [name for name in dynamic if name in session.images]
    return Refusal(f"%{images[0]} is an image of dynamic size; fix it when converting") if images else None


def _set_type(var: Var, sym_type: Any) -> None:
    """The type of a value, which coremltools sets once."""
    setattr(var, "_sym_type", sym_type)  # noqa: B010 - the stub has no private members


def _infer(op: Operation) -> None:
    """The types and values of the results, from those of the operands.

    Raises:
        PassError: the shapes do not fit.
    """
    held = [np_dtype(v) if types.is_tensor(v.sym_type) else None for v in op.outputs]
    try:
        op.type_value_inference(overwrite_output=True)
    except Exception as error:
        words = f"the shapes do not fit {op.op_type} {op.name}: {error}"
        raise PassError(f"fix_shapes: {words}") from error
    for var, kind in zip(op.outputs, held, strict=True):
        if kind is not None and types.is_tensor(var.sym_type) and np_dtype(var) != kind:
            raise PassError(f"fix_shapes: %{var.name} would become {dtype_name(var)}")


def example() -> Program:
    """A reshape to a form that is counted out."""
    from coremltools.converters.mil.mil import get_new_symbol

    @mb.program(
        input_specs=[mb.TensorSpec((get_new_symbol(), 4), dtype=types.fp16)], opset_version=ct.target.iOS17
    )
    def program(ids: Var) -> Var:
        sizes = mb.shape(x=ids, name="sizes")
        rows = mb.gather(x=sizes, indices=np.int32(0), axis=0, name="rows")
        form = mb.concat(values=(rows, np.int32(2), np.int32(2)), axis=0, name="form")
        return mb.reshape(x=ids, shape=form, name="y")

    return program
