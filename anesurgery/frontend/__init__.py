"""Teach coremltools' torch front end operations of today's transformers that it lacks or converts wrongly.

::

    from anesurgery import frontend

    frontend.register()
    ct.convert(torch.jit.trace(model, example), ...)

Nothing is registered on import. Each converter says which part of torch's operation it covers, and raises for
the rest. Operations without a converter are converted as torch itself decomposes them, for static shapes. Where
a newer coremltools has a converter of its own, that is kept, and one registered later with `register_torch_op`
replaces ours. Errors name the operation and its module. (Written for coremltools 9.0, torch 2.13 and
transformers 5.23, by trace and by torch.export.)

Limits: torch itself refuses a cache or a `ModelOutput` as the output of a trace (return the logits). bfloat16
in a model is computed as float32, since MIL has no bfloat16. For rows that a mask hides entirely, coremltools'
fused attention gives a mean where torch gives zeros.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import cache, partial, reduce
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from anesurgery import registry
from anesurgery.frontend import complex_numbers, parts
from anesurgery.frontend.arguments import (
    Convert,
    add_results,
    dtype_of,
    inputs_of,
    keyword,
    known_value,
    wrapper,
)
from anesurgery.frontend.complex_numbers import is_complex
from anesurgery.frontend.conversions import ALIASES, CONVERSIONS, WRAPPERS
from anesurgery.frontend.experts import register_experts
from anesurgery.frontend.written_views import with_scattered_views
from anesurgery.mil import Array, Var, is_symbolic, mb, np_dtype, quiet_host, types
from anesurgery.ops import names

DTYPES = {"b": torch.bool, "i": torch.int64, "u": torch.int64}
PLAIN: dict[str, Any] = {
    "IntType": int,
    "FloatType": float,
    "BoolType": bool,
    "NumberType": lambda v: v,
    "StringType": str,
}
"""Type of a plain argument in torch's schemas -> Python type."""
INSTEAD = {
    "mode": "of whole numbers from 0 below n, `(x[..., None] == torch.arange(n)).sum(-2).argmax(-1)` gives it",
    **dict.fromkeys(("lgamma", "digamma"), "compute it in the app, or read it from a table of whole numbers"),
    **dict.fromkeys(
        names(
            "_linalg_eigh _linalg_svd linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_matrix_exp "
            "linalg_qr linalg_svd linalg_svdvals svd special_erfcx special_log_ndtr special_ndtri special_i0 "
            "special_i0e special_i1 special_i1e"
        ),
        "compute it in the app",
    ),
    **dict.fromkeys(
        ("linalg_lstsq", "linalg_pinv", "pinverse"),
        "of full rank with 2 to 4 columns, `torch.linalg.solve(a.mT @ a, a.mT @ b)` gives a solution",
    ),
}
"""Operation without a converter -> what to do."""


def _decomposable(converters: dict[str, Any]) -> dict[str, Convert]:
    """Return a converter for each operation that is unknown and that torch decomposes, or computes.

    Gradients, and operations that draw random numbers, are left out.
    """
    kinds = {
        kind
        for op in (*_operations_in_table(), *_all_operations())
        if torch.Tag.nondeterministic_seeded not in op.tags and "backward" not in op.name()
        for kind in _node_kinds(op)
    } | INSTEAD.keys()
    return dict.fromkeys((k for k in sorted(kinds) if k not in converters and not k.endswith("_")), _decomposed)


def _operations_in_table() -> Iterator[Any]:
    """Yield the operations in torch's table of decompositions."""
    from torch._decomp import decomposition_table

    return (op for op in decomposition_table if isinstance(op, torch._ops.OpOverload))


def _all_operations() -> Iterator[Any]:
    """Yield the operations that others implement, and all public ones: torch computes their constants."""
    composite = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    public = (n for n in torch._C._dispatch_get_all_op_names() if not n.startswith("aten::_"))
    for name in (n.removeprefix("aten::") for n in (*composite, *public) if n.startswith("aten::")):
        packet, _, overload = name.partition(".")
        if (op := getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)) is not None:
            yield op


