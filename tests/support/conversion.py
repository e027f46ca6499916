"""Torch modules as coremltools converts them, by trace and by export."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
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
) -> None:
    """Functions agree with torch on each input, converted with the first one.

    All are in one model, as most of the time goes into coremltools' passes.
    """
    frontend.register()
    whole = Function(lambda x: tuple(function(x) for function in cases.values()))
    model = convert(whole, {"x": inputs[0]}, how, "iOS17", "FLOAT32")
    for x in inputs:
        found = run(model, {"x": x.numpy()}).values()
        for (name, function), value in zip(cases.items(), found, strict=True):
            expected = np.atleast_1d(function(x).numpy())
            assert np.atleast_1d(value).shape == expected.shape, name
            assert_close(np.atleast_1d(value), expected, rtol=rtol)


class _Quick(threading.local):
    """Is this thread inside a pipeline that is nobody's but coremltools'?"""

    inside = False


def convert_quickly() -> None:
    """Leave out what costs coremltools half of a conversion, and tells about coremltools only.

    It validates the program after each of its 110 passes, writes its text for a log that is off, and collects
    garbage. Here it validates once for each pipeline, unless passes of ours are in it. What a type is called it
    works out anew whenever it asks; the types themselves it keeps, so here their descriptions are kept too.
    """
    from coremltools.converters import _converters_entry
    from coremltools.converters.mil.mil import Program
    from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager
    from coremltools.converters.mil.mil.types import type_list, type_mapping

    apply, validate, text = PassPipelineManager.apply_pipeline, Program.validate, Program.__str__
    quick = _Quick()

    def apply_pipeline(prog: Any, pass_pipeline: Any) -> None:
        quick.inside = not any(name.startswith("anesurgery::") for name in pass_pipeline.passes)
        try:
            apply(prog, pass_pipeline)
        finally:
            quick.inside = False
        prog.validate()

    PassPipelineManager.apply_pipeline = staticmethod(apply_pipeline)
    Program.validate = lambda self, *given, **named: None if quick.inside else validate(self, *given, **named)
    Program.__str__ = lambda self: "" if quick.inside else text(self)
    for module in (type_mapping, type_list):
        module.get_type_info = functools.cache(module.get_type_info)
    _converters_entry.gc = SimpleNamespace(collect=lambda: 0)
