"""One model at several fixed sizes, whose weights are stored once."""

from __future__ import annotations

import io
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from inspect import signature
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anesurgery import frontend
from anesurgery.checking.exactness import nearness
from anesurgery.doors import door
from anesurgery.errors import IsPipeline, LoadError, SurgeryError, UnknownName
from anesurgery.facts.dependence import slice_back
from anesurgery.facts.windows import unpadded
from anesurgery.files.interface import describe, new_spec
from anesurgery.files.joining import default_function, join
from anesurgery.files.package import WEIGHTS, Loaded, write_spec
from anesurgery.files.protobuf import proto, to_proto
from anesurgery.files.sequence import ModelSequence
from anesurgery.files.size_index import INDEX, Padding, SizeRow, in_words, index_text, is_sized
from anesurgery.files.weights import WeightWriter
from anesurgery.files.writing import check_place, write_atomically
from anesurgery.frontend.resampling import Resampled, resampled_constants
from anesurgery.interpret.core import evaluate
from anesurgery.interpret.features import allows
from anesurgery.loading import load, load_sequence
from anesurgery.mil import (
    Array,
    Function,
    Operation,
    Var,
    add_input,
    any_symbolic,
    constant,
    consumers,
    ct,
    dtype_name,
    exclusive,
    function_of,
    is_output,
    is_symbolic,
    mb,
    next_op,
    quiet_host,
    replace_uses,
    types,
    walk_ops,
)
from anesurgery.ops import CONTROL, LISTS, POINTWISE
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.inspector import inspect
from anesurgery.placement.target import Target
from anesurgery.registry import make_pass
from anesurgery.rewriting.ml_program import MLProgram
from anesurgery.rewriting.newer_opsets import raised
from anesurgery.rewriting.passes import run_pass
from anesurgery.rewriting.session import Session
from anesurgery.semantics.reading import each_axis, slice_places
from anesurgery.shipping.filling import (
    InputShapes,
    along,
    free_length,
    lengths_of,
    longest,
    padding_between,
    steps_along,
    unfolded,
)
from anesurgery.shipping.resized import REFUSED, REMEDY, lengthened
from anesurgery.shipping.shared_tables import SHARE, share_tables, weights_of
from anesurgery.splitting.merge import FUNCTIONS, merge

# -- tables that are one stored table resampled to each size ---------------------------------------------
#
# Tables that are one stored table resampled to each size are computed from it, where storing them costs much.
#
# Positions of pictures are interpolated to the size of each: a table for each size, of which none begins
# another. The table that is given is stored once instead, and each size multiplies it by the matrix of its
# rows and that of its columns. In fp16 this rounds in another way than the stored table did, so that it is
# done only where the tables make the weights more than `SHARE` larger than those of the largest size; how near
# is said.

LEAST = 70.0
"""Decibels: a computed table that is further from the stored one is not used. Rounding leaves about 80."""


@dataclass(frozen=True)
class _Table:
    """A stored table that holds a resampled one at its end.

    Attributes:
        op: the constant.
        source: what was resampled to make it.
        head: the numbers before it, as the positions of class tokens are: (rows, channels), or empty.
        channels_last: is it (height, width, channels)?
    """

    op: Operation
    source: Resampled
    head: Array
    channels_last: bool

    @property
    def array(self) -> Array:
        """Its numbers."""
        value: Array = self.op.outputs[0].val
        return value

    @property
    def grid(self) -> Array:
        """What was resampled, in the order and the type of the table."""
        grid = self.source.x[0].transpose(1, 2, 0) if self.channels_last else self.source.x[0]
        return np.ascontiguousarray(grid.astype(self.array.dtype))

    @property
    def matrices(self) -> list[Array]:
        """The matrix of the rows and that of the columns, in its type."""
        return [m.astype(self.array.dtype) for m in (self.source.rows, self.source.columns)]


