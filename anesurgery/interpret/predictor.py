"""Call a model as Core ML does: `run` once, or a `Predictor` many times.

Inputs and outputs follow the description of the package: images, labels, optional inputs, flexible shapes. A
pipeline runs its models one after the other, each on what those before gave.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anesurgery import registry
from anesurgery.doors import door
from anesurgery.errors import InterpretError, UnknownName
from anesurgery.files import size_index
from anesurgery.files.package import PIPELINES, PROGRAM, Loaded
from anesurgery.files.sequence import ModelSequence
from anesurgery.interpret import features, state
from anesurgery.interpret.arithmetic.constant_memory import widen
from anesurgery.interpret.arithmetic.precision import run_dtype, to_numpy
from anesurgery.interpret.core import Executable
from anesurgery.interpret.sampling import indexed_rows, sample_function
from anesurgery.interpret.table import Listener
from anesurgery.loading import load, load_member, load_sequence
from anesurgery.mil import Function, Operation, Var, ct, function_of, is_stored, np_dtype, types
from anesurgery.neuralnetwork.importing import runnable
from anesurgery.registry import INTERPRETER


class Probe(Listener):
    """A listener that keeps some values of a run by name.

    Args:
        executables: that run.
        names: of the values.
        arithmetic: of the run.
        then: another listener, which gets all calls too; or None.
    """

    def __init__(
        self, executables: Sequence[Executable], names: Sequence[str], arithmetic: str, then: Any
    ) -> None:
        readable = {v.name: (v, e) for e in executables for v in _values(e.function)}
        for name in names:
            if name not in readable:
                raise UnknownName("value", name, readable)
        self._wanted = {readable[name][0] for name in names}
        self._arithmetic, self._then = arithmetic, then
        self.found: dict[str, Any] = {}
        for var, executable in (readable[name] for name in names):
            if is_stored(var):  # no op runs that makes it
                value = widen(executable.plan.value({}, var))
                self.found[var.name] = to_numpy(value, var, arithmetic)

    def before(self, op: Operation, inputs: Mapping[str, Any]) -> None:
        """Call the other listener."""
        if self._then is not None:
            self._then.before(op, inputs)

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Keep the values that were asked for, and call the other listener."""
        for var, value in zip(op.outputs, outputs, strict=True):
            if var in self._wanted:
                self.found[var.name] = to_numpy(value, var, self._arithmetic)
        if self._then is not None:
            self._then.after(op, outputs)


def _values(function: Function) -> Iterator[Var]:
    """Yield the values that can be asked for by name: results of ops, outputs, and constant tensors."""
    for op in function.operations:
        yield from (v for v in op.outputs if not is_stored(v) or run_dtype(v) is not None)
    yield from function.outputs


