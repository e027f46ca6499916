"""Torch modules as coremltools converts them, by trace and by export."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from closeness import assert_close

from anesurgery import frontend
from anesurgery.interpret import run
from anesurgery.mil import ct, quiet_host


class Function(torch.nn.Module):
    """A function of one tensor as a module."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def convert(
    module: torch.nn.Module,
    examples: Mapping[str, torch.Tensor],
    how: str,
    target: str,
    precision: str,
    **options: Any,
) -> Any:
    """The model of a module whose inputs have names, shapes and dtypes of the examples; int64 becomes int32.

    `how` is "trace", or a function of torch.export.
    """
    given = tuple(examples.values())
    kinds = [np.float32 if v.is_floating_point() else np.int32 for v in given]
    with torch.no_grad(), quiet_host():
        graph: Any = (
            torch.jit.trace(module, given, check_trace=False)  # type: ignore[no-untyped-call]
            if how == "trace"
            else getattr(torch.export, how)(module, given).run_decompositions({})
        )
        return ct.convert(
            graph,
            inputs=[
                ct.TensorType(name, tuple(v.shape), dtype=kind)
                for (name, v), kind in zip(examples.items(), kinds, strict=True)
            ],
            minimum_deployment_target=getattr(ct.target, target),
            compute_precision=getattr(ct.precision, precision),
            skip_model_load=True,
            **options,
        )


def assert_each_agrees(
    cases: Mapping[str, Callable[[torch.Tensor], torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    how: str,
    rtol: float = 1e-6,
    target: str = "iOS17",
) -> None:
    """Functions agree with torch on each input, converted with the first one.

    All are in one model, as most of the time goes into coremltools' passes.
    """
    frontend.register()
    whole = Function(lambda x: tuple(function(x) for function in cases.values()))
    model = convert(whole, {"x": inputs[0]}, how, target, "FLOAT32")
    for x in inputs:
        found = run(model, {"x": x.numpy()}).values()
        for (name, function), value in zip(cases.items(), found, strict=True):
            expected = np.atleast_1d(function(x).numpy())
            assert np.atleast_1d(value).shape == expected.shape, name
            assert_close(np.atleast_1d(value), expected, rtol=rtol)
