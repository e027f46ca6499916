"""A PyTorch module as a model of one size: traced and converted at the shapes of that size."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from typing import Any

import numpy as np

from anesurgery import frontend
from anesurgery.errors import LoadError, SurgeryError, UnknownName
from anesurgery.mil import ct, quiet_host

KINDS = {"float32": np.float32, "int32": np.int32}
"""Types of inputs that a module may be given."""


def converter(module: Any, dtypes: Mapping[str, str] | None) -> Callable[[Mapping[str, tuple[int, ...]]], Any]:
    """What converts a module at given shapes, for iOS 18 and in fp16.

    Args:
        module: of PyTorch; its inputs have the names of the parameters of `forward`.
        dtypes: input -> "int32" or "float32"; float32 for those left out.

    Returns:
        A function of input -> shape, which raises `LoadError` where the module cannot be converted and
        `UnknownName` where `forward` has no such parameter.

    Raises:
        SurgeryError: a type that is not known.
    """
    kinds = dict(dtypes or {})
    for name, kind in kinds.items():
        if kind not in KINDS:
            raise SurgeryError(f"sizes: the type of {name} is {kind!r}; give one of {', '.join(KINDS)}")
    parameters = [p for p in inspect.signature(module.forward).parameters.values() if p.kind < p.VAR_POSITIONAL]

    def at(shapes: Mapping[str, tuple[int, ...]]) -> Any:
        names = [p.name for p in parameters if p.name in shapes]
        for name in (*shapes, *kinds):
            if name not in shapes or name not in names:
                raise UnknownName("input", name, [p.name for p in parameters])
        missing = [p.name for p in parameters if p.default is p.empty and p.name not in shapes]
        if missing or names != [p.name for p in parameters[: len(names)]]:
            listed = ", ".join(p.name for p in parameters)
            raise SurgeryError(
                f"sizes: forward takes {listed}; give the shapes of the first ones without a gap"
            )
        return _converted(module, {name: (shapes[name], KINDS[kinds.get(name, "float32")]) for name in names})

    return at


def _converted(module: Any, inputs: Mapping[str, tuple[tuple[int, ...], Any]]) -> Any:
    """The module at some shapes and types.

    Raises:
        LoadError: it cannot be traced or converted; says why.
    """
    import torch

    frontend.register()
    examples = tuple(torch.from_numpy(np.zeros(shape, kind)) for shape, kind in inputs.values())
    was_training = module.training
    try:
        with torch.no_grad(), quiet_host(), redirect_stderr(io.StringIO()):  # coremltools' progress bars
            trace: Any = torch.jit.trace
            return ct.convert(
                trace(module.eval(), examples, check_trace=False),
                inputs=[ct.TensorType(name, shape, dtype=kind) for name, (shape, kind) in inputs.items()],
                minimum_deployment_target=ct.target.iOS18,
                skip_model_load=True,
            )
    except Exception as error:  # torch and coremltools raise what they like
        words = ", ".join(f"{name} {np.dtype(kind)}" for name, (_, kind) in inputs.items())
        raise LoadError(
            f"{type(module).__name__} was not converted with {words} (other types: dtypes=): "
            f"{str(error).strip()}"
        ) from error
    finally:
        module.train(was_training)
