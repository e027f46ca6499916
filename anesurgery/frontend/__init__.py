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

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from anesurgery.frontend import complex_numbers, parts
from anesurgery.frontend.arguments import Convert, dtype_of, inputs_of, known_value
from anesurgery.frontend.complex_numbers import is_complex
from anesurgery.frontend.conversions import ALIASES, CONVERSIONS, WRAPPERS
from anesurgery.frontend.decomposing import decomposable
from anesurgery.frontend.experts import register_experts
from anesurgery.frontend.written_views import write_through_views
from anesurgery.mil import Var, is_symbolic, mb, np_dtype, quiet_host

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
            converters[name] = wrap(converters[name])
    _add(converters, decomposable(converters))
    _let_later_ones_replace(_TORCH_OPS_REGISTRY)
    write_through_views()
    parts.register()
    complex_numbers.register()
    name_modules_in_errors()
    write_slices()
    scale_attention()
    _compute_bfloat16_as_float32()


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


def _compute_bfloat16_as_float32() -> None:
    """Read bfloat16 as float32, which MIL has; and complex128 as complex64."""
    from coremltools.converters.mil.frontend.torch import converter, ops, utils

    complex64, number = 9, 15  # torch's numbers of dtypes; the latter is bfloat16
    for holder, name in ((converter.TorchConverter, "_add_const"), (ops, "_construct_constant")):
        host = getattr(holder, name)
        if host.__module__ != __name__:
            setattr(holder, name, _with_floats(host))
    for kind in (torch.complex64, torch.complex128):
        utils.TORCH_DTYPE_TO_NUM.setdefault(kind, complex64)
    utils.TORCH_DTYPE_TO_NUM.setdefault(torch.bfloat16, utils.TORCH_DTYPE_TO_NUM[torch.float32])
    utils.NUM_TO_TORCH_DTYPE.setdefault(number, torch.float32)
    utils.NUM_TO_NUMPY_DTYPE.setdefault(number, np.float32)
    utils.NUM_TO_DTYPE_STRING.setdefault(number, "fp32")


NARROWER = {torch.bfloat16: torch.float32, torch.complex128: torch.complex64}
"""Dtype of a constant that MIL lacks -> the one that is used instead."""


def _with_floats(host: Any) -> Any:
    """Wrap the reader of constants, to narrow dtypes that MIL lacks."""

    def constant(*positional: Any) -> Any:
        return host(*(_narrowed(value) for value in positional))

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


def name_modules_in_errors() -> None:
    """Let every error of a conversion name its operation and module."""
    from coremltools.converters.mil.frontend.torch import ops

    if ops.convert_single_node.__module__ != __name__:
        ops.convert_single_node = _naming_module(ops.convert_single_node)


def _naming_module(host: Convert) -> Convert:
    def convert_single_node(context: Any, node: Any) -> None:
        try:
            host(context, node)
        except Exception as error:
            if not hasattr(error, "converting") and _reads_complex(context, node):
                error = NotImplementedError(COMPLEX.format(kind=node.kind))
            said, *rest = error.args or (f"{type(error).__name__} without a reason",)
            if isinstance(said, str) and not hasattr(error, "converting"):
                error.args = (f"{said} (converting {node.kind}{_module_words(node)})", *rest)
            error.converting = node.kind  # type: ignore[attr-defined]
            raise error

    return convert_single_node


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


def scale_attention() -> None:
    """Fuse a scale and a shift only where x has their channels; a second call changes nothing."""
    from coremltools.converters.mil.mil.passes.defs.optimize_elementwise_binary import (
        fuse_elementwise_to_batchnorm,
    )

    host = fuse_elementwise_to_batchnorm._try_to_transform
    if host.__module__ != __name__:
        fuse_elementwise_to_batchnorm._try_to_transform = staticmethod(_with_the_same_channels(host))


def _with_the_same_channels(host: Callable[[Any, Any, Any], bool]) -> Callable[[Any, Any, Any], bool]:
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


# What is written into a slice at constant places is joined to what stays: slices and concatenations.
#
# It takes the dtype of what it is written into, and an empty slice changes nothing, as in torch.
# Before iOS 18 coremltools flattens the tensor and scatters, which was placed on the Neural Engine in no form
# (measured: M4, macOS 27). From iOS 18 on it writes `slice_update`, which is kept: caches are read from it.

Ranges = list[tuple[int, int]]


def write_slices() -> None:
    """Let every write into a slice pass here first; a second call changes nothing."""
    from coremltools.converters.mil.frontend.torch import ops

    host = ops._translate_torch_tensor_assign
    if host.__module__ != __name__:
        ops._translate_torch_tensor_assign = _with_joined_slices(host)


def _with_joined_slices(host: Callable[..., Var]) -> Callable[..., Var]:
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
            or _has_slice_update()
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
    begin, end = [0] * x.rank, [int(n) for n in x.shape]
    begin[axis], end[axis] = first, last
    part: Var = mb.slice_by_index(x=x, begin=begin, end=end)
    if part.val is None:
        return part
    return mb.const(val=np.asarray(part.val, np_dtype(x)))  # coremltools takes it for integers
