"""A mask that is added as an input to a model that has none, so that what is filled up can be hidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from anesurgery.errors import SurgeryError
from anesurgery.facts.padded_windows import unpadded
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
from anesurgery.shipping.filling import InputShapes, free_length, steps_along, unfolded

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
