"""Convert operations that coremltools lacks as torch itself decomposes them into others.

`register` adds `decomposed` as the converter of each such operation. torch keeps a table of decompositions, and
composite operations are made of others anyway. The graph is made for the shapes and plain arguments of the
call, so shapes must be static.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch

from anesurgery.frontend.arguments import Convert, inputs_of, keyword, known_value
from anesurgery.mil import Array, Var, is_symbolic, mb, np_dtype, types

DTYPES = {"b": torch.bool, "i": torch.int64, "u": torch.int64}
PLAIN: dict[str, Any] = {
    "IntType": int,
    "FloatType": float,
    "BoolType": bool,
    "NumberType": lambda v: v,
    "StringType": str,
}
"""Type of a plain argument in torch's schemas -> Python type."""


def decomposable(converters: dict[str, Any]) -> dict[str, Convert]:
    """Return a converter for each operation that is unknown and that torch decomposes.

    Gradients, and operations that draw random numbers, are left out.
    """
    kinds = {
        kind
        for op in (*_operations_in_table(), *_composite_operations())
        if not _is_left_out(op)
        for kind in _node_kinds(op)
    }
    return dict.fromkeys((k for k in sorted(kinds) if k not in converters and not k.endswith("_")), decomposed)


def _operations_in_table() -> Iterator[Any]:
    """Yield the operations in torch's table of decompositions."""
    from torch._decomp import decomposition_table

    return (op for op in decomposition_table if isinstance(op, torch._ops.OpOverload))


def _composite_operations() -> Iterator[Any]:
    """Yield the operations that are implemented by others."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    for name in (name.removeprefix("aten::") for name in registered if name.startswith("aten::")):
        packet, _, overload = name.partition(".")
        if (op := getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)) is not None:
            yield op


def _is_left_out(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags or "backward" in op.name()


@cache
def _node_kinds(op: Any) -> tuple[str, str]:
    """Return the names of an operation in the front end: by export with its overload, by trace without."""
    from coremltools.converters.mil.frontend.torch.utils import sanitize_op_kind

    name = op.name()
    return sanitize_op_kind(name), sanitize_op_kind(name.partition(".")[0])


def decomposed(context: Any, node: Any) -> None:
    """Convert the graph into which torch decomposes the operation."""
    op, values = _overload_and_arguments(context, node)
    tensors = [v for v in _flatten(values.values()) if isinstance(v, Var)]
    for v in tensors:
        if types.is_complex(v.dtype) or any(map(is_symbolic, v.shape)):
            what = "complex numbers" if types.is_complex(v.dtype) else f"a dynamic shape {v.shape}"
            raise NotImplementedError(f"{node.name}: {node.kind} of {what} (%{v.name})")
    if tensors and all(v.val is not None for v in tensors):
        results = _constant_results(op, values, tensors)
    else:
        results = _convert_graph(context, node, _decomposed_graph(op, values, tensors), tensors)
    if len(results) == len(node.outputs):
        for name, value in zip(node.outputs, results, strict=True):
            context.add(mb.identity(x=value, name=name))
    else:  # torch.export selects the results of an operation by nodes of their own
        context.add(tuple(results), torch_name=node.name)


def _overload_and_arguments(context: Any, node: Any) -> tuple[Any, dict[str, Any]]:
    """Return the overload that takes these arguments, and the arguments by name."""
    packet = getattr(torch.ops.aten, node.kind.partition(".")[0].removesuffix("_"))
    positional = inputs_of(context, node)
    by_name = {name: keyword(context, node, name) for name in node.kwinputs or ()}
    for numbers_are_tensors in (False, True):
        for op in (getattr(packet, name) for name in packet.overloads()):
            wanted = {a.name: a for a in op._schema.arguments}
            needed = {name for name, a in wanted.items() if not a.has_default_value()}
            values = dict(zip(wanted, positional, strict=False)) | by_name
            if len(positional) > len(wanted) or not needed <= values.keys() <= wanted.keys():
                continue
            try:
                return op, {k: _as_argument(v, wanted[k], numbers_are_tensors) for k, v in values.items()}
            except (TypeError, ValueError):
                continue
    raise NotImplementedError(f"{node.name}: no form of {node.kind} takes these {len(positional)} arguments")


def _as_argument(value: Any, argument: Any, numbers_are_tensors: bool) -> Any:
    """Return an argument as a schema wants it; TypeError where it does not fit."""
    declared = str(argument.real_type)
    if any(name in declared for name in ("Device", "Layout")):
        return None
    if "ScalarType" in declared and value is not None:
        from coremltools.converters.mil.frontend.torch.utils import NUM_TO_TORCH_DTYPE

        return NUM_TO_TORCH_DTYPE[int(known_value(value))]
    return _as_torch_type(value, argument.type, numbers_are_tensors)


def _as_torch_type(value: Any, wanted: Any, numbers_are_tensors: bool) -> Any:
    """Return a value as a type of torch; TypeError where it does not fit."""
    kind, plain = wanted.kind(), known_value(value)
    if kind == "OptionalType":
        return None if value is None else _as_torch_type(value, wanted.getElementType(), numbers_are_tensors)
    if kind == "ListType":
        parts = value if isinstance(value, (list, tuple)) else np.ravel(plain).tolist()
        return [_as_torch_type(v, wanted.getElementType(), True) for v in parts]
    if kind == "TensorType" and isinstance(value, Var) and (plain is None or value.rank or numbers_are_tensors):
        return value
    if kind not in PLAIN or plain is None or np.ndim(plain):
        raise TypeError(f"{value} for {wanted}")
    return PLAIN[kind](np.asarray(plain).item())


def _flatten(values: Any) -> Iterator[Any]:
    for value in values:
        yield from _flatten(value) if isinstance(value, list) else (value,)


def _decomposed_graph(op: Any, values: dict[str, Any], tensors: list[Var]) -> Any:
    """Return the graph of the decomposed operation, for tensors of these shapes."""
    from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY
    from torch._decomp import decomposition_table
    from torch.fx.experimental.proxy_tensor import make_fx

    converters = _TORCH_OPS_REGISTRY.name_to_func_mapping
    lacking = {
        other: how
        for other, how in decomposition_table.items()
        if isinstance(other, torch._ops.OpOverload)
        and converters.get(_node_kinds(other)[0], decomposed) is decomposed
    }

    def called(*fakes: torch.Tensor) -> Any:
        return op(**_with_tensors(values, fakes))

    examples = [torch.zeros(tuple(v.shape), dtype=_torch_dtype(v)) for v in tensors]
    return make_fx(called, decomposition_table=lacking, tracing_mode="fake")(*examples).graph


def _with_tensors(values: dict[str, Any], tensors: Iterable[Any]) -> dict[str, Any]:
    """Return the arguments with tensors in the place of variables."""
    left = iter(tensors)

    def filled(value: Any) -> Any:
        if isinstance(value, list):
            return [filled(v) for v in value]
        return next(left) if isinstance(value, Var) else value

    return {name: filled(value) for name, value in values.items()}


def _constant_results(op: Any, values: dict[str, Any], tensors: list[Var]) -> list[Var]:
    """Return the results for constant operands, which torch computes."""
    constants = [torch.from_numpy(np.asarray(v.val)).to(_torch_dtype(v)) for v in tensors]
    computed = op(**_with_tensors(values, constants))
    results = computed if isinstance(computed, (list, tuple)) else [computed]
    return [mb.const(val=_as_mil_dtype(r.numpy())) for r in results]


def _torch_dtype(v: Var) -> torch.dtype:
    dtype = np_dtype(v)
    return DTYPES.get(dtype.kind) or torch.from_numpy(np.zeros(0, dtype)).dtype


def _convert_graph(context: Any, node: Any, graph: Any, tensors: list[Var]) -> list[Var]:
    """Convert a graph of torch as torch.export's are, and return its results."""
    from coremltools.converters.mil.frontend.torch.ops import convert_single_node
    from coremltools.converters.mil.frontend.torch.utils import TorchFrontend

    before, context.frontend = context.frontend, TorchFrontend.TORCHEXPORT
    places = [n for n in graph.nodes if n.op == "placeholder"]
    _replace_in_place_writes(node, graph)
    for inner in graph.nodes:
        inner.name = f"{node.name}_{inner.name}"
    context.push(([n.name for n in places], tensors))
    try:
        for inner in graph.nodes:
            if inner.op == "get_attr":
                value = np.asarray(getattr(graph.owning_module, inner.target))
                context.add(mb.const(val=_as_mil_dtype(value), name=inner.name))
            elif inner.op == "call_function":
                convert_single_node(context, _front_end_node(node, inner))
            elif inner.op == "output":
                results = inner.args[0]
                return [context[r.name] for r in (results if isinstance(results, (list, tuple)) else [results])]
    finally:
        context.pop()
        context.frontend = before
    raise AssertionError("a graph without output")


