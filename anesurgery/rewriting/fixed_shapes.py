"""Give the dynamic inputs of a function static shapes, and infer all other types anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anesurgery.errors import PassError, Refusal
from anesurgery.mil import Function, Var, any_symbolic, is_symbolic, types, walk_ops
from anesurgery.rewriting.graph_edits import infer, set_type
from anesurgery.semantics.reading import shape_in_words

PASS = "fix_shapes"
"""The pass that errors name."""


@dataclass(frozen=True)
class Shapes:
    """The static shapes that inputs shall have."""

    given: Mapping[str, Sequence[int]]
    """Input -> its shape."""
    length: int
    """The length of a dynamic axis if no given shape tells it; the first axis, the batch, then has 1."""

    def sizes(self, function: Function) -> dict[Any, int]:
        """Return the length of each dynamic size of the inputs, by its symbol.

        Raises:
            PassError: a shape that is given does not fit.
        """
        lengths: dict[Any, int] = {}
        for name, var in function.inputs.items():
            shape = self.given.get(name)
            if shape is None:
                continue
            if len(shape) != len(var.shape):
                raise PassError(f"{PASS}: {name} has {len(var.shape)} axes, the shape given {len(shape)}")
            for size, wanted in zip(var.shape, shape, strict=True):
                length = lengths.setdefault(size, int(wanted)) if is_symbolic(size) else int(size)
                if length != wanted or wanted < 1:
                    words = f"{shape_in_words(var.shape)}, not {shape_in_words(shape)}"
                    raise PassError(f"{PASS}: the shape of {name} is {words}")
        given_sizes = [(axis, int(size)) for shape in self.given.values() for axis, size in enumerate(shape)]
        likely = {0: 1, **dict(reversed(given_sizes))}  # of several inputs, the first one counts
        for var in function.inputs.values():
            for axis, size in enumerate(var.shape or ()):
                if is_symbolic(size):
                    lengths.setdefault(size, likely.get(axis, self.length))
        return lengths

    def fix(self, function: Function) -> None:
        """Give the inputs of a function their shapes; where one does not fit, the function stays as it was.

        Raises:
            PassError: a shape does not fit the input, another input or an op.
        """
        values = [*function.inputs.values(), *(v for op in walk_ops(function) for v in op.outputs)]
        values += [v for op in walk_ops(function) for block in op.blocks for v in block.inputs]
        before = [(v, v.sym_type, getattr(v, "_sym_val", None)) for v in values]
        sizes = self.sizes(function)
        try:
            with function:  # some ops build others to infer their shapes
                for var in dynamic_inputs(function):
                    set_type(var, types.tensor(var.dtype, [sizes.get(d, d) for d in var.shape]))
                for op in function.operations:
                    if op.op_type != "const":
                        infer(op)
        except PassError as error:
            for var, sym_type, value in before:
                set_type(var, sym_type)
                setattr(var, "_sym_val", value)  # noqa: B010
            raise PassError(f"{PASS}: {error}") from error


def dynamic_inputs(function: Function) -> list[Var]:
    """Return the inputs of dynamic shape."""
    return [var for var in function.inputs.values() if any_symbolic(var.shape or ())]


def barred(function: Function, images: frozenset[str]) -> Refusal | None:
    """Return why the shapes of a function cannot be fixed."""
    pictures = [var.name for var in dynamic_inputs(function) if var.name in images]
    return Refusal(f"%{pictures[0]} is an image of dynamic size; fix it when converting") if pictures else None