@cache
def _node_kinds(op: Any) -> tuple[str, str]:
    """Return the names of an operation in the front end: by export with its overload, by trace without."""
    from coremltools.converters.mil.frontend.torch.utils import sanitize_op_kind

    name = op.name()
    return sanitize_op_kind(name), sanitize_op_kind(name.partition(".")[0])


def _decomposed(context: Any, node: Any) -> None:
    """Convert the graph into which torch decomposes the operation."""
    op, values = _overload_and_arguments(context, node)
    tensors = [v for v in _flatten(values.values()) if isinstance(v, Var)]
    for v in tensors:
        if types.is_complex(v.dtype) or any(map(is_symbolic, v.shape)):
            what = "complex numbers" if types.is_complex(v.dtype) else f"a dynamic shape {v.shape}"
            raise NotImplementedError(f"{node.name}: {node.kind} of {what} (%{v.name})")
    if all(v.val is not None for v in tensors):
        results = _constant_results(op, values, tensors)
    elif words := INSTEAD.get(node.kind.partition(".")[0]):
        raise NotImplementedError(f"{node.name}: Core ML has no {node.kind} of computed numbers: {words}")
    else:
        results = _convert_graph(context, node, _decomposed_graph(op, values, tensors), tensors)
    add_results(context, node, results)


@wrapper
def _with_projections(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of an LSTM: MIL has no projection of the state (`proj_size`); torch's steps have."""
    states = inputs_of(context, node)[1]  # no list for packed sequences
    projected = isinstance(states, (list, tuple)) and states[0].shape[-1] != states[1].shape[-1]
    (_decomposed if projected else host)(context, node)


def _overload_and_arguments(context: Any, node: Any) -> tuple[Any, dict[str, Any]]:
    """Return the overload that takes these arguments, and the arguments by name."""
    kind, _, overload = node.kind.partition(".")
    packet = getattr(torch.ops.aten, kind.removesuffix("_"))
    overloads = [overload] if overload in packet.overloads() else packet.overloads()  # export names it
    positional = inputs_of(context, node)
    by_name = {name: keyword(context, node, name) for name in node.kwinputs or ()}
    for numbers_are_tensors in (False, True):
        for op in (getattr(packet, name) for name in overloads):
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
        and converters.get(_node_kinds(other)[0], _decomposed) is _decomposed
    }

    def called(*fakes: torch.Tensor) -> Any:
        return op(**_with_tensors(values, fakes))

    examples = [torch.zeros(tuple(v.shape), dtype=_torch_dtype(v)) for v in tensors]
    try:
        return make_fx(called, decomposition_table=lacking, tracing_mode="fake")(*examples).graph
    except DataDependentOutputException:
        raise NotImplementedError(f"{op} decides by numbers that are computed") from None


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
            packet = getattr(torch.ops.aten, name[:-1])
            inner.target = getattr(packet, inner.target._overloadname, getattr(packet, packet.overloads()[0]))


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


__all__ = ["ALIASES", "CONVERSIONS", "WRAPPERS", "register", "register_experts"]


def register() -> None:
    """Register the conversions; a second call changes nothing."""
    with quiet_host():
        from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

    converters = _TORCH_OPS_REGISTRY.name_to_func_mapping
    every = CONVERSIONS | converters
    ours = CONVERSIONS | {name: every[same] for name, same in ALIASES.items() if same in every}
    _add(converters, {name: convert for name, convert in ours.items() if name not in converters})
    for name, wrap in WRAPPERS.items():
        if name in converters and not converters[name].__module__.startswith(__name__):
            host = wrap(converters[name])
            converters[name] = _with_projections(host) if name == "lstm" else host
    added = [name for name in ALIASES.keys() - WRAPPERS if name in _ADDED.keys() & converters]
    kept = [name for name in added if converters[name] is _ADDED[name] and ALIASES[name] in converters]
    _add(converters, {name: converters[ALIASES[name]] for name in kept})  # with what was wrapped since
    _add(converters, _decomposable(converters))
    _let_later_ones_replace(_TORCH_OPS_REGISTRY)
    for place in REPLACED:
        _replace(*place)
    _name_dtypes_that_mil_lacks()


_ADDED: dict[str, Any] = {}
"""Operation that coremltools lacked -> the converter that was added."""


def _add(known: dict[str, Any], converters: dict[str, Any]) -> None:
    _ADDED.update(converters)
    known.update(converters)


