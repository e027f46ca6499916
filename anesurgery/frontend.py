"""Teach coremltools' torch front end the operations that today's transformers emit and it lacks.

::

    from anesurgery import frontend

    frontend.register()
    ct.convert(torch.jit.trace(model, example), ...)

Nothing is registered on import. Each conversion says which part of torch's operation it covers, and raises for
the rest. (Found with coremltools 9.0, torch 2.13 and transformers 5.23, by trace and by torch.export.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from anesurgery.mil import Var, mb, quiet_host, static_shape, types

Convert = Callable[[Any, Any], None]


def register() -> None:
    """Register the conversions; doing it again changes nothing."""
    with quiet_host():
        from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

    known = _TORCH_OPS_REGISTRY.name_to_func_mapping
    for name, convert in CONVERSIONS.items():
        known.setdefault(name, convert)
    for name, wrap in WRAPPERS.items():
        if not hasattr(known[name], "anesurgery"):
            known[name] = wrap(known[name])


def _inputs(context: Any, node: Any) -> list[Any]:
    from coremltools.converters.mil.frontend.torch.ops import _get_inputs

    found: list[Any] = _get_inputs(context, node)
    return found


def _keyword(context: Any, node: Any, name: str) -> Any:
    from coremltools.converters.mil.frontend.torch.ops import _get_kwinputs

    return (_get_kwinputs(context, node, name) or [None])[0]


def _known(value: Any) -> Any:
    """The plain value of an argument that is known at conversion, or the argument itself."""
    return value.val if isinstance(value, Var) else value


def _argument(context: Any, node: Any, position: int, name: str, default: Any = None) -> Any:
    """An argument of a torch operation, given by position or by name."""
    given = _inputs(context, node)
    if position < len(given) and given[position] is not None:
        return given[position]
    named = _keyword(context, node, name)
    return default if named is None else named


def _promote(a: Any, b: Any) -> tuple[Var, Var]:
    from coremltools.converters.mil.frontend.torch.ops import promote_input_dtypes

    x, y = promote_input_dtypes([a, b])
    return x, y


def diff(context: Any, node: Any) -> None:
    """`torch.diff(x, n=1, dim=-1, prepend=None, append=None)` for n = 1; of booleans it is "not equal"."""
    n = _known(_argument(context, node, 1, "n", 1))
    if n != 1:
        raise NotImplementedError(f"{node.name}: diff of order n={n}; only n=1 is covered")
    x = _inputs(context, node)[0]
    axis = int(_known(_argument(context, node, 2, "dim", -1))) % x.rank
    ends = [_argument(context, node, 3, "prepend"), _argument(context, node, 4, "append")]
    parts = [v for v in (ends[0], x, ends[1]) if v is not None]
    x = mb.concat(values=parts, axis=axis) if len(parts) > 1 else x
    later, earlier = _without(x, axis, first=True), _without(x, axis, first=False)
    if types.is_bool(x.dtype):
        whole = [mb.cast(x=v, dtype="int32") for v in (later, earlier)]
        context.add(mb.not_equal(x=whole[0], y=whole[1], name=node.name))
    else:
        context.add(mb.sub(x=later, y=earlier, name=node.name))


def _without(x: Var, axis: int, *, first: bool) -> Var:
    """What is left without the first, or without the last element of an axis."""
    begin, end = [0] * x.rank, [0] * x.rank
    begin[axis], end[axis] = (1, 0) if first else (0, -1)
    end_mask = [not (i == axis and not first) for i in range(x.rank)]
    return mb.slice_by_index(x=x, begin=begin, end=end, end_mask=end_mask)


def _new_filled(value: float | None) -> Convert:
    """The converter of `x.new_ones(size)` and its siblings; the dtype is that of x unless another is given."""

    def convert(context: Any, node: Any) -> None:
        from coremltools.converters.mil.frontend.torch.ops import NUM_TO_DTYPE_STRING

        given = _inputs(context, node)
        at = 2 if value is not None else 3
        content = float(value) if value is not None else float(_known(given[2]))
        code = _known(_argument(context, node, at, "dtype"))
        dtype = NUM_TO_DTYPE_STRING[int(code)] if code is not None else _dtype(given[0])
        if isinstance(given[1], Var) and given[1].shape == (0,):
            filled = mb.const(val=np.float32(content))
        else:
            filled = mb.fill(shape=_shape(given[1]), value=content)
        context.add(mb.cast(x=filled, dtype=dtype, name=node.name))

    return convert


def _shape(size: Any) -> Any:
    if isinstance(size, (list, tuple)):
        if any(isinstance(d, Var) and d.val is None for d in size):
            return mb.concat(values=list(size), axis=0)
        return np.array([int(_known(d)) for d in size], np.int32)
    return size


def _dtype(x: Var) -> str:
    return str(types.builtin_to_string(x.dtype))


def where_scalar(context: Any, node: Any) -> None:
    """`torch.where(condition, a, b)` where a, b or both are plain numbers."""
    condition, a, b = _inputs(context, node)
    a, b = _promote(a, b)
    if not types.is_bool(condition.dtype):
        condition = mb.cast(x=condition, dtype="bool")
    a, b = (_spread(v, condition) for v in (a, b))
    context.add(mb.select(cond=condition, a=a, b=b, name=node.name))


def _spread(value: Var, condition: Var) -> Var:
    """A constant scalar in the shape of the condition: MIL's `select` takes its shape from its sides."""
    shape = static_shape(condition)
    if value.val is None or np.size(value.val) != 1 or shape is None:
        return value
    return mb.const(val=np.full(shape, np.asarray(value.val).reshape(())))


