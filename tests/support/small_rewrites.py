"""Small rewrites and programs, for the tests of the driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from anesurgery.mil import Program, ct, mb, types, walk_ops
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.pattern import Match, OpPattern, Ops, var
from anesurgery.rewriting.rewrite import Rewrite

IOS17 = ct.target.iOS17


def kinds(program: Program) -> list[str]:
    return [op.op_type for op in walk_ops(program) if op.op_type != "const"]


def outputs(program: Program) -> list[str]:
    return [v.name for v in program.functions["main"].outputs]


def one_input(body: Any, shape: tuple[Any, ...] = (2, 3), dtype: Any = types.fp32) -> Program:
    specs = [mb.TensorSpec(shape, dtype=dtype)]
    made: Program = mb.program(input_specs=specs, opset_version=IOS17)(lambda x: body(x))
    return made


def small_rewrite(
    name: str, pattern: Callable[[Ops], OpPattern], rewrite: Callable[[Builder, Match], Any], **own: Any
) -> type[Rewrite]:
    """A pass without options, of its pattern and what replaces a match; `own` are attributes of the class."""
    methods = {"pattern": lambda self, op: pattern(op), "rewrite": lambda self, mb, m: rewrite(mb, m)}
    made = type("".join(map(str.capitalize, name.split("_"))), (Rewrite,), {"name": name, **methods, **own})
    return dataclass(frozen=True)(made)


@dataclass(frozen=True)
class DoubleRelu(Rewrite):
    """`relu(relu(x))` is `relu(x)`."""

    name: ClassVar[str] = "double_relu"

    def pattern(self, op: Ops) -> OpPattern:
        return op.relu(x=op.relu(x=var("x"), as_="inner"))

    def rewrite(self, mb: Builder, m: Match) -> Any:
        return mb.relu(x=m.x)


def target() -> Program:
    return one_input(lambda x: mb.relu(x=mb.exp(x=x, name="e"), name="y"))