def _let_later_ones_replace(registry: Any) -> None:
    """Let a converter that is registered later replace one that was added here."""
    host = registry.register_func
    if host.__module__ == __name__:
        return

    def register_func(func: Any = None, torch_alias: Any = None, override: bool = False) -> None:
        table = registry.name_to_func_mapping
        names = [name for name in (func.__name__, *(torch_alias or ())) if name in _ADDED]
        moved = {name: table.pop(name) for name in names if table.get(name) is _ADDED[name]}
        try:
            host(func, torch_alias, override)
        except Exception:
            table |= {name: convert for name, convert in moved.items() if name not in table}
            raise

    registry.register_func = register_func


def _replace(module: str, path: str, wrap: Callable[[Any], Any]) -> None:
    """Wrap a function of coremltools, unless a module of ours did; a static or class method stays one."""
    *owners, name = path.split(".")
    owner = reduce(getattr, owners, import_module(f"coremltools.converters.mil.{module}"))
    host, kind = getattr(owner, name), type(inspect.getattr_static(owner, name))
    if inspect.unwrap(host, stop=lambda f: f.__module__ == wrap.__module__).__module__ != wrap.__module__:
        wrapped = wrap(host)
        wrapped.__wrapped__ = host
        setattr(owner, name, kind(wrapped) if kind in (staticmethod, classmethod) else wrapped)


def _name_dtypes_that_mil_lacks() -> None:
    """Let bfloat16 mean float32, and complex128 complex64."""
    from coremltools.converters.mil.frontend.torch import utils

    complex64, number = 9, 15  # torch's numbers of dtypes; the latter is bfloat16
    for kind in (torch.complex64, torch.complex128):
        utils.TORCH_DTYPE_TO_NUM.setdefault(kind, complex64)
    utils.TORCH_DTYPE_TO_NUM.setdefault(torch.bfloat16, utils.TORCH_DTYPE_TO_NUM[torch.float32])
    utils.NUM_TO_TORCH_DTYPE.setdefault(number, torch.float32)
    utils.NUM_TO_NUMPY_DTYPE.setdefault(number, np.float32)
    utils.NUM_TO_DTYPE_STRING.setdefault(number, "fp32")


# coremltools keeps the known ones of a few floats with symbols for the others, and a slice of these is taken
# for integers: a pose matrix of zeros, a rotation and a 1 is not converted.


def _known_whole(host: Any) -> Any:
    """Wrap what is known of a concat or stack: of floats all numbers are, or none."""

    def value_inference(op: Any) -> Any:
        value = host(op)
        partly = types.is_float(op.values[0].dtype) and np.asarray(value).dtype == object
        return None if partly else value

    return value_inference


WRITES = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.true_divide,
    "max": np.maximum,
    "min": np.minimum,
}
"""Mode of a scatter -> what it does with what is there."""


def _scatter_by_mode(host: Any) -> Any:
    """Wrap what is known of a scatter of constants, which overwrites in the host's, whatever the mode is."""

    def value_inference(op: Any) -> Any:
        value, write = host(op), WRITES.get(op.mode.val)
        if write is None:
            return value
        if op.data.val.dtype.kind != "f" and write is np.true_divide:
            return None
        whole, at, axis = np.copy(op.data.val), op.indices.val, op.axis.val % op.data.rank
        places = list(np.indices(at.shape, sparse=True))
        places[axis] = at
        write.at(whole, tuple(places), op.updates.val)
        return whole

    return value_inference


def _whole_and_interleaved(host: Any) -> Any:
    """Wrap what is known of a concat, of which the host leaves `interleave` out."""
    whole = _known_whole(host)

    def value_inference(op: Any) -> Any:
        value = whole(op)
        if value is None or not op.interleave.val:
            return value
        axis = op.axis.val % value.ndim
        return np.stack(np.split(value, len(op.values), axis), axis + 1).reshape(value.shape)

    return value_inference


# coremltools folds constants in their own dtype: in fp16 a norm overflows, and a running count ends at 2048.
# `thresholded_relu` writes into its operand, which may be the memory of a torch module.


