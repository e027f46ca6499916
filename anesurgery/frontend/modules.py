"""Convert a PyTorch module or an exported program where a Core ML model is expected.

`load(module, inputs=...)` calls `convert_module`. The module is traced in eval mode with the given inputs, and
converted by coremltools with the operations that `frontend.register` adds.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils import _pytree

from anesurgery import frontend, registry
from anesurgery.errors import LoadError, SurgeryError, first_line, warn
from anesurgery.mil import Array, Program, ct, exclusive, silent_host

Tensors = Mapping[str, torch.Tensor]
POSITIONAL = frozenset({Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD})

AXES = "rerank"
"""The pass that rewrites ops of more than five axes, which Core ML refuses. It says which ops it leaves."""

NO_INPUTS = (
    "a PyTorch module says nothing of its inputs: give inputs=, tensors or arrays as it takes them, in a list "
    "or by name"
)
BRANCHES = ("torch.jit.trace a dynamo-optimized function", "Only torch.Tensor attr handled yet")
"""What torch's tracer and coremltools say of functions as operands, as `torch.cond` has."""
TRACED = 1e-2
"""The share of the range of an output from which on a difference after a trace is no rounding."""
STORED = {torch.int64: np.int32, torch.int32: np.int32, torch.int16: np.int32, torch.bool: np.int32}
"""Torch dtype of an input -> dtype in Core ML; float32 for all others."""


@exclusive()
def convert_module(module: Any, inputs: Any, target: Any = None) -> tuple[Any, dict[str, Array] | None]:
    """Convert a module in eval mode to an ML Program in fp16.

    Args:
        module: a `torch.nn.Module`, which is left as it is, or a `torch.export.ExportedProgram`.
        inputs: tensors or arrays, one, a list of them, or by name; an exported program has its own.
        target: chip and OS; an OS older than iOS 17 or macOS 14 gets a model that it loads.

    Returns:
        The MLModel, and the inputs as arrays by its names; None where none were given.

    Raises:
        SurgeryError: no inputs, or not as many as the module takes.
        LoadError: the module cannot be traced or converted.
    """
    if isinstance(module, torch.export.ExportedProgram):
        count = len(_pytree.tree_leaves(module.example_inputs))
        names = list(module.graph_signature.user_inputs)[:count]
        model = _convert(module, target)
        given = None if inputs is None else _named(names, inputs)
    else:
        if inputs is None:
            raise SurgeryError(NO_INPUTS)
        given = _inputs_by_name(module, inputs)
        with _in_eval_mode(module), torch.no_grad():
            model = _trace_and_convert(module, given, target)
    words = f"{_module_words(module)} was converted for this with frontend.register()"
    warn(f"{words}: fp16, {_deployment(target, module).name}")
    return model, None if given is None else {_core_ml_name(n): _array(v) for n, v in given.items()}


def _trace_and_convert(module: torch.nn.Module, example: Tensors, target: Any) -> Any:
    """Trace a module, and convert the trace."""
    if scalar := next((name for name, value in example.items() if value.ndim == 0), None):
        raise SurgeryError(
            f"inputs: {scalar} has no axes, and Core ML takes no such input; give it the shape (1,)"
        )
    call = _Call(module, example)
    values = [v.int() if v.dtype == torch.bool else v for v in example.values()]
    ran = False
    try:
        with _buffers_kept(module) as changed:
            made = call.outputs(values)
        ran = True
        plain = patch("torch.jit._trace.script", lambda function: function)  # of torch.jit.script_if_tracing
        with warnings.catch_warnings(), _buffers_kept(module), plain:
            warnings.simplefilter("ignore")  # of the tracer, about what stays constant
            trace: Any = torch.jit.trace
            traced = trace(call, tuple(values), check_trace=False)
    except Exception as error:  # a module raises what it likes
        failed = (
            "runs on the inputs, but torch.jit.trace cannot trace it; try the program of torch.export.export"
            if ran
            else "does not run on the inputs"
        )
        raise LoadError(f"{_module_words(module)} {failed}: {_said(error)}") from error
    with _buffers_kept(module):
        apart = _largest_difference(traced(*values), made.values())
    if apart > TRACED:
        warn(
            f"{_module_words(module)} gives other numbers when it is traced ({apart:.2g} of their range): it "
            "asks whether it is traced, or draws random numbers, and the model does what the trace does; if "
            "it makes masks itself, give them as inputs"
        )
    if changed:
        warn(
            f"{_module_words(module)} writes to its buffers ({', '.join(changed)}): the model keeps no such "
            "state, and each prediction begins with the values of now; give the program of torch.export, whose "
            "buffers become states (iOS 18), or make them inputs and outputs"
        )
    inputs = [ct.TensorType(n, shape=tuple(v.shape), dtype=_core_ml_dtype(v)) for n, v in example.items()]
    return _convert(traced, target, module, inputs=inputs, outputs=[ct.TensorType(n) for n in made])


