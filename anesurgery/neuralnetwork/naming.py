"""Names of a program made from a network: those of the blobs, made unique and valid in MIL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count
from typing import cast

from anesurgery.mil import Block, Function, Operation, Var, operands, producer, quiet_host

with quiet_host():
    from coremltools.converters.mil.mil.passes.defs.preprocess import NameSanitizer


def identifier(name: str) -> str:
    """A name as MIL takes it: letters, digits and underscores, no digit first, no word of the language."""
    return str(NameSanitizer().sanitize_name(name))


def identifiers(names: Iterable[str]) -> list[str]:
    """Names as MIL takes them, each once."""
    names, taken = list(names), _Names([n for n in names if identifier(n) == n])
    return [n if identifier(n) == n else taken.fresh(n) for n in names]


class _Names:
    """Hands out each name once."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self.constants: set[Var] = set()
        """Those that have their name."""

    def fresh(self, wish: str) -> str:
        """The wish, or the wish with a number appended."""
        name = identifier(wish)
        name = next(n for i in count() if (n := f"{name}_{i}" if i else name) not in self._taken)
        self._taken.add(name)
        return name


def rename(function: Function, labels: Mapping[Var, str], fixed: Mapping[Var, str]) -> None:
    """Name all ops and values of a function after the blobs that they make.

    Args:
        function: what was built.
        labels: the blob that a value is; the ops in front of it that make no blob are named after it.
        fixed: values that keep a name, as outputs do.
    """
    names = _Names([*function.inputs, *fixed.values()])
    _rename(function, labels, fixed, names, "value")


def _rename(
    block: Block, labels: Mapping[Var, str], fixed: Mapping[Var, str], names: _Names, last: str
) -> None:
    pending: list[Operation] = []
    for op in block.operations:
        if op.op_type == "const":
            continue
        pending.append(op)
        label = next((w for v in op.outputs if (w := fixed.get(v) or labels.get(v))), None)
        if label is not None:
            _name_group(pending, label, labels, fixed, names)
            pending, last = [], label
    _name_group(pending, last, labels, fixed, names)


def _name_group(
    ops: list[Operation], label: str, labels: Mapping[Var, str], fixed: Mapping[Var, str], names: _Names
) -> None:
    for op in ops:
        for nested in op.blocks:
            _rename(nested, labels, fixed, names, label)
        wish = f"{label}_{op.op_type}"
        for i, var in enumerate(op.outputs):
            other = wish if len(op.outputs) == 1 else f"{wish}_{i}"
            var.name = fixed.get(var) or names.fresh(labels.get(var, other))
        op.name = op.outputs[0].name if op.outputs else names.fresh(wish)
        for parameter, var in operands(op):
            if producer(var, "const") and var not in names.constants:
                names.constants.add(var)
                var.name = cast("Operation", var.op).name = names.fresh(
                    labels.get(var, f"{op.name}_{parameter}")
                )
