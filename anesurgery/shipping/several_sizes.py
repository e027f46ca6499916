"""Make a model at several fixed sizes that share their weights (`anesurgery.sizes`), and estimate their times.

The engine runs fixed shapes even where it does not run a range of them. A dynamic model is fixed at each size;
a model of one size is made dynamic first (`resized`); a PyTorch module or a function is converted at each
size. Then tables are shared (`position_tables`), and it is decided how inputs between two sizes are padded
(`filling`). `SizedModel.save` writes a folder with `sizes.json`.

`size_times` makes the model at up to 8 lengths, inspects each on the target chip, and returns a `SizeTimes`: a
function of the length that interpolates between these 8. The user calls it before `choose_sizes(time=...)`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from anesurgery import frontend
from anesurgery.doors import door
from anesurgery.errors import IsPipeline, LoadError, SurgeryError, UnknownName
from anesurgery.files.interface import describe, new_spec
from anesurgery.files.joining import default_function, joined
from anesurgery.files.package import WEIGHTS, Loaded, write_spec
from anesurgery.files.protobuf import proto, to_proto
from anesurgery.files.sequence import ModelSequence
from anesurgery.files.size_index import INDEX, Padding, SizeRow, in_words, index_text, is_sized
from anesurgery.files.weights import WeightWriter
from anesurgery.files.writing import check_place, link_or_copy, write_atomically
from anesurgery.frontend.resampling import Resampled, resampled_constants
from anesurgery.interpret.features import refused_shape
from anesurgery.loading import load, load_sequence
from anesurgery.mil import (
    Function,
    Operation,
    Var,
    any_symbolic,
    constant,
    ct,
    exclusive,
    function_of,
    silent_host,
)
from anesurgery.ops import CONTROL, LISTS
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.inspector import inspect
from anesurgery.placement.target import Target
from anesurgery.registry import make_pass
from anesurgery.rewriting.ml_program import MLProgram
from anesurgery.rewriting.newer_opsets import raised
from anesurgery.rewriting.passes import run_pass
from anesurgery.rewriting.session import Session
from anesurgery.semantics.reading import each_axis, slice_places
from anesurgery.shipping.filling import largest_shapes, lengths_of, padding_along, padding_between, with_mask
from anesurgery.shipping.position_tables import compute_tables, share_tables
from anesurgery.shipping.resized import REFUSED, REMEDY, lengthened
from anesurgery.splitting.merge import FUNCTIONS, merge
from anesurgery.splitting.size_choice import Lengths, read_lengths

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
PACKAGE = "model.mlpackage"
"""The one package, where one can hold several functions."""
ONE_MODEL = "what was converted is one model at all sizes, and is read as that model between them too"
"""The assumption behind padding a model that was converted at each size."""


@dataclass(frozen=True)
class SizedModel:
    """A model at several sizes, the smallest first.

    Attributes:
        models: name of a size -> the model at it; they share their weights.
        shapes: name of a size -> the shapes of the inputs that were given.
        padding: how inputs between two sizes are padded, if that is proved to change nothing; else why not.
        assumed: assumptions that the numbers of the model do not show, such as learned tables that are cut.
        computed: tables that each call computes, because storing them would take more than 2 % of the weights,
            with their PSNR.
    """

    models: Mapping[str, Loaded]
    shapes: Mapping[str, Shapes]
    padding: Padding
    assumed: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [f"{name}: {in_words(self.shapes[name])}" for name in self.models]
        assumed = [f"assumed: {words}" for words in self.assumed]
        return "\n".join([*rows, f"between sizes: {self.padding}", *assumed, *self.computed])

    @property
    def one_package(self) -> bool:
        """Whether one package holds all sizes, as functions (iOS 18)."""
        return len(self.models) > 1 and max(m.version for m in self.models.values()) >= FUNCTIONS

    @property
    def rows(self) -> tuple[SizeRow, ...]:
        """The entries of `sizes.json`."""
        if self.one_package:
            return tuple(SizeRow(name, name, PACKAGE, shapes) for name, shapes in self.shapes.items())
        return tuple(SizeRow(name, None, f"{name}.mlpackage", shapes) for name, shapes in self.shapes.items())

    def inspect(self, target: Target | str | None = None) -> dict[str, Inspection]:
        """Return name of a size -> where its ops run.

        Raises:
            UnknownName: no such target.
        """
        return {name: inspect(model, target) for name, model in self.models.items()}

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write a folder with `sizes.json` and the packages, atomically.

        From iOS 18 on it holds one package with a function for each size. Below it holds a package for each
        size, whose weight files are one file, linked where the disk can, else copied.

        Args:
            path: the folder.
            overwrite: may what is there be replaced?

        Raises:
            LoadError: it exists, or cannot be written.
        """
        target = Path(path).expanduser().absolute()
        if overwrite and target.exists() and not is_sized(target):
            raise LoadError(f"{target} is no folder of sizes, and is not replaced; choose another place")
        for model in self.models.values():
            check_place(target, overwrite, model.source)
        return write_atomically(target, self._write, overwrite)

    def _write(self, folder: Path) -> None:
        folder.mkdir()
        if self.one_package:
            merge(self.models, folder / PACKAGE)
        else:
            _write_packages(self.models, folder)
        (folder / INDEX).write_text(index_text(self.rows, self.padding), encoding="utf-8")


