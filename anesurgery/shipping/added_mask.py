"""A mask that is added as an input to a model that has none, so that what is filled up can be hidden."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
    any_symbolic,
    constant,
    dtype_name,
    function_of,
    is_symbolic,
    mb,
    types,
    walk_ops,
)
from anesurgery.rewriting.ml_program import MLProgram
from anesurgery.shipping.filling import InputShapes, free_length, steps_along, unfolded

HIDING = 1e4
"""What is taken from scores that are hidden: two such masks are still numbers of fp16."""


def with_mask(loaded: Loaded, mask: str, axes: Mapping[str, int], largest: InputShapes) -> Loaded:
    """A copy of a model with one more input, 1 where a place counts and 0 where it is hidden.

    Its shape is (1, length), its type fp32. Each softmax over a last axis of dynamic length has 10,000 taken
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
    softmaxes, windows = _softmaxes(function), _windows(function)
    if not softmaxes and not windows:
        raise SurgeryError(
            "sizes: no softmax goes over the length of the inputs, nor does a window of a convolution, so "
            "that a mask hides nothing"
        )
    shares = _shares(loaded, function, axes, largest)
    masks = _Masks(function, add_input(function, mask, (1, length), types.fp32))
    with function:
        for op in softmaxes:
            _hide(function, op, masks.bias(shares(op.x, op.x.rank - 1)))
        for op in windows:
            x = unpadded(op)
            _zero(function, op, masks.of(shares(x, _dynamic(x)[0])))
    return copied


def _shares(
    loaded: Loaded, function: Function, axes: Mapping[str, int], largest: InputShapes
) -> Callable[[Var, int], int]:
    """How many places of the inputs one of a value along an axis stands for, as convolutions move by steps.

    Raises:
        PassError: an op cannot have the lengths at which this is seen.
    """
    multiple = steps_along(function)
    length = multiple * free_length(function, [n for shape in largest.values() for n in shape])
    shapes = {
        key: tuple(length if axes.get(key) == a else n for a, n in enumerate(shape))
        for key, shape in largest.items()
    }
    there = unfolded(loaded, default_function(loaded), shapes)
    sizes = {
        v.name: v.shape for v in (*there.inputs.values(), *(o for op in walk_ops(there) for o in op.outputs))
    }

    def share(var: Var, axis: int) -> int:
        places = int(sizes[var.name][axis])
        if length % places or multiple % (length // places):
            words = f"{places} long where the inputs have {length} places, so that a mask has none for each"
            raise SurgeryError(f"sizes: axis {axis} of %{var.name} is {words}")
        return length // places

    return share


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


def _softmaxes(function: Function) -> list[Operation]:
    """Those over keys.

    Raises:
        SurgeryError: there are none, or some that a mask cannot be added to.
    """
    found = list[Operation]()
    for op in walk_ops(function):
        if op.op_type == "scaled_dot_product_attention":
            raise SurgeryError(
                f"sizes: {op.name} is fused attention, to which no mask is added; convert for iOS 17, "
                "or with a mask"
            )
        if op.op_type == "softmax" and any_symbolic([op.x.shape[constant(op.axis)]]):
            if constant(op.axis) not in (-1, op.x.rank - 1):
                raise SurgeryError(f"sizes: {op.name} is a softmax over axis {constant(op.axis)}, not the last")
            found.append(op)
    return found


def _windows(function: Function) -> list[Operation]:
    """Convolutions whose windows go over one axis of dynamic length."""
    return [
        op
        for op in walk_ops(function)
        if op.op_type == "conv" and len(along := _dynamic(unpadded(op))) == 1 and op.weight.shape[along[0]] != 1
    ]


def _dynamic(x: Var) -> list[int]:
    """The spatial axes of dynamic length."""
    return [a for a in range(2, x.rank) if is_symbolic(x.shape[a])]


def _zero(function: Function, op: Operation, given: Var) -> None:
    """Multiply what a convolution reads by the mask, before its padding."""
    x = unpadded(op)
    before = op if x is op.x else op.x.op
    (axis,) = _dynamic(x)
    new = [a for a in range(x.rank) if a not in (0, axis)]
    wide = mb.expand_dims(x=given, axes=new, before_op=before, name=f"{op.name}_mask")
    if dtype_name(x) != "fp32":
        wide = mb.cast(x=wide, dtype=dtype_name(x), before_op=before, name=f"{op.name}_mask_cast")
    kept = mb.mul(x=x, y=wide, before_op=before, name=f"{op.name}_masked")
    function.replace_uses_of_var_after_op(anchor_op=kept.op, end_op=before, old_var=x, new_var=kept)


def _hide(function: Function, op: Operation, bias: Var) -> None:
    """Add the mask to the scores of one softmax."""
    scores, wide = op.x, bias
    if scores.rank > 2:
        new = list(range(1, scores.rank - 1))
        wide = mb.expand_dims(x=bias, axes=new, before_op=op, name=f"{op.name}_bias")
    if dtype_name(scores) != "fp32":
        wide = mb.cast(x=wide, dtype=dtype_name(scores), before_op=op, name=f"{op.name}_bias_cast")
    masked = mb.add(x=scores, y=wide, before_op=op, name=f"{op.name}_masked")
    function.replace_uses_of_var_after_op(anchor_op=masked.op, end_op=op, old_var=scores, new_var=masked)
