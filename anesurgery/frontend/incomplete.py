"""Operations that coremltools converts for some of their arguments, and wrongly or not for the others."""

from __future__ import annotations

import string
from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np

from anesurgery.frontend.arguments import (
    Convert,
    Wrap,
    argument,
    converted,
    dtype_of,
    inputs_of,
    known_value,
    option,
    promoted,
    wrapper,
)
from anesurgery.frontend.complex_numbers import bilinear, is_complex
from anesurgery.frontend.parts import slice_of_axis
from anesurgery.frontend.resampling import sample_volume
from anesurgery.mil import Array, Var, ct, is_symbolic, mb, np_dtype, types


@wrapper
def with_choice_among_all(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `torch.argmax` or `argmin`: without an axis it chooses among all elements."""
    x = inputs_of(context, node)[0]
    if option(context, node, 1, "dim", None) is not None:
        return host(context, node)
    if types.is_int(x.dtype):
        x = mb.cast(x=x, dtype="int32")
    keep = bool(option(context, node, 2, "keepdim", False))
    choose = mb.reduce_argmax if node.kind == "argmax" else mb.reduce_argmin
    place = choose(x=mb.reshape(x=x, shape=[-1]), axis=0, keep_dims=keep)
    context.add(mb.reshape(x=place, shape=[1] * x.rank) if keep else place, torch_name=node.name)


def _has_ios16() -> bool:
    """Is the model converted for iOS 16 or later? Without a target, coremltools converts for iOS 15."""
    from coremltools.converters.mil.mil.block import is_current_opset_version_compatible_with

    return bool(is_current_opset_version_compatible_with(ct.target.iOS16))


@wrapper
def with_any_order(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `torch.topk`: where no order is asked for, iOS 15 has the sorted one only."""
    if not _has_ios16():
        node = copy(node)
        node.inputs = node.inputs[:4]
        node.kwinputs = {name: value for name, value in (node.kwinputs or {}).items() if name != "sorted"}
    host(context, node)


@wrapper
def with_patches_as_channels(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `pixel_unshuffle`: iOS 15 lacks the op, and has convolutions that pick pixels."""
    x, factor = inputs_of(context, node)[:2]
    if _has_ios16() or x.rank != 4 or not types.is_float(x.dtype):
        return host(context, node)
    channels, n = x.shape[1], int(known_value(factor))
    weight = np.tile(np.eye(n * n).reshape(n * n, 1, n, n), (channels, 1, 1, 1)).astype(np_dtype(x))
    context.add(mb.conv(x=x, weight=weight, strides=[n, n], groups=channels, pad_type="valid", name=node.name))


@wrapper
def with_shape_alone(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `torch.rand`: torch.export gives the shape alone by position."""
    given = inputs_of(context, node)
    if len(given) == 5:
        host(context, node)
    else:
        context.add(mb.random_uniform(shape=given[0], low=0.0, high=1.0, name=node.name))


def diagonal(context: Any, node: Any) -> None:
    """Convert `torch.diagonal(x, offset=0, dim1=0, dim2=1)`: the diagonal becomes the last axis."""
    x = inputs_of(context, node)[0]
    offset, first, second = (
        int(option(context, node, i, name, default))
        for i, name, default in ((1, "offset", 0), (2, "dim1", 0), (3, "dim2", 1))
    )
    axes = [first % x.rank, second % x.rank]
    others = [axis for axis in range(x.rank) if axis not in axes]
    rows, columns = (x.shape[axis] for axis in axes)
    if is_symbolic(rows) or is_symbolic(columns):
        raise NotImplementedError(f"{node.name}: diagonal of matrices of dynamic size {x.shape}")
    begin = max(-offset, 0), max(offset, 0)
    count = max(min(rows - begin[0], columns - begin[1]), 0)
    places = (begin[0] + np.arange(count)) * columns + begin[1] + np.arange(count)
    turned = mb.transpose(x=x, perm=[*others, *axes]) if [*others, *axes] != list(range(x.rank)) else x
    sizes = [x.shape[axis] for axis in others]
    if sum(map(is_symbolic, sizes)) > 1:
        raise NotImplementedError(f"{node.name}: diagonal of a tensor of dynamic sizes {x.shape}")
    shape = [-1 if is_symbolic(n) else n for n in sizes]
    flat = mb.reshape(x=turned, shape=[*shape, rows * columns])
    context.add(mb.gather(x=flat, indices=places.astype(np.int32), axis=-1, name=node.name))


@wrapper
def with_one_dtype(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `torch.stack`: several dtypes are cast to the one that holds them all."""
    name, values = node.inputs[0], inputs_of(context, node)[0]
    if isinstance(values, Var):  # known numbers, which the host has joined to a vector
        context.add(mb.identity(x=values, name=node.name))
        return
    if any(map(is_complex, values)) or len({dtype_of(v) for v in values}) == 1:
        return host(context, node)
    cast = promoted(list(values))
    named = {name: cast} if isinstance(name, str) else dict(zip(name, cast, strict=True))
    (made,) = converted(host, context, node, named)
    context.add(made, torch_name=node.name)


@wrapper
def with_scalars(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `where(condition, a, b)`, to take scalars for all three."""
    arguments = inputs_of(context, node)
    if len(arguments) < 3 or any(one.rank for one in arguments):
        return host(context, node)
    a, b = promoted(arguments[1:])
    context.add(mb.select(cond=mb.cast(x=arguments[0], dtype="bool"), a=a, b=b, name=node.name))


@wrapper
def with_truths(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converters of `all` and `any`: the host takes the least or largest number, also below zero."""
    x = inputs_of(context, node)[0]
    named = {} if types.is_bool(x.dtype) else {node.inputs[0]: mb.not_equal(x=x, y=np_dtype(x).type(0))}
    (made,) = converted(host, context, node, named)
    context.add(made, torch_name=node.name)


@wrapper
def with_whole_equation(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `torch.einsum`: `...` becomes letters, and a result that is left out is written."""
    from coremltools.converters.mil.frontend._utils import build_einsum_mil

    equation, values = inputs_of(context, node)[:2]
    equation = str(known_value(equation)).replace(" ", "")
    complex_ones = any(map(is_complex, values))
    to_number = len(values) == 1 and equation.endswith("->")  # the host transposes the axes of a number
    if "..." not in equation and "->" in equation and not (complex_ones or to_number):
        return host(context, node)
    whole = _whole_equation(equation, [value.rank for value in values])
    if complex_ones and len(values) == 2:
        product = bilinear(lambda x, y: build_einsum_mil([x, y], whole, None))
        context.add(product(*values), torch_name=node.name)
    elif to_number:
        one = next(letter for letter in string.ascii_letters if letter not in whole)
        kept = build_einsum_mil(
            [mb.expand_dims(x=values[0], axes=[0])], f"{one}{whole}{one}", f"{node.name}_kept"
        )
        context.add(mb.squeeze(x=kept, axes=[0], name=node.name))
    else:
        context.add(build_einsum_mil(promoted(list(values)), whole, node.name))


def _whole_equation(equation: str, ranks: Sequence[int]) -> str:
    """Return an equation without `...`: its axes are counted from the last, as torch broadcasts them.

    "...ij,jk" of operands with 4 and 2 axes becomes "abij,jk->abik".
    """
    left, arrow, right = equation.partition("->")
    operands = left.split(",")
    free = [letter for letter in string.ascii_letters if letter not in equation]
    counts = [rank - len(one.replace("...", "")) for one, rank in zip(operands, ranks, strict=True)]
    more = free[: max(count if "..." in one else 0 for one, count in zip(operands, counts, strict=True))]
    if not arrow:
        once = sorted(letter for letter in set(left) - set(",.") if left.count(letter) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    written = [
        one.replace("...", "".join(more[len(more) - count :]))
        for one, count in zip(operands, counts, strict=True)
    ]
    return ",".join(written) + "->" + right.replace("...", "".join(more))


@wrapper
def with_vectors(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `torch.matmul`: a vector is a row on the left, and a column on the right."""
    x, y = inputs_of(context, node)[:2]
    if x.rank != 1 and y.rank != 1:
        return host(context, node)
    x, y = promoted([x, y])
    if x.rank == y.rank:
        context.add(mb.reduce_sum(x=mb.mul(x=x, y=y), axes=[0], keep_dims=False, name=node.name))
        return
    row = x.rank == 1
    made = (
        mb.matmul(x=mb.expand_dims(x=x, axes=[0]), y=y)
        if row
        else mb.matmul(x=x, y=mb.expand_dims(x=y, axes=[1]))
    )
    context.add(mb.squeeze(x=made, axes=[-2 if row else -1], name=node.name))


def narrow(context: Any, node: Any) -> None:
    """Convert `torch.narrow(x, axis, start, length)`; a negative start counts from the end."""
    x, axis, start, length = inputs_of(context, node)[:4]
    axis, first, count = int(known_value(axis)) % x.rank, int(known_value(start)), int(known_value(length))
    context.add(slice_of_axis(x, axis, first, first + count or None, name=node.name))


@wrapper
def with_rolls_to_the_left(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `torch.roll`: Core ML keeps the sign of a negative shift by a dynamic length."""
    x = inputs_of(context, node)[0]
    shifts, axes = (np.ravel(option(context, node, i, n, ())) for i, n in ((1, "shifts"), (2, "dims")))
    if len(axes) and not (any(map(is_symbolic, x.shape)) and min(shifts) < 0):
        return host(context, node)
    flat = x if len(axes) else mb.reshape(x=x, shape=[-1])
    for shift, axis in zip(map(int, shifts), map(int, axes if len(axes) else [0]), strict=True):
        length = mb.gather(x=mb.shape(x=flat), indices=np.int32(axis % flat.rank), axis=0)
        first = np.int32(-shift) if shift < 0 else mb.sub(x=length, y=mb.mod(x=np.int32(shift), y=length))
        places = mb.add(x=mb.range_1d(start=np.int32(0), end=length, step=np.int32(1)), y=first)
        flat = mb.gather(x=flat, indices=mb.mod(x=places, y=length), axis=axis)
    context.add(flat if len(axes) else mb.reshape(x=flat, shape=mb.shape(x=x)), torch_name=node.name)


@wrapper
def with_places(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of a max pooling, to give the places of the maxima too."""
    kind = node.kind
    node.kind = kind.removesuffix("_with_indices")
    host(context, node)
    node.kind = kind
    x, largest = inputs_of(context, node)[0], context[node.name]  # x has the batch that `with_batch` adds
    of_export = len(node.outputs) == 1  # it selects the results by nodes of their own
    if any(map(is_symbolic, x.shape)):
        if not of_export:
            raise NotImplementedError(f"{node.name}: places of maxima in a tensor of dynamic shape {x.shape}")
        context.add((largest, None), torch_name=node.name, override=True)
        return
    kernel, stride, pad = (
        np.resize(option(context, node, i, name, 0), x.rank - 2).astype(int)
        for i, name in ((1, "kernel_size"), (2, "stride"), (3, "padding"))
    )
    places = _places_of_maxima(x, largest.shape[2 - x.rank :], kernel, stride if stride.any() else kernel, pad)
    both = largest, places if largest.rank == x.rank else mb.squeeze(x=places, axes=[0])
    for name, value in [(node.name, both)] if of_export else zip(node.outputs, both, strict=True):
        context.add(value, torch_name=name, override=True)


def _places_of_maxima(x: Var, counts: tuple[int, ...], kernel: Array, stride: Array, pad: Array) -> Var:
    """Return the place of the first maximum of each window: the place of its first element, plus an offset.

    A place counts the elements of an image row by row. In an image of width 5, a window of 2x2 has the offsets
    0, 1, 5, 6.
    """
    sizes, counts_of = np.asarray(x.shape[2:], int), np.asarray(counts, int)
    after = np.maximum((counts_of - 1) * stride + kernel - sizes - pad, 0)
    least = np_dtype(x).type(-np.inf if np_dtype(x).kind == "f" else np.iinfo(np.int32).min)
    ends = np.stack([pad, after], 1).ravel().tolist()
    padded = mb.pad(x=x, pad=[0, 0, 0, 0, *ends], mode="constant", constant_val=least) if any(ends) else x
    steps = list(np.ndindex(*kernel))
    parts = [
        mb.slice_by_index(
            x=padded,
            begin=[0, 0, *step],
            end=[0, 0, *(step + (counts_of - 1) * stride + 1)],
            stride=[1, 1, *stride],
            begin_mask=[True, True, *[False] * len(step)],
            end_mask=[True, True, *[False] * len(step)],
        )
        for step in map(np.asarray, steps)
    ]
    lengths = np.append(np.cumprod(sizes[::-1])[::-1][1:], 1)  # elements from one place to the next of an axis
    starts = [(np.arange(n) * s - p) * unit for n, s, p, unit in zip(counts, stride, pad, lengths, strict=True)]
    first = np.asarray(sum(np.ix_(*starts)), np.int32)
    offsets = (np.asarray(steps) @ lengths).astype(np.int32)
    which = mb.reduce_argmax(x=mb.stack(values=parts, axis=0), axis=0, keep_dims=False)
    return mb.add(x=mb.gather(x=offsets, indices=which, axis=0), y=first)


def max_unpool(context: Any, node: Any) -> None:
    """Convert `max_unpool2d(x, indices, output_size)`: the maxima at their places, and 0 elsewhere."""
    x, places, size = inputs_of(context, node)[:3]
    shape = [*x.shape[:-2], *map(int, np.ravel(known_value(size)))]
    if any(map(is_symbolic, shape)):
        raise NotImplementedError(f"{node.name}: max_unpool2d of a dynamic shape {x.shape}")
    rows, count = int(np.prod(shape[:-2])), int(np.prod(shape[-2:]))
    flat = [mb.reshape(x=v, shape=[rows, -1]) for v in (x, places)]
    zeros = np.zeros((rows, count), np_dtype(x))
    filled = mb.scatter_along_axis(data=zeros, indices=flat[1], updates=flat[0], axis=1, mode="update")
    context.add(mb.reshape(x=filled, shape=shape, name=node.name))


@wrapper
def with_running_statistics(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `instance_norm`: a given mean and variance are used, not those of the input."""
    x, gamma, beta, mean, variance, of_input = inputs_of(context, node)[:6]
    if mean is None or variance is None or bool(known_value(of_input)):
        return host(context, node)
    epsilon = float(option(context, node, 7, "eps", 1e-5))
    number = np_dtype(x).type
    given = {"gamma": gamma, "beta": beta, "mean": mean, "variance": variance}
    known = {k: np.asarray(known_value(v), number) for k, v in given.items() if v is not None}
    context.add(mb.batch_norm(x=x, **known, epsilon=number(epsilon), name=node.name))


# Transposed convolutions whose output is padded by more at its end than is cut off there.
#
# coremltools pads the input by that amount. But each element of the input becomes `stride` elements of the
# output, so the output gets too long. Here the input gets only the zeros that are needed, and the excess is cut
# off.

TRANSPOSED = ("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input")
PLACES = {"stride": 3, "padding": 4, "dilation": 7, "output_padding": 5, "groups": 6}
"""Argument of `conv_transpose` -> its position."""
GENERAL_PLACES = {"stride": 3, "padding": 4, "dilation": 5, "output_padding": 7, "groups": 8}
"""Argument of `convolution` -> its position; position 6 says whether it is transposed."""


@wrapper
def with_any_output_padding(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of transposed convolutions, to take any padding of the output."""
    operands = inputs_of(context, node)
    general = node.kind not in TRANSPOSED
    if general and not (len(operands) > 6 and bool(known_value(operands[6]))):
        return host(context, node)
    x, weight = promoted(operands[:2])
    g = _sizes(context, node, GENERAL_PLACES if general else PLACES, weight.rank - 2)
    extra = g["output_padding"] - g["padding"]
    if not (extra > 0).any() and not (weight.rank == 5 and g["output_padding"].any()):
        return host(context, node)
    more = np.maximum(-(-extra // g["stride"]), 0)
    ends = [0, 0, 0, 0, *np.stack([np.zeros_like(more), more], 1).ravel().tolist()]
    padded = mb.pad(x=x, pad=ends, mode="constant", constant_val=np_dtype(x).type(0)) if any(ends) else x
    bias = argument(context, node, 2, "bias", None)
    options = {"strides": g["stride"], "dilations": g["dilation"], "groups": int(g["groups"][0])}
    made = mb.conv_transpose(
        x=padded, weight=weight, **({} if bias is None else {"bias": bias}), **options, pad_type="valid"
    )
    context.add(_cut(made, g["padding"], more * g["stride"] - extra, node.name))


def _sizes(context: Any, node: Any, places: dict[str, int], rank: int) -> dict[str, Array]:
    """Return each argument for every axis; one that is not given is 0 for a padding, else 1."""
    given = {name: option(context, node, i, name, int("padding" not in name)) for name, i in places.items()}
    return {name: np.resize(np.asarray(value, np.int32), rank) for name, value in given.items()}


def _cut(x: Var, begin: Array, end: Array, name: str) -> Var:
    """Cut elements off both ends of the last axes."""
    before, whole = [0, 0, *begin.tolist()], [True, True]
    return mb.slice_by_index(
        x=x,
        begin=before,
        end=[0, 0, *(-end).tolist()],
        begin_mask=[*whole, *(begin == 0).tolist()],
        end_mask=[*whole, *(end == 0).tolist()],
        name=name,
    )


# Grids of sampling points from an affine map, as in spatial transformers.


@wrapper
def with_map_by_name(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `affine_grid_generator`: coremltools looks the map up by its name in MIL."""
    theta = inputs_of(context, node)[0]
    if theta.val is None and theta.name not in context:
        context.add(theta, torch_name=theta.name)
    host(context, node)


BILINEAR, ZEROS, BICUBIC = 0, 0, 2
"""Torch's numbers for bilinear sampling, for padding with zeros, and for bicubic sampling."""


@wrapper
def with_affine_sampling(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `grid_sampler`: on affine maps the host takes bilinear sampling with zeros only.

    MIL samples images only; volumes are sampled by one gather of the neighbours of each point.
    """
    if option(context, node, 2, "interpolation_mode", BILINEAR) == BICUBIC:
        raise NotImplementedError(f"{node.name}: bicubic sampling; Core ML samples bilinearly, or the nearest")
    grid = node.inputs[1]
    held = f"{grid}_align_corners"
    if context[node.inputs[0]].rank == 5:
        if grid not in context and held in context:
            context.add(_grid(context, grid, bool(known_value(context[held]))), torch_name=grid)
        sample_volume(context, node)
        return
    if grid not in context and held in context:
        along = bool(known_value(context[held]))
        names = [name for name in node.inputs[2:5] if name in context]  # torch.export has numbers there
        if [known_value(context[name]) for name in names] != [BILINEAR, ZEROS, along]:
            context.add(_grid(context, grid, along), torch_name=grid)
    host(context, node)


@wrapper
def with_points(host: Convert, context: Any, node: Any) -> None:
    """Wrap a converter, to read the points of an affine map: coremltools has them for `grid_sampler` only."""
    for name in node.inputs[:1]:
        held = f"{name}_align_corners"
        if isinstance(name, str) and name not in context and held in context:
            context.add(_grid(context, name, bool(known_value(context[held]))), torch_name=name)
    host(context, node)


def _grid(context: Any, grid: str, corners: bool) -> Var:
    """Build the points of an affine map, (batch, .., width, axes): the map times the points of the output."""
    theta, size = known_value(context[f"{grid}_theta"]), np.ravel(known_value(context[f"{grid}_size"]))
    theta = context[theta] if isinstance(theta, str) else mb.const(val=np.asarray(theta, np.float32))
    sizes = [int(n) for n in size[2:]]
    sides = [np.linspace(-1, 1, n) if corners and n > 1 else (2 * np.arange(n) + 1) / n - 1 for n in sizes]
    points = np.stack([*reversed(np.meshgrid(*sides, indexing="ij")), np.ones(sizes)], -1)
    points = points.reshape(1, -1, len(sizes) + 1)
    made = mb.matmul(x=points.astype(np_dtype(theta)), y=theta, transpose_y=True)
    return mb.reshape(x=made, shape=[-1, *sizes, len(sizes)])


WRAPPERS: dict[str, Wrap] = {
    **dict.fromkeys(("argmax", "argmin"), with_choice_among_all),
    "topk": with_any_order,
    "matmul": with_vectors,
    "stack": with_one_dtype,
    **dict.fromkeys(("where", "where.self"), with_scalars),
    **{f"max_pool{n}d_with_indices": with_places for n in (1, 2, 3)},
    "pixel_unshuffle": with_patches_as_channels,
    "rand": with_shape_alone,
    **dict.fromkeys(("diagonal", "diagonal_copy"), lambda _: diagonal),
    "instance_norm": with_running_statistics,
    **dict.fromkeys(("all", "any", "all.dim", "any.dim", "any.dims", "all.dims"), with_truths),
    "einsum": with_whole_equation,
    "narrow": lambda _: narrow,
    "roll": with_rolls_to_the_left,
    **dict.fromkeys(("_convolution", "convolution", *TRANSPOSED), with_any_output_padding),
    "affine_grid_generator": with_map_by_name,
    "grid_sampler": with_affine_sampling,
}
