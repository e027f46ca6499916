"""Make dynamic shapes static, and compute once what depends on them only.

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

`shapes` gives the shapes of inputs: `FixShapes(shapes={"ids": (1, 128)})`, on the command line
`--set 'shapes={"ids": [1, 128]}'`. A dynamic axis that is not given takes the size given for the same axis of
another input; otherwise the first axis (the batch) becomes 1, and any other axis becomes `length`. Types are
inferred again from the inputs on, and `fold_constants` computes the arithmetic of shapes. The changed inputs
and outputs are declared.

`sizes` makes several functions from the one function of the model; they share every weight. They are named by
length (`sizes=[64, 128]` makes `length_64` and `length_128`) or by you
(`sizes={"short": {"ids": [1, 64]}, "long": {"ids": [1, 512]}}`). The first is the default.

Refuses when no shape is dynamic, for images, when control flow or lists depend on the shape, and several sizes
below iOS 18 or for a model that already has several functions.

Why it helps: the arithmetic of shapes is int32, which stays on the CPU (measured, M4, macOS 27.0.1, by
751K/Apple-Neural-Engine-Microarchitecture-Study-M6); passes that need lengths (`unroll_recurrent`, masks,
lookups) apply to static shapes only. What the pass gains in time was not measured.

Grade: none: the interface changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery import interpret
from anesurgery.authoring import Pass, Program, Refusal, Session, Var, mb
from anesurgery.errors import InterfaceError, PassError, UnknownName
from anesurgery.files.copying import copy_program
from anesurgery.passes.fold_constants import FoldConstants
from anesurgery.semantics import inference

LENGTH = 128
"""What a dynamic size becomes where nothing else is known. A choice: a short text."""

InputShapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class FixShapes(Pass):
    """Inputs of dynamic shape get a static one, or one in each of several functions."""

    name = "fix_shapes"
    asked_for = True
    precedes = ("*",)
    shapes: InputShapes | None = None
    """Input -> its shape; of inputs that are left out, each axis by the rule above."""
    length: int = LENGTH
    """The length of dynamic axes of which nothing else is known, but the first."""
    sizes: Mapping[str, InputShapes] | Sequence[int] | None = None
    """Several functions: their lengths, or function -> shapes of inputs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sizes is not None and (self.shapes or not self.sizes):
            raise PassError(f"{self.name}: give shapes (one function) or sizes (several), at least one")
        is_list = isinstance(self.sizes, Mapping | list | tuple | None)
        if not is_list or not all(map(_is_size, self.sizes or ())):
            raise PassError(
                f"{self.name}: sizes={self.sizes!r}; give lengths, as [64, 128], or the shapes of the inputs "
                'for each function, as {"short": {"ids": [1, 64]}}'
            )

    @property
    def wanted(self) -> dict[str, inference.FixedShapes]:
        """The shapes of each function to make, by its name; "" stands for the function as it is named."""
        if self.sizes is None:
            return {"": inference.FixedShapes(self.shapes or {}, self.length)}
        if isinstance(self.sizes, Mapping):
            return {name: inference.FixedShapes(lengths, self.length) for name, lengths in self.sizes.items()}
        return {f"length_{n}": inference.FixedShapes({}, n) for n in self.sizes}

    def requires(self, program: Program) -> Refusal | None:
        """Refuse programs without a dynamic input, or of which several functions cannot be made.

        Raises:
            UnknownName: an input that does not exist.
        """
        inputs = {name for f in program.functions.values() for name in f.inputs}
        for name in (name for shapes in self.wanted.values() for name in shapes.given):
            if name not in inputs:
                raise UnknownName("input", name, inputs)
        if not any(inference.dynamic_inputs(f) for f in program.functions.values()):
            return Refusal("no input has a dynamic shape")
        if self.sizes is None:
            return None
        if len(program.functions) > 1:
            return Refusal(f"it has the functions {', '.join(program.functions)}; several sizes need one")
        if any(f.opset_version < an.ct.target.iOS18 for f in program.functions.values()):
            return Refusal(
                "several functions came with iOS 18; convert with minimum_deployment_target=iOS18, or give "
                "one shape"
            )
        return None

    def run(self, program: Program, session: Session) -> None:
        """Fix the inputs of each function, infer all types anew, and fold."""
        edits = len(session.changes)
        for name, function in list(program.functions.items()):
            refusal = inference.barred(function, session.images)
            if refusal is None and self.sizes is not None:
                self.several(program, name, session)
            elif refusal is None:
                refusal = self.fixed(function, session)
            if refusal is not None:
                session.refuse(self.name, refusal)
        if len(session.changes) > edits:
            FoldConstants().run(program, session)

    def fixed(self, function: an.Function, session: Session) -> Refusal | None:
        """Fix the shapes; where none were given and the likely ones do not fit, leave the function as it was.

        Raises:
            PassError: a shape that was given does not fit.
        """
        before = {v: an.shape_in_words(v.shape) for v in (*function.inputs.values(), *function.outputs)}
        dynamic = inference.dynamic_inputs(function)
        try:
            self.wanted[""].fix(function)
        except PassError as error:
            if self.shapes or self.length != LENGTH:
                raise
            return Refusal(f"{error}; give the shapes (shapes=, length=)")
        for var in dynamic.values():
            words = f"give {var.name} as {an.shape_in_words(var.shape)}, which was {before[var]}"
            session.declare(self.name, var.name, an.InterfaceChange(words, (var.name,)), (), ())
        for var in function.outputs:
            if (now := an.shape_in_words(var.shape)) != before[var]:
                words = f"{var.name} is {now}, it was {before[var]}"
                session.contract.append(an.InterfaceChange(words, (var.name,)))
        return None

    def several(self, program: Program, name: str, session: Session) -> None:
        """Put a function for each size in place of the one; they share the arrays of their constants.

        Raises:
            PassError: a shape does not fit.
        """
        functions: dict[str, an.Function] = {}
        for word, shapes in self.wanted.items():
            functions[word] = copy_program(program).functions[name]
            shapes.fix(functions[word])
        old = program.functions.pop(name)
        for word, function in functions.items():
            program.add_function(word, function)
        forms = {w: _form(f) for w, f in functions.items()}
        words = f"call {' or '.join(f'{w} ({form})' for w, form in forms.items())}; {name} took any shape"
        names = (name, *functions, *old.inputs, *(v.name for v in old.outputs))
        session.declare(self.name, name, an.InterfaceChange(words, names, call=_call), (), list(functions))