def _from_wide_copies(host: Any) -> Any:
    """Wrap how constants are folded: from copies, and in fp32 where they are fp16."""

    def value_inference(op: Any) -> Any:
        known = {
            v: v._sym_val for v in op.get_flattened_inputs() if v.val is not None and types.is_float(v.dtype)
        }
        is_half = any(np_dtype(v) == np.float16 for v in known)
        try:
            for v, stored in known.items():
                v._sym_val = SimpleNamespace(val=np.array(stored.val, np.float32))
            value = host(op)
        finally:
            for v, stored in known.items():
                v._sym_val = stored
        with np.errstate(over="ignore"):
            return value.astype(np.float16) if is_half else value

    return value_inference


def _softplus_in_range(host: Any) -> Any:
    """Wrap what is known of a softplus: its exponential may overflow, or be lost beside 1."""

    def value_inference(op: Any) -> Any:
        if op.x.val is None:
            return host(op)
        a: Any = 1.0
        b: Any = 1.0
        x = np.float64(op.x.val)
        if op.op_type == "softplus_parametric":
            a, b = (np.reshape(v.val, (-1, *[1] * (x.ndim - 2))) for v in (op.alpha, op.beta))
        with np.errstate(over="ignore"):
            return (a * np.logaddexp(0, x * b)).astype(np_dtype(op.x))

    return value_inference


def _with_hidden_rows(_: Any) -> Any:
    """Replace the log of a sum of exponentials: it is -inf where all terms are, and NaN in the host's."""
    return lambda op: partial(np.logaddexp.reduce, dtype=np.float64)


def _band_of_infinities(host: Any) -> Any:
    """Wrap what is known of a band: the host's is a product with zeros, NaN for what is not finite."""

    def value_inference(op: Any) -> Any:
        if op.x.val is None:
            return host(op)
        lower, upper = op.lower.val, op.upper.val
        x = op.x.val if upper < 0 else np.tril(op.x.val, upper)
        return x if lower < 0 else np.triu(x, -lower)

    return value_inference


def _stable_order(host: Any) -> Any:
    """Wrap what is known of an order: the first of equals first; from the largest on NaN leads, as in torch."""

    def value_inference(op: Any) -> Any:
        found, x, axis = host(op), op.x.val, op.axis.val
        if op.ascending.val:
            order = np.argsort(x, axis, kind="stable")
        else:
            order = x.shape[axis] - 1 - np.flip(np.argsort(np.flip(x, axis), axis, kind="stable"), axis)
        if op.op_type == "argsort":
            return order
        order = np.take(order, range(found[0].shape[axis]), axis)
        return np.take_along_axis(x, order, axis), order

    return value_inference


def _squeezed_to_scalar(host: Any) -> Any:
    """Wrap what is known of a squeeze: a number where no axis is left, of which the host keeps some."""

    def value_inference(op: Any) -> Any:
        value = host(op)
        axes = range(op.x.rank) if op.axes is None else op.axes.val
        return value if value is None or len(axes) < op.x.rank or value.size > 1 else np.ravel(value)[0]

    return value_inference


def _element_of_any_dtype(host: Any) -> Any:
    """Wrap what is known of a slice: one element may be a fp16 number or a boolean, which the host refuses."""

    def value_inference(op: Any) -> Any:
        squeezed = known_value(op.squeeze_mask)
        if op.x.val is None or op.begin.val is None or squeezed is None or not np.all(squeezed):
            return host(op)
        from_start = np.resize(False if op.begin_mask is None else op.begin_mask.val, op.x.rank)
        return op.x.val[tuple(np.where(from_start, 0, op.begin.val))]

    return value_inference


NARROWER = {torch.bfloat16: torch.float32, torch.complex128: torch.complex64}
"""Dtype of a constant that MIL lacks -> the one that is used instead."""


def _with_floats(host: Any) -> Any:
    """Wrap the reader of constants, to narrow dtypes that MIL lacks."""

    def constant(*positional: Any, **named: Any) -> Any:
        return host(*(_narrowed(value) for value in positional), **named)

    return constant


