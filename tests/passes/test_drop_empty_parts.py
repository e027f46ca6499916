"""Parts without elements go, of splits and of concatenations, unless something needs them."""

from __future__ import annotations

from pass_cases import ignores, refuses, rewrites, table

from anesurgery.mil import Program, Var, ct, mb
from anesurgery.passes.drop_empty_parts import DropEmptyParts


def detector(sizes: list[int], reads: str = "") -> Program:
    """The parts of a detector's predictions; `reads` says what else reads the last part."""

    @mb.program(input_specs=[mb.TensorSpec((1, 9, 6))], opset_version=ct.target.iOS17)
    def program(x: Var) -> tuple[Var, ...]:
        parts = mb.split(x=x, split_sizes=sizes, axis=-1)
        kept = tuple(mb.tanh(x=part) for part in parts[:-1])
        if reads == "concat":
            return (mb.concat(values=[parts[-1], *kept], axis=-1, name="y"),)
        if reads == "empty concat":
            return (*kept, mb.concat(values=[parts[-1], parts[-1]], axis=-1, name="y"))
        return (*kept, mb.relu(x=parts[-1])) if reads else kept

    return program


def beside_a_slice() -> Program:
    @mb.program(input_specs=[mb.TensorSpec((3, 4))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        none = mb.slice_by_index(x=x, begin=[0, 0], end=[3, 0])
        return mb.relu(x=mb.concat(values=[none, x], axis=1), name="y")

    return program


test_cases, test_surroundings = table(
    DropEmptyParts(),
    rewrites(detector, [4, 2, 0]),
    rewrites(detector, [2, 4, 0], "concat"),
    rewrites(detector, [6, 0]),
    rewrites(beside_a_slice),
    ignores(detector, [4, 2], "concat"),
    refuses("which is empty, is needed", detector, [4, 2, 0], "relu"),
    refuses("which is empty, is needed", detector, [4, 2, 0], "empty concat"),
)