def compute_tables(
    functions: Mapping[str, Function], resampled: Mapping[str, Sequence[Resampled]]
) -> list[str]:
    """Let functions compute their resampled tables from the one that was given, where that is worth it.

    Args:
        functions: name of a size -> what is edited; in rising order, the last is the largest.
        resampled: name of a size -> the constants that its conversion resampled.

    Returns:
        What is said of each table that is computed.
    """
    tables = {
        name: [t for one in resampled[name] if (t := _table_of(function, one)) is not None]
        for name, function in functions.items()
    }
    every = [t for listed in tables.values() for t in listed]
    last = list(functions)[-1]
    more = sum(t.array.nbytes for t in every) - sum(t.array.nbytes for t in tables[last])
    if more <= SHARE * weights_of(functions[last]) or _computed_bytes(every) >= sum(
        t.array.nbytes for t in every
    ):
        return []
    return [
        words
        for name, function in functions.items()
        for table in tables[name]
        if (words := _compute(function, name, table))
    ]


def _computed_bytes(tables: Sequence[_Table]) -> int:
    """Bytes of what tables are computed from; what is equal is stored once."""
    parts = [part for t in tables for part in (t.grid, t.head, *t.matrices)]
    return sum({part.tobytes(): part.nbytes for part in parts}.values())


def _table_of(function: Function, source: Resampled) -> _Table | None:
    """The table of a function that ends with what was resampled, bit for bit."""
    for op in function.operations:
        value = op.outputs[0].val if op.op_type == "const" else None
        if isinstance(value, np.ndarray) and value.dtype.kind == "f" and _may_be_computed(op.outputs[0]):
            for last in (True, False):
                if (head := _head(value, source, last)) is not None:
                    return _Table(op, source, head, last)
    return None


def _may_be_computed(var: Var) -> bool:
    """Is it read by ops on single elements only, which take what is computed as well as constants?"""
    return not is_output(var) and all(op.op_type in POINTWISE for op in consumers(var))


def _head(value: Array, source: Resampled, channels_last: bool) -> Array | None:
    """The rows before what was resampled; None where a table does not end with it."""
    picture = source.result[0]
    tail = (picture.transpose(1, 2, 0) if channels_last else picture).astype(value.dtype).ravel()
    flat, channels = value.ravel(), picture.shape[0]
    if len(source.x) != 1 or flat.size < tail.size or flat[-tail.size :].tobytes() != tail.tobytes():
        return None
    head = flat[: -tail.size]
    rows = channels_last and value.ndim > 1 and value.shape[-1] == channels
    whole = rows and value.shape[-2] * channels == value.size
    return head.reshape(-1, channels) if whole else head if not head.size else None


def _compute(function: Function, name: str, table: _Table) -> str:
    """Put the computation in the place of a table; what is said of it, or "" where it is too far off."""
    op, array = table.op, table.array
    with function:
        new = _built(table, next_op(op))
    (value,) = evaluate(slice_back([new], set()), {}, [new], "fp16")
    near = nearness({"table": array.astype(np.float64)}, {"table": value.to(torch.float64).numpy()})
    added = slice_back([new], set())
    if near < LEAST:
        function.remove_ops(added[::-1])
        return ""
    replace_uses(function, anchor_op=new.op, old_var=op.outputs[0], new_var=new)
    function.remove_ops([op])
    size = "bit for bit" if np.isinf(near) else f"{near:.0f} dB near the table"
    return f"{name} computes %{op.name} at each call, from the one table that all sizes store: {size}"