def _write_packages(models: Mapping[str, Loaded], folder: Path) -> None:
    """Write a package for each model, all with the same weight file."""
    places = {name: folder / f"{name}.mlpackage" for name in models}
    files = {id(f): f for m in models.values() for f in (m.weights, *m.other_weights) if f is not None}
    first, *others = (place / "Data" / WEIGHTS for place in places.values())
    first.mkdir(parents=True)
    for model in models.values():
        model.check_source()
    with (first / "weight.bin").open("w+b") as file:
        writer = WeightWriter(file, *files.values())
        specs = {name: _spec_at_writer(model, writer) for name, model in models.items()}
        writer.finish()
    for other in others:
        other.mkdir(parents=True)
        link_or_copy(first / "weight.bin", other / "weight.bin")
    for name, spec in specs.items():
        write_spec(spec, places[name])


def _spec_at_writer(model: Loaded, writer: WeightWriter) -> Any:
    """Return a model's specification, after its weights were given to a writer."""
    given = new_spec(model.program, model.version) if model.spec is None else model.spec
    spec = proto.Model_pb2.Model(specificationVersion=model.version)
    spec.description.CopyFrom(given.description)
    spec.mlProgram.CopyFrom(to_proto(model.program, model.version, writer.add, given.mlProgram))
    describe(spec, model.program)
    return spec