def _narrowed(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype == np.complex128:
        return value.astype(np.complex64)
    return value.to(NARROWER[value.dtype]) if getattr(value, "dtype", None) in NARROWER else value


# Errors of a conversion say where in the model they arose: coremltools says that in its log only.

COMPLEX = (
    "{kind} is not converted for complex numbers: write it by their real and imaginary parts (x.real, x.imag; "
    "torch.complex puts them together)"
)


@wrapper
def _naming_module(host: Convert, context: Any, node: Any) -> None:
    """Wrap the conversion of a node: every error names its operation and module."""
    try:
        host(context, node)
    except Exception as error:
        is_ours = hasattr(error, "converting") or str(error).startswith(f"{node.name}: ")
        if not is_ours and _reads_complex(context, node):
            error = NotImplementedError(COMPLEX.format(kind=node.kind))
        said, *rest = error.args or (f"{type(error).__name__} without a reason",)
        if isinstance(said, str) and not hasattr(error, "converting"):
            error.args = (f"{said} (converting {node.kind}{_module_words(node)})", *rest)
        error.converting = node.kind  # type: ignore[attr-defined]
        raise error


def _reads_complex(context: Any, node: Any) -> bool:
    try:
        return any(map(is_complex, inputs_of(context, node)))
    except Exception:  # the operands are what could not be converted
        return False


def _module_words(node: Any) -> str:
    """Return " in " and the module of an operation, as a trace or an export records it."""
    if node.model_hierarchy:
        *modules, _ = node.get_scope_info()[0]
        return f" in {'.'.join(modules)}" if modules else ""
    entered = list((node.meta or {}).get("nn_module_stack", {}).values())
    return f" in {entered[-1][0]}" if entered and entered[-1][0] else ""


# A scale and a shift that broadcast one channel to many are no batch norm.
#
# coremltools fuses `mul` and `add` of constants into a `batch_norm` by the constants' shapes alone: an x of one
# channel then keeps one, and the conversion fails.


def _with_the_same_channels(host: Callable[[Any, Any, Any], bool]) -> Callable[[Any, Any, Any], bool]:
    """Wrap the fusion of a scale and a shift: only where x has their channels."""

    def try_to_transform(mul_op: Any, add_op: Any, block: Any) -> bool:
        before, after = mul_op.outputs[0].shape, add_op.outputs[0].shape
        x = mul_op.x if mul_op.x.val is None else mul_op.y
        sizes = [shape[-3] for shape in (x.shape, before, after) if len(shape) == 4]
        constants = [
            v.shape[-3] for op in (mul_op, add_op) for v in (op.x, op.y) if v.val is not None and v.rank > 2
        ]
        static = [n for n in (*sizes, *constants) if not is_symbolic(n)]
        return len(set(static)) <= 1 and host(mul_op, add_op, block)

    return try_to_transform


# A constant that a convolution is joined with stays as it is.
#
# coremltools negates in place what is subtracted from a convolution, also where other ops read it.


def _with_copied_bias(host: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Wrap the fusion of a bias: it is joined from a copy of its constant."""

    def try_to_transform(conv_op: Any, add_op: Any) -> bool:
        known = {v: v._sym_val for v in (add_op.x, add_op.y) if v.val is not None}
        for v, value in known.items():
            v._sym_val = deepcopy(value)
        try:
            return host(conv_op, add_op)
        finally:
            for v, value in known.items():
                v._sym_val = value

    return try_to_transform


# A reduction over all axes, such as `x.sum()`, may follow a transpose: there, coremltools 9.0 asks for axes.


def _without_axes(host: Callable[..., None]) -> Callable[..., None]:
    """Wrap how a transpose passes a reduction: not where that names no axes."""

    def init(self: Any, op: Any, **options: Any) -> None:
        from coremltools.converters.mil.mil.passes.defs.optimize_repeat_ops import _TransformReduceMean

        if op.inputs.get("axes") is not None:
            host(self, op=op, **options)
        else:  # an op other than a constant stands for axes that cannot be updated
            super(_TransformReduceMean, self).__init__(op=op, **options)
            self.axes_var, self.axes_op = None, op

    return init


# A cast to integers before one to booleans stays: 0.25 is true, its whole part is not. coremltools fuses them.


def _with_whole_parts(host: Callable[[Any, Any, Any], bool]) -> Callable[[Any, Any, Any], bool]:
    """Wrap the choice of casts to fuse: before one to booleans, only casts of booleans."""
    return lambda self, first, second: (
        (second.dtype.val != "bool" or types.is_bool(first.x.dtype)) and host(self, first, second)
    )


# An image may have a scale for each channel; coremltools gives its biases three axes, and not its scales.


def _with_scales(host: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap the ops in front of images: each channel is multiplied by its own scale."""

    def insert_image_preprocessing_ops(block: Any) -> None:
        for image in block.input_types:
            if np.size(getattr(image, "scale", 1)) > 1:
                image.scale = np.reshape(image.scale, (-1, 1, 1)).tolist()
        host(block)

    return insert_image_preprocessing_ops


# Values of more than five axes, which Core ML refuses, are computed with fewer.
#
# coremltools writes a transpose of six axes or more as exchanges of two axes, and leaves all other ops.


def _with_fewer_axes(host: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Wrap the pass that exchanges axes: `rerank` runs before it."""

    def apply(self: Any, program: Any) -> None:
        registry.run_by_name("rerank", program)
        host(self, program)

    return apply


# What is written into a slice at constant places is joined to what stays: slices and concatenations.
#
# It takes the dtype of what it is written into, and an empty slice changes nothing, as in torch.
# Before iOS 18 coremltools flattens the tensor and scatters, which was placed on the Neural Engine in no form
# (measured: M4, macOS 27). From iOS 18 on it writes `slice_update`, which is kept for inputs and states, since
# caches are read from it. Elsewhere the Neural Engine does not take it (rule `slice-update-alone`).

Ranges = list[tuple[int, int]]


def _with_joined_slices(host: Callable[..., Var]) -> Callable[..., Var]:
    """Wrap every write into a slice."""

    def translate(x: Var, updates: Var, begin: Any, end: Any, **options: Any) -> Var:
        name, ranges = options.get("name"), _ranges(x, begin, end, options)
        region = [last - first for first, last in ranges or ()]
        if name is not None and 0 in region:
            return mb.identity(x=x, name=name)
        if updates.dtype != x.dtype:
            updates = mb.cast(x=updates, dtype=dtype_of(x))
        if (
            ranges is None
            or name is None
            or any(map(is_symbolic, updates.shape))
            or math.prod(updates.shape) != math.prod(region)
            or (_has_slice_update() and _is_memory(x))
        ):
            return host(x=x, updates=updates, begin=begin, end=end, **options)
        if list(updates.shape) != region:
            updates = mb.reshape(x=updates, shape=region)
        return mb.identity(x=_with_update(x, updates, ranges, 0), name=name)

    return translate


def _ranges(x: Var, begin: Any, end: Any, options: dict[str, Any]) -> Ranges | None:
    """Return (first, end) on each axis; None where they are dynamic or strided."""
    begin, end, stride = (known_value(v) for v in (begin, end, options.get("stride")))
    if begin is None or end is None:
        return None
    if any(map(is_symbolic, x.shape)) or not (stride is None or (np.asarray(stride) == 1).all()):
        return None
    masks = [options.get(f"{kind}_mask") for kind in ("begin", "end", "squeeze")]
    from_start, to_end, one = (np.resize(False if m is None else known_value(m), x.rank) for m in masks)
    spans = []
    for axis, length in enumerate(map(int, x.shape)):
        first, _, _ = slice(None if from_start[axis] else int(begin[axis]), None).indices(length)
        _, last, _ = slice(None, None if to_end[axis] else int(end[axis])).indices(length)
        spans.append((first, first + 1 if one[axis] else max(first, last)))
    return spans


def _has_slice_update() -> bool:
    from coremltools.converters.mil._deployment_compatibility import AvailableTarget
    from coremltools.converters.mil.frontend.torch.ops import is_current_opset_version_compatible_with

    return bool(is_current_opset_version_compatible_with(AvailableTarget.iOS18))


def _is_memory(x: Var) -> bool:
    """Is a value an input or a state, or a version of one?"""
    while x.op is not None and x.op.op_type in ("cast", "identity", "slice_update"):
        x = x.op.x
    return x.op is None or x.op.op_type == "read_state"


def _with_update(x: Var, updates: Var, ranges: Ranges, axis: int) -> Var:
    """Return x with the updates in those ranges; on the axes before `axis`, x is cut to them already."""
    while axis < x.rank and ranges[axis] == (0, x.shape[axis]):
        axis += 1
    if axis == x.rank:
        return updates
    (first, last), length = ranges[axis], int(x.shape[axis])
    inner = (
        updates
        if axis + 1 == x.rank
        else _with_update(_axis_slice(x, axis, first, last), updates, ranges, axis + 1)
    )
    joined = [_axis_slice(x, axis, 0, first)] if first else []
    joined += [inner, _axis_slice(x, axis, last, length)] if last < length else [inner]
    return mb.concat(values=joined, axis=axis)


def _axis_slice(x: Var, axis: int, first: int, last: int) -> Var:
    part = parts.slice_of_axis(x, axis, first, last)
    if part.val is None:
        return part
    return mb.const(val=np.asarray(part.val, np_dtype(x)))  # coremltools takes it for integers


GRAPH, OPS, PASSES = "frontend.torch.internal_graph", "frontend.torch.ops", "mil.passes.defs"
FOLDS: dict[Callable[[Any], Any], str] = {
    _from_wide_copies: "activation.elu activation.gelu activation.sigmoid activation.thresholded_relu "
    "elementwise_unary.log linear.einsum normalization.layer_norm reduction.ReductionAxes "
    "tensor_operation.cumsum",
    _softplus_in_range: "activation.softplus activation.softplus_parametric",
    _scatter_by_mode: "scatter_gather.scatter_along_axis",
    _whole_and_interleaved: "tensor_operation.concat",
    _known_whole: "tensor_operation.stack",
    _band_of_infinities: "tensor_operation.band_part",
    _stable_order: "tensor_operation.argsort tensor_operation.topk",
    _squeezed_to_scalar: "tensor_transformation.squeeze",
    _element_of_any_dtype: "tensor_transformation.slice_by_index",
}
"""Wrapper -> the ops of iOS 15, with their modules, that coremltools folds wrong or fails to fold."""
REPLACED: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("frontend.torch.converter", "generate_tensor_assignment_ops", with_scattered_views),
    (GRAPH, "InternalTorchIRNode.from_torchscript_node", parts.with_strides_in_trace),
    (GRAPH, "InternalTorchIRNode.from_exir_node", parts.with_strides_in_export),
    (GRAPH, "InternalTorchIRNode.from_torchscript_node", complex_numbers.with_literals_in_trace),
    (GRAPH, "InternalTorchIRNode.from_exir_node", complex_numbers.with_literals_in_export),
    (GRAPH, "InternalTorchIRGraph.from_exir", complex_numbers.with_literals),
    (
        f"{PASSES}.lower_complex_dialect_ops",
        "_lower_complex_dialect_ops_in_block",
        complex_numbers.keeping_modules,
    ),
    (OPS, "convert_single_node", _naming_module),
    (OPS, "_translate_torch_tensor_assign", _with_joined_slices),
    (
        f"{PASSES}.optimize_elementwise_binary",
        "fuse_elementwise_to_batchnorm._try_to_transform",
        _with_the_same_channels,
    ),
    (f"{PASSES}.optimize_conv", "fuse_conv_bias._try_to_transform", _with_copied_bias),
    (f"{PASSES}.optimize_repeat_ops", "_TransformReduceMean.__init__", _without_axes),
    (f"{PASSES}.optimize_repeat_ops", "cast_optimization._is_cast_ops_fusable", _with_whole_parts),
    (f"{PASSES}.optimize_tensor_operation", "expand_high_rank_reshape_and_transpose.apply", _with_fewer_axes),
    ("backend.mil.passes.insert_image_preprocessing_op", "_insert_image_preprocessing_ops", _with_scales),
    ("frontend.torch.converter", "TorchConverter._add_const", _with_floats),
    (OPS, "_construct_constant", _with_floats),
    ("mil.ops.defs.iOS15.reduction", "reduce_log_sum_exp.get_operator", _with_hidden_rows),
    *(
        (f"mil.ops.defs.iOS15.{module}", f"{op}.value_inference", wrap)
        for wrap, ops in FOLDS.items()
        for module, _, op in (name.partition(".") for name in names(ops))
    ),
)
"""(module, path in it, wrapper) of functions of coremltools that `register` wraps, the innermost first."""