def _largest_difference(values: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> float:
    """Return the largest difference of finite numbers, as a share of the range of the expected ones."""
    largest = 0.0
    for value, other in zip(values, expected, strict=True):
        if other.is_floating_point() and other.numel():
            known, zero = other.isfinite(), torch.zeros_like(other)
            gap = torch.where(known, value - other, zero).abs().max().nan_to_num(torch.inf)
            low, high = torch.where(known, other, zero).aminmax()
            largest = max(largest, float(gap / (high - low).clamp(min=1e-6)))
    return largest


class _Call(torch.nn.Module):
    """Calls a module with tensors in the order of their names, and returns only tensors."""

    def __init__(self, module: torch.nn.Module, example: Tensors) -> None:
        super().__init__()
        self.module = module
        self.names = list(example)
        self.masks = [value.dtype == torch.bool for value in example.values()]
        scripted = isinstance(module, torch.jit.ScriptModule)
        parameters = {} if scripted else inspect.signature(module.forward).parameters
        kinds = {name: parameter.kind for name, parameter in parameters.items()}
        self.no_cache = {"use_cache": False} if "use_cache" in kinds and "use_cache" not in example else {}
        takes_rest = Parameter.VAR_POSITIONAL in kinds.values() and not set(self.names) <= set(kinds)
        placed = POSITIONAL if takes_rest else {Parameter.POSITIONAL_ONLY}
        known = [name for name, kind in kinds.items() if kind in placed]
        self.by_place = [name for name in known if name in example]
        self.by_place += [name for name in self.names if takes_rest and name not in kinds]
        for name, given in zip(known, self.by_place, strict=False):
            if name != given:
                raise SurgeryError(f"inputs: {name} is missing, and comes before {given}; give both")

    def _call_module(self, values: Sequence[torch.Tensor]) -> Any:
        read = [value.bool() if mask else value for value, mask in zip(values, self.masks, strict=True)]
        by_name = dict(zip(self.names, read, strict=True))
        placed = [by_name.pop(name) for name in self.by_place]
        return self.module(*placed, **by_name, **self.no_cache)

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tensors in the module's output, in order."""
        return tuple(v for v in _pytree.tree_leaves(self._call_module(values)) if isinstance(v, torch.Tensor))

    def outputs(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return each output by a name."""
        paths, _ = _pytree.tree_flatten_with_path(self._call_module(values))
        made = [(_pytree.keystr(path), value) for path, value in paths if isinstance(value, torch.Tensor)]
        words = [re.sub(r"\W+", "_", name).strip("_") for name, _ in made]
        named = [word if word and not word[0].isdigit() else f"output_{word}".rstrip("_") for word in words]
        names = [f"{name}_out" if name in self.names else name for name in named]
        return dict(zip(names, (value for _, value in made), strict=True))


def _convert(traced: Any, target: Any, module: Any = None, **options: Any) -> Any:
    """Convert the trace of a module, or an exported program, with coremltools."""
    frontend.register()
    pipeline = registry.pipeline_with(AXES)
    try:
        with torch.no_grad(), silent_host(), patch.object(Program, "validate", _validate):
            if module is None:
                traced = traced.run_decompositions({})
            return ct.convert(
                traced,
                **options,
                minimum_deployment_target=_deployment(target, traced),
                pass_pipeline=pipeline,
                skip_model_load=True,
            )
    except SurgeryError:
        raise
    except Exception as error:  # coremltools raises what it likes
        wide = [r.reason for name, r in pipeline.report.refusals if name == AXES and "rank" in str(error)]
        said = f"{_said(error)} ({AXES}: {wide[0]})" if wide else _said(error)
        raise LoadError(f"{_module_words(module or traced)} was not converted: {said}") from error


def _validate(program: Program, check_essential_scope: bool = False) -> None:
    """Check a program where coremltools says that it is complete; and not after each pass, which is slow."""
    if check_essential_scope:
        for function in program.functions.values():
            function.validate(force_validate=True, check_essential_scope=True)


def _said(error: Exception) -> str:
    """Return the first line of an error; for branches as functions, what to do."""
    line = first_line(error)
    branches = any(words in line for words in BRANCHES)
    return f"{line} (of torch.cond: compute both branches, and choose with torch.where)" if branches else line


def _deployment(target: Any, module: Any) -> Any:
    """The oldest OS for which the model is made: iOS 17, or an older one that is named; iOS 18 with states."""
    if isinstance(module, torch.export.ExportedProgram) and module.graph_signature.buffers_to_mutate:
        return ct.target.iOS18
    named = re.search(r"(iOS|macOS) ?(\d+)", str(target or ""))
    wanted = ct.target.__members__.get("".join(named.groups()) if named else "", ct.target.iOS17)
    return min(ct.target.iOS17, max(ct.target.iOS15, wanted))


def _inputs_by_name(module: torch.nn.Module, inputs: Any) -> Tensors:
    """Return the inputs by the names of the module's parameters.

    Raises:
        SurgeryError: there are too many inputs, or one has an unknown name.
    """
    if isinstance(module, torch.jit.ScriptModule):
        forward: Any = module.forward
        return _named([argument.name for argument in forward.schema.arguments[1:]], inputs)
    parameters = inspect.signature(module.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in POSITIONAL]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    if isinstance(inputs, Mapping):
        if rest is not None:  # any other name is one of the rest, in their order
            inputs = {n: inputs[n] for n in names if n in inputs} | dict(inputs)
        names += [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    elif rest is not None:
        count = len(inputs) if isinstance(inputs, (list, tuple)) else 1
        names += [f"{rest}_{i}" for i in range(count - len(names))]
    return _named(names, inputs, rest is not None or any(p.kind is p.VAR_KEYWORD for p in parameters))


def _named(names: Sequence[str], inputs: Any, any_name: bool = False) -> Tensors:
    if isinstance(inputs, Mapping):
        unknown = [] if any_name else [name for name in inputs if name not in names]
        if unknown:
            raise SurgeryError(f"inputs: the module takes no {unknown[0]!r}; it takes {', '.join(names)}")
        return {name: _tensor(value) for name, value in inputs.items()}
    values = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
    if len(values) > len(names):
        raise SurgeryError(
            f"inputs: {len(values)} are given, and the module takes {', '.join(names) or 'none'}"
        )
    return {name: _tensor(value) for name, value in zip(names, values, strict=False)}


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach()
    try:
        return torch.from_numpy(np.array(value))
    except (TypeError, ValueError) as error:
        raise SurgeryError(f"inputs: a {type(value).__name__} is no tensor and no array") from error


def _array(value: torch.Tensor) -> Array:
    plain = value.float() if value.dtype == torch.bfloat16 else value  # which numpy has not
    return plain.detach().cpu().numpy().astype(_core_ml_dtype(value))


def _core_ml_name(name: str) -> str:
    """Return the name that coremltools gives an input: "state" is a word of MIL, and gets an ending."""
    from coremltools.converters.mil.mil.passes.defs.preprocess import NameSanitizer

    return str(NameSanitizer().sanitize_name(name))


def _core_ml_dtype(value: torch.Tensor) -> Any:
    return STORED.get(value.dtype, np.float32)


@contextmanager
def _buffers_kept(module: torch.nn.Module) -> Iterator[list[str]]:
    """Within the context, a forward may write to buffers, whose names it yields; then they are as before."""
    kept = [
        (part, f"{path}.{name}" if path else name, name, value, value.clone())
        for path, part in module.named_modules()
        for name, value in part.named_buffers(recurse=False)
    ]
    changed: list[str] = []
    try:
        yield changed
    finally:
        for part, path, name, value, before in kept:
            if not _are_equal(getattr(part, name), before):
                changed.append(path)
            setattr(part, name, value)
            value.copy_(before)


def _are_equal(now: torch.Tensor | None, before: torch.Tensor) -> bool:
    """Are the values of a buffer equal, NaN included? None stands for a buffer that was removed."""
    if now is None or now.shape != before.shape:
        return False
    return bool(((now == before) | ((now != now) & (before != before))).all())


@contextmanager
def _in_eval_mode(module: torch.nn.Module) -> Iterator[None]:
    """Within the context, the module is in eval mode; afterwards each part is as before."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _module_words(module: Any) -> str:
    return "the exported program" if isinstance(module, torch.export.ExportedProgram) else type(module).__name__
