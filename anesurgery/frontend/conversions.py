"""The converters of torch operations, and the tables from which `register` takes them.

`CONVERSIONS` holds operations that coremltools lacks: name -> converter. `WRAPPERS` holds operations that it
converts in part or wrongly: name -> a function that is given coremltools' converter and returns a better one.
In such functions `host` is coremltools' own converter. Converters of complex numbers, elementary operations,
mixtures of experts, resampling and scatters have files of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from anesurgery.frontend import complex_numbers, elementary, experts, incomplete, parts, written_views
from anesurgery.frontend.arguments import (
    Convert,
    Wrap,
    add_results,
    argument,
    converted,
    dtype_of,
    inputs_of,
    is_one,
    keyword,
    known_value,
    option,
    promoted,
    read_instead,
    wrapper,
)
from anesurgery.frontend.complex_numbers import COMPLEX_CODES, MOVING, SUMS, conjugate, is_complex, resolved
from anesurgery.frontend.length_choices import refusing_length_choices
from anesurgery.frontend.parts import slice_of_axis
from anesurgery.frontend.resampling import resampling, resized, scales_of
from anesurgery.mil import Array, Var, is_symbolic, mb, np_dtype, producer, types

# -- triangles of matrices, and triangular systems, which gated linear attention solves -------------------


def solve_triangular(context: Any, node: Any) -> None:
    """Convert `torch.linalg.solve_triangular(a, b, upper=..., left=True, unitriangular=False)` to products.

    The inverses of diagonal blocks are merged in pairs: [[a, 0], [c, d]] has the inverse
    [[a', 0], [-d' c a', d']]. All pairs of a size are merged by two products of whole matrices.
    """
    a, b = promoted(inputs_of(context, node)[:2])
    upper, left, unit = (
        bool(option(context, node, i, name, default))
        for i, name, default in ((2, "upper", False), (3, "left", True), (4, "unitriangular", False))
    )
    inverted = _triangular_inverse(node, a, upper=upper, unit=unit)
    x, y = (inverted, b) if left else (b, inverted)
    context.add(mb.matmul(x=x, y=y, name=node.name))


def _triangular_inverse(node: Any, a: Var, *, upper: bool, unit: bool = False) -> Any:
    """Return the inverses of triangular matrices: a variable, or numbers that are known."""
    if is_symbolic(a.shape[-1]):
        raise NotImplementedError(f"{node.name}: {node.kind} of matrices of dynamic size {a.shape}")
    n, dtype = int(a.shape[-1]), types.nptype_from_builtin(a.dtype)
    eye = np.eye(n, dtype=dtype)
    inverted = eye if unit else mb.real_div(x=eye, y=mb.add(x=mb.mul(x=a, y=eye), y=1 - eye))
    for size in (2**k for k in range((n - 1).bit_length())):
        beside = mb.mul(x=a, y=_off_diagonal_mask(n, size, upper=upper).astype(dtype))
        if inverted is not eye:
            beside = mb.matmul(x=mb.matmul(x=inverted, y=beside), y=inverted)
        inverted = mb.sub(x=inverted, y=beside)
    return inverted


MOST_ROWS = 16
"""The most rows of a Cholesky factor, which takes seven ops for each; a choice."""


def cholesky(context: Any, node: Any) -> None:
    """Convert `torch.linalg.cholesky_ex(a, upper=False)`, column by column.

    The code is 0, or the number of the first minor that is not positive.
    """
    rest = inputs_of(context, node)[0]
    upper = bool(option(context, node, 1, "upper", False))
    n = rest.shape[-1]
    if is_symbolic(n) or n > MOST_ROWS:
        raise NotImplementedError(
            f"{node.name}: only matrices of up to {MOST_ROWS} rows are factored; these have {n}: "
            "factor them in the app"
        )
    front, columns, pivots = [0] * (rest.rank - 2), [], []
    for k in range(n):
        column = mb.slice_by_size(x=rest, begin=[*front, 0, k], size=[-1] * (rest.rank - 1) + [1])
        pivots.append(mb.slice_by_size(x=column, begin=[*front, k, 0], size=[*[-1] * len(front), 1, 1]))
        below = (np.arange(n) >= k).astype(np_dtype(rest))[:, None]
        columns.append(mb.mul(x=mb.real_div(x=column, y=mb.sqrt(x=pivots[-1])), y=below))
        rest = mb.sub(x=rest, y=mb.matmul(x=columns[-1], y=columns[-1], transpose_y=True))
    factor = mb.concat(values=columns, axis=-1)
    positive = mb.cast(x=mb.greater(x=mb.concat(values=pivots, axis=-1), y=0.0), dtype="int32")
    count = mb.reduce_sum(x=positive, axes=[-2, -1], keep_dims=False)  # the pivots after a failure are NaN
    code = mb.mul(x=mb.add(x=count, y=1), y=mb.cast(x=mb.less(x=count, y=n), dtype="int32"))
    add_results(context, node, (_turned(factor) if upper else factor, code))


def cholesky_solve(context: Any, node: Any) -> None:
    """Convert `torch.cholesky_solve(b, factor, upper=False)`; `torch.cholesky_inverse(factor)` has no b."""
    *others, factor = (v for v in inputs_of(context, node) if isinstance(v, Var) and v.rank > 1)
    place = len(others) + 1
    upper = bool(option(context, node, place, "upper", False))
    inverted = _triangular_inverse(node, factor, upper=upper)
    # with A = L L^T, its inverse is the transpose of the inverse of L times the inverse of L
    first = mb.matmul(x=inverted, y=others[0], transpose_x=upper) if others else inverted
    if others:
        context.add(mb.matmul(x=inverted, y=first, transpose_x=not upper, name=node.name))
    else:
        context.add(mb.matmul(x=first, y=first, transpose_x=not upper, transpose_y=upper, name=node.name))


@wrapper
def with_small_inverses(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `torch.linalg.inv`, which takes constants: cofactors invert 2 to 4 rows."""
    x = inputs_of(context, node)[0]
    if x.val is not None:
        host(context, node)
    else:
        context.add(_inverse(x, node.name, node.name))


def linalg_solve(context: Any, node: Any) -> None:
    """Convert `torch.linalg.solve(a, b, left=True)` for 2 to 4 unknowns: the inverse of a times b."""
    a, b = promoted(inputs_of(context, node)[:2])
    left = bool(option(context, node, 2, "left", True))
    vectors = b.rank == 1 or tuple(b.shape) == tuple(a.shape[:-1])  # as torch tells vectors from matrices
    b = mb.expand_dims(x=b, axes=[-1]) if vectors else b
    inverted = _inverse(a, node.name, f"{node.name}_inverse")
    x, y = (inverted, b) if left else (b, inverted)
    solved = mb.matmul(x=x, y=y, name=f"{node.name}_columns" if vectors else node.name)
    context.add(mb.squeeze(x=solved, axes=[-1], name=node.name) if vectors else solved)


def _inverse(x: Var, refused: str, name: str) -> Var:
    """Return the inverses of computed matrices of 2 to 4 rows: their cofactors over their determinant."""
    shares, largest = _shares_of_largest(x)
    cofactors, determinants = _expanded(shares, refused)
    return mb.real_div(x=_turned(cofactors), y=mb.mul(x=determinants, y=largest), name=name)


def _shares_of_largest(x: Var) -> tuple[Var, Var]:
    """Return matrices over their largest magnitudes, and these: the product of large elements may overflow."""
    largest = mb.reduce_max(x=mb.abs(x=x), axes=[-2, -1], keep_dims=True)
    scale = mb.maximum(x=largest, y=np_dtype(x).type(1e-4))
    return mb.real_div(x=x, y=scale), scale