def alias(context: Any, node: Any) -> None:
    """A value under another name (`aten.alias`, and detaching forms of it)."""
    context.add(mb.identity(x=_inputs(context, node)[0], name=node.name))


def _logical(op_type: str) -> Convert:
    """The converter of `a & b` and its siblings, for booleans."""

    def convert(context: Any, node: Any) -> None:
        given = _inputs(context, node)[:2]
        sides = [v if isinstance(v, Var) else mb.const(val=np.bool_(v)) for v in given]
        if any(not types.is_bool(v.dtype) for v in sides):
            raise NotImplementedError(
                f"{node.name}: {node.kind} of integers; only booleans are covered"
            )
        context.add(getattr(mb, op_type)(x=sides[0], y=sides[1], name=node.name))

    return convert


def _with_grouped_heads(host: Convert) -> Convert:
    """Attention with fewer key than query heads (`enable_gqa=True`): the key and value heads are repeated."""

    def scaled_dot_product_attention(context: Any, node: Any) -> None:
        if bool(_known(_argument(context, node, 7, "enable_gqa", False))):
            query = _inputs(context, node)[0]
            for position in (1, 2):
                _repeat_heads(context, node, position, int(query.shape[-3]))
        host(context, node)

    scaled_dot_product_attention.anesurgery = True  # type: ignore[attr-defined]
    return scaled_dot_product_attention


def _repeat_heads(context: Any, node: Any, position: int, heads: int) -> None:
    x = _inputs(context, node)[position]
    groups = int(x.shape[-3])
    if groups == heads:
        return
    if x.rank != 4 or heads % groups:
        raise NotImplementedError(f"{node.name}: {heads} query heads over keys of shape {x.shape}")
    batch, _, length, width = x.shape
    wide = mb.tile(x=mb.expand_dims(x=x, axes=[2]), reps=[1, 1, heads // groups, 1, 1])
    name = f"{node.name}_heads_{position}"
    context.add(mb.reshape(x=wide, shape=[batch, heads, length, width], name=name))
    inputs = list(node.inputs)
    inputs[position] = name
    node.inputs = inputs


CONVERSIONS: dict[str, Convert] = {
    "diff": diff,
    "new_ones": _new_filled(1.0),
    "new_zeros": _new_filled(0.0),
    "new_full": _new_filled(None),
    "where.scalarother": where_scalar,
    "where.scalarself": where_scalar,
    "where.scalar": where_scalar,
    "alias": alias,
    "__and__": _logical("logical_and"),
    **dict.fromkeys(("or", "__or__", "bitwise_or"), _logical("logical_or")),
    **dict.fromkeys(("xor", "__xor__", "bitwise_xor"), _logical("logical_xor")),
}
"""Torch operation, as the front end names it -> converter; one that coremltools brings itself is left alone."""

WRAPPERS: dict[str, Callable[[Convert], Convert]] = {
    "scaled_dot_product_attention": _with_grouped_heads,
}
"""Operations that coremltools converts in part: what is done before its own converter runs."""
