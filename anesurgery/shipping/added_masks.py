"""Add a mask input to a model that has none, so that its inputs may be padded (`sizes(mask=...)`).

The new input has shape (1, length) and dtype fp32: 1 at real positions, 0 at padding. It is subtracted from the
scores of every softmax over the length, and multiplied with the input of every convolution whose window goes
along the length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from anesurgery.errors import SurgeryError
from anesurgery.facts.windows import unpadded
from anesurgery.files.joining import default_function
from anesurgery.files.package import Loaded
from anesurgery.mil import (
    Function,
    Operation,
    Var,
    add_input,
    constant,
    dtype_name,
    function_of,
    is_symbolic,
    mb,
    replace_uses,
    types,
    walk_ops,
)
from anesurgery.rewriting.ml_program import MLProgram
from anesurgery.shipping.filling import InputShapes, free_length, total_stride, unfolded

HIDING = 1e4
"""What is subtracted from hidden scores: the sum of two such masks is still finite in fp16."""


def with_mask(loaded: Loaded, mask: str, axes: Mapping[str, int], largest: InputShapes) -> Loaded:
    """Return a copy of a model with a mask input.

    Downstream of a convolution with stride 2, every second position of the mask is used.

    Args:
        loaded: a model of dynamic shapes.
        mask: the name of the new input.
        axes: input -> its axis that is as long as the mask.
        largest: the shapes of the inputs at the largest size.

    Raises:
        PassError: an op cannot have other lengths.
        SurgeryError: the name is taken, there is nothing to hide, attention is fused, or a softmax is over
            another axis, or over an axis that is no part of the length.
    """
    source, axis = next(iter(axes.items()))
    copied = MLProgram(loaded).clone().loaded
    function = function_of(copied.program, default_function(copied))
    if mask in function.inputs:
        raise SurgeryError(f"sizes: the model has an input {mask!r} already; give its shapes instead of mask=")
    length = function.inputs[source].shape[axis]
    if not is_symbolic(length):
        raise SurgeryError(f"sizes: axis {axis} of {source} is fixed, so that a mask has nothing to hide")
    axis_lengths = _AxisLengths(loaded, function, axes, largest)
    softmaxes, windows = _softmaxes(function, axis_lengths), _convs_along_length(function, axis_lengths)
    if not softmaxes and not windows:
        raise SurgeryError(
            "sizes: no softmax goes over the length of the inputs, nor does a window of a convolution, so "
            "that a mask hides nothing"
        )
    masks = _Masks(function, add_input(function, mask, (1, length), types.fp32))
    with function:
        for op in softmaxes:
            _mask_scores(function, op, masks.bias(axis_lengths.stride(op.x, op.x.rank - 1)))
        for op, along in windows:
            _mask_input(function, op, along, masks.of(axis_lengths.stride(unpadded(op), along)))
    return copied


class _AxisLengths:
    """The sizes of all axes at two lengths of the inputs, to see which axes depend on it.

    Raises:
        PassError: an op cannot have one of these two lengths.
    """

    def __init__(
        self, loaded: Loaded, function: Function, axes: Mapping[str, int], largest: InputShapes
    ) -> None:
        self.multiple = total_stride(function)
        self.length = self.multiple * free_length(function, [n for shape in largest.values() for n in shape])
        probe = {
            key: tuple(self.length if axes.get(key) == a else n for a, n in enumerate(shape))
            for key, shape in largest.items()
        }
        name = default_function(loaded)
        self.probe_sizes, self.largest_sizes = (
            _shapes_by_name(unfolded(loaded, name, shapes)) for shapes in (probe, largest)
        )

    def differs(self, var: Var, axis: int) -> bool:
        """Return whether an axis depends on the length of the inputs."""
        return bool(self.probe_sizes[var.name][axis] != self.largest_sizes[var.name][axis])

    def stride(self, var: Var, axis: int) -> int:
        """Return how many input positions one position along an axis stands for, downstream of strides.

        Raises:
            SurgeryError: the axis is no whole part of the length.
        """
        places = int(self.probe_sizes[var.name][axis])
        if self.length % places or self.multiple % (self.length // places):
            words = (
                f"{places} long where the inputs have {self.length} places, so that a mask has none for each"
            )
            raise SurgeryError(f"sizes: axis {axis} of %{var.name} is {words}")
        return self.length // places


def _shapes_by_name(function: Function) -> dict[str, Sequence[int]]:
    """Return name -> shape, of all values of a function."""
    made = (v for op in walk_ops(function) for v in op.outputs if types.is_tensor(v.sym_type))
    return {v.name: v.shape for v in (*function.inputs.values(), *made)}


class _Masks:
    """The mask at each stride, and as a bias; each is built once, at the beginning of the function."""

    def __init__(self, function: Function, given: Var) -> None:
        self.first = next(op for op in function.operations if op.op_type != "const")
        self.given, self.ready = given, dict[tuple[str, int], Var]()

    def of(self, share: int) -> Var:
        """Return the mask at every `share`-th position."""
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
        """Return 0 at real positions and a large negative number at hidden ones."""
        if ("bias", share) not in self.ready:
            mask = self.of(share)
            less = mb.sub(x=mask, y=np.float32(1), before_op=self.first, name=f"{mask.name}_hidden")
            self.ready["bias", share] = mb.mul(
                x=less, y=np.float32(HIDING), before_op=self.first, name=f"{mask.name}_bias"
            )
        return self.ready["bias", share]


def _softmaxes(function: Function, axis_lengths: _AxisLengths) -> list[Operation]:
    """Return the softmax ops over the length.

    Raises:
        SurgeryError: a mask cannot be added to one of them.
    """
    found = list[Operation]()
    for op in walk_ops(function):
        fused = op.op_type == "scaled_dot_product_attention"
        if fused and axis_lengths.differs(op.key, op.key.rank - 2):
            raise SurgeryError(
                f"sizes: {op.name} is fused attention, and cannot get a mask; convert for iOS 17, "
                "or with a mask"
            )
        if op.op_type == "softmax" and axis_lengths.differs(op.x, constant(op.axis)):
            if constant(op.axis) not in (-1, op.x.rank - 1):
                raise SurgeryError(f"sizes: {op.name} is a softmax over axis {constant(op.axis)}, not the last")
            found.append(op)
    return found


def _convs_along_length(function: Function, axis_lengths: _AxisLengths) -> list[tuple[Operation, int]]:
    """Return convolutions whose window goes along the length, each with that axis."""
    along = [
        (
            op,
            [
                a
                for a in range(2, op.x.rank)
                if op.weight.shape[a] != 1 and axis_lengths.differs(unpadded(op), a)
            ],
        )
        for op in walk_ops(function)
        if op.op_type == "conv"
    ]
    return [(op, axes[0]) for op, axes in along if len(axes) == 1]


def _mask_input(function: Function, op: Operation, axis: int, given: Var) -> None:
    """Multiply the input of a convolution by the mask, upstream of its padding."""
    x = unpadded(op)
    before = op if x is op.x else op.x.op
    new = [a for a in range(x.rank) if a not in (0, axis)]
    wide = mb.expand_dims(x=given, axes=new, before_op=before, name=f"{given.name}_{op.name}_mask")
    if dtype_name(x) != "fp32":
        wide = mb.cast(x=wide, dtype=dtype_name(x), before_op=before, name=f"{wide.name}_cast")
    kept = mb.mul(x=x, y=wide, before_op=before, name=f"{given.name}_{op.name}_masked")
    replace_uses(function, anchor_op=kept.op, end_op=before, old_var=x, new_var=kept)


def _mask_scores(function: Function, op: Operation, bias: Var) -> None:
    """Add the bias to the scores of one softmax."""
    scores, wide = op.x, bias
    if scores.rank > 2:
        new = list(range(1, scores.rank - 1))
        wide = mb.expand_dims(x=bias, axes=new, before_op=op, name=f"{op.name}_bias")
    if dtype_name(scores) != "fp32":
        wide = mb.cast(x=wide, dtype=dtype_name(scores), before_op=op, name=f"{op.name}_bias_cast")
    masked = mb.add(x=scores, y=wide, before_op=op, name=f"{op.name}_masked")
    replace_uses(function, anchor_op=masked.op, end_op=op, old_var=scores, new_var=masked)