def _replace_in_place_writes(node: Any, graph: Any) -> None:
    """Replace each write in place by the plain operation; what it overwrites must not be read again."""
    place = {inner: i for i, inner in enumerate(graph.nodes)}
    for inner in graph.nodes:
        name = inner.target.overloadpacket.__name__ if isinstance(inner.target, torch._ops.OpOverload) else ""
        if not name.endswith("_") or name.startswith("__"):
            continue
        for base in _bases(inner.args[0]):
            if any(place[user] > place[inner] for user in base.users):
                raise NotImplementedError(f"{node.name}: {node.kind} writes in place ({name}) and reads on")
        if name == "copy_":
            inner.target, inner.args = torch.ops.aten.expand_as.default, (inner.args[1], inner.args[0])
        else:
            inner.target = getattr(getattr(torch.ops.aten, name[:-1]), inner.target._overloadname)


def _bases(inner: Any) -> Iterator[Any]:
    """Yield a tensor, and then each tensor that it is a view of."""
    yield inner
    target = inner.target
    views = isinstance(target, torch._ops.OpOverload) and any(r.alias_info for r in target._schema.returns)
    if views or target is operator.getitem:
        yield from _bases(inner.args[0])


def _front_end_node(node: Any, inner: Any) -> Any:
    """Return a node of torch as the front end holds it."""
    from coremltools.converters.mil.frontend.torch.internal_graph import InternalTorchIRNode

    same = node.kind.partition(".")[0]
    if isinstance(inner.target, torch._ops.OpOverload) and _node_kinds(inner.target)[1] == same:
        raise NotImplementedError(f"{node.name}: torch does not decompose this form of {node.kind}")
    try:
        return InternalTorchIRNode.from_exir_node(inner)
    except NotImplementedError as error:
        raise NotImplementedError(f"{node.name}: {node.kind} needs {inner.target}: {error}") from None


def _as_mil_dtype(value: Array) -> Array:
    """Cast an array to a dtype that MIL has."""
    return value.astype({"i": np.int32, "f": np.float32}.get(value.dtype.kind, value.dtype))
