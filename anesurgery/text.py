"""Print a program in one canonical form: the same program always gives the same text.

::

    main(%x: 2x3) {
      %y: 2x3xfp16 = mul(x=%x, y=-1)
      return %y
    }

fp32 is not written; every other element type is. Constants of up to eight elements stand inline, larger ones
as ``const<2x4xfp16>``, with their name in front when more than one op reads them. Optional inputs that
hold the op's default are left out. A dynamic dimension is ``?``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anesurgery.mil import Block, Operation, Program, Var, dtype_name, is_symbolic, types

INLINE = 8
"""Largest number of elements of a constant that is written out."""


def to_text(program: Program | Block | Operation) -> str:
    """The canonical text of a program, function or op (no trailing newline)."""
    if isinstance(program, Program):
        return "\n\n".join(_block(f, name, "") for name, f in program.functions.items())
    if isinstance(program, Operation):
        return "\n".join(_operation(program, ""))
    return _block(program, program.name, "")


def type_text(var: Var) -> str:
    """Shape and element type of a value: ``1x16x64xfp16``; ``fp32`` for a scalar."""
    if types.is_list(var.sym_type):
        return "list"
    if types.is_state(var.sym_type):
        wrapped = var.sym_type.wrapped_type()
        shape, dtype = wrapped.get_shape(), types.builtin_to_string(wrapped.get_primitive())
        return f"state<{'x'.join([*map(str, shape), dtype])}>"
    dtype = dtype_name(var)
    dims = ["?" if is_symbolic(d) else str(d) for d in var.shape or ()]
    return "x".join(dims if dtype == "fp32" and dims else [*dims, dtype])


def _block(block: Block, name: str, indent: str) -> str:
    inputs = list(block.inputs.values()) if isinstance(block.inputs, dict) else list(block.inputs)
    args = ", ".join(f"%{v.name}: {type_text(v)}" for v in inputs)
    lines = [f"{indent}{name}({args}) {{"]
    for op in block.operations:
        if op.op_type != "const":
            lines += _operation(op, indent + "  ")
    results = ", ".join(operand_text(v) for v in block.outputs)
    return "\n".join([*lines, f"{indent}  return {results}", f"{indent}}}"])


def _operation(op: Operation, indent: str) -> list[str]:
    left = ", ".join(f"%{v.name}: {type_text(v)}" for v in op.outputs)
    defaults = dict(op.default_inputs().items())
    arguments = [
        f"{name}={_argument(value)}"
        for name, value in op.inputs.items()
        if value is not None and not name.startswith("_") and not _is_default(value, defaults.get(name))
    ]
    lines = [f"{indent}{left}{' = ' if left else ''}{op.op_type}({', '.join(arguments)})"]
    for nested in op.blocks:
        lines.append(_block(nested, "block", indent + "  "))
    return lines


def _argument(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"({', '.join(operand_text(v) for v in value)})"
    return operand_text(value)


def operand_text(var: Var) -> str:
    """How an op names one of its operands: a value by name, a constant by its content."""
    if var.op is None or var.op.op_type != "const":
        return f"%{var.name}"
    val = var.val
    if isinstance(val, (str, bool, np.bool_)):
        return f'"{val}"' if isinstance(val, str) else str(bool(val))
    if not isinstance(val, (np.ndarray, np.generic)):
        return repr(val)
    if val.size <= INLINE:
        return _small(val)
    shared = f"%{var.name}:" if len(set(var.child_ops)) > 1 else ""
    return f"{shared}const<{type_text(var)}>"


def _small(val: Any) -> str:
    if val.ndim == 0:
        item = val.item()
        return f"{item:.6g}" if isinstance(item, float) else str(item)
    return "[" + ", ".join(_small(v) for v in val) + "]"


def _is_default(value: Any, default: Any) -> bool:
    """Does an optional input hold the value that the op would take anyway?"""
    if default is None or not isinstance(value, Var):
        return False
    val = value.val
    if val is None or not (value.op is not None and value.op.op_type == "const"):
        return False
    if isinstance(val, str) or isinstance(default, str):
        return bool(val == default)
    val, expected = np.asarray(val), np.asarray(default)
    return val.size <= INLINE and val.shape == expected.shape and bool(np.all(val == expected))