def _built(table: _Table, before: Operation) -> Var:
    """The table, computed."""
    grid, name, shape = table.grid, table.op.name, table.array.shape
    (rows, columns), height = table.matrices, table.source.x.shape[2]
    kept = [np.array_equal(m, np.eye(*m.shape)) for m in (rows, columns)]
    if table.channels_last:
        value = mb.const(val=grid.reshape(height, -1), before_op=before, name=f"{name}_grid")
        if not kept[0]:
            value = mb.matmul(x=rows, y=value, before_op=before, name=f"{name}_rows")
        picture = (len(rows), grid.shape[1], grid.shape[2])
        value = mb.reshape(x=value, shape=picture, before_op=before, name=f"{name}_picture")
        if not kept[1]:
            value = mb.matmul(x=columns[None], y=value, before_op=before, name=f"{name}_columns")
    else:
        value = mb.const(val=grid, before_op=before, name=f"{name}_grid")
        if not kept[0]:
            value = mb.matmul(x=rows[None], y=value, before_op=before, name=f"{name}_rows")
        if not kept[1]:
            value = mb.matmul(x=value, y=columns.T[None], before_op=before, name=f"{name}_columns")
    if not table.head.size:
        return mb.reshape(x=value, shape=shape, before_op=before, name=f"{name}_computed")
    lead = shape[:-2]
    tail = mb.reshape(x=value, shape=(*lead, -1, shape[-1]), before_op=before, name=f"{name}_places")
    head = table.head.reshape(*lead, -1, shape[-1])
    return mb.concat(values=[head, tail], axis=len(shape) - 2, before_op=before, name=f"{name}_computed")


# -- a mask that is added as an input to a model that has none -------------------------------------------

HIDING = 1e4
"""What is taken from scores that are hidden: two such masks are still numbers of fp16."""


def with_mask(loaded: Loaded, mask: str, axes: Mapping[str, int], largest: InputShapes) -> Loaded:
    """A copy of a model with one more input, 1 where a place counts and 0 where it is hidden.

    Its shape is (1, length), its type fp32. Each softmax over a last axis of that length has 10,000 taken
    from the scores of places that are hidden; what a convolution with a window along the length reads is
    multiplied by the mask. Behind convolutions that move by more than 1, every second place of it counts, say.

    Args:
        loaded: a model of dynamic shapes.
        mask: the name of the new input.
        axes: input -> its axis that is as long as the mask.
        largest: the shapes of the inputs at the largest size.

    Raises:
        PassError: an op cannot have other lengths.
        SurgeryError: the name is taken, there is nothing to hide, a softmax is fused or over another axis, or
            goes over what is no part of the length.
    """
    source, axis = next(iter(axes.items()))
    copied = MLProgram(loaded).clone().loaded
    function = function_of(copied.program, default_function(copied))
    if mask in function.inputs:
        raise SurgeryError(f"sizes: the model has an input {mask!r} already; give its shapes instead of mask=")
    length = function.inputs[source].shape[axis]
    if not is_symbolic(length):
        raise SurgeryError(f"sizes: axis {axis} of {source} is fixed, so that a mask has nothing to hide")
    follows = _Follows(loaded, function, axes, largest)
    softmaxes, windows = _softmaxes(function, follows), _windows(function, follows)
    if not softmaxes and not windows:
        raise SurgeryError(
            "sizes: no softmax goes over the length of the inputs, nor does a window of a convolution, so "
            "that a mask hides nothing"
        )
    masks = _Masks(function, add_input(function, mask, (1, length), types.fp32))
    with function:
        for op in softmaxes:
            _hide(function, op, masks.bias(follows.share(op.x, op.x.rank - 1)))
        for op, along in windows:
            _zero(function, op, along, masks.of(follows.share(unpadded(op), along)))
    return copied