@wrapper
def with_matrix_norms(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of norms; those of matrices by singular values are refused by name."""
    order, axes = (option(context, node, i, "") for i in (1, 2))
    count = inputs_of(context, node)[0].rank if axes is None else np.size(axes)
    if order == "nuc" or (order in (2, -2) and count == 2):
        raise NotImplementedError(
            f"{node.name}: a norm of matrices by singular values (ord={order}): compute it in the app, or take "
            '"fro", 1 or inf'
        )
    host(context, node)


def determinant(*, logarithm: bool) -> Convert:
    """Return the converter of `torch.linalg.det(a)`, or of `slogdet`: of constants, or of 2 to 4 rows."""

    def convert(context: Any, node: Any) -> None:
        x = inputs_of(context, node)[0]
        if x.val is not None:
            sign, log = np.linalg.slogdet(x.val)
            results = (
                (mb.const(val=sign), mb.const(val=log)) if logarithm else (mb.const(val=sign * np.exp(log)),)
            )
        else:
            n, real = x.shape[-1], np_dtype(x).type
            shares, scale = _shares_of_largest(x)
            expanded = _expanded(shares if logarithm else x, node.name)[1]
            first = mb.slice_by_size(x=expanded, begin=[0] * x.rank, size=[*[-1] * (x.rank - 2), 1, 1])
            value, scale = (mb.squeeze(x=v, axes=[-2, -1]) for v in (first, scale))
            log = mb.add(x=mb.log(x=mb.abs(x=value)), y=mb.mul(x=mb.log(x=scale), y=real(n)))
            results = (mb.sign(x=value), log) if logarithm else (value,)
        unread = mb.const(val=np.int32(0))  # the factors and their order, which no public call returns
        add_results(context, node, (*results, unread, unread))

    return convert


def _turned(x: Var, **named: str) -> Var:
    """Return matrices transposed."""
    return mb.transpose(x=x, perm=[*range(x.rank - 2), x.rank - 1, x.rank - 2], **named)


def _expanded(x: Var, refused: str) -> tuple[Var, Var]:
    """Return the cofactors of computed matrices of 2 to 4 rows, and their determinants in a column each."""
    n = x.shape[-1]
    if n not in (2, 3, 4):
        raise NotImplementedError(
            f"{refused}: of computed matrices, only those of 2 to 4 rows are inverted, or have a determinant; "
            f"these have {n}: compute it in the app"
        )

    def moved(rows: int, columns: int) -> Var:
        places = ((np.arange(n) + first) % n for first in (rows, columns))
        by_row, by_column = (p.astype(np.int32) for p in places)
        return mb.gather(x=mb.gather(x=x, indices=by_row, axis=-2), indices=by_column, axis=-1)

    def minors(row: int, columns: tuple[int, ...]) -> Var:
        whole = moved(row, columns[0])
        for k, column in enumerate(columns if row + 1 < n else ()):
            part = mb.mul(x=moved(row, column), y=minors(row + 1, columns[:k] + columns[k + 1 :]))
            whole = part if k == 0 else (mb.sub if k % 2 else mb.add)(x=whole, y=part)
        return whole

    cofactors = minors(1, tuple(range(1, n)))
    if n % 2 == 0:
        cofactors = mb.mul(x=cofactors, y=((-1.0) ** np.add.outer(range(n), range(n))).astype(np_dtype(x)))
    expanded = mb.reduce_sum(x=mb.mul(x=x, y=cofactors), axes=[-1], keep_dims=True)  # each row: the determinant
    return cofactors, expanded


def covariance(context: Any, node: Any) -> None:
    """Convert `torch.cov(x, correction=1)` without weights, and `torch.corrcoef(x)`: a row is a variable."""
    x = inputs_of(context, node)[0]
    if any(isinstance(argument(context, node, i, name), Var) for i, name in ((2, "fweights"), (3, "aweights"))):
        raise NotImplementedError(f"{node.name}: {node.kind} with weights")
    rows = mb.expand_dims(x=x, axes=[0]) if x.rank == 1 else x
    rows = mb.sub(x=rows, y=mb.reduce_mean(x=rows, axes=[-1], keep_dims=True))
    real = np_dtype(rows).type
    if node.kind == "cov":
        count = x.shape[-1] - int(option(context, node, 1, "correction", 1))
        divided = mb.mul(x=rows, y=real(1 / count))  # before the product, which may overflow
    else:
        rows = mb.real_div(x=rows, y=mb.reduce_l2_norm(x=rows, axes=[-1], keep_dims=True))
        divided = rows
    products = mb.matmul(x=divided, y=rows, transpose_y=True)
    if node.kind == "corrcoef":
        products = mb.clip(x=products, alpha=real(-1), beta=real(1))
    whole = mb.squeeze(x=products, axes=[0, 1]) if x.rank == 1 else mb.identity(x=products)
    context.add(whole, torch_name=node.name)


def broadcast_in_dim(context: Any, node: Any) -> None:
    """Convert `prims.broadcast_in_dim(x, shape, places)`: axis i of x becomes axis `places[i]`."""
    x, *lists = inputs_of(context, node)
    shape, places = (np.ravel([known_value(v) for v in np.atleast_1d(v)]).tolist() for v in lists)
    before = [x.shape[places.index(i)] if i in places else 1 for i in range(len(shape))]
    repeats = [n // m for n, m in zip(shape, before, strict=True)]
    context.add(mb.tile(x=mb.reshape(x=x, shape=before), reps=repeats, name=node.name))


def _off_diagonal_mask(n: int, size: int, *, upper: bool) -> Array:
    """Return a mask of the blocks of a size beside the diagonal, between the two blocks that are merged."""
    block = np.arange(n) // size
    one, other = (block[None], block[:, None]) if upper else (block[:, None], block[None])
    return (one // 2 == other // 2) & (one > other)


def with_selected_triangle(*, upper: bool) -> Wrap:
    """Return a wrapper for the converter of `torch.triu(x, diagonal=0)` or `torch.tril`.

    coremltools subtracts the other triangle from x, which gives NaN where x is infinite, as masks are. Here the
    other triangle is replaced by zeros.
    """

    @wrapper
    def wrap(host: Convert, context: Any, node: Any) -> None:
        diagonal = int(option(context, node, 1, "diagonal", 0))
        if (diagonal <= 0) if upper else (diagonal >= 0):
            return host(context, node)
        x = inputs_of(context, node)[0]
        band = {"lower": -1, "upper": diagonal - 1} if upper else {"lower": -diagonal - 1, "upper": -1}
        keep = mb.equal(x=mb.band_part(x=_full_like(x, np.float32(1)), **band), y=np.float32(0))
        context.add(mb.select(cond=keep, a=x, b=_full_like(x, np_dtype(x).type(0)), name=node.name))

    return wrap


def _full_like(x: Var, value: Any) -> Any:
    """Return one value in the shape of x."""
    if any(map(is_symbolic, x.shape)):
        return mb.fill(shape=mb.shape(x=x), value=value)
    return np.full(x.shape, value)


TRIANGULAR = {"triu": with_selected_triangle(upper=True), "tril": with_selected_triangle(upper=False)}


# -- operations that coremltools converts wrongly: `x % 1`, `atan2`, circular padding, means ---------------
#
# `inspect` reports models that were converted without these (rules `lost-...`).


@wrapper
def with_remainder_by_one(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `x % 1`: coremltools drops the division by 1, and with it the floor."""
    x, by = inputs_of(context, node)[:2]
    if not is_one(by) or types.is_int(promoted([x, by])[0].dtype):
        return host(context, node)
    x, _ = promoted([x, by])
    context.add(mb.sub(x=x, y=mb.floor(x=x), name=node.name))


@wrapper
def with_circular_padding(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of padding: MIL's `pad` has no mode for circular padding."""
    mode = option(context, node, 2, "mode", "constant")
    if mode != "circular":
        return host(context, node)
    x, pads = inputs_of(context, node)[:2]
    amounts = np.ravel(known_value(pads)).astype(int).reshape(-1, 2).tolist()
    for i, (before, after) in enumerate(amounts):
        x = _circularly_padded(x, x.rank - 1 - i, before, after)
    context.add(mb.identity(x=x, name=node.name))


def _circularly_padded(x: Var, axis: int, before: int, after: int) -> Var:
    """Return a value with its last elements in front and its first at the end; negative amounts cut.

    [1, 2, 3, 4] with before=1 and after=2 is [4, 1, 2, 3, 4, 1, 2].
    """
    if min(before, after) < 0:
        x = slice_of_axis(x, axis, max(-before, 0), min(after, 0) or None)
    parts = [slice_of_axis(x, axis, -before, None)] if before > 0 else []
    parts += [x, slice_of_axis(x, axis, 0, after)] if after > 0 else [x]
    return mb.concat(values=parts, axis=axis) if len(parts) > 1 else x


@wrapper
def with_counted_windows(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of a mean of windows: elements beyond the end do not count in torch."""
    divisor = option(context, node, 6, "divisor_override")
    if divisor is not None:
        _sums_by(host, context, node, divisor)
        return
    host(context, node)
    mean = context[node.name]
    op = mean.op
    if op is None or op.op_type != "avg_pool" or op.ceil_mode is None or not op.ceil_mode.val:
        return
    if op.exclude_padding_from_average.val:
        return
    x, pads = op.x, [] if op.pad is None or op.pad_type.val != "custom" else list(op.pad.val)
    if any(pads):
        x = mb.pad(x=x, pad=[0] * 4 + pads, constant_val=np_dtype(x).type(0))
    inside = mb.avg_pool(
        x=x,
        kernel_sizes=op.kernel_sizes,
        strides=op.strides,
        pad_type="valid",
        ceil_mode=True,
        exclude_padding_from_average=True,
    )
    if inside.shape != mean.shape:  # a window that begins in the padding is none
        size = [-1 if a < 2 else int(n) for a, n in enumerate(mean.shape)]
        inside = mb.slice_by_size(x=inside, begin=[0] * inside.rank, size=size)
    context.add(mb.identity(x=inside, name=f"{node.name}_inside"), torch_name=node.name, override=True)


def _sums_by(host: Convert, context: Any, node: Any, divisor: int) -> None:
    """Convert the sum of each window by a divisor: of the mean with padding."""
    name, kernel = node.name, known_value(inputs_of(context, node)[1])
    read_instead(context, node, 5, mb.const(val=True, name=f"{name}_5"))
    context.add(None, torch_name=f"{name}_6")
    node.inputs = [*node.inputs[:6], f"{name}_6", *node.inputs[7:]]
    node.name = f"{name}_mean"
    host(context, node)
    node.name, mean = name, context[node.name]
    context.add(mb.mul(x=mean, y=np_dtype(mean).type(math.prod(kernel) / divisor), name=name))


def logcumsumexp(context: Any, node: Any) -> None:
    """Convert `torch.logcumsumexp(x, dim)`; for a known length by sums of pairs, which never overflow.

    For a dynamic length the largest number is subtracted first: numbers below it by 104 in fp32, or 17 in fp16,
    vanish.
    """
    x = inputs_of(context, node)[0]
    axis = int(option(context, node, 1, "dim", 0)) % x.rank
    length = x.shape[axis]
    if is_symbolic(length):
        most = mb.reduce_max(x=x, axes=[axis], keep_dims=True)
        total = mb.cumsum(x=mb.exp(x=mb.sub(x=x, y=most)), axis=axis)
        context.add(mb.add(x=mb.log(x=total), y=most, name=node.name))
        return
    reach = 1  # so many numbers, up to its own, are in each sum
    while reach < length:
        first, later = mb.split(x=x, split_sizes=[reach, length - reach], axis=axis)
        earlier, _ = mb.split(x=x, split_sizes=[length - reach, reach], axis=axis)
        x = mb.concat(values=[first, _log_of_sum(earlier, later)], axis=axis)
        reach *= 2
    context.add(mb.identity(x=x, name=node.name))


def _log_of_sum(x: Var, y: Var) -> Var:
    """Return log(exp(x) + exp(y)); equal operands, which may be infinite, are not subtracted."""
    most, least = mb.maximum(x=x, y=y), mb.minimum(x=x, y=y)
    none = np_dtype(x).type(0)
    share: Var = mb.exp(x=mb.select(cond=mb.equal(x=x, y=y), a=none, b=mb.sub(x=least, y=most)))
    return mb.add(x=most, y=mb.log(x=mb.add(x=share, y=1.0)))


# -- encoder layers and attention of torch.nn, which a trace without gradients records as one operation ----

ENCODER_LAYER = (
    *("x", "width", "heads", "qkv_weight", "qkv_bias", "weight", "bias", "gelu", "norm_first", "eps"),
    *("gamma_1", "beta_1", "gamma_2", "beta_2", "weight_1", "bias_1", "weight_2", "bias_2"),
)
"""The arguments of `_transformer_encoder_layer_fwd`, without the mask."""
ATTENTION = ("query", "key", "value", "width", "heads", "qkv_weight", "qkv_bias", "weight", "bias")
"""The parameters of `_native_multi_head_attention`."""
QUERIES = 0
"""Mask type of rank 2 for (queries, keys); any other is for (batch, keys)."""


def encoder_layer(context: Any, node: Any) -> None:
    """Convert `_transformer_encoder_layer_fwd`: attention and a feed-forward network, each with a norm.

    With `norm_first`, x + attention(norm_1(x)) and then + feed_forward(norm_2(..)); else a norm after each sum.
    """
    arguments = dict(zip(ENCODER_LAYER, inputs_of(context, node), strict=False))
    heads, uses_gelu, first = (known_value(arguments[n]) for n in ("heads", "gelu", "norm_first"))
    eps = np.float32(known_value(arguments["eps"]))

    def normed(x: Var, which: int) -> Var:
        scales = {"gamma": arguments[f"gamma_{which}"], "beta": arguments[f"beta_{which}"]}
        return mb.layer_norm(x=x, axes=[-1], epsilon=eps, **scales)

    def attended(x: Var) -> Var:
        mixed, _ = _attention([x] * 3, arguments, int(heads), keep)
        return mixed

    def feed_forward(x: Var) -> Var:
        x = mb.linear(x=x, weight=arguments["weight_1"], bias=arguments["bias_1"])
        x = mb.gelu(x=x, mode="EXACT") if uses_gelu else mb.relu(x=x)
        return mb.linear(x=x, weight=arguments["weight_2"], bias=arguments["bias_2"])

    rows = arguments["x"]
    x: Var = rows.x if isinstance(rows, Nested) else rows
    keep = rows.keep if isinstance(rows, Nested) else _kept_scores(context, node, len(ENCODER_LAYER))
    if first:
        x = mb.add(x=x, y=attended(normed(x, 1)))
        x = mb.add(x=x, y=feed_forward(normed(x, 2)))
    else:
        x = normed(mb.add(x=x, y=attended(x)), 1)
        x = normed(mb.add(x=x, y=feed_forward(x)), 2)
    if isinstance(rows, Nested):
        context.add(Nested(x, rows.keep), torch_name=node.name)
    else:
        context.add(mb.identity(x=x, name=node.name))


class Nested(NamedTuple):
    """Rows of several lengths, which torch stores without padding."""

    x: Var
    """The rows with their padding, (batch, length, width)."""
    keep: Var
    """False for padding, (batch, 1, 1, length)."""


def nested_rows(context: Any, node: Any) -> None:
    """Convert `_nested_tensor_from_mask`: the rows keep their padding, and the mask goes along."""
    x, mask = inputs_of(context, node)[:2]
    kept = mb.expand_dims(x=mb.cast(x=mask, dtype="bool"), axes=[1, 2])
    context.add(Nested(x, kept), torch_name=node.name)


def padded_rows(context: Any, node: Any) -> None:
    """Convert `to_padded_tensor`: a number in the place of padding."""
    rows, number = inputs_of(context, node)[:2]
    kept = mb.expand_dims(x=mb.squeeze(x=rows.keep, axes=[1, 2]), axes=[2])
    number = np_dtype(rows.x).type(known_value(number))
    context.add(mb.select(cond=kept, a=rows.x, b=number, name=node.name))


def multi_head_attention(context: Any, node: Any) -> None:
    """Convert `_native_multi_head_attention`: the attended values, and the weights, averaged over heads."""
    arguments = dict(zip(ATTENTION, inputs_of(context, node), strict=False))
    keep = _kept_scores(context, node, len(ATTENTION), between=2)
    rows = [arguments[name] for name in ("query", "key", "value")]
    mixed, weights = _attention(rows, arguments, int(known_value(arguments["heads"])), keep)
    average = option(context, node, len(ATTENTION) + 2, "average_attn_weights", True)
    weights = mb.reduce_mean(x=weights, axes=[1], keep_dims=False) if average else weights
    for name, value in zip(node.outputs, (mixed, weights), strict=True):
        context.add(value, torch_name=name)


def _attention(rows: list[Var], arguments: dict[str, Any], heads: int, keep: Var | None) -> tuple[Var, Var]:
    """Return what attention gives, (batch, queries, width), and its weights, (batch, heads, queries, keys).

    Args:
        rows: query, key and value, each (batch, length, width).
        arguments: the arguments of the node by name: `width`, and the weights and biases of both products.
        heads: the number of heads.
        keep: which scores are kept; None for all.
    """
    width = int(known_value(arguments["width"]))
    weights = mb.split(x=arguments["qkv_weight"], num_splits=3, axis=0)
    biases = mb.split(x=arguments["qkv_bias"], num_splits=3, axis=0)
    batch = int(rows[0].shape[0])

    def by_head(x: Var, weight: Var, bias: Var) -> Var:
        mixed_rows = mb.reshape(
            x=mb.linear(x=x, weight=weight, bias=bias), shape=[batch, -1, heads, width // heads]
        )
        return mb.transpose(x=mixed_rows, perm=[0, 2, 1, 3])

    q, k, v = (by_head(*part) for part in zip(rows, weights, biases, strict=True))
    scores = mb.matmul(x=mb.mul(x=q, y=np.float32((width // heads) ** -0.5)), y=k, transpose_y=True)
    scores = scores if keep is None else mb.select(cond=keep, a=scores, b=np.float32(-np.inf))
    share = mb.softmax(x=scores, axis=-1)
    mixed = mb.transpose(x=mb.matmul(x=share, y=v), perm=[0, 2, 1, 3])
    mixed = mb.reshape(x=mixed, shape=[batch, -1, width])
    return mb.linear(x=mixed, weight=arguments["weight"], bias=arguments["bias"]), share


def _kept_scores(context: Any, node: Any, position: int, between: int = 0) -> Var | None:
    """Return which scores are kept, where the mask is 0: (batch, heads, queries, keys); None without a mask.

    `position` is that of the mask among the arguments; `between` more lie between it and its type.
    """
    mask = argument(context, node, position, "mask")
    if mask is None:
        return None
    kind = option(context, node, position + 1 + between, "mask_type")
    if mask.rank == 2:
        mask = mb.expand_dims(x=mask, axes=[0, 1] if kind == QUERIES else [1, 2])
    elif mask.rank != 4:
        raise NotImplementedError(f"{node.name}: a mask of rank {mask.rank}; of rank 2 and 4 it is covered")
    zero = np.float32(0)
    return mb.equal(x=mb.cast(x=mask, dtype="fp32"), y=zero)


# -- repeated and copied values: `repeat_interleave`, grouped attention, `flip` ----------------------------


@wrapper
def with_repeats(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `repeat_interleave`: known repeats become one tile, or one gather.

    A trace computes the number of repeats from sizes, which coremltools does in floats. Computed repeats
    of each element are covered where `output_size` gives their sum.
    """
    x, repeats = inputs_of(context, node)[:2]
    times = known_value(repeats)
    if times is None and isinstance(x, Var) and repeats.rank and repeats.shape != (1,):
        context.add(_repeat_by_counts(context, node, x, repeats), torch_name=node.name)
        return
    if times is None or not isinstance(x, Var) or any(map(is_symbolic, x.shape)):
        return host(context, node)
    axis = option(context, node, 2, "dim")
    if axis is None:
        x, axis = mb.reshape(x=x, shape=[-1]), 0
    counts = np.ravel(times).astype(np.int64)
    convert = _repeat_evenly if (counts == counts[0]).all() else _repeat_unevenly
    context.add(convert(x, int(axis) % x.rank, counts, node.name))


def _repeat_evenly(x: Var, axis: int, counts: Any, name: str) -> Var:
    times, shape = int(counts[0]), [int(n) for n in x.shape]
    if times == 1:
        return mb.identity(x=x, name=name)
    before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    rows = mb.reshape(x=x, shape=[before, shape[axis], 1, after])
    shape[axis] *= times
    return mb.reshape(x=mb.tile(x=rows, reps=[1, 1, times, 1]), shape=shape, name=name)


def bernoulli(context: Any, node: Any) -> None:
    """Convert `torch.bernoulli(x)` and `torch.bernoulli(x, p)`: 1 where a random number is below x, or p."""
    x, *rest = inputs_of(context, node)
    p = rest[0] if rest and rest[0] is not None else x
    drawn = mb.random_uniform(shape=mb.shape(x=x), low=0.0, high=1.0)
    context.add(mb.cast(x=mb.less(x=drawn, y=promoted([p, drawn])[0]), dtype=dtype_of(x), name=node.name))


def _repeat_by_counts(context: Any, node: Any, x: Var, counts: Var) -> Var:
    """Return x with each element repeated a computed number of times.

    A place gets the element whose number is how many running sums of the counts are not above it. 2, 0, 1
    have the sums 2, 2, 3, so the places 0, 1, 2 get the elements 0, 0, 2.
    """
    length = option(context, node, 3, "output_size")
    if length is None:
        raise NotImplementedError(
            f"{node.name}: the length of the result depends on the numbers of repeats, which are computed: "
            "give their sum as `output_size`, or convert what comes before and after it, and repeat in the app"
        )
    axis = option(context, node, 2, "dim")
    if axis is None:
        x, axis = mb.reshape(x=x, shape=[-1]), 0
    ends = mb.cumsum(x=mb.cast(x=counts, dtype="int32"), axis=0)
    before = mb.less_equal(x=ends, y=np.arange(int(length), dtype=np.int32)[:, None])
    places = mb.reduce_sum(x=mb.cast(x=before, dtype="int32"), axes=[1], keep_dims=False)
    return mb.gather(x=x, indices=places, axis=int(axis))


def _repeat_unevenly(x: Var, axis: int, counts: Any, name: str) -> Var:
    places = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    return mb.gather(x=x, indices=places, axis=axis, name=name)


@wrapper
def with_grouped_heads(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of attention with fewer key than query heads (`enable_gqa=True`)."""
    if bool(option(context, node, 7, "enable_gqa", False)):
        query = inputs_of(context, node)[0]
        for position in (1, 2):
            _repeat_heads(context, node, position, int(query.shape[-3]))
    host(context, node)


def _repeat_heads(context: Any, node: Any, position: int, heads: int) -> None:
    """Let a node read its keys or values repeated to as many heads: (1, 2, 7, 64) to (1, 8, 7, 64) for 8."""
    x = inputs_of(context, node)[position]
    groups = int(x.shape[-3])
    if groups == heads:
        return
    shape = [-1 if is_symbolic(size) else int(size) for size in x.shape]
    if x.rank not in (3, 4) or heads % groups or shape.count(-1) > 1:
        raise NotImplementedError(
            f"{node.name}: enable_gqa with {heads} query heads over keys or values of shape {x.shape}"
        )
    axis = x.rank - 3  # of the heads; the copies of each get a new axis behind it
    reps = [heads // groups if i == axis + 1 else 1 for i in range(x.rank + 1)]
    wide = mb.tile(x=mb.expand_dims(x=x, axes=[axis + 1]), reps=reps)
    shape[axis] = heads
    repeated = mb.reshape(x=wide, shape=shape, name=f"{node.name}_heads_{position}")
    read_instead(context, node, position, repeated)


@wrapper
def with_copied_flip(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `x.flip(axes)`: known values are copied, as torch takes no negative strides."""
    x, axes = map(known_value, inputs_of(context, node)[:2])
    if isinstance(x, np.ndarray):
        context.add(mb.const(val=np.flip(x, tuple(axes)).copy(), name=node.name))
    else:
        host(context, node)


# -- numbers that depend on data, as torch.export computes them for its assertions -------------------------


def sym_ite(context: Any, node: Any) -> None:
    """Convert `torch.sym_ite(condition, a, b)` of numbers."""
    condition, *sides = inputs_of(context, node)[:3]
    a, b = promoted([v if isinstance(v, Var) else mb.const(val=v) for v in sides])
    context.add(mb.select(cond=_boolean(condition), a=a, b=b, name=node.name))


def sym_not(context: Any, node: Any) -> None:
    """Convert `torch.sym_not(condition)`."""
    context.add(mb.logical_not(x=_boolean(inputs_of(context, node)[0]), name=node.name))


def _boolean(x: Var) -> Var:
    return x if types.is_bool(x.dtype) else mb.cast(x=x, dtype="bool")


# -- recurrent layers of torch.export: `lstm.input` and its siblings return a tuple ------------------------

OUTPUTS = {"lstm": 3, "gru": 2, "rnn_tanh": 2, "rnn_relu": 2}
"""Torch operation -> how many values it returns."""


def exported_recurrent(kind: str) -> Convert:
    """Return the converter of `<kind>.input`, which calls the one for traces."""

    def convert(context: Any, node: Any) -> None:
        from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

        outputs = [f"{node.name}_output_{i}" for i in range(OUTPUTS[kind])]
        traced = _traced(node, kind, node.inputs, outputs)
        _TORCH_OPS_REGISTRY.get_func(kind)(context, traced)
        context.add(tuple(context[name] for name in outputs), torch_name=node.name)

    return convert


@wrapper
def with_joined_states(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `lstm`: states that were stacked are joined, for a pass of the host fails on them.

    The states of several layers are stacked, and a second call of these layers splits them again. The pass
    `fuse_stack_split` then removes states that are still read.
    """
    states = inputs_of(context, node)[1]
    if isinstance(states, (list, tuple)) and any(producer(state, "stack") is not None for state in states):
        context.add([_joined(state) for state in states], torch_name=f"{node.name}_states")
        node.inputs = [node.inputs[0], f"{node.name}_states", *node.inputs[2:]]
    host(context, node)


def _joined(x: Var) -> Var:
    """Return stacked values, joined along a new axis; other values as they are."""
    op = producer(x, "stack")
    if op is None:
        return x
    axis = int(op.axis.val)
    return mb.concat(values=[mb.expand_dims(x=v, axes=[axis]) for v in op.values], axis=axis)


@wrapper
def with_both_directions(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `rnn_tanh` and `rnn_relu`, which refuses layers that read from both ends."""
    x, first, weights, _, layers, _, _, both, batch_first = inputs_of(context, node)
    if not known_value(both):
        host(context, node)
        return
    x = x if known_value(batch_first) else mb.transpose(x=x, perm=[1, 0, 2])
    one_way = f"{node.name}_one_way"
    context.add(mb.const(val=False), torch_name=one_way)
    settings = [*(node.inputs[i] for i in (3, 5, 6)), one_way]
    each, ends = len(weights) // (2 * known_value(layers)), []
    for i in range(known_value(layers)):
        read = []
        for j, rows in enumerate((x, mb.reverse(x=x, axes=[1])), 2 * i):
            values = rows, slice_of_axis(first, 0, j, j + 1), weights[j * each : (j + 1) * each]
            y, end = _one_layer(host, context, node, values, settings)
            read.append(y)
            ends.append(end)
        x = mb.concat(values=[read[0], mb.reverse(x=read[1], axes=[1])], axis=2)
    x = x if known_value(batch_first) else mb.transpose(x=x, perm=[1, 0, 2])
    for name, value in zip(node.outputs, (x, mb.concat(values=ends, axis=0)), strict=True):
        context.add(mb.identity(x=value, name=name))


# -- recurrent layers of rows of several lengths, as `pack_padded_sequence` makes them ---------------------

PAST = 1e4
"""What gates read past the end of a row: the sigmoid is 0 or 1 then, in fp16 too, whatever else they read."""
HOLDING = {"lstm": (-1, 1, 0, 0), "gru": (0, 1, 0), "rnn_tanh": (0,), "rnn_relu": (0,)}
"""Layer -> the weight with which each of its gates reads `PAST`, so that the state stays as it is."""


def packed_rows(context: Any, node: Any) -> None:
    """Convert `_pack_padded_sequence`: rows keep their padding; the batch sizes name the lengths."""
    x, lengths, batch_first = inputs_of(context, node)
    x = x if known_value(batch_first) else mb.transpose(x=x, perm=[1, 0, 2])
    if any(map(is_symbolic, x.shape)):
        raise NotImplementedError(f"{node.name}: packed rows of a dynamic shape {x.shape}")
    rows, sizes = node.outputs
    context.add(mb.identity(x=x, name=rows))
    context.add(mb.const(val=np.full(x.shape[1], x.shape[0], np.int32), name=sizes))
    context.add(mb.cast(x=lengths, dtype="int32", name=f"{sizes}_lengths"))


def padded_again(context: Any, node: Any) -> None:
    """Convert `_pad_packed_sequence`: a number in the place of what lies past the ends."""
    x, _, batch_first, number, total = inputs_of(context, node)
    if known_value(total) not in (-1, x.shape[1]):
        raise NotImplementedError(f"{node.name}: {x.shape[1]} steps, padded to {known_value(total)}")
    lengths = context[f"{node.inputs[1]}_lengths"]
    kept = mb.expand_dims(x=mb.less(**_steps_and(lengths, x)), axes=[2])
    padded = mb.select(cond=kept, a=x, b=np_dtype(x).type(known_value(number)))
    padded = padded if known_value(batch_first) else mb.transpose(x=padded, perm=[1, 0, 2])
    for name, value in zip(node.outputs, (padded, lengths), strict=True):
        context.add(mb.identity(x=value, name=name))


def _steps_and(lengths: Var, x: Var) -> dict[str, Any]:
    """Return the operands that compare each step with a number for each row, (batch, length)."""
    return {"x": np.arange(x.shape[1], dtype=np.int32)[None], "y": mb.expand_dims(x=lengths, axes=[1])}


def with_packed_rows(kind: str) -> Wrap:
    """Return a wrapper for the converter of a recurrent layer, which then ends packed rows where they end.

    coremltools converts an LSTM as if all rows had the full length, and refuses the other kinds.
    """

    @wrapper
    def wrap(host: Convert, context: Any, node: Any) -> None:
        if f"{node.inputs[1]}_lengths" not in context:
            return host(context, node)
        x, _, first, weights, _, layers, _, _, both = map(known_value, inputs_of(context, node))
        x, lengths = context[node.inputs[0]], context[f"{node.inputs[1]}_lengths"]
        states = list(first) if kind == "lstm" else [context[node.inputs[2]]]
        started = states[0].val is None or np.any(states[0].val)
        if both and (kind in ("rnn_tanh", "rnn_relu") or (kind == "lstm" and started)):
            layer = "an LSTM with a first state" if kind == "lstm" else "a plain RNN"
            raise NotImplementedError(f"{node.name}: packed rows, which {layer} reads from their ends")
        past = _flags(mb.greater_equal(**_steps_and(lengths, x)), x, PAST)
        last = _flags(mb.equal(**_steps_and(mb.sub(x=lengths, y=np.int32(1)), x)), x, 1)
        count, directions, ends = len(weights) // layers, 1 + both, []
        for i in range(layers):
            own = [slice_of_axis(state, 0, i * directions, (i + 1) * directions) for state in states]
            read = _holding(kind, weights[i * count : (i + 1) * count], count // directions)
            rows = mb.concat(values=[x, past], axis=2)
            values = rows, own if kind == "lstm" else own[0], read
            x, *end = _one_layer(host, context, node, values, [node.inputs[i] for i in (4, 6, 7, 8)])
            ends.append(end if kind == "gru" else [_at_ends(x, end[0], last), *end[1:]])
        joined = [mb.concat(values=list(values), axis=0) for values in zip(*ends, strict=True)]
        for name, value in zip(node.outputs, (x, *joined), strict=True):
            context.add(mb.identity(x=value, name=name))

    return wrap


def _flags(chosen: Var, x: Var, number: float) -> Var:
    """Return a number at the chosen steps, and 0 at the others, (batch, length, 1)."""
    flags = mb.mul(x=mb.cast(x=chosen, dtype=dtype_of(x)), y=np_dtype(x).type(number))
    return mb.expand_dims(x=flags, axes=[2])


def _holding(kind: str, weights: list[Var], each: int) -> list[Var]:
    """Return the weights of a layer, whose inputs end with `PAST`; `each` direction has so many weights."""
    read = list(weights)
    for i in range(0, len(read), each):
        weight = read[i].val
        if weight is None:
            raise NotImplementedError("packed rows, and a layer with computed weights")
        column = np.repeat(HOLDING[kind], len(weight) // len(HOLDING[kind]))[:, None]
        read[i] = mb.const(val=np.concatenate([weight, column.astype(weight.dtype)], axis=1))
    return read


def _one_layer(
    host: Convert, context: Any, node: Any, values: tuple[Any, ...], settings: list[str]
) -> list[Var]:
    """Convert one layer of a node, that reads these rows, states and weights; return what it gives.

    The settings name whether it has biases, its dropout, whether it trains, and whether it reads both ways.
    """
    name = f"{node.name}_{values[0].name}"
    added = {f"{name}_{i}": value for i, value in enumerate((*values, mb.const(val=1), mb.const(val=True)))}
    for key, value in added.items():
        context.add(value, torch_name=key)
    rows, states, weights, layers, batch_first = added
    biased, dropout, training, both = settings
    inputs = [rows, states, weights, biased, layers, dropout, training, both, batch_first]
    outputs = [f"{name}_{output}" for output in node.outputs]
    host(context, _traced(node, node.kind, inputs, outputs))
    return [context[output] for output in outputs]


def _at_ends(x: Var, states: Var, last: Var) -> Var:
    """Return the states at the last step of each row; those of the other direction are there already."""
    forwards = slice_of_axis(x, 2, 0, states.shape[2])
    forwards = mb.reduce_sum(x=mb.mul(x=forwards, y=last), axes=[1], keep_dims=False)
    forwards = mb.expand_dims(x=forwards, axes=[0])
    if states.shape[0] == 1:
        return forwards
    return mb.concat(values=[forwards, slice_of_axis(states, 0, 1, 2)], axis=0)


def _traced(node: Any, kind: str, inputs: list[Any], outputs: list[str]) -> Any:
    """Return a node for a converter of traces."""
    from coremltools.converters.mil.frontend.torch.internal_graph import InternalTorchIRNode

    return InternalTorchIRNode(
        kind=kind, name=outputs[0], inputs=inputs, outputs=outputs, blocks=[], meta=node.meta
    )


# -- missing axes: pools without a batch, products with a vector as weight ---------------------------------


def with_batch(rank: int) -> Any:
    """Return a wrapper for the converter of a pooling, to add a missing batch axis, stride and numbers."""

    @wrapper
    def wrap(host: Convert, context: Any, node: Any) -> None:
        x = inputs_of(context, node)[0]
        if len(node.inputs) == 2:  # as torch.export writes it
            node.inputs = [*node.inputs, node.inputs[1]]
        _one_number_for_each_axis(context, node, rank - 2)
        if x.rank != rank - 1:
            return host(context, node)
        name, alone = node.name, f"{node.name}_alone"
        context.add(mb.expand_dims(x=x, axes=[0], name=alone))
        node.inputs, node.name = [alone, *node.inputs[1:]], f"{name}_batch"
        host(context, node)
        node.name = name
        context.add(mb.squeeze(x=context[f"{name}_batch"], axes=[0], name=name))

    return wrap


def _one_number_for_each_axis(context: Any, node: Any, axes: int) -> None:
    """Repeat a kernel, stride or padding that is given as one number for all axes."""
    for i, value in enumerate(inputs_of(context, node)[1:4], 1):
        known = known_value(value)
        if known is not None and np.size(known) == 1 and axes > 1:
            numbers = np.resize(known, axes).astype(np.int32)
            read_instead(context, node, i, mb.const(val=numbers, name=f"{node.name}_{i}"))


@wrapper
def with_vector_weight(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `linear(x, weight)`, to take a vector as weight."""
    x, weight = inputs_of(context, node)[:2]
    if weight.rank != 1:
        return host(context, node)
    bias = argument(context, node, 2, "bias")
    product = mb.matmul(x=x, y=mb.expand_dims(x=weight, axes=[1]))
    product = mb.squeeze(x=product, axes=[-1])
    product = product if bias is None else mb.add(x=product, y=bias)
    context.add(mb.identity(x=product, name=node.name))


# -- `torch.nn.functional.fold` as a transposed convolution ------------------------------------------------


@wrapper
def with_overlapping_fold(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `fold(x, output_size, kernel_size, dilation, padding, stride)`.

    coremltools folds windows that tile the padded image, and refuses overlaps, dilation and remainders.
    """
    x, *numbers = inputs_of(context, node)[:6]
    size, kernel, dilation, padding, stride = (np.resize(known_value(v), 2).astype(int) for v in numbers)
    tiled = (dilation == 1).all() and (stride >= kernel).all() and not ((size + 2 * padding) % stride).any()
    if tiled and x.rank == 3:
        return host(context, node)
    if any(map(is_symbolic, x.shape)):
        raise NotImplementedError(f"{node.name}: fold of a dynamic shape {x.shape}")
    span = dilation * (kernel - 1) + 1
    count = (size + 2 * padding - span) // stride + 1
    channels = int(x.shape[-2])
    windows = mb.reshape(x=x, shape=[-1, channels, *count])
    image = mb.conv_transpose(
        x=windows,
        weight=_scatter_weight(channels, kernel, np_dtype(x)),
        strides=stride,
        dilations=dilation,
        groups=int(channels // kernel.prod()),
        pad_type="valid",
    )
    ends = np.maximum(size + 2 * padding - ((count - 1) * stride + span), 0)
    if ends.any():
        image = mb.pad(
            x=image, pad=[0, 0, 0, 0, 0, int(ends[0]), 0, int(ends[1])], constant_val=np_dtype(x).type(0)
        )
    shape = [int(image.shape[0]), int(image.shape[1]), *map(int, size)]
    image = mb.slice_by_size(x=image, begin=[0, 0, *padding], size=shape)
    context.add(mb.reshape(x=image, shape=shape[3 - x.rank :], name=node.name))


def _scatter_weight(channels: int, kernel: Array, dtype: np.dtype[Any]) -> Array:
    """Return the weight of a transposed convolution that puts each channel at its position in the window."""
    places = int(kernel.prod())
    one = np.eye(places, dtype=dtype).reshape(places, 1, *kernel)
    return np.tile(one, (channels // places, 1, 1, 1))


# -- filled tensors, the dtypes that calls name, masks and crops -------------------------------------------


def _fill(value: float, *, like: bool) -> Convert:
    """Return the converter of `x.new_ones(size, dtype)` (`like`), or of `torch.zeros(size, dtype)`."""

    def convert(context: Any, node: Any) -> None:
        arguments = inputs_of(context, node)
        size = arguments[int(like)]
        code = argument(context, node, 1 + like, "dtype")
        if _is_empty(size):
            filled = mb.const(val=np.float32(value))
        else:
            filled = mb.fill(shape=_shape(size), value=value)
        if code is not None and known_value(code) in COMPLEX_CODES:
            context.add(mb.complex(real_data=filled, imag_data=mb.mul(x=filled, y=np.float32(0))), node.name)
            return
        default = dtype_of(arguments[0]) if like else "fp32"
        context.add(mb.cast(x=filled, dtype=_dtype(code, default), name=node.name))

    return convert


def _dtype(code: Any, default: str) -> str:
    """Return MIL's name of torch's code of a dtype."""
    from coremltools.converters.mil.frontend.torch.ops import NUM_TO_DTYPE_STRING

    return default if code is None else NUM_TO_DTYPE_STRING[int(known_value(code))]


def _with_dtype(value: float) -> Wrap:
    """Return a wrapper for `torch.zeros(size, dtype=...)`, to take the dtype by name and an empty size."""

    @wrapper
    def wrap(host: Convert, context: Any, node: Any) -> None:
        named = keyword(context, node, "dtype") is not None
        empty = _is_empty(inputs_of(context, node)[0])
        waves = option(context, node, 1, "dtype") in COMPLEX_CODES
        (_fill(value, like=False) if named or empty or waves else host)(context, node)

    return wrap


def _is_empty(size: Any) -> bool:
    """Return whether a size is that of a scalar."""
    return size.shape == (0,) if isinstance(size, Var) else len(size) == 0


@wrapper
def _with_dtype_like(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `zeros_like(x, dtype=...)` or `ones_like(...)`, to take the dtype by name."""
    code = keyword(context, node, "dtype")
    if code is None:
        return host(context, node)
    value = {"zeros_like": 0.0, "ones_like": 1.0}[node.kind]
    filled = mb.fill(shape=mb.shape(x=inputs_of(context, node)[0]), value=value)
    context.add(mb.cast(x=filled, dtype=_dtype(code, ""), name=node.name))


@wrapper
def _with_dtype_of_eye(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `torch.eye(n, m, dtype=...)`: coremltools' own gives floats, for masks too."""
    given = inputs_of(context, node)
    *sizes, code = given[:-3] if len(given) > 4 else (*given, keyword(context, node, "dtype"))
    if known_value(code) in COMPLEX_CODES:
        return host(context, node)
    eye = np.eye(*(int(known_value(size)) for size in sizes), dtype=np.float32)
    context.add(mb.cast(x=eye, dtype=_dtype(code, "fp32"), name=node.name))


def _filled(context: Any, node: Any) -> None:
    """Convert `full_like(x, value)`, `x.fill(value)` or `x.new_full(size, value)`.

    The result has the dtype that is asked for, or that of x. coremltools' own has that of the number: what is
    written later into a tensor filled with 3 would lose its fractions.
    """
    x, *rest = inputs_of(context, node)
    size = _shape(rest.pop(0)) if node.kind == "new_full" else mb.shape(x=x)
    code = rest[1] if len(rest) > 1 else keyword(context, node, "dtype")
    known = known_value(rest[0])
    value = mb.cast(x=rest[0] if known is None else mb.const(val=known), dtype=_dtype(code, dtype_of(x)))
    if _is_empty(size):
        context.add(mb.identity(x=value, name=node.name))
    elif known is None:  # `fill` takes no computed number
        context.add(mb.add(x=mb.fill(shape=size, value=np_dtype(value).type(0)), y=value, name=node.name))
    else:
        context.add(mb.fill(shape=size, value=value.val, name=node.name))


@wrapper
def _with_dtype_of_sum(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `x.mean(dtype=...)` or `x.sum(...)`: cast x before its elements are added."""
    arguments, rest = inputs_of(context, node), list(node.inputs[1:])
    code = keyword(context, node, "dtype")
    if "." not in node.kind and len(arguments) in (2, 4):  # traced: (x, dtype) or (x, axes, keepdim, dtype)
        code = arguments[-1]
        rest.pop()
    if known_value(code) is not None:
        node.inputs = [f"{node.name}_terms", *rest]
        context.add(mb.cast(x=arguments[0], dtype=_dtype(code, ""), name=node.inputs[0]))
    host(context, node)


def _shape(size: Any) -> Any:
    if isinstance(size, (list, tuple)):
        if any(isinstance(d, Var) and d.val is None for d in size):
            return mb.concat(values=list(size), axis=0)
        return np.array([int(known_value(d)) for d in size], np.int32)
    return size


def where(context: Any, node: Any) -> None:
    """Convert `torch.where(condition, a, b)` with plain numbers, which are promoted as tensors are."""
    from coremltools.converters.mil.frontend.torch.ops import where as host

    host(context, node)


@wrapper
def _with_wide_masks(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `x.masked_fill(mask, value)`: x is broadcast to a larger mask."""
    x, mask = inputs_of(context, node)[:2]
    static = not any(map(is_symbolic, (*x.shape, *mask.shape)))
    if static and np.broadcast_shapes(x.shape, mask.shape) != tuple(x.shape):
        node.inputs = [node.inputs[i] for i in (1, 2, 0)]
        where(context, node)
    else:
        host(context, node)


@wrapper
def _with_crops(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of padding: negative amounts cut elements off."""
    x, pads = inputs_of(context, node)[:2]
    pads = np.ravel(known_value(pads)) if not isinstance(pads, list) else None
    if pads is None or None in pads or (pads >= 0).all():
        return host(context, node)
    mode = option(context, node, 2, "mode", "constant")
    if isinstance(mode, str) and mode != "constant":
        raise NotImplementedError(f"{node.name}: padding by {pads.tolist()}, mode {mode}")
    begin, end = [0] * x.rank, [0] * x.rank
    for i, (first, last) in enumerate(np.minimum(pads, 0).reshape(-1, 2)):
        begin[x.rank - 1 - i], end[x.rank - 1 - i] = -int(first), int(last)
    cropped, positive = f"{node.name}_cropped", f"{node.name}_pads"
    mask = [not e for e in end]
    context.add(mb.slice_by_index(x=x, begin=begin, end=end, end_mask=mask, name=cropped))
    context.add(mb.const(val=np.maximum(pads, 0).astype(np.int32), name=positive))
    node.inputs = [cropped, positive, *node.inputs[2:]]
    host(context, node)


@wrapper
def _with_dynamic_amounts(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of padding, to take amounts known only at run time, which Core ML refuses in `pad`."""
    x, pads = inputs_of(context, node)[:2]
    known = [known_value(v) for v in pads] if isinstance(pads, list) else [0]
    if None not in known and not any(isinstance(v, Var) for v in known):
        return host(context, node)
    place = 3 if node.kind == "pad" else 2
    mode = option(context, node, 2, "mode", "constant") if place == 3 else "constant"
    if mode != "constant":
        raise NotImplementedError(f"{node.name}: mode {mode} needs amounts that are known at conversion")
    value = option(context, node, place, "value") or 0.0
    for i, amount in enumerate(pads):
        if known[i] != 0:
            x = _lengthened(x, x.rank - 1 - i // 2, amount, value, in_front=i % 2 == 0)
    context.add(mb.identity(x=x, name=node.name))


def _lengthened(x: Var, axis: int, amount: Any, value: float, in_front: bool) -> Var:
    """Return a value with an amount of numbers at one end of an axis; a negative amount cuts."""
    if isinstance(amount, Var) and amount.rank == 0:
        amount = mb.expand_dims(x=amount, axes=[0])
    elif not isinstance(amount, Var):
        amount = np.array([amount], np.int32)
    added = mb.add(x=mb.maximum(x=amount, y=np.int32(0)), y=np.int32(1))  # one more, so that it is never empty
    sizes, others = mb.shape(x=x), [np.zeros(n, np.int32) for n in (axis, x.rank - 1 - axis)]
    before = [mb.slice_by_size(x=sizes, begin=[0], size=[axis])] if axis else []
    after = [mb.slice_by_size(x=sizes, begin=[axis + 1], size=[-1])] if axis + 1 < x.rank else []
    shape = mb.concat(values=[*before, added, *after], axis=0)
    filled = mb.fill(shape=shape, value=np_dtype(x).type(value))
    joined = mb.concat(values=[filled, x] if in_front else [x, filled], axis=axis)
    cut = mb.sub(x=added, y=amount) if in_front else mb.sub(x=amount, y=added)
    ends = mb.concat(values=[others[0], cut, others[1]], axis=0)
    free, rest = [True] * x.rank, [a != axis for a in range(x.rank)]
    begin, end = (ends, [0] * x.rank) if in_front else ([0] * x.rank, ends)
    masks = {"begin_mask": rest if in_front else free, "end_mask": free if in_front else rest}
    return mb.slice_by_index(x=joined, begin=begin, end=end, **masks)


@wrapper
def _with_sizes(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `torch.linspace`, to take sizes, which a trace holds as tensors of one element."""
    ends = [known_value(v) for v in inputs_of(context, node)[:3]]
    if any(v is None or np.size(v) != 1 for v in ends):
        return host(context, node)
    first, last, count = (np.asarray(v).item() for v in ends)
    context.add(mb.const(val=np.linspace(first, last, int(count), dtype=np.float32), name=node.name))


def alias(context: Any, node: Any) -> None:
    """Convert `alias`: the value under another name."""
    x = inputs_of(context, node)[0]
    resolved(context, node) if is_complex(x) else context.add(mb.identity(x=x, name=node.name))


# -- logical, Python and elementwise operations ------------------------------------------------------------


def _bitwise(name: str) -> Convert:
    """Return the converter of `a & b`, `a | b` or `a ^ b`.

    Computed integers are split into 32 bits; `x & (2**k - 1)` is the remainder by 2**k, also below 0.
    """

    def convert(context: Any, node: Any) -> None:
        operands = inputs_of(context, node)[:2]
        sides = [v if isinstance(v, Var) else mb.const(val=v) for v in operands]
        bools = all(types.is_bool(v.dtype) for v in sides)
        sides = sides if bools else [mb.cast(x=v, dtype="int32") for v in sides]
        known = [v.val for v in sides if v.val is not None]
        if bools:
            result = getattr(mb, f"logical_{name}")(x=sides[0], y=sides[1], name=node.name)
        elif len(known) == 2:
            result = mb.const(val=getattr(np, f"bitwise_{name}")(*known).astype(np.int32), name=node.name)
        elif name == "and" and len(known) == 1 and _is_low_mask(known[0]):
            computed = sides[0] if sides[0].val is None else sides[1]
            count = np.int32(known[0] + 1)  # `mod` of Core ML has the sign of x
            whole = mb.mul(x=mb.floor_div(x=computed, y=count), y=count)
            result = mb.sub(x=computed, y=whole, name=node.name)
        else:
            a, b = map(_bits, sides)
            if name == "xor":
                bits = mb.abs(x=mb.sub(x=a, y=b))
            else:
                bits = (mb.minimum if name == "and" else mb.maximum)(x=a, y=b)
            weights = np.append(2 ** np.arange(31), -(2**31)).astype(np.int32)
            result = mb.reduce_sum(x=mb.mul(x=bits, y=weights), axes=[-1], name=node.name)
        context.add(result)

    return convert


def _bits(x: Var) -> Var:
    """Return the 32 bits of each integer, the lowest first, on a new last axis; the last is the sign."""
    powers = (2 ** np.arange(31)).astype(np.int32)
    shifted = mb.floor_div(x=mb.expand_dims(x=x, axes=[-1]), y=powers)
    rest = mb.floor_div(x=shifted, y=np.int32(2))
    low = mb.sub(x=shifted, y=mb.mul(x=rest, y=np.int32(2)))
    sign = mb.cast(x=mb.less(x=mb.expand_dims(x=x, axes=[-1]), y=np.int32(0)), dtype="int32")
    return mb.concat(values=[low, sign], axis=-1)


def _is_low_mask(value: Any) -> bool:
    """Return whether integers have ones in their lowest bits only, and can grow by 1 as int32."""
    mask = np.asarray(value)
    return mask.dtype.kind in "iu" and bool(np.all((mask > 0) & (mask < 2**31 - 1) & (mask & (mask + 1) == 0)))


def python_op(context: Any, node: Any) -> None:
    """Convert a `torch.autograd.Function` in a trace, by what its `forward` computes."""
    from coremltools.converters.mil.frontend.torch.internal_graph import InternalTorchIRBlock
    from coremltools.converters.mil.frontend.torch.ops import convert_block

    graph = node.attr.get("Subgraph")
    if graph is None:
        raise NotImplementedError(f"{node.name}: this torch does not record what a python function computes")
    block = InternalTorchIRBlock.from_torchscript_block(block=graph, parent=node)
    for part in (block, *block.nodes):  # the same function is called in several places
        part.inputs = [f"{node.name}_{name}" for name in part.inputs]
        part.outputs = [f"{node.name}_{name}" for name in part.outputs]
    for part in block.nodes:
        part.name = f"{node.name}_{part.name}"
    for name, value in zip(node.outputs, convert_block(context, block, inputs_of(context, node)), strict=True):
        context.add(mb.identity(x=value, name=name))


def bucketize(context: Any, node: Any) -> None:
    """Convert `torch.bucketize(x, bounds, right)`: how many bounds lie below x; with `right`, or at it."""
    x, bounds = inputs_of(context, node)[:2]
    right = bool(option(context, node, 3, "right", False))
    context.add(_number_below(x, bounds, right, node.name))


def searchsorted(context: Any, node: Any) -> None:
    """Convert `torch.searchsorted(bounds, x, right, side, sorter)`, where one row of bounds may be for all x.

    coremltools ignores the sorter, and wants as many axes of bounds as of x.
    """
    bounds, x = inputs_of(context, node)[:2]
    right, side = (option(context, node, i, n) for i, n in ((3, "right"), (4, "side")))
    if (order := argument(context, node, 5, "sorter")) is not None:
        bounds = mb.gather_along_axis(x=bounds, indices=mb.cast(x=order, dtype="int32"), axis=-1)
    if bounds.rank > 1:
        bounds = mb.expand_dims(x=bounds, axes=[-2])
    context.add(_number_below(x, bounds, side == "right" if side else bool(right), node.name))


def _number_below(x: Var, bounds: Var, right: bool, name: str) -> Var:
    """Return how many bounds on the last axis lie below x; with `right`, or at it."""
    x, bounds = promoted([mb.expand_dims(x=x, axes=[-1]), bounds])
    passed = (mb.greater_equal if right else mb.greater)(x=x, y=bounds)
    return mb.reduce_sum(x=mb.cast(x=passed, dtype="int32"), axes=[-1], name=name)


def lerp(context: Any, node: Any) -> None:
    """Convert `torch.lerp(a, b, weight)`."""
    a, b, weight = promoted(inputs_of(context, node)[:3])
    context.add(mb.add(x=a, y=mb.mul(x=weight, y=mb.sub(x=b, y=a)), name=node.name))


def reciprocal(context: Any, node: Any) -> None:
    """Convert `1 / x`; coremltools writes `inverse`, which adds 1e-4 to x by default."""
    (x,) = inputs_of(context, node)[:1]
    number = x if types.is_float(x.dtype) else mb.cast(x=x, dtype="fp32")
    context.add(mb.real_div(x=np_dtype(number).type(1), y=number, name=node.name))


def _add_scaled(op_type: str) -> Convert:
    """Return the converter of `a + value * (b op c)`."""

    def convert(context: Any, node: Any) -> None:
        a, b, c = promoted(inputs_of(context, node)[:3])
        scaled = getattr(mb, op_type)(x=b, y=c)
        value = float(option(context, node, 3, "value", 1))
        if value != 1:
            scaled = mb.mul(x=scaled, y=types.nptype_from_builtin(scaled.dtype)(value))
        context.add(mb.add(x=a, y=scaled, name=node.name))

    return convert


def diff(context: Any, node: Any) -> None:
    """Convert `torch.diff(x, n=1, dim=-1, prepend=None, append=None)` for n = 1, also of booleans."""
    n = option(context, node, 1, "n", 1)
    if n != 1:
        raise NotImplementedError(f"{node.name}: diff of order n={n}; only n=1 is covered")
    x = inputs_of(context, node)[0]
    axis = int(option(context, node, 2, "dim", -1)) % x.rank
    ends = [argument(context, node, 3, "prepend"), argument(context, node, 4, "append")]
    parts = promoted([v for v in (ends[0], x, ends[1]) if v is not None])
    x = mb.concat(values=parts, axis=axis) if len(parts) > 1 else x
    later, earlier = slice_of_axis(x, axis, 1, None), slice_of_axis(x, axis, 0, -1)
    if types.is_bool(x.dtype):
        whole = [mb.cast(x=v, dtype="int32") for v in (later, earlier)]
        context.add(mb.not_equal(x=whole[0], y=whole[1], name=node.name))
    else:
        context.add(mb.sub(x=later, y=earlier, name=node.name))


def matrix_transpose(context: Any, node: Any) -> None:
    """Convert `x.mT`: exchange the last two axes."""
    context.add(_turned(inputs_of(context, node)[0], name=node.name))


def adjoint(context: Any, node: Any) -> None:
    """Convert `x.mH`: exchange the last two axes, and take the conjugate."""
    (conjugate if is_complex(inputs_of(context, node)[0]) else resolved)(context, node)
    turn, given = complex_numbers.with_complex_parts(matrix_transpose), {node.inputs[0]: context[node.name]}
    (turned,) = converted(turn, context, node, given)
    context.add(turned, node.name, override=True)


def bilinear(context: Any, node: Any) -> None:
    """Convert `torch.nn.functional.bilinear(x, y, weight, bias)`: x^T W y for each matrix W of the weight."""
    (x, y, weight), bias = inputs_of(context, node)[:3], argument(context, node, 3, "bias")
    product = mb.matmul(x=mb.expand_dims(x=x, axes=[-2, -3]), y=weight)
    total = mb.reduce_sum(x=mb.mul(x=product, y=mb.expand_dims(x=y, axes=[-2, -3])), axes=[-1, -2])
    context.add(total if bias is None else mb.add(x=total, y=bias), torch_name=node.name)


def fill_diagonal(context: Any, node: Any) -> None:
    """Convert `x.fill_diagonal_(value)` of a matrix."""
    x, value = inputs_of(context, node)[:2]
    if x.rank != 2 or any(map(is_symbolic, x.shape)):
        raise NotImplementedError(f"{node.name}: {node.kind} of the shape {x.shape}; a matrix is covered")
    on_it = np.eye(*x.shape) == 1
    number = np_dtype(x).type(known_value(value))
    context.add(mb.select(cond=on_it, a=np.full(x.shape, number), b=x, name=node.name))


@wrapper
def _with_promotion(host: Convert, context: Any, node: Any) -> None:
    """Wrap a converter, to promote two operands to one dtype first."""
    arguments = inputs_of(context, node)
    if len({v.dtype for v in arguments[:2] if isinstance(v, Var)}) > 1:
        for i, var in enumerate(promoted(arguments[:2])):
            read_instead(context, node, i, mb.identity(x=var, name=f"{node.name}_operand_{i}"))
    host(context, node)


@wrapper
def _with_real_options(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of an activation: integer options, as in `Threshold(0, 1)`, become floats."""
    x, *options = inputs_of(context, node)
    for i, given in enumerate(options, 1):
        if isinstance(given, Var) and given.val is not None and np_dtype(given).kind in "iu":
            real = np.asarray(given.val, dtype=np_dtype(x))
            read_instead(context, node, i, mb.const(val=real[()], name=f"{node.name}_option_{i}"))
    host(context, node)


@wrapper
def _with_integer_limits(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `torch.clamp`: integers between integers stay integers, also with one limit."""
    x = inputs_of(context, node)[0]
    low, high = argument(context, node, 1, "min"), argument(context, node, 2, "max")
    limits = [v for v in (low, high) if v is not None]
    if not all(map(_is_integer, (x, *limits))):
        return host(context, node)
    for limit in limits:
        bounded = mb.maximum if limit is low else mb.minimum
        x, y = promoted([x, limit])
        x = bounded(x=x, y=y)
    context.add(x, node.name)


def _is_integer(value: Any) -> bool:
    return np_dtype(value).kind in "iu" if isinstance(value, Var) else isinstance(value, (int, np.integer))


@wrapper
def with_a_slope_per_channel(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `prelu`: MIL has a slope for each channel only where x has four axes."""
    x, slopes = inputs_of(context, node)
    if x.rank not in (2, 3, 5) or slopes.val is None or np.unique(slopes.val).size < 2:
        host(context, node)
    elif x.rank == 5:
        below = mb.mul(x=mb.minimum(x=x, y=np_dtype(x).type(0)), y=slopes.val[:, None, None, None])
        context.add(mb.add(x=mb.relu(x=x), y=below, name=node.name))
    else:
        more = list(range(x.rank, 4))
        result = mb.prelu(x=mb.expand_dims(x=x, axes=more), alpha=slopes)
        context.add(mb.squeeze(x=result, axes=more, name=node.name))


def with_given_scales(resample: str, first: int, axes: int) -> Wrap:
    """Return a wrapper for a resampling whose scales, arguments from `first` on, may give no whole size.

    torch then samples by the scale, and Core ML by the sizes; coremltools refuses bilinear ones. It also
    refuses sizes that vary, unless they are multiples of that of an image.
    """

    @wrapper
    def wrap(host: Convert, context: Any, node: Any) -> None:
        x, size, *rest = inputs_of(context, node)
        made = resized(resample, x, size, first == 3 and bool(known_value(rest[0])), node.name)
        if made is not None:
            context.add(made)
            return
        fixed = not any(map(is_symbolic, x.shape[-axes:])) and not (first == 3 and known_value(rest[0]))
        sides = zip(x.shape[-axes:], scales_of(context, node, first, axes), strict=True) if fixed else ()
        sizes = [side * scale for side, scale in sides if scale is not None]
        whole = np.allclose(sizes, np.round(sizes), rtol=0, atol=1e-6)
        (host if whole else resampling(resample, axes))(context, node)

    return wrap


def _with_whole_axis(reduce: str) -> Wrap:
    """Return a wrapper for an adaptive pooling of one axis to length 1, of which the host needs the length."""

    @wrapper
    def wrap(host: Convert, context: Any, node: Any) -> None:
        x, size = inputs_of(context, node)[:2]
        if is_symbolic(x.shape[-1]) and np.all(known_value(size) == 1):
            context.add(getattr(mb, reduce)(x=x, axes=[-1], keep_dims=True, name=node.name))
        else:
            host(context, node)

    return wrap


def _with_integer_indices(place: int) -> Wrap:
    """Return a wrapper that casts indices to integers: counts such as `(x > edges).sum(-1)` are floats."""

    @wrapper
    def wrap(host: Convert, context: Any, node: Any) -> None:
        places = inputs_of(context, node)[place]
        if isinstance(places, Var) and np_dtype(places).kind == "f":
            whole = mb.cast(x=places, dtype="int32", name=f"{node.name}_places")
            read_instead(context, node, place, whole)
        host(context, node)

    return wrap


@wrapper
def _with_plain_numbers(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of a number that becomes a tensor: the host gives a known one an axis."""
    x = inputs_of(context, node)[0]
    if known_value(x) is None or np.ndim(known_value(x)):
        host(context, node)
    else:
        context.add(mb.identity(x=x, name=node.name))


# -- the tables --------------------------------------------------------------------------------------------

SMOOTH = resampling("_upsample_bilinear2d_aa")

SAMPLED_BY_SCALE = {
    "linear1d": ("upsample_bilinear2d", 3, 1),
    "bilinear2d": ("upsample_bilinear2d", 3, 2),
    "nearest1d": ("upsample_nearest2d", 2, 1),
    "nearest2d": ("upsample_nearest2d", 2, 2),
}
"""Resampling -> torch's operation with the same matrices, the place of its first scale, its axes."""

CONVERSIONS: dict[str, Convert] = {
    "diff": diff,
    "new_ones": _fill(1.0, like=True),
    "where.scalarother": complex_numbers.with_complex_choice(where),
    "alias": alias,
    **dict.fromkeys(("__and__", "iand"), _bitwise("and")),
    **dict.fromkeys(("or", "__or__", "ior", "bitwise_or"), _bitwise("or")),
    **dict.fromkeys(("xor", "__xor__", "ixor", "bitwise_xor"), _bitwise("xor")),
    **dict.fromkeys(("upsample_bicubic2d", "upsample_bicubic2d.vec"), resampling("upsample_bicubic2d")),
    **dict.fromkeys(
        ("_upsample_bicubic2d_aa", "_upsample_bicubic2d_aa.vec"), resampling("_upsample_bicubic2d_aa")
    ),
    **dict.fromkeys(("upsample_trilinear3d", "upsample_trilinear3d.vec"), resampling("upsample_bilinear2d", 3)),
    **dict.fromkeys(("upsample_nearest3d", "upsample_nearest3d.vec"), resampling("upsample_nearest2d", 3)),
    "pythonop": python_op,
    "mt": complex_numbers.with_complex_parts(matrix_transpose),
    **dict.fromkeys(("mh", "matrix_h", "adjoint"), adjoint),
    "bilinear": bilinear,
    "fill_diagonal": fill_diagonal,
    "lerp": lerp,
    "bucketize": bucketize,
    "narrow_scatter": written_views.narrow_scatter,
    "written_as": written_views.written_as,
    "max_unpool2d": incomplete.max_unpool,
    "addcmul": _add_scaled("mul"),
    "addcdiv": _add_scaled("real_div"),
    **dict.fromkeys(("bernoulli", "bernoulli.p"), bernoulli),
    "_transformer_encoder_layer_fwd": encoder_layer,
    "_native_multi_head_attention": multi_head_attention,
    "_nested_tensor_from_mask": nested_rows,
    "to_padded_tensor": padded_rows,
    "sym_ite": sym_ite,
    "sym_not": sym_not,
    **{f"{kind}.input": exported_recurrent(kind) for kind in OUTPUTS},
    "linalg_solve_triangular": solve_triangular,
    "linalg_solve": linalg_solve,
    "linalg_cholesky_ex": cholesky,
    **dict.fromkeys(("cholesky_solve", "cholesky_inverse"), cholesky_solve),
    "_linalg_check_errors": lambda context, node: None,
    "_linalg_det": determinant(logarithm=False),
    "_linalg_slogdet": determinant(logarithm=True),
    "prims::broadcast_in_dim": broadcast_in_dim,
    "fft_fftshift": complex_numbers.centred(back=False),
    "fft_ifftshift": complex_numbers.centred(back=True),
    "cov": covariance,
    "corrcoef": covariance,
    **parts.CONVERSIONS,
    **complex_numbers.CONVERSIONS,
    **experts.CONVERSIONS,
    **elementary.CONVERSIONS,
    **dict.fromkeys(("prod", "prod.dim_int"), complex_numbers.with_complex_product_of_all(elementary.product)),
}
"""Torch operation, as the front end names it -> converter; coremltools' own converter is kept if it has one."""

ALIASES = {
    "multiply": "mul",
    "subtract": "sub",
    "divide": "div",
    "negative": "neg",
    "_neg_view": "neg",
    "absolute": "abs",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "not_equal": "ne",
    "concatenate": "cat",
    "broadcast_to": "expand",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    **{f"arc{name}h": f"a{name}h" for name in ("sin", "cos", "tan")},
    "arccos": "acos",
    "arcsin": "asin",
    "arctan": "atan",
    "special_expit": "sigmoid",
    "special_erf": "erf",
    "alpha_dropout": "dropout",
    "feature_alpha_dropout": "dropout",
    **{f"{name}.stable": name for name in ("sort", "argsort")},
    "special_softmax": "softmax",
    "special_log_softmax": "log_softmax",
    **complex_numbers.TRANSFORMS,
    **elementary.PRIMITIVES,
}
"""Other name of an operation in torch -> its name in coremltools."""


@wrapper
def _with_single_chunk(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `chunk`, to let `x.chunk(1)` be x; the host's own splits a list of one."""
    if int(node.attr["chunks"]) > 1:
        host(context, node)
    else:
        context.add(mb.identity(x=inputs_of(context, node)[0], name=node.name), node.outputs[0])


@wrapper
def _with_single_lengths(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `shape[i]` in a scripted function, to give one length; the host gives all for 0."""
    sizes, index = inputs_of(context, node)
    if not isinstance(sizes, Var) or sizes.rank != 1 or producer(sizes, "shape") is None:
        return host(context, node)
    place = int(known_value(index)) % sizes.shape[0]
    if sizes.val is not None:
        context.add(mb.const(val=np.int32(sizes.val[place]), name=node.name))
    else:
        context.add(mb.gather(x=sizes, indices=place, axis=0, name=node.name))


OWN: dict[str, Wrap] = {
    "linalg_inv": with_small_inverses,
    **dict.fromkeys(("linalg_matrix_norm", "linalg_norm", "linalg_norm.ord_str"), with_matrix_norms),
    **TRIANGULAR,
    "constantchunk": _with_single_chunk,
    "numtotensor": _with_plain_numbers,
    "getitem": _with_single_lengths,
    **dict.fromkeys(("and", "bitwise_and"), lambda _: _bitwise("and")),
    "searchsorted": lambda _: searchsorted,
    "scaled_dot_product_attention": with_grouped_heads,
    **dict.fromkeys(("outer", "clamp_min", "clamp_max", "bmm", "mm", "matmul"), _with_promotion),
    **dict.fromkeys(("leaky_relu", "elu", "threshold"), _with_real_options),
    **dict.fromkeys(("clamp", "clip"), _with_integer_limits),
    **dict.fromkeys(("gather", "index_select"), _with_integer_indices(2)),
    "embedding": _with_integer_indices(1),
    "masked_fill": _with_wide_masks,
    **dict.fromkeys(("pad", "constant_pad_nd"), _with_crops),
    "remainder": with_remainder_by_one,
    "logcumsumexp": lambda _: logcumsumexp,
    "zeros": _with_dtype(0.0),
    "ones": _with_dtype(1.0),
    **dict.fromkeys(("zeros_like", "ones_like"), _with_dtype_like),
    **dict.fromkeys(("new_full", "full_like", "fill"), lambda _: _filled),
    **dict.fromkeys(("eye", "eye.m"), _with_dtype_of_eye),
    "linspace": _with_sizes,
    **dict.fromkeys(SUMS, _with_dtype_of_sum),
    "flip": with_copied_flip,
    **dict.fromkeys(
        ("repeat_interleave", "repeat_interleave.self_tensor", "repeat_interleave.self_int"), with_repeats
    ),
    "reciprocal": lambda _: reciprocal,
    "linear": with_vector_weight,
    "lstm": with_joined_states,
    **dict.fromkeys(("rnn_tanh", "rnn_relu"), with_both_directions),
    "_pack_padded_sequence": lambda _: packed_rows,
    "_pad_packed_sequence": lambda _: padded_again,
    "col2im": with_overlapping_fold,
    **{f"avg_pool{n}d": with_counted_windows for n in (1, 2, 3)},
    **{f"max_pool{n}d{places}": with_batch(n + 2) for n in (1, 2, 3) for places in ("", "_with_indices")},
    "adaptive_avg_pool1d": _with_whole_axis("reduce_mean"),
    "adaptive_max_pool1d": _with_whole_axis("reduce_max"),
    "prelu": with_a_slope_per_channel,
    **{
        f"upsample_{kind}{form}": with_given_scales(*how)
        for kind, how in SAMPLED_BY_SCALE.items()
        for form in ("", ".vec")
    },
    "new_zeros": lambda _: _fill(0.0, like=True),  # the host's own takes no dtype and no empty size
    "_upsample_bilinear2d_aa": lambda _: SMOOTH,  # the host's own does not smooth
    "_upsample_bilinear2d_aa.vec": lambda _: SMOOTH,
    "where.scalarself": lambda _: where,  # the host's own takes no number of another dtype
}
AROUND: dict[str, Wrap] = {
    **dict.fromkeys(
        ("pad", "constant_pad_nd"), lambda host: _with_dynamic_amounts(with_circular_padding(host))
    ),
    **{f"avg_pool{n}d": with_batch(n + 2) for n in (1, 2, 3)},
    **{kind: with_packed_rows(kind) for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}
OUTERMOST: dict[str, Wrap] = {
    **dict.fromkeys((*MOVING, *SUMS, "add", "sub", "rsub", "mul"), incomplete.with_points),
    "copy": written_views.with_written_dtype,
    **dict.fromkeys(("where", "where.self"), refusing_length_choices),
}
LAYERS = (
    OWN,
    AROUND,
    elementary.WRAPPERS,
    incomplete.WRAPPERS,
    parts.WRAPPERS,
    complex_numbers.WRAPPERS,
    OUTERMOST,
)


def _joined_wrappers(wrappers: Sequence[Wrap]) -> Wrap:
    """Return several wrappers as one, the first of them innermost."""
    return lambda host: reduce(lambda convert, wrap: wrap(convert), wrappers, host)


WRAPPERS: dict[str, Wrap] = {
    kind: _joined_wrappers([layer[kind] for layer in LAYERS if kind in layer])
    for kind in dict.fromkeys(kind for layer in LAYERS for kind in layer)
}
"""Operation that coremltools converts in part -> a function of its converter that returns ours.

Each layer wraps what the layers before it give; the outermost looks at a node first.
"""