def _is_size(size: object) -> bool:
    """Is it the name of a function with given shapes, or a positive length?"""
    return isinstance(size, str) or (type(size) is int and size > 0)


def _form(function: an.Function) -> str:
    """Return the shapes of the inputs in words."""
    return ", ".join(f"{n} {an.shape_in_words(v.shape)}" for n, v in function.inputs.items())


def _call(model: Any, values: an.Values, precision: str) -> an.Values:
    """Call the function whose inputs have the shapes of the values.

    Raises:
        InterfaceError: there is none.
    """
    shapes = {name: np.shape(value) for name, value in values.items()}
    for word, function in model.functions.items():
        now = {n: tuple(v.shape) for n, v in function.inputs.items() if not an.types.is_state(v.sym_type)}
        if all(shape == shapes.get(n) for n, shape in now.items()):
            return interpret.run(model, values, precision=precision, function=word)
    forms = "; ".join(map(_form, model.functions.values()))
    raise InterfaceError(f"no function takes inputs of these shapes; give one of: {forms}")


def example() -> Program:
    """A reshape to a form that is counted out."""
    from coremltools.converters.mil.mil import get_new_symbol

    @mb.program(
        input_specs=[mb.TensorSpec((get_new_symbol(), 4), dtype=an.types.fp16)],
        opset_version=an.ct.target.iOS17,
    )
    def program(ids: Var) -> Var:
        sizes = mb.shape(x=ids, name="sizes")
        rows = mb.gather(x=sizes, indices=np.int32(0), axis=0, name="rows")
        form = mb.concat(values=(rows, np.int32(2), np.int32(2)), axis=0, name="form")
        return mb.reshape(x=ids, shape=form, name="y")

    return program