class _Follows:
    """How long axes are at two lengths of the inputs.

    Raises:
        PassError: an op cannot have the lengths at which this is seen.
    """

    def __init__(
        self, loaded: Loaded, function: Function, axes: Mapping[str, int], largest: InputShapes
    ) -> None:
        self.multiple = steps_along(function)
        self.length = self.multiple * free_length(function, [n for shape in largest.values() for n in shape])
        probe = {
            key: tuple(self.length if axes.get(key) == a else n for a, n in enumerate(shape))
            for key, shape in largest.items()
        }
        name = default_function(loaded)
        self.there, self.last = (_sizes(unfolded(loaded, name, shapes)) for shapes in (probe, largest))

    def differs(self, var: Var, axis: int) -> bool:
        """Is an axis as long as the inputs are, or a part of that?"""
        return bool(self.there[var.name][axis] != self.last[var.name][axis])

    def share(self, var: Var, axis: int) -> int:
        """How many places of the inputs one of a value along an axis stands for, as convolutions move by steps.

        Raises:
            SurgeryError: it is no part of the length.
        """
        places = int(self.there[var.name][axis])
        if self.length % places or self.multiple % (self.length // places):
            words = (
                f"{places} long where the inputs have {self.length} places, so that a mask has none for each"
            )
            raise SurgeryError(f"sizes: axis {axis} of %{var.name} is {words}")
        return self.length // places


def _sizes(function: Function) -> dict[str, Sequence[int]]:
    """The shapes of all values, by name."""
    made = (v for op in walk_ops(function) for v in op.outputs if types.is_tensor(v.sym_type))
    return {v.name: v.shape for v in (*function.inputs.values(), *made)}


class _Masks:
    """The mask, and every second place of it, or third, each made once, at the beginning."""

    def __init__(self, function: Function, given: Var) -> None:
        self.first = next(op for op in function.operations if op.op_type != "const")
        self.given, self.ready = given, dict[tuple[str, int], Var]()

    def of(self, share: int) -> Var:
        """1 where a place counts, and 0 where it is hidden."""
        if share == 1:
            return self.given
        if ("mask", share) not in self.ready:
            self.ready["mask", share] = mb.slice_by_index(
                x=self.given,
                begin=[0, 0],
                end=[0, 0],
                stride=[1, share],
                begin_mask=[True, True],
                end_mask=[True, True],
                before_op=self.first,
                name=f"{self.given.name}_each_{share}",
            )
        return self.ready["mask", share]

    def bias(self, share: int) -> Var:
        """0 where a place counts, and a large negative number where it is hidden."""
        if ("bias", share) not in self.ready:
            mask = self.of(share)
            less = mb.sub(x=mask, y=np.float32(1), before_op=self.first, name=f"{mask.name}_hidden")
            self.ready["bias", share] = mb.mul(
                x=less, y=np.float32(HIDING), before_op=self.first, name=f"{mask.name}_bias"
            )
        return self.ready["bias", share]


def _softmaxes(function: Function, follows: _Follows) -> list[Operation]:
    """Those over keys of the length.

    Raises:
        SurgeryError: there are none, or some that a mask cannot be added to.
    """
    found = list[Operation]()
    for op in walk_ops(function):
        fused = op.op_type == "scaled_dot_product_attention"
        if fused and follows.differs(op.key, op.key.rank - 2):
            raise SurgeryError(
                f"sizes: {op.name} is fused attention, and cannot get a mask; convert for iOS 17, "
                "or with a mask"
            )
        if op.op_type == "softmax" and follows.differs(op.x, constant(op.axis)):
            if constant(op.axis) not in (-1, op.x.rank - 1):
                raise SurgeryError(f"sizes: {op.name} is a softmax over axis {constant(op.axis)}, not the last")
            found.append(op)
    return found


def _windows(function: Function, follows: _Follows) -> list[tuple[Operation, int]]:
    """Convolutions whose windows go over one axis of the length, and which."""
    along = [
        (op, [a for a in range(2, op.x.rank) if op.weight.shape[a] != 1 and follows.differs(unpadded(op), a)])
        for op in walk_ops(function)
        if op.op_type == "conv"
    ]
    return [(op, axes[0]) for op, axes in along if len(axes) == 1]


def _zero(function: Function, op: Operation, axis: int, given: Var) -> None:
    """Multiply what a convolution reads by the mask, before its padding."""
    x = unpadded(op)
    before = op if x is op.x else op.x.op
    new = [a for a in range(x.rank) if a not in (0, axis)]
    wide = mb.expand_dims(x=given, axes=new, before_op=before, name=f"{given.name}_{op.name}_mask")
    if dtype_name(x) != "fp32":
        wide = mb.cast(x=wide, dtype=dtype_name(x), before_op=before, name=f"{wide.name}_cast")
    kept = mb.mul(x=x, y=wide, before_op=before, name=f"{given.name}_{op.name}_masked")
    replace_uses(function, anchor_op=kept.op, end_op=before, old_var=x, new_var=kept)


def _hide(function: Function, op: Operation, bias: Var) -> None:
    """Add the mask to the scores of one softmax."""
    scores, wide = op.x, bias
    if scores.rank > 2:
        new = list(range(1, scores.rank - 1))
        wide = mb.expand_dims(x=bias, axes=new, before_op=op, name=f"{op.name}_bias")
    if dtype_name(scores) != "fp32":
        wide = mb.cast(x=wide, dtype=dtype_name(scores), before_op=op, name=f"{op.name}_bias_cast")
    masked = mb.add(x=scores, y=wide, before_op=op, name=f"{op.name}_masked")
    replace_uses(function, anchor_op=masked.op, end_op=op, old_var=scores, new_var=masked)


# -- the sizes -------------------------------------------------------------------------------------------

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
PACKAGE = "model.mlpackage"
"""The one package, where one can hold several functions."""


ONE_MODEL = "what was converted is one model at all sizes, and is read as that model between them too"


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
        """Does one package hold all sizes, as functions (iOS 18)?"""
        return len(self.models) > 1 and max(m.version for m in self.models.values()) >= FUNCTIONS

    @property
    def rows(self) -> tuple[SizeRow, ...]:
        """The content of `sizes.json`."""
        joined = self.one_package
        return tuple(
            SizeRow(name, name if joined else None, PACKAGE if joined else f"{name}.mlpackage", shapes)
            for name, shapes in self.shapes.items()
        )

    def inspect(self, target: Target | str | None = None) -> dict[str, Inspection]:
        """Where the ops run at each size.

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
    """A package for each model, each with the same weight file."""
    places = {name: folder / f"{name}.mlpackage" for name in models}
    files = {id(f): f for m in models.values() for f in (m.weights, *m.other_weights) if f is not None}
    first, *others = (place / "Data" / WEIGHTS for place in places.values())
    first.mkdir(parents=True)
    for model in models.values():
        model.check_source()
    with (first / "weight.bin").open("w+b") as file:
        writer = WeightWriter(file, *files.values())
        specs = {name: _spec(model, writer) for name, model in models.items()}
        writer.finish()
    for other in others:
        other.mkdir(parents=True)
        _link(first / "weight.bin", other / "weight.bin")
    for name, spec in specs.items():
        write_spec(spec, places[name])


def _spec(model: Loaded, writer: WeightWriter) -> Any:
    """The specification of a model, whose weights go to a writer."""
    given = new_spec(model.program, model.version) if model.spec is None else model.spec
    spec = proto.Model_pb2.Model(specificationVersion=model.version)
    spec.description.CopyFrom(given.description)
    spec.mlProgram.CopyFrom(to_proto(model.program, model.version, writer.add, given.mlProgram))
    describe(spec, model.program)
    return spec


def _link(source: Path, place: Path) -> None:
    """Another name of a file; a copy where the file system has only one."""
    try:
        os.link(source, place)
    except OSError:
        shutil.copyfile(source, place)


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
    wanted = _in_order(shapes)
    assumed, computed = tuple[str, ...](), tuple[str, ...]()
    is_module = hasattr(model, "state_dict")
    if dtypes is not None and not is_module:
        raise SurgeryError("sizes: dtypes= is for a PyTorch module; other models say what their inputs are")
    convert = converter(model, dtypes) if is_module else model
    if callable(convert):
        if mask is not None:
            raise SurgeryError(
                "sizes: mask= is added to a model of dynamic shapes; have the function give a mask"
            )
        names = _names(wanted)
        models, computed, padding = _converted(convert, dict(zip(names, wanted, strict=True)), share=is_module)
        assumed = () if padding.why_not else (ONE_MODEL,)
    else:
        try:
            whole = load(model)
        except IsPipeline:
            whole = joined(getattr(model, "package_path", None) or model)
        loaded = _straight(whole)
        loaded, assumed = _dynamic(loaded, wanted, unrolled=_loops(whole) and not _loops(loaded))
        if mask is not None:
            loaded, wanted = _masked(loaded, wanted, mask)
        names = _names(wanted)
        models = _fixed(loaded, dict(zip(names, wanted, strict=True)))
        padding = padding_between(loaded, wanted)
    return SizedModel(models, dict(zip(names, wanted, strict=True)), padding, assumed, computed)


def _straight(loaded: Loaded) -> Loaded:
    """The model without loops and lists, whose shapes cannot be followed, where their rounds are known."""
    if not _loops(loaded):
        return loaded
    subject = MLProgram(loaded).clone()
    run_pass(make_pass("unroll_loop"), subject.program, Session())
    return subject.loaded


def _loops(loaded: Loaded) -> bool:
    """Does a model have loops or lists?"""
    chosen = function_of(loaded.program, default_function(loaded))
    return any(op.op_type in CONTROL | LISTS for op in chosen.operations)


def _dynamic(loaded: Loaded, wanted: Sequence[Shapes], *, unrolled: bool) -> tuple[Loaded, tuple[str, ...]]:
    """The model, with dynamic axes where it has one fixed size; and what that assumes.

    Raises:
        SurgeryError: an op cannot be another size.
        UnknownName: no such input.
    """
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
        if not allows(loaded.described_inputs, shapes):
            raise SurgeryError(
                f"sizes: the model does not take {in_words(shapes)}; its description has another range"
            )
    return loaded, ()


def _masked(
    loaded: Loaded, wanted: Sequence[dict[str, Shape]], mask: str
) -> tuple[Loaded, list[dict[str, Shape]]]:
    """The model with a mask, and its shapes at each size.

    Raises:
        SurgeryError: no mask can be added.
    """
    _fixed(loaded, {"the first size": wanted[0]})
    lengths, sizes = lengths_of(loaded, wanted), [dict(size) for size in wanted]
    if not lengths:
        raise SurgeryError(f"sizes: mask={mask!r} has no length: the sizes do not differ by one")
    several = len(lengths) > 1
    masked = loaded
    for length in lengths:
        if several and not along(loaded, wanted, length).why_not:
            continue
        source, axis = next(iter(length.axes.items()))
        name = f"{mask}_{source}_{axis}" if several else mask
        masked = with_mask(masked, name, length.axes, longest(sizes))
        sizes = [{**size, name: (1, size[source][axis])} for size in sizes]
    return masked, sizes


def _in_order(shapes: Mapping[str, Sequence[Sequence[int]]]) -> list[dict[str, Shape]]:
    """The shapes of each size, in rising order of elements.

    Raises:
        SurgeryError: there are none, not as many for each input, some twice, or some that are no shapes.
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


def _names(wanted: Sequence[Shapes]) -> list[str]:
    """A name for each size, of the lengths that differ: size_64, size_224x320."""
    columns = list(zip(*([n for shape in size.values() for n in shape] for size in wanted), strict=False))
    differing = dict.fromkeys(column for column in columns if len(set(column)) > 1)
    if not differing:
        return ["size_" + "x".join(map(str, next(iter(wanted[0].values()))))]
    names = ["size_" + "x".join(map(str, row)) for row in zip(*differing, strict=True)]
    if len(set(names)) < len(names):  # inputs of other ranks, whose columns do not tell the sizes apart
        names = [f"{name}_{i}" for i, name in enumerate(names)]
    return names


def _fixed(loaded: Loaded, wanted: Mapping[str, Shapes]) -> dict[str, Loaded]:
    """The model at each size.

    Raises:
        SurgeryError: it cannot have that size.
        UnknownName: no such input.
    """
    models = {name: _at(loaded, name, shapes) for name, shapes in wanted.items()}
    _share(models)
    return models


def _converted(
    convert: Callable[[dict[str, Shape]], Any], wanted: Mapping[str, Shapes], *, share: bool
) -> tuple[dict[str, Loaded], tuple[str, ...], Padding]:
    """The model that is converted at each size, what is said of tables that are computed, and how it is padded.

    Raises:
        LoadError: it cannot be converted.
        SurgeryError: what was converted has another size.
    """
    models, resampled = dict[str, Loaded](), dict[str, list[Resampled]]()
    for name, size in wanted.items():
        with resampled_constants() as resampled[name]:
            models[name] = _checked(load(convert(dict(size))), size)
    padding = _padding_of(models, wanted)
    if not share:
        return models, (), padding
    computed = compute_tables(_functions(models), resampled)
    _share(models)
    return models, tuple(computed), padding


def _padding_of(models: Mapping[str, Loaded], wanted: Mapping[str, Shapes]) -> Padding:
    """How inputs are run between sizes that were converted each by itself.

    The largest is followed at the other sizes, as a model of one size is. Where that gives each of the others,
    op by op, it is one model at many lengths, for which padding can be proved.
    """
    apart = "each size was converted separately, and they are not shown to be one model"
    largest = list(models)[-1]
    try:
        followed, _ = lengthened(models[largest], list(wanted.values()))
        at_sizes = {name: _at(followed, name, shapes) for name, shapes in wanted.items()}
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


def _share(models: Mapping[str, Loaded]) -> None:
    """Tables of shorter sizes are cut from those of the largest."""
    share_tables(_functions(models))


def _at(loaded: Loaded, name: str, shapes: Shapes) -> Loaded:
    """The model at one size; its weights are shared.

    Raises:
        SurgeryError: an op cannot have that size.
    """
    subject = MLProgram(loaded).clone()
    session = Session(prove_sites=False)
    run_pass(make_pass("fix_shapes", shapes=dict(shapes)), subject.program, session)
    if not session.changes:
        reasons = "; ".join(str(refusal) for _, refusal in session.refusals)
        raise SurgeryError(f"sizes: {name} cannot be made: {reasons}")
    return subject.loaded


def _checked(loaded: Loaded, shapes: Shapes) -> Loaded:
    """A model that was converted for a size, if it has that size.

    Raises:
        SurgeryError: it has another.
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


# Models that run one after the other as one model: what is padded for the first is followed through all.


def joined(place: str | os.PathLike[str]) -> Loaded:
    """The models of a pipeline or of a chain as one, which gives what the last ones give.

    Args:
        place: its package or folder.

    Raises:
        LoadError: it cannot be read, or one reads what none gives.
        SurgeryError: a picture passes between two of them, which rounds to whole numbers there, or an op would
            mean something else in the newest opset among them.
    """
    path = Path(place).expanduser()
    models = load_sequence(path)
    described = models.spec.description
    ends = {f.name for f in (*described.input, *described.output)}
    for part in models.parts:
        for feature in () if part.spec is None else part.spec.description.output:
            if feature.name not in ends and feature.type.WhichOneof("Type") == "imageType":
                raise SurgeryError(
                    f"sizes: the picture {feature.name} passes between two models of {path}, and is rounded "
                    "there to whole numbers; make each model of the pipeline at its sizes by itself"
                )
    version = max(part.version for part in models.parts)
    parts = [
        replace(part, program=raised(part.program, version, f"model {i} of {path}"))
        for i, part in enumerate(models.parts, 1)
    ]
    whole = join(ModelSequence.of_parts(models.spec, parts), [f.name for f in described.output])
    spec = proto.Model_pb2.Model(specificationVersion=version)
    spec.description.CopyFrom(described)
    spec.mlProgram.SetInParent()
    files = tuple(f for part in parts for f in (part.weights, *part.other_weights) if f is not None)
    return Loaded(whole, spec, path.resolve(), other_weights=files)


# Whether two functions are the same, op by op: names apart, and shapes and slices by what they come to.

TOLD = {"reshape": {"shape"}, "slice_by_index": {"begin", "end", "stride", "begin_mask", "end_mask"}}
"""Parameters that may say the same in several ways: the shapes of the results show it, and `_sliced_alike`."""


def first_difference(one: Function, other: Function) -> str:
    """The name of the first op that is not in the other function too; "" where all are.

    Args:
        one: a function; its inputs are in the order of the other's.
        other: the same, or not.
    """
    partners = dict(zip(one.inputs.values(), other.inputs.values(), strict=False))
    for a, b in zip_longest(*([op for op in f.operations if op.op_type != "const"] for f in (one, other))):
        if a is None or b is None or not _alike(a, b, partners):
            return str((a or b).name)
        partners.update(zip(a.outputs, b.outputs, strict=True))
    same = len(one.outputs) == len(other.outputs) and all(map(_of(partners), one.outputs, other.outputs))
    return "" if same else "an output"


def _alike(a: Operation, b: Operation, partners: dict[Var, Var]) -> bool:
    """Is it the same op, of the same values?"""
    shapes = [[(v.shape, v.dtype) for v in op.outputs] for op in (a, b)]
    if a.op_type != b.op_type or shapes[0] != shapes[1] or a.blocks or b.blocks:
        return False
    if a.op_type == "slice_by_index" and not _sliced_alike(a, b):
        return False
    told, defaults, same = TOLD.get(a.op_type, set()), dict(a.default_inputs().items()), _of(partners)
    for name in (a.inputs.keys() | b.inputs.keys()) - told:
        x, y = (_list(op.inputs.get(name)) for op in (a, b))
        if not x or not y:
            stated = [v.val for v in (*x, *y)]
            if any(not _equal(val, defaults.get(name)) for val in stated):
                return False
        elif len(x) != len(y) or not all(map(same, x, y)):
            return False
    return True


def _list(value: Any) -> tuple[Any, ...]:
    """What an operand holds, one or several."""
    return () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _of(partners: dict[Var, Var]) -> Any:
    """Says of two values whether they are the same: made by the same op, or equal constants."""

    def same(x: Var, y: Var) -> bool:
        held, other = constant(x), constant(y)
        if held is None or other is None:
            return held is other and partners.get(x) is y
        return _equal(held, other)

    return same


def _equal(x: Any, y: Any) -> bool:
    """Are two constants equal, bit for bit?"""
    a, b = np.asarray(x), np.asarray(y)
    if a.dtype.kind in "US" or b.dtype.kind in "US":
        return bool(np.array_equal(a, b))
    return a is b or (a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


def _sliced_alike(a: Operation, b: Operation) -> bool:
    """Do two slices take the same places? Where they begin and end must be known."""
    places = slice_places(a)
    steps = [each_axis(op, "stride", 1) for op in (a, b)]
    return places is not None and places == slice_places(b) and steps[0] == steps[1]


# A PyTorch module as a model of one size: traced and converted at the shapes of that size.

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
        return _converted_at(
            module, {name: (shapes[name], KINDS[kinds.get(name, "float32")]) for name in names}
        )

    return at


def _converted_at(module: Any, inputs: Mapping[str, tuple[tuple[int, ...], Any]]) -> Any:
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
