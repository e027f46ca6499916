"""Two computations of the same inputs, side by side in one program, checked as a site."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from coremltools.converters.mil.mil.block import curr_block

from anesurgery.checking.grades import PLAIN, Promise, SiteCheck
from anesurgery.checking.site import check_site
from anesurgery.errors import Refusal
from anesurgery.mil import Program, Var, ct, mb, types

Body = Callable[..., Any]
F32 = (types.fp32, (2, 4))


def checked(
    old: Body,
    new: Body,
    *inputs: tuple[Any, Sequence[Any]],
    promise: Promise = PLAIN,
    seed: int = 0,
    opset: Any = ct.target.iOS17,
) -> SiteCheck | Refusal:
    """The result of checking `new` against `old`; inputs are pairs (dtype, shape): by default fp32 (2, 4)."""
    _, olds, news, made = side_by_side(old, new, *inputs, opset=opset)
    pairs = list(zip(olds, news, strict=True))
    return check_site(pairs, made, lambda v, rng: None, seed, promise=promise)


def side_by_side(
    old: Body, new: Body, *inputs: tuple[Any, Sequence[Any]], opset: Any = ct.target.iOS17
) -> tuple[Program, list[Var], list[Var], list[Any]]:
    """The program, the old and the new values, and the new ops."""
    specs = [mb.TensorSpec(tuple(shape), dtype=dtype) for dtype, shape in inputs or [F32]]
    count = 0

    def body(values: Sequence[Var]) -> list[Var]:
        nonlocal count
        olds = _tuple(old(*values))
        count = len(curr_block().operations)
        news = _tuple(new(*values))
        sizes.append(len(olds))
        return [*olds, *news]

    sizes: list[int] = []
    makers = {1: lambda a: body([a]), 2: lambda a, b: body([a, b]), 3: lambda a, b, c: body([a, b, c])}
    program: Program = mb.program(input_specs=specs, opset_version=opset)(makers[len(specs)])
    function = program.functions["main"]
    ops = list(function.operations)
    outputs = list(function.outputs)
    return program, outputs[: sizes[0]], outputs[sizes[0] :], ops[count:]


def _tuple(value: Any) -> list[Var]:
    return list(value) if isinstance(value, (tuple, list)) else [value]