class Predictor:
    """A model made ready once and called many times.

    Images, classifier labels, defaults of optional inputs and flexible shapes follow the description of the
    model. A bare program has no description: its functions declare its inputs and outputs.

    Args:
        model: path of a package, MLModel, Loaded, MIL program; or a Predictor, whose programs are shared.
        precision: the arithmetic: "fp32", "fp16" or "ane".
        function: name of the function. Default: the default of the package, or `main`.
        fuse: may "fp32" compute attention at once, as torch does? Its sums then come in another order.
        device: "cpu", or "cuda" where torch has one.
        member: of a pipeline, the one model to run, by name or number; all of them when absent.

    Raises:
        InterpretError: an op that is not known, or no such device.
        LoadError: the model cannot be read.
        UnknownName: no such function or precision.
    """

    def __init__(
        self,
        model: Any,
        *,
        precision: str = "fp32",
        function: str | None = None,
        fuse: bool = True,
        device: str = "cpu",
        member: str | int | None = None,
    ) -> None:
        self.models = _read(model, member)
        self.parts, spec = self.models.parts, self.models.spec
        parts = [p for p in self.parts if function in p.program.functions] or self.parts
        self.executables = [
            Executable(
                p.program, function=_function_name(p, function), precision=precision, fuse=fuse, device=device
            )
            for p in parts
        ]
        passed: set[str] = set()
        for executable in self.executables:
            executable.exact = frozenset(passed if precision == "fp32" else ())  # at a border neither
            passed |= {v.name for v in executable.function.outputs}
        self._rows = [_indexed_rows(e.function) for e in self.executables]
        self._descriptions = [_description(p, e.function) for p, e in zip(parts, self.executables, strict=True)]
        whole = spec is not None and spec.WhichOneof("Type") in PIPELINES
        self._whole = _described(spec.description, function) if whole else None
        if self._whole is not None:
            _check_outputs(self._whole, self._descriptions)

    def __call__(
        self, values: Mapping[str, Any], *, state: state.States | None = None, listener: Listener | None = None
    ) -> dict[str, Any]:
        """Return the outputs by name: arrays, PIL images, a label, a dictionary of probabilities.

        Args:
            values: arrays, tensors or PIL images by input name.
            state: states that live on between calls (`make_state`).
            listener: called for each op.

        Raises:
            InterpretError: inputs that do not fit, or an op that fails.
        """
        if self._whole is None:
            return self._run(0, values, state, listener)
        features.check_names([f.name for f in self._whole.input], values)
        features_so_far = dict(values)
        for i, description in enumerate(self._descriptions):
            inputs = {f.name: features_so_far[f.name] for f in description.input if f.name in features_so_far}
            features_so_far |= self._run(i, inputs, state, listener)
        return {f.name: features_so_far[f.name] for f in self._whole.output}

    @property
    def functions(self) -> list[str]:
        """The names of the functions of all parts."""
        return list(dict.fromkeys(name for part in self.parts for name in part.program.functions))

    @property
    def inputs(self) -> list[Any]:
        """`FeatureDescription` messages of the inputs; none for a bare program."""
        described = self._whole if self._whole is not None else self._descriptions[0]
        return [] if described is None else list(described.input)

    @property
    def outputs(self) -> list[str]:
        """The names of the outputs, in order."""
        if self._whole is not None:
            return [feature.name for feature in self._whole.output]
        return [v.name for v in self.executables[-1].function.outputs]

    @property
    def ports(self) -> tuple[dict[str, Var], dict[str, Var]]:
        """The inputs, outputs and states of the function by name, without values that pass between chunks."""
        entries, exits = dict[str, Var](), dict[str, Var]()
        for executable in reversed(self.executables):
            entries |= executable.function.inputs
            exits |= {v.name: v for v in executable.function.outputs}
        if self._whole is not None:
            taken = {f.name for f in self._whole.input}
            entries = {n: v for n, v in entries.items() if n in taken or types.is_state(v.sym_type)}
        return entries, {name: exits[name] for name in self.outputs}

    def sample(self, seed: int = 0) -> dict[str, Any]:
        """Draw random inputs with the default shapes (see `sample_inputs`)."""
        shapes, pictures = features.default_shapes(self.inputs), features.images(self.inputs)
        drawn: dict[str, Any] = {}
        for executable in reversed(self.executables):
            drawn |= sample_function(executable.function, seed=seed, shapes=shapes, images=pictures)
        return {name: drawn[name] for name in shapes or drawn if name in drawn}

    def _run(
        self, part: int, values: Mapping[str, Any], state: Any, listener: Listener | None
    ) -> dict[str, Any]:
        description, executable = self._descriptions[part], self.executables[part]
        _check_ids(self._rows[part], values)
        if state is not None and len(self.executables) > 1:
            state = {name: box for name, box in state.items() if name in executable.function.inputs}
        if description is None:
            return executable(values, state=state, listener=listener)
        outputs = executable(features.bind(description.input, values), state=state, listener=listener)
        return features.present(description.output, outputs)

    def make_state(self) -> state.States:
        """Return new states of the model, all zero; of a chain, those of all its models."""
        states: state.States = {}
        for executable in self.executables:
            states |= executable.make_state()
        return states


def _indexed_rows(function: Function) -> dict[str, int]:
    """Return for each input of ids, which may be floats, the rows of the table that they index."""
    numeric = {
        n: v for n, v in function.inputs.items() if not types.is_state(v.sym_type) and np_dtype(v).kind in "iuf"
    }
    tables = {name: indexed_rows(var) for name, var in numeric.items()}
    return {name: rows for name, rows in tables.items() if rows is not None}


def _check_ids(rows: Mapping[str, int], values: Mapping[str, Any]) -> None:
    """Raise `InterpretError` unless ids are rows of their table or count back from its end."""
    for name in rows.keys() & (values.keys() if isinstance(values, Mapping) else ()):
        try:
            ids = np.asarray(values[name])
        except (ValueError, RuntimeError):
            continue  # it is no array, and binding will say so
        truncated = np.trunc(ids) if ids.dtype.kind in "iuf" else np.zeros(0)
        outside = truncated[(truncated >= rows[name]) | (truncated < -rows[name])]
        if outside.size:
            raise InterpretError(
                f"the input {name} holds {outside.flat[0]:g}, and indexes a table of {rows[name]} rows; "
                f"give ids from 0 to {rows[name] - 1}"
            )


def _read(model: Any, member: str | int | None = None) -> ModelSequence:
    """Return the models to run, in order, as ML Programs."""
    if isinstance(model, Predictor) and member is None:
        return model.models
    if isinstance(model, ct.models.MLModel) and model.package_path:
        model = model.package_path
    if member is None and isinstance(model, (str, os.PathLike)):
        return load_sequence(model)
    if member is None and isinstance(model, ModelSequence):
        return ModelSequence.of_parts(model.spec, list(map(runnable, model.parts)))
    loaded = load(model) if member is None else load_member(model, member)
    return ModelSequence(loaded.spec, {"model": loaded})


def program_of(predictor: Predictor) -> Loaded | None:
    """Return the ML Program that a predictor read; None for a neural network or a pipeline."""
    spec = predictor.models.spec
    return predictor.parts[0] if spec is not None and spec.WhichOneof("Type") == PROGRAM else None


def _function_name(loaded: Loaded, name: str | None) -> str | None:
    """Return a given name, or else the default function of the package."""
    default = None if loaded.spec is None else loaded.spec.description.defaultFunctionName
    return name or default or None


