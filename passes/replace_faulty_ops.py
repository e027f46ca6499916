"""Rewrite an op that was reported to give wrong results on the Neural Engine in a form that was correct.

Before::

    main(%x: 2x3xfp16) {
      %y: 2x3xfp16 = softplus(x=%x)
      return %y
    }

After::

    main(%x: 2x3xfp16) {
      %y_replace_faulty_ops_minimum: 2x3xfp16 = minimum(x=%x, y=10)
      %y_replace_faulty_ops_softplus: 2x3xfp16 = softplus(x=%y_replace_faulty_ops_minimum)
      %y_replace_faulty_ops_sub: 2x3xfp16 = sub(x=%x, y=10)
      %y_replace_faulty_ops_relu: 2x3xfp16 = relu(x=%y_replace_faulty_ops_sub)
      %y: 2x3xfp16 = add(x=%y_replace_faulty_ops_softplus, y=%y_replace_faulty_ops_relu)
      return %y
    }

| report | op | becomes |
|---|---|---|
| `softplus-cliff` | `softplus`, also inside mish | `softplus(min(x, 10)) + max(x - 10, 0)` |
| `log-sum-cliff` | `reduce_log_sum_exp` | the maximum, plus the logarithm of the sum without it |
| `hard-swish-rank-2`, `hard-swish-mobile-net` | a hard swish of a product of rank 2 | the same at rank 4 |
| `argmax-narrow` | `reduce_argmax` of fp16 | of the scores cast to fp32 |
| `conv-uneven-kernel` | a strided `conv` with an uneven kernel | the kernel padded with zeros to odd sides |
| `conv-transpose-shape` | `conv_transpose` whose `output_shape` cuts unevenly | the padding written out |
| `resample-pixels` | `resample` at pixels | the points between -1 and 1 |
| `depthwise-concat` | a depthwise `conv` of a wide `concat` | the parts convolved, and their concat |
| `batch-norm-volume` | `batch_norm` of rank 5 | a product and a sum |
| `instance-norm-volume` | `instance_norm` of rank 5 | the same with two axes joined |
| `conv-dilated-groups` | a dilated `conv` of rank 3 with groups | a `conv` for each group, and their concat |
| `gather-negative` | a `gather` at negative places | the same places, counted from the front |
| `shuffle-bias` | a `pixel_shuffle` of a wide `conv` with a bias | a transpose between two reshapes |
| `int8-zero-point` | weights of int8 with zero point 0 | uint8 with zero point 128, the same numbers |
| `power-of-two` | `pow` with the constant base 2 | `exp2` |

A softplus or a sum stays as it is if its values are known to stay below the range that is wrong.

Refuses when a shape is symbolic, when a parameter is not a constant, when an `output_shape` is larger than the
full result, and when a resample takes the nearest pixel, which rounding could change.

Why it helps: each row was reported with wrong results, or with a crash (docs/engine-faults.md has chip, OS and
source). What it costs in time was not measured.

Grade: checked: exponentials and logarithms are no polynomials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb
from anesurgery.facts import windows
from anesurgery.interpret.arithmetic.engine_faults import FAULTS, decoder_of
from anesurgery.interpret.ops.windows import transposed_cuts
from anesurgery.placement.rules.faulty_ops import fault_words
from anesurgery.regions import formulas
from anesurgery.regions.small_builds import again

# Each form is a function that builds it. A function `_why_not_...` beside it says why an op has no such
# form, and returns "" if the op has one.


def _why_not_odd_kernel(op: an.Operation) -> str:
    if an.static_shape(op.x) is None or not an.is_stored(op.weight):
        return f"%{op.weight.name} is not a constant, or a shape is symbolic"
    return ""


def _odd_kernel(mb: Builder, op: an.Operation) -> Var:
    """Append zeros to each even side of the kernel, and pad its end by as much: results stay in place."""
    spatial = op.x.rank - 2
    dilations = an.ints(op, "dilations") or [1] * spatial
    zeros = [1 - int(n) % 2 for n in op.weight.shape[2:]]
    pads = np.array(windows.window_pads(op)).reshape(spatial, 2)
    pads[:, 1] += np.array(zeros) * dilations
    widths = [(0, 0), (0, 0), *((0, n) for n in zeros)]
    key, name = ("odd kernel", op.weight), f"{op.weight.name}_odd"
    weight = mb.stored_like(op.weight, lambda: np.pad(an.decoded(op.weight), widths), key, name)
    rest = an.op_inputs(op, "weight", "pad", "pad_type")
    return mb.conv(**rest, weight=weight, pad_type="custom", pad=pads.ravel().tolist())


def _why_not_written_padding(op: an.Operation) -> str:
    if an.static_shape(op.x) is None or an.static_shape(op.outputs[0]) is None:
        return f"%{op.x.name} has a symbolic shape"
    cuts = transposed_cuts(op)
    if any(n < 0 for pair in cuts for n in pair):
        return f"the output is larger than the full result: it would be cut by {cuts}"
    return ""


def _written_padding(mb: Builder, op: an.Operation) -> Var:
    rest = an.op_inputs(op, "pad", "pad_type", "output_shape")
    pad = [n for pair in transposed_cuts(op) for n in pair]
    return mb.conv_transpose(**rest, pad_type="custom", pad=pad)


def _why_not_normalized_points(op: an.Operation) -> str:
    sides = op.x.shape[-2:]
    if any(an.is_symbolic(n) or n < 2 for n in sides):
        return f"%{op.x.name} is {an.shape_in_words(op.x.shape)}: a side of one pixel has no coordinates"
    mode = str(an.constant(op.sampling_mode))
    return "" if mode == "bilinear" else f"sampling_mode is {mode!r}: rounding may choose another pixel"


def _normalized_points(mb: Builder, op: an.Operation) -> Var:
    """Give points as 2 x / (width - 1) - 1, with aligned corners; in fp32, since fp16 rounds large places."""
    height, width = (int(n) for n in op.x.shape[-2:])
    points = op.coordinates
    if an.np_dtype(points) != np.float32:
        points = mb.cast(x=points, dtype="fp32")
    half = np.array([width - 1, height - 1], np.float32) / 2
    points = mb.sub(x=mb.real_div(x=points, y=half), y=np.float32(1))
    rest = an.op_inputs(op, "coordinates", "coordinates_mode", "align_corners")
    mode = "normalized_minus_one_to_one"
    return mb.resample(**rest, coordinates=points, coordinates_mode=mode, align_corners=True)


def _why_not_stored(op: an.Operation) -> str:
    stored = all(an.is_stored(v) for v in (op.weight, op.inputs.get("bias")) if v is not None)
    return "" if stored else f"%{op.weight.name} is not a constant"


def _why_not_parts_of_concat(op: an.Operation) -> str:
    concat = an.producer(op.x, "concat")
    assert concat is not None
    if any(an.static_shape(v) is None for v in (op.x, *concat.values)):
        return f"%{op.x.name} has a symbolic shape"
    if int(an.number(concat.axis) or 0) % op.x.rank != 1 or an.flag(concat, "interleave"):
        return f"%{op.x.name} joins no whole channels"
    return _why_not_stored(op)


def _groups(mb: Builder, op: an.Operation) -> Var:
    return _convolved_by_parts(mb, op, mb.split(x=op.x, num_splits=int(an.number(op.groups) or 1), axis=1))


def _convolved_by_parts(mb: Builder, op: an.Operation, parts: Sequence[Var]) -> Var:
    """Convolve each part of the channels with its own kernels, and concatenate the results.

    Example: 12 kernels in 6 groups over 6 channels, of which a part has 2, are 4 kernels in 2 groups over it.
    """
    channels, groups = int(op.x.shape[1]), int(an.number(op.groups) or 1)
    rest = an.op_inputs(op, "x", "weight", "bias", "groups")
    stored = {name: op.inputs[name] for name in ("weight", "bias") if op.inputs.get(name) is not None}
    results, start = [], 0
    for part in parts:
        end = start + int(op.weight.shape[0]) * int(part.shape[1]) // channels
        own = {name: _rows(mb, v, start, end) for name, v in stored.items()}
        results.append(mb.conv(**rest, **own, x=part, groups=groups * int(part.shape[1]) // channels))
        start = end
    return mb.concat(values=results, axis=1)


def _rows(mb: Builder, stored: Var, start: int, end: int) -> Var:
    """Return some rows of a constant."""
    name = f"{stored.name}_{start}"
    return mb.stored_like(stored, lambda: an.decoded(stored)[start:end], ("rows", stored, start, end), name)


def _why_not_scaled_volume(op: an.Operation) -> str:
    parameters = (op.inputs.get(name) for name in ("mean", "variance", "gamma", "beta"))
    dynamic = [v.name for v in parameters if v is not None and an.constant(v) is None]
    return f"%{dynamic[0]} is not a constant" if dynamic else ""


def _scaled_volume(mb: Builder, op: an.Operation) -> Var:
    """Write gamma (x - mean) / sqrt(variance + epsilon) + beta as a product and a sum."""

    def read(name: str, default: float) -> an.Array:
        value = an.constant(op.inputs.get(name))
        return np.asarray(default if value is None else value, np.float64)

    scale = read("gamma", 1.0) / np.sqrt(read("variance", 1.0) + read("epsilon", 1e-5))
    shift = read("beta", 0.0) - read("mean", 0.0) * scale
    dtype, shape = an.np_dtype(op.x), (1, -1, *[1] * (op.x.rank - 2))
    scaled = mb.mul(x=op.x, y=scale.reshape(shape).astype(dtype))
    return mb.add(x=scaled, y=shift.reshape(shape).astype(dtype))


def _why_not_joined_axes(op: an.Operation) -> str:
    return "" if an.static_shape(op.x) is not None else f"%{op.x.name} has a symbolic shape"


def _joined_axes(mb: Builder, op: an.Operation) -> Var:
    """Norm an image with the elements of the volume, which have the same mean and variance."""
    batch, channels, depth, height, width = op.x.shape
    flat = mb.reshape(x=op.x, shape=[batch, channels, depth * height, width])
    return mb.reshape(x=mb.instance_norm(**an.op_inputs(op, "x"), x=flat), shape=list(op.x.shape))


def _unsigned_weights(mb: Builder, op: an.Operation) -> Var:
    """Read a weight whose data and zero point are 128 higher."""
    decoder = decoder_of(op, "constexpr_affine_dequantize")
    assert decoder is not None
    data, zero = (np.asarray(an.constant(decoder.inputs[name])) for name in ("quantized_data", "zero_point"))
    moved = {
        "quantized_data": (data.astype(np.int16) + 128).astype(np.uint8),
        "zero_point": np.full_like(zero, 128, np.uint8),
    }
    rest, old = an.op_inputs(decoder, *moved), decoder.outputs[0]
    new = mb.shared_value(("unsigned", old), [old], lambda mb: mb.constexpr_affine_dequantize(**rest, **moved))
    return again(mb, op, **{name: new for name, v in an.op_inputs(op).items() if v is old})


def _why_not_places_from_front(op: an.Operation) -> str:
    length = op.x.shape[int(an.number(op.axis) or 0)]
    return f"%{op.x.name} has a symbolic length" if an.is_symbolic(length) else ""


def _places_from_front(mb: Builder, op: an.Operation) -> Var:
    places = np.asarray(an.constant(op.indices))
    length = int(op.x.shape[int(an.number(op.axis) or 0)])
    return again(mb, op, indices=np.where(places < 0, places + length, places).astype(places.dtype))


def _why_not_moved_pixels(op: an.Operation) -> str:
    return "" if an.static_shape(op.x) is not None else f"%{op.x.name} has a symbolic shape"


def _moved_pixels(mb: Builder, op: an.Operation) -> Var:
    """Write a pixel_shuffle as a transpose between two reshapes, with all images and channels on one axis."""
    images, channels, height, width = op.outputs[0].shape
    r = int(an.number(op.upscale_factor) or 1)
    parts = mb.reshape(x=op.x, shape=[images * channels, r, r, height // r, width // r])
    return mb.reshape(x=mb.transpose(x=parts, perm=[0, 3, 1, 4, 2]), shape=list(op.outputs[0].shape))


def _why_not_power_of_two(op: an.Operation) -> str:
    same = tuple(op.y.shape or ()) == tuple(op.outputs[0].shape or ())
    return "" if same else f"%{op.x.name} has more axes, or longer ones, than %{op.y.name}"


def _power_of_two(mb: Builder, op: an.Operation) -> Var:
    return mb.exp2(x=op.y)


class _HardSwish(NamedTuple):
    """The ops of a hard swish of a product: p = x @ w, then p * clip(p + 3, 0, 6) / 6."""

    product: an.Operation
    between: list[an.Operation]
    """The ops after the product and before the end, in the order in which they run."""
    end: an.Operation
    """The op that multiplies or divides last."""


def _hard_swish(op: an.Operation) -> _HardSwish | None:
    """Find the hard swish around an op that its end alone reads; None if it is none of one product alone."""
    readers = an.consumers(op.outputs[0])
    if len(readers) != 1 or readers[0].op_type not in ("mul", "real_div"):
        return None
    (end,) = readers
    between, pending = [op], [v for v in (op.x, end.x, end.y) if v is not op.outputs[0]]
    product = None
    while pending:
        maker = pending.pop().op
        if maker is None or maker.op_type == "const" or maker in between or maker is product:
            continue
        if maker.op_type in an.ops.WEIGHTED:
            if product is not None:
                return None
            product = maker
        elif maker.op_type in ("thresholded_relu", "clip", "add", "mul"):
            between.append(maker)
            pending += [v for _, v in an.operands(maker)]
        else:
            return None
    block = op.enclosing_block
    if product is None or block is None:
        return None
    return _HardSwish(product, sorted(between, key=list(block.operations).index), end)


def _why_not_rank_4_swish(op: an.Operation) -> str:
    swish = _hard_swish(op)
    if swish is None:
        return "it is no hard swish of one product alone"
    product = swish.product
    stored = product.inputs.get("weight") or product.y
    if not an.is_stored(stored) or (product.op_type == "matmul" and an.flag(product, "transpose_x")):
        return f"%{stored.name} is not a constant"
    operands = [v for inner in (*swish.between, swish.end) for _, v in an.operands(inner)]
    wide = [v for v in operands if an.is_stored(v) and len(v.shape or ()) > 2]
    return f"%{wide[0].name} has rank {wide[0].rank}" if wide else ""


def _rank_4_swish(mb: Builder, op: an.Operation) -> dict[Var, Var]:
    """Compute the product, and all ops up to the end of the hard swish, as 1x1xMxN."""
    swish = _hard_swish(op)
    assert swish is not None
    mb, end = mb.before(swish.end), swish.end
    new = {swish.product.outputs[0]: _rank_4_product(mb, swish.product)}
    for inner in (*swish.between, end):
        new[inner.outputs[0]] = again(mb, inner, **{n: new[v] for n, v in an.operands(inner) if v in new})
    return {end.outputs[0]: mb.squeeze(x=new[end.outputs[0]], axes=[0, 1])}


def _rank_4_product(mb: Builder, product: an.Operation) -> Var:
    x = mb.expand_dims(x=product.x, axes=[0, 1])
    if product.op_type == "matmul":
        return mb.matmul(x=x, y=product.y, transpose_y=an.flag(product, "transpose_y"))
    y = mb.matmul(x=x, y=product.weight, transpose_y=True)
    return y if product.inputs.get("bias") is None else mb.add(x=y, y=product.bias)


@dataclass(frozen=True)
class _Form:
    """How a faulty op is written otherwise."""

    build: Callable[[Builder, an.Operation], Any]
    why_not: Callable[[an.Operation], str] = lambda op: ""
    """Why an op has no such form; "" if it has."""


FORMS: dict[str, _Form] = {
    "softplus-cliff": _Form(lambda mb, op: formulas.safe_softplus(mb, op.x)),
    "log-sum-cliff": _Form(
        lambda mb, op: formulas.log_sum_exp(mb, op.x, an.reading.axes_of(op), an.flag(op, "keep_dims"))
    ),
    "hard-swish-rank-2": _Form(_rank_4_swish, _why_not_rank_4_swish),
    "hard-swish-mobile-net": _Form(_rank_4_swish, _why_not_rank_4_swish),
    "argmax-narrow": _Form(lambda mb, op: again(mb, op, x=mb.cast(x=op.x, dtype="fp32"))),
    "conv-uneven-kernel": _Form(_odd_kernel, _why_not_odd_kernel),
    "conv-transpose-shape": _Form(_written_padding, _why_not_written_padding),
    "resample-pixels": _Form(_normalized_points, _why_not_normalized_points),
    "depthwise-concat": _Form(
        lambda mb, op: _convolved_by_parts(mb, op, op.x.op.values), _why_not_parts_of_concat
    ),
    "int8-zero-point": _Form(_unsigned_weights),
    "batch-norm-volume": _Form(_scaled_volume, _why_not_scaled_volume),
    "instance-norm-volume": _Form(_joined_axes, _why_not_joined_axes),
    "conv-dilated-groups": _Form(_groups, _why_not_stored),
    "gather-negative": _Form(_places_from_front, _why_not_places_from_front),
    "shuffle-bias": _Form(_moved_pixels, _why_not_moved_pixels),
    "power-of-two": _Form(_power_of_two, _why_not_power_of_two),
}
"""Name of a row of the table of faults -> the form that was correct."""
REPAIRED = tuple(fault for fault in FAULTS if fault.name in FORMS)


@dataclass(frozen=True)
class ReplaceFaultyOps(Rewrite):
    """Ops that reports call wrong on the engine, in the form that was correct."""

    name = "replace_faulty_ops"
    kinds = frozenset(op_type for fault in REPAIRED for op_type in fault.ops)
    tolerance = an.REASSOCIATED
    tolerates_nonfinite = False
    """An infinity less the maximum, which is infinite too, is NaN."""
    only: tuple[str, ...] = an.option((), among=tuple(FORMS))
    """Names of reports; all of them by default."""

    def check(self, m: Match) -> Match | Refusal:
        """Match an op with a fault that its values can reach."""
        op = m.root
        for fault in REPAIRED:
            if (self.only and fault.name not in self.only) or not fault_words(fault, op):
                continue
            if why := FORMS[fault.name].why_not(op):
                return Refusal(why, op)
            return m.bind(fault=fault.name)
        return an.NO_MATCH

    def rewrite(self, mb: Builder, m: Match) -> Any:
        """Build the form that was correct."""
        return FORMS[m.fault].build(mb, m.root)


@an.example((2, 3), dtype="fp16")
def example(x: Var) -> Var:
    """The softplus of six numbers."""
    return mb.softplus(x=x, name="y")