@door("model")
@exclusive()
def sizes(
    model: Any,
    shapes: Mapping[str, Sequence[Sequence[int]]],
    *,
    mask: str | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> SizedModel:
    """Make a model at several fixed sizes, which run on the engine even if a range does not.

    Args:
        model: path, MLModel or MIL program with dynamic or fixed shapes; a pipeline or chain, which becomes one
            program; a PyTorch module, which is converted at each size (iOS 18, fp16, inputs named as in
            `forward`); or a function of the shapes of a size, {"ids": (1, 64)}, that returns a model.
        shapes: input -> its shape at each size, {"ids": [(1, 64), (1, 128)]}. Inputs that are left out follow
            the others.
        mask: name of a mask input to add: (1, length), fp32, 1 for real positions and 0 for padding. If sizes
            differ by several lengths, each gets its own, called mask_input_axis.
        dtypes: of a PyTorch module, input -> "int32" or "float32"; float32 for those left out.

    Returns:
        The `SizedModel`: the model at each size. Its `save` writes a folder that shares the weights.

    Raises:
        LoadError: the model cannot be read.
        SurgeryError: no sizes, a size that occurs twice or that the model does not take, or an op that cannot
            have that size.
        UnknownName: no such input.
    """
    wanted = _shapes_of_sizes(shapes)
    computed = tuple[str, ...]()
    is_module = hasattr(model, "state_dict")
    if dtypes is not None and not is_module:
        raise SurgeryError("sizes: dtypes= is for a PyTorch module; other models say what their inputs are")
    convert = converter(model, dtypes) if is_module else model
    if callable(convert):
        if mask is not None:
            raise SurgeryError(
                "sizes: mask= is added to a model of dynamic shapes; have the function give a mask"
            )
        sizes_by_name = _by_name(wanted)
        models, computed, padding = _convert_each_size(convert, sizes_by_name, share=is_module)
        assumed: tuple[str, ...] = () if padding.why_not else (ONE_MODEL,)
    else:
        try:
            whole = load(model)
        except IsPipeline:
            whole = join_models(getattr(model, "package_path", None) or model)
        loaded = _unrolled(whole)
        loaded, assumed = _as_dynamic(loaded, wanted, unrolled=_has_loops(whole) and not _has_loops(loaded))
        if mask is not None:
            loaded, wanted = _add_masks(loaded, wanted, mask)
        sizes_by_name = _by_name(wanted)
        models = _at_each_size(loaded, sizes_by_name)
        padding = padding_between(loaded, wanted)
    return SizedModel(models, sizes_by_name, padding, assumed, computed)


def _unrolled(loaded: Loaded) -> Loaded:
    """Return the model with loops and lists unrolled, whose shapes cannot be followed."""
    if not _has_loops(loaded):
        return loaded
    subject = MLProgram(loaded).clone()
    run_pass(make_pass("unroll_loop"), subject.program, Session())
    return subject.loaded


def _has_loops(loaded: Loaded) -> bool:
    """Return whether a model has loops or lists."""
    chosen = function_of(loaded.program, default_function(loaded))
    return any(op.op_type in CONTROL | LISTS for op in chosen.operations)


def _as_dynamic(loaded: Loaded, wanted: Sequence[Shapes], *, unrolled: bool) -> tuple[Loaded, tuple[str, ...]]:
    """Return the model with dynamic axes where it has one fixed size, and what that assumes."""
    chosen = function_of(loaded.program, default_function(loaded))
    for name in wanted[0]:
        if name not in chosen.inputs:
            raise UnknownName("input", name, chosen.inputs)
    if not any(any_symbolic(v.shape or ()) for v in chosen.inputs.values()):
        try:
            return lengthened(loaded, wanted)
        except SurgeryError as error:
            if not unrolled:
                raise
            words = "its loops were unrolled, for as many rounds as its one size has"
            raise SurgeryError(f"{error} ({words})") from error
    for shapes in wanted:
        if refused := refused_shape(loaded.described_inputs, shapes):
            raise SurgeryError(f"sizes: the model does not take {refused}")
    return loaded, ()


def _add_masks(
    loaded: Loaded, wanted: Sequence[dict[str, Shape]], mask: str
) -> tuple[Loaded, list[dict[str, Shape]]]:
    """Return the model with a mask for each length that needs one, and its shapes at each size."""
    _at_each_size(loaded, {"the first size": wanted[0]})
    lengths, sizes = lengths_of(loaded, wanted), [dict(size) for size in wanted]
    if not lengths:
        raise SurgeryError(f"sizes: mask={mask!r} has no length: the sizes do not differ by one")
    several = len(lengths) > 1
    masked = loaded
    for length in lengths:
        if several and not padding_along(loaded, wanted, length).why_not:
            continue
        source, axis = next(iter(length.axes.items()))
        name = f"{mask}_{source}_{axis}" if several else mask
        masked = with_mask(masked, name, length.axes, largest_shapes(sizes))
        sizes = [{**size, name: (1, size[source][axis])} for size in sizes]
    return masked, sizes


def _shapes_of_sizes(shapes: Mapping[str, Sequence[Sequence[int]]]) -> list[dict[str, Shape]]:
    """Check the shapes, and return them for each size, in rising order of elements.

    Raises:
        SurgeryError: there are no sizes, an input has fewer, a size occurs twice, or is no shape.
    """
    counts = {name: len(listed) for name, listed in shapes.items()}
    if not counts or not all(counts.values()):
        raise SurgeryError('sizes: there are no sizes; give shapes, as {"ids": [(1, 64), (1, 128)]}')
    if len(set(counts.values())) > 1:
        words = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise SurgeryError(f"sizes: each input needs a shape for each size, but {words}")
    for name, listed in shapes.items():
        for shape in listed:
            if isinstance(shape, (str, int)) or not all(type(n) is int and n > 0 for n in shape):
                raise SurgeryError(f"sizes: {shape!r} of {name} is no shape; give whole numbers, as (1, 64)")
    count = next(iter(counts.values()))
    found = [{name: tuple(listed[i]) for name, listed in shapes.items()} for i in range(count)]
    for i, size in enumerate(found):
        if size in found[:i]:
            raise SurgeryError(f"sizes: {in_words(size)} is there twice; leave one out")
    return sorted(found, key=lambda size: [math.prod(shape) for shape in size.values()])


def _by_name(wanted: Sequence[Shapes]) -> dict[str, Shapes]:
    """Return the sizes, each by a name from the lengths that differ: size_64, size_224x320."""
    columns = zip(*([n for shape in size.values() for n in shape] for size in wanted), strict=False)
    differing = dict.fromkeys(column for column in columns if len(set(column)) > 1)
    rows = zip(*differing, strict=True) if differing else [next(iter(wanted[0].values()))]
    names = ["size_" + "x".join(map(str, row)) for row in rows]
    if len(set(names)) < len(names):  # inputs of other ranks, whose columns do not tell the sizes apart
        names = [f"{name}_{i}" for i, name in enumerate(names)]
    return dict(zip(names, wanted, strict=True))


def _at_each_size(loaded: Loaded, wanted: Mapping[str, Shapes]) -> dict[str, Loaded]:
    """Return a dynamic model at each size, with shared tables."""
    models = {name: _at_size(loaded, name, shapes) for name, shapes in wanted.items()}
    share_tables(_functions(models))
    return models


def _convert_each_size(
    convert: Callable[[dict[str, Shape]], Any], wanted: Mapping[str, Shapes], *, share: bool
) -> tuple[dict[str, Loaded], tuple[str, ...], Padding]:
    """Convert a model at each size; return the models, sentences on computed tables, and how to pad."""
    models, resampled = dict[str, Loaded](), dict[str, list[Resampled]]()
    for name, size in wanted.items():
        with resampled_constants() as resampled[name]:
            models[name] = _check_size(load(convert(dict(size))), size)
    padding = _padding_of_conversions(models, wanted)
    if not share:
        return models, (), padding
    computed = compute_tables(_functions(models), resampled)
    share_tables(_functions(models))
    return models, tuple(computed), padding


def _padding_of_conversions(models: Mapping[str, Loaded], wanted: Mapping[str, Shapes]) -> Padding:
    """Return how to pad inputs between sizes that were converted separately.

    The largest model is made dynamic, and fixed at the other sizes. If that gives the converted models, op by
    op, they are one model at many lengths, for which padding can be proved.
    """
    apart = "each size was converted separately, and they cannot be proved to be one model"
    largest = list(models)[-1]
    try:
        followed, _ = lengthened(models[largest], list(wanted.values()))
        at_sizes = {name: _at_size(followed, name, shapes) for name, shapes in wanted.items()}
    except SurgeryError as error:
        reason = str(error).removeprefix(f"{REFUSED}: ").removesuffix(f"; {REMEDY}")
        return Padding({}, {}, f"{apart}: {reason}")
    functions, others = _functions(models), _functions(at_sizes)
    for name, function in functions.items():
        if op := first_difference(function, others[name]):
            return Padding({}, {}, f"{apart}: at {name}, {op} is another than {largest} has at that length")
    return padding_between(followed, list(wanted.values()))


def _functions(models: Mapping[str, Loaded]) -> dict[str, Function]:
    return {name: function_of(m.program, default_function(m)) for name, m in models.items()}


def _at_size(loaded: Loaded, name: str, shapes: Shapes) -> Loaded:
    """Return the model at one size; its weights are shared."""
    subject = MLProgram(loaded).clone()
    session = Session(prove_sites=False)
    run_pass(make_pass("fix_shapes", shapes=dict(shapes)), subject.program, session)
    if not session.changes:
        reasons = "; ".join(str(refusal) for _, refusal in session.refusals)
        raise SurgeryError(f"sizes: {name} cannot be made: {reasons}")
    return subject.loaded


def _check_size(loaded: Loaded, shapes: Shapes) -> Loaded:
    """Return a model that was converted for a size, after checking that it has that size.

    Raises:
        SurgeryError: the model has another size.
        UnknownName: it has no such input.
    """
    chosen = function_of(loaded.program, default_function(loaded))
    for name, shape in shapes.items():
        if name not in chosen.inputs:
            raise UnknownName("input", name, chosen.inputs)
        if tuple(chosen.inputs[name].shape) != shape:
            raise SurgeryError(
                f"sizes: {name} was to be {shape}, and the model that was converted takes "
                f"{tuple(chosen.inputs[name].shape)}"
            )
    return loaded


# -- a pipeline or chain as one model, so that padding is followed through all its parts -----------------


def join_models(place: str | os.PathLike[str]) -> Loaded:
    """Join the models of a pipeline or chain into one, with the outputs of the last ones.

    Args:
        place: the package or folder.

    Raises:
        LoadError: it cannot be read, or a model reads what no other gives.
        SurgeryError: a picture passes between two models, where it is rounded to integers; or an op would mean
            something else in the newest opset among them.
    """
    path = Path(place).expanduser()
    models = load_sequence(path)
    version = max(part.version for part in models.parts)
    parts = [
        replace(part, program=raised(part.program, version, f"model {i} of {path}"))
        for i, part in enumerate(models.parts, 1)
    ]
    return joined(ModelSequence.of_parts(models.spec, parts), path)


# -- whether two functions are equal, op by op, whatever their names -------------------------------------

FREE_PARAMETERS = {"reshape": {"shape"}, "slice_by_index": {"begin", "end", "stride", "begin_mask", "end_mask"}}
"""Parameters that can say the same in several ways; result shapes and slices are compared instead."""


def first_difference(one: Function, other: Function) -> str:
    """Return the name of the first op that the other function has not; "" where both are equal.

    Args:
        one: a function; its inputs are in the order of the other's.
        other: the function to compare with.
    """
    partners = dict(zip(one.inputs.values(), other.inputs.values(), strict=False))
    for a, b in zip_longest(*([op for op in f.operations if op.op_type != "const"] for f in (one, other))):
        if a is None or b is None or not _ops_are_equal(a, b, partners):
            return str((a or b).name)
        partners.update(zip(a.outputs, b.outputs, strict=True))
    same = len(one.outputs) == len(other.outputs) and all(
        _are_equal_values(x, y, partners) for x, y in zip(one.outputs, other.outputs, strict=True)
    )
    return "" if same else "an output"


def _ops_are_equal(a: Operation, b: Operation, partners: Mapping[Var, Var]) -> bool:
    """Return whether two ops have the same type, parameters and operands.

    `partners` maps each value before them in one function to its equal in the other.
    """
    shapes = [[(v.shape, v.dtype) for v in op.outputs] for op in (a, b)]
    if a.op_type != b.op_type or shapes[0] != shapes[1] or a.blocks or b.blocks:
        return False
    if a.op_type == "slice_by_index" and not _slices_are_equal(a, b):
        return False
    defaults = dict(a.default_inputs().items())
    for name in (a.inputs.keys() | b.inputs.keys()) - FREE_PARAMETERS.get(a.op_type, set()):
        x, y = (_values_of_operand(op.inputs.get(name)) for op in (a, b))
        if not x or not y:  # one op states it, and the other leaves it at its default
            if not all(_constants_are_equal(v.val, defaults.get(name)) for v in (*x, *y)):
                return False
        elif len(x) != len(y) or not all(_are_equal_values(*pair, partners) for pair in zip(x, y, strict=True)):
            return False
    return True


def _values_of_operand(value: Any) -> tuple[Any, ...]:
    """Return the values of an operand as a tuple: none, one or several."""
    return () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _are_equal_values(x: Var, y: Var, partners: Mapping[Var, Var]) -> bool:
    """Return whether two values are made by partner ops, or are equal constants."""
    value, other = constant(x), constant(y)
    if value is None or other is None:
        return value is other and partners.get(x) is y
    return _constants_are_equal(value, other)


def _constants_are_equal(x: Any, y: Any) -> bool:
    """Return whether two constants are equal, bit for bit."""
    a, b = np.asarray(x), np.asarray(y)
    if a.dtype.kind in "US" or b.dtype.kind in "US":
        return bool(np.array_equal(a, b))
    return a is b or (a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


def _slices_are_equal(a: Operation, b: Operation) -> bool:
    """Return whether two slices take the same positions, which must be constant."""
    places = slice_places(a)
    steps = [each_axis(op, "stride", 1) for op in (a, b)]
    return places is not None and places == slice_places(b) and steps[0] == steps[1]


# -- a PyTorch module, converted at the shapes of one size -----------------------------------------------

KINDS = {"float32": np.float32, "int32": np.int32}
"""Accepted values of `dtypes`."""


def converter(module: Any, dtypes: Mapping[str, str] | None) -> Callable[[Mapping[str, tuple[int, ...]]], Any]:
    """Return a function that converts a module at given shapes, for iOS 18 and in fp16.

    Args:
        module: a PyTorch module; the parameters of its `forward` name the inputs.
        dtypes: input -> "int32" or "float32"; float32 for those left out.

    Returns:
        A function of {input: shape}. It raises `LoadError` where the module cannot be converted, and
        `UnknownName` where `forward` has no such parameter.

    Raises:
        SurgeryError: an unknown dtype.
    """
    kinds = dict(dtypes or {})
    for name, kind in kinds.items():
        if kind not in KINDS:
            raise SurgeryError(f"sizes: the type of {name} is {kind!r}; give one of {', '.join(KINDS)}")
    parameters = [p for p in signature(module.forward).parameters.values() if p.kind < p.VAR_POSITIONAL]

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
        return _convert_module(module, {n: (shapes[n], KINDS[kinds.get(n, "float32")]) for n in names})

    return at


def _convert_module(module: Any, inputs: Mapping[str, tuple[tuple[int, ...], Any]]) -> Any:
    """Trace and convert the module."""
    frontend.register()
    examples = tuple(torch.from_numpy(np.zeros(shape, kind)) for shape, kind in inputs.values())
    was_training = module.training
    try:
        with torch.no_grad(), silent_host():
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


PROBES = 8
"""Lengths at which the model is made and estimated: each costs a conversion; times between change little."""


@dataclass(frozen=True)
class SizeTimes:
    """The expected milliseconds of one call, as a function of the length: `times(300)`.

    Attributes:
        milliseconds: length -> time, at the lengths that were estimated. Lengths at which the model stays on
            the CPU are left out.
        inspections: length -> where the ops run.
        weights: bytes of the weights of all these lengths, stored once.
        program: bytes that each length adds.
    """

    milliseconds: Mapping[int, float]
    inspections: Mapping[int, Inspection]
    weights: int
    program: int

    def package(self, count: int) -> int:
        """Return the largest size, in bytes, of a package with this many sizes."""
        return self.weights + count * self.program

    def __call__(self, length: int) -> float:
        """Return the expected milliseconds at a length.

        Interpolates linearly between the estimated lengths; beyond them, takes the time of the nearest one.
        """
        return float(np.interp(length, list(self.milliseconds), list(self.milliseconds.values())))


@door("model")
def size_times(
    model: Any,
    shapes: Mapping[str, Sequence[int | None]],
    lengths: Lengths,
    target: Target | str,
    *,
    multiple: int = 1,
    dtypes: Mapping[str, str] | None = None,
) -> SizeTimes:
    """Estimate the time of a call at several lengths, as `time` for `choose_sizes`.

    The model is made at up to 8 lengths between the least and the largest, evenly spread over their logarithms.

    Args:
        model: as for `sizes`: with dynamic shapes, a PyTorch module, or a function that converts at shapes.
        shapes: input -> its shape, with None for the length: {"ids": (1, None)}.
        lengths: as for `choose_sizes`.
        target: of one chip, as "M4/macOS 15".
        multiple: as for `choose_sizes`.
        dtypes: as for `sizes`.

    Returns:
        The `SizeTimes`: called with a length, it gives the expected milliseconds of a call.

    Raises:
        LoadError: the model cannot be read.
        SurgeryError: no shape has a length, the model cannot have one of the lengths, or there is no estimate
            for this target.
        UnknownName: no such target or input.
    """
    device = Target.parse(target)
    if not any(None in shape for shape in shapes.values()):
        raise SurgeryError('size_times: no shape has a length; put None in its place, as {"ids": (1, None)}')
    probes = _probe_lengths(read_lengths(lengths), multiple)
    sized = sizes(
        model,
        {name: [tuple(n or length for n in shape) for length in probes] for name, shape in shapes.items()},
        dtypes=dtypes,
    )
    inspections = dict(zip(probes, sized.inspect(device).values(), strict=True))
    milliseconds = {length: inspection.time.ms for length, inspection in inspections.items() if inspection.time}
    if not milliseconds:
        notes = (note for note in inspections[probes[-1]].notes if note.startswith("no time"))
        why = next(notes, "no time is known")
        choose = "choose by padding, without a model"
        raise SurgeryError(f"no length has an estimated time on {device}: {why}; {choose}")
    return SizeTimes(milliseconds, inspections, *_stored_bytes(sized))


def _stored_bytes(sized: SizedModel) -> tuple[int, int]:
    """Return the bytes that `save` writes: (all weights, the program of one size)."""
    with TemporaryDirectory(prefix="anesurgery-") as scratch:
        folder = sized.save(Path(scratch) / "sized")
        # sizes link to one file of weights, which counts once
        weights = {file.stat().st_ino: file.stat().st_size for file in folder.rglob("*.bin")}
        programs = sum(file.stat().st_size for file in folder.rglob("*.mlmodel"))
    return sum(weights.values()), programs // len(sized.models)


def _probe_lengths(share_of_length: Mapping[int, float], multiple: int) -> list[int]:
    """Return rising lengths between the shortest and the longest call, evenly spaced on a log scale."""
    first, last = (-(-n // multiple) * multiple for n in (min(share_of_length), max(share_of_length)))
    spread = np.geomspace(first, last, PROBES).round().astype(int).tolist()
    return sorted({min(-(-n // multiple) * multiple, last) for n in spread})