def _described(description: Any, function: str | None) -> Any:
    """Return the part of a description that is about a function; all of it where there is only one."""
    functions = {f.name: f for f in description.functions}
    name = function or description.defaultFunctionName
    if functions and name not in functions:
        raise UnknownName("function", name, functions)
    return functions.get(name, description)


def _description(loaded: Loaded, function: Function) -> Any:
    """Return the description of a function's inputs and outputs; None for a program without a specification."""
    if loaded.spec is None:
        return None
    name = next(n for n, f in loaded.program.functions.items() if f is function)
    return _described(loaded.spec.description, name)


def _check_outputs(whole: Any, members: Iterable[Any]) -> None:
    """Raise `InterpretError` if an output of a pipeline is neither an output of its models nor an input."""
    names = {f.name for m in members if m is not None for f in m.output} | {f.name for f in whole.input}
    for feature in whole.output:
        if feature.name not in names:
            raise InterpretError(
                f"the output {feature.name!r} of the pipeline is made by none of its models, which make "
                f"{', '.join(sorted(names))}; build the pipeline again"
            )


def bound(loaded: Loaded, values: Mapping[str, Any], function: str | None = None) -> dict[str, Any]:
    """Return the inputs of a program, given those of the model that it is part of.

    Raises:
        InterpretError: the description of the model does not allow them, or ids are no rows of their table.
        UnknownName: no such function or input.
    """
    chosen = function_of(loaded.program, _function_name(loaded, function))
    _check_ids(_indexed_rows(chosen), values)
    description = _description(loaded, chosen)
    if description is not None:
        return features.bind(description.input, values)
    features.check_names(chosen.inputs, values)
    return dict(values)


def _run_sized(
    folder: Path, values: Mapping[str, Any], size: str | None, outputs: Iterable[str] | None, **how: Any
) -> dict[str, Any]:
    """Run the model of a folder of sizes that fits the values, padded if none fits exactly."""
    rows, padding = size_index.read(folder)
    plain = (torch.Tensor, list, tuple)
    values = {n: features.as_array(n, v) if isinstance(v, plain) else v for n, v in values.items()}
    call = size_index.choose_call(rows, padding, values, size)
    if call.lengths and outputs is not None:
        raise InterpretError(
            "outputs= names inner values, which are not cropped; give inputs of one of the sizes"
        )
    results = run(folder / call.row.package, call.values, function=call.row.function, outputs=outputs, **how)
    return {name: call.cropped(name, value, padding) for name, value in results.items()}


@door("values", "state", "precision", draws=True)
def run(
    model: Any,
    values: Mapping[str, Any],
    *,
    precision: str = "fp32",
    function: str | None = None,
    outputs: Iterable[str] | None = None,
    listener: Listener | None = None,
    state: state.States | None = None,
    device: str = "cpu",
    member: str | int | None = None,
    engine: str = INTERPRETER,
) -> dict[str, Any]:
    """Run a model once, op by op, on any machine.

    Args:
        model: path of a package, of a Core AI model or of a folder of sizes, MLModel, or MIL program.
        values: inputs by name: numpy arrays, tensors, PIL images.
        precision: "fp32" computes fp16 programs exactly in fp32; "fp16" rounds as stored; "ane" estimates the
            arithmetic measured on Neural Engines.
        function: name of the function, or of a size. Default: the package's default, or the size that fits the
            shapes of the values.
        outputs: names of outputs, or of any other value of the function; all outputs by default.
        listener: told about each op.
        state: from `Predictor.make_state`; it keeps what the model wrote.
        device: "cpu", or "cuda" where torch has one.
        member: of a pipeline, the one model to run, by name or number; all of them when absent.
        engine: "interpreter", or "coreai": Apple's Core AI runtime, in a process of its own, runs the model as
            it is stored. It takes neither `precision` nor `listener`, `device` and `member`.

    Returns:
        The outputs by name, as Core ML gives them: numpy arrays of the stated shapes and dtypes, PIL images,
        labels, dictionaries of probabilities.

    Raises:
        InterpretError: inputs that do not fit, an op that is not known or fails.
        LoadError: the model cannot be read.
        SurgeryError: an argument is not what the call takes.
        UnknownName: no such function, value or engine.
    """
    how: dict[str, Any] = {"precision": precision, "listener": listener, "state": state, "device": device}
    if engine != INTERPRETER:
        return registry.engine(engine)(model, values, function=function, outputs=outputs, member=member, **how)
    if isinstance(model, (str, os.PathLike)) and size_index.is_sized(Path(model).expanduser()):
        return _run_sized(Path(model).expanduser(), values, function, outputs, **how)
    predictor = Predictor(
        model, precision=precision, function=function, fuse=False, device=device, member=member
    )
    if outputs is None:
        return predictor(values, state=state, listener=listener)
    names = list(outputs)
    probe = Probe(predictor.executables, names, precision, listener)
    results = predictor(values, state=state, listener=probe)
    by_name = probe.found | results
    return {name: by_name[name] for name in names}
