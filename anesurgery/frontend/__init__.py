"""Teach coremltools' torch front end the operations that today's transformers emit and it lacks.

::

    from anesurgery import frontend

    frontend.register()
    ct.convert(torch.jit.trace(model, example), ...)

Nothing is registered on import. Each conversion says which part of torch's operation it covers, and raises for
the rest. An operation that has no converter is converted as torch itself decomposes it, for static shapes. What
coremltools lacks is added op by op: where a newer one has a converter of its own, that is kept, and one that is
registered later with `register_torch_op` takes the place of ours. An error says which operation of which module
it is about. (Found with coremltools 9.0, torch 2.13 and transformers 5.23, by trace and by torch.export.)

Refused by torch itself: a cache or a `ModelOutput` as the output of a trace (return the logits).
bfloat16 within a model is computed as float32, which MIL has.
Of rows that a mask hides entirely, coremltools' fused attention gives a mean where torch gives zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from anesurgery.frontend import (
    assigning,
    complex_numbers,
    error_context,
    fused_scales,
    strided_views,
    written_slices,
)
from anesurgery.frontend.conversions import ALIASES, CONVERSIONS, WRAPPERS
from anesurgery.frontend.decomposing import decomposable
from anesurgery.frontend.experts import register_experts
from anesurgery.mil import quiet_host

__all__ = ["ALIASES", "CONVERSIONS", "WRAPPERS", "register", "register_experts"]


def register() -> None:
    """Register the conversions; doing it again changes nothing."""
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
    _give_way(_TORCH_OPS_REGISTRY)
    assigning.register()
    strided_views.register()
    complex_numbers.register()
    error_context.register()
    written_slices.register()
    fused_scales.register()
    _compute_bfloat16_as_float32()


_ADDED: dict[str, Any] = {}
"""Operation that the host lacked -> the converter that was added here."""


def _add(known: dict[str, Any], converters: dict[str, Any]) -> None:
    _ADDED.update(converters)
    known.update(converters)


def _give_way(registry: Any) -> None:
    """A converter that the host or a user registers later takes the place of one that was added here."""
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
    """MIL has no bfloat16: values keep what torch would round away. Complex numbers are complex64."""
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
"""Dtypes of constants that MIL lacks -> the one that it has."""


def _with_floats(host: Any) -> Any:
    """Constants of bfloat16, which numpy has not either, as float32, and those of complex128 as complex64."""

    def constant(*positional: Any) -> Any:
        return host(*(_narrowed(value) for value in positional))

    return constant


def _narrowed(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype == np.complex128:
        return value.astype(np.complex64)
    return value.to(NARROWER[value.dtype]) if getattr(value, "dtype", None) in NARROWER else value
