"""Teach coremltools' torch front end the operations that today's transformers emit and it lacks.

::

    from anesurgery import frontend

    frontend.register()
    ct.convert(torch.jit.trace(model, example), ...)

Nothing is registered on import. Each conversion says which part of torch's operation it covers, and raises for
the rest. An operation that has no converter is converted as torch itself decomposes it, for static shapes. An
error says which operation of which module it is about. (Found with coremltools 9.0, torch 2.13 and transformers
5.23, by trace and by torch.export.)

Refused by torch itself: a cache or a `ModelOutput` as the output of a trace (return the logits).
bfloat16 within a model is computed as float32, which MIL has.
Of rows that a mask hides entirely, coremltools' fused attention gives a mean where torch gives zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from anesurgery.frontend import assigning, error_context, fused_scales, strided_views, written_slices
from anesurgery.frontend.conversions import ALIASES, CONVERSIONS, WRAPPERS
from anesurgery.frontend.decomposing import decomposable
from anesurgery.frontend.experts import register_experts
from anesurgery.mil import quiet_host

__all__ = ["ALIASES", "CONVERSIONS", "WRAPPERS", "register", "register_experts"]


def register() -> None:
    """Register the conversions; doing it again changes nothing."""
    with quiet_host():
        from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

    known = _TORCH_OPS_REGISTRY.name_to_func_mapping
    for name, convert in CONVERSIONS.items():
        known.setdefault(name, convert)
    for name, same in ALIASES.items():
        if same in known:
            known.setdefault(name, known[same])
    for name, wrap in WRAPPERS.items():
        if not known[name].__module__.startswith(__name__):
            known[name] = wrap(known[name])
    known |= decomposable(known)
    assigning.register()
    strided_views.register()
    error_context.register()
    written_slices.register()
    fused_scales.register()
    _compute_bfloat16_as_float32()


def _compute_bfloat16_as_float32() -> None:
    """MIL has no bfloat16: values keep the precision that torch would round away."""
    from coremltools.converters.mil.frontend.torch import converter, ops, utils

    complex64, number = 9, 15  # torch's numbers of dtypes; the latter is bfloat16
    for holder, name in ((converter.TorchConverter, "_add_const"), (ops, "_construct_constant")):
        host = getattr(holder, name)
        if host.__module__ != __name__:
            setattr(holder, name, _with_floats(host))
    utils.TORCH_DTYPE_TO_NUM.setdefault(torch.complex64, complex64)
    utils.TORCH_DTYPE_TO_NUM.setdefault(torch.bfloat16, utils.TORCH_DTYPE_TO_NUM[torch.float32])
    utils.NUM_TO_TORCH_DTYPE.setdefault(number, torch.float32)
    utils.NUM_TO_NUMPY_DTYPE.setdefault(number, np.float32)
    utils.NUM_TO_DTYPE_STRING.setdefault(number, "fp32")


def _with_floats(host: Any) -> Any:
    """Constants of bfloat16, which numpy has not either, as float32."""

    def constant(*given: Any) -> Any:
        return host(*(v.float() if getattr(v, "dtype", None) == torch.bfloat16 else v for v in given))

    return constant
