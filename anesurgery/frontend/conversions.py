"""The conversions, and the table of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from anesurgery.frontend import lost_parts
from anesurgery.frontend.arguments import Convert, argument, dtype_of, inputs_of, keyword, known_value, promoted
from anesurgery.frontend.complex_numbers import (
    by_parts,
    computing,
    conjugate,
    exponential,
    inverse,
    keeping_complex,
    of_real_numbers,
    polar,
    resolved,
    squared,
    view_as_complex,
)
from anesurgery.frontend.elementary import CONVERSIONS as ELEMENTARY
from anesurgery.frontend.elementary import PRIMITIVES, SHORTENED, completed, rounding_whole_numbers
from anesurgery.frontend.elementary import WRAPPERS as ELEMENTARY_WRAPPERS
from anesurgery.frontend.experts import grouped_product, histogram
from anesurgery.frontend.exported_rnns import OUTPUTS, of_export
from anesurgery.frontend.fast_attention import encoder_layer, multi_head_attention
from anesurgery.frontend.folding import folding
from anesurgery.frontend.ignored_arguments import (
    gelu,
    rms_norm,
    rounded,
    variance,
    with_factor,
    with_threshold,
    with_word,
)
from anesurgery.frontend.length_choices import choosing
from anesurgery.frontend.missing_axes import one_row, pooling
from anesurgery.frontend.repeating import copying, repeating, with_grouped_heads
from anesurgery.frontend.resampling import resampled
from anesurgery.frontend.scattering import CONVERSIONS as SCATTERING
from anesurgery.frontend.scattering import WRAPPERS as SCATTERING_WRAPPERS
from anesurgery.frontend.strided_views import as_strided, unfold
from anesurgery.frontend.symbolic_numbers import sym_ite, sym_not
from anesurgery.frontend.triangular import WRAPPERS as TRIANGULAR_WRAPPERS
from anesurgery.frontend.triangular import solve_triangular
from anesurgery.mil import Var, is_symbolic, mb, np_dtype, types


def diff(context: Any, node: Any) -> None:
    """`torch.diff(x, n=1, dim=-1, prepend=None, append=None)` for n = 1; of booleans it is "not equal"."""
    n = known_value(argument(context, node, 1, "n", 1))
    if n != 1:
        raise NotImplementedError(f"{node.name}: diff of order n={n}; only n=1 is covered")
    x = inputs_of(context, node)[0]
    axis = int(known_value(argument(context, node, 2, "dim", -1))) % x.rank
    ends = [argument(context, node, 3, "prepend"), argument(context, node, 4, "append")]
    parts = promoted([v for v in (ends[0], x, ends[1]) if v is not None])
    x = mb.concat(values=parts, axis=axis) if len(parts) > 1 else x
    later, earlier = _without(x, axis, first=True), _without(x, axis, first=False)
    if types.is_bool(x.dtype):
        whole = [mb.cast(x=v, dtype="int32") for v in (later, earlier)]
        context.add(mb.not_equal(x=whole[0], y=whole[1], name=node.name))
    else:
        context.add(mb.sub(x=later, y=earlier, name=node.name))


def _without(x: Var, axis: int, *, first: bool) -> Var:
    """What is left without the first, or without the last element of an axis."""
    begin, end = [0] * x.rank, [0] * x.rank
    begin[axis], end[axis] = (1, 0) if first else (0, -1)
    end_mask = [not (i == axis and not first) for i in range(x.rank)]
    return mb.slice_by_index(x=x, begin=begin, end=end, end_mask=end_mask)


def _filled(value: float, *, like: bool) -> Convert:
    """The converter of `x.new_ones(size, dtype=None)`, like x, or of `torch.zeros(size, dtype=None)`."""

    def convert(context: Any, node: Any) -> None:
        arguments = inputs_of(context, node)
        size = arguments[int(like)]
        code = argument(context, node, 1 + like, "dtype")
        if isinstance(size, Var) and size.shape == (0,):
            filled = mb.const(val=np.float32(value))
        else:
            filled = mb.fill(shape=_shape(size), value=value)
        default = dtype_of(arguments[0]) if like else "fp32"
        context.add(mb.cast(x=filled, dtype=_dtype(code, default), name=node.name))

    return convert


def _dtype(code: Any, default: str) -> str:
    """MIL's name of torch's number of a dtype."""
    from coremltools.converters.mil.frontend.torch.ops import NUM_TO_DTYPE_STRING

    return default if code is None else NUM_TO_DTYPE_STRING[int(known_value(code))]


def _with_dtype(host: Convert) -> Convert:
    """`torch.zeros(size, dtype=...)`: torch.export names the dtype, which coremltools expects by position."""

    def convert(context: Any, node: Any) -> None:
        named = keyword(context, node, "dtype") is not None
        (_filled(0.0, like=False) if named else host)(context, node)

    return convert


def _like(host: Convert) -> Convert:
    """`zeros_like(x, dtype=...)` and `full_like(x, value, dtype=...)`, which torch.export writes likewise."""

    def convert(context: Any, node: Any) -> None:
        code = keyword(context, node, "dtype")
        if code is None:
            host(context, node)
            return
        x, *rest = inputs_of(context, node)
        value = {"zeros_like": 0.0, "ones_like": 1.0}.get(node.kind)
        filled = mb.fill(shape=mb.shape(x=x), value=float(known_value(rest[0])) if value is None else value)
        context.add(mb.cast(x=filled, dtype=_dtype(code, ""), name=node.name))

    return convert


def _shape(size: Any) -> Any:
    if isinstance(size, (list, tuple)):
        if any(isinstance(d, Var) and d.val is None for d in size):
            return mb.concat(values=list(size), axis=0)
        return np.array([int(known_value(d)) for d in size], np.int32)
    return size


def where_scalar(context: Any, node: Any) -> None:
    """`torch.where(condition, a, b)` where a or b is a plain number: promoted and broadcast as tensors are."""
    from coremltools.converters.mil.frontend.torch.ops import where

    where(context, node)


def _with_wide_masks(host: Convert) -> Convert:
    """`x.masked_fill(mask, value)` where the mask has sizes that x has not: x is broadcast to them."""

    def convert(context: Any, node: Any) -> None:
        x, mask = inputs_of(context, node)[:2]
        static = not any(map(is_symbolic, (*x.shape, *mask.shape)))
        if static and np.broadcast_shapes(x.shape, mask.shape) != tuple(x.shape):
            node.inputs = [node.inputs[i] for i in (1, 2, 0)]
            where_scalar(context, node)
        else:
            host(context, node)

    return convert


def _with_crops(host: Convert) -> Convert:
    """Padding by negative numbers: that many elements are cut off at the end that they name."""

    def convert(context: Any, node: Any) -> None:
        x, pads = inputs_of(context, node)[:2]
        pads = np.ravel(known_value(pads)) if not isinstance(pads, list) else None
        if pads is None or None in pads or (pads >= 0).all():
            host(context, node)
            return
        mode = known_value(argument(context, node, 2, "mode", "constant"))
        if isinstance(mode, str) and mode != "constant":
            raise NotImplementedError(f"{node.name}: padding by {pads.tolist()}, mode {mode}")
        begin, end = [0] * x.rank, [0] * x.rank
        for i, (first, last) in enumerate(np.minimum(pads, 0).reshape(-1, 2)):
            begin[x.rank - 1 - i], end[x.rank - 1 - i] = -int(first), int(last)
        names = [f"{node.name}_cropped", f"{node.name}_pads"]
        mask = [not e for e in end]
        context.add(mb.slice_by_index(x=x, begin=begin, end=end, end_mask=mask, name=names[0]))
        context.add(mb.const(val=np.maximum(pads, 0).astype(np.int32), name=names[1]))
        node.inputs = [*names, *node.inputs[2:]]
        host(context, node)

    return convert


def _with_sizes(host: Convert) -> Convert:
    """`torch.linspace` between sizes, which a trace holds as tensors of one element."""

    def convert(context: Any, node: Any) -> None:
        ends = [known_value(v) for v in inputs_of(context, node)[:3]]
        if any(v is None or np.size(v) != 1 for v in ends):
            host(context, node)
            return
        first, last, count = (np.asarray(v).item() for v in ends)
        context.add(mb.const(val=np.linspace(first, last, int(count), dtype=np.float32), name=node.name))

    return convert


def _mean_of_windows(rank: int) -> Callable[[Convert], Convert]:
    """A mean of windows inside the ends, with or without a batch."""
    return lambda host: pooling(rank)(lost_parts.within_ends(host))


def alias(context: Any, node: Any) -> None:
    """A value under another name."""
    context.add(mb.identity(x=inputs_of(context, node)[0], name=node.name))


def _logical(op_type: str) -> Convert:
    """The converter of `a & b` and its siblings, for booleans."""

    def convert(context: Any, node: Any) -> None:
        operands = inputs_of(context, node)[:2]
        sides = [v if isinstance(v, Var) else mb.const(val=v) for v in operands]
        if any(not types.is_bool(v.dtype) for v in sides):
            raise NotImplementedError(f"{node.name}: {node.kind} of integers; only booleans are covered")
        context.add(getattr(mb, op_type)(x=sides[0], y=sides[1], name=node.name))

    return convert


def python_op(context: Any, node: Any) -> None:
    """A `torch.autograd.Function` of a trace: what its `forward` computes."""
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
    """`torch.bucketize(x, bounds, right=False)`: how many bounds lie below x; with `right`, or at it."""
    x, bounds = inputs_of(context, node)[:2]
    right = bool(known_value(argument(context, node, 3, "right", False)))
    x, bounds = promoted([mb.expand_dims(x=x, axes=[-1]), bounds])
    passed = (mb.greater_equal if right else mb.greater)(x=x, y=bounds)
    context.add(mb.reduce_sum(x=mb.cast(x=passed, dtype="int32"), axes=[-1], name=node.name))


def lerp(context: Any, node: Any) -> None:
    """`torch.lerp(a, b, weight)`."""
    a, b, weight = promoted(inputs_of(context, node)[:3])
    context.add(mb.add(x=a, y=mb.mul(x=weight, y=mb.sub(x=b, y=a)), name=node.name))


def reciprocal(context: Any, node: Any) -> None:
    """`1 / x`. coremltools writes `inverse`, which adds 1e-4 to x by default."""
    (x,) = inputs_of(context, node)[:1]
    number = x if types.is_float(x.dtype) else mb.cast(x=x, dtype="fp32")
    context.add(mb.real_div(x=np_dtype(number).type(1), y=number, name=node.name))


def _with_scaled(op_type: str) -> Convert:
    """The converter of `a + value * (b op c)`."""

    def convert(context: Any, node: Any) -> None:
        a, b, c = promoted(inputs_of(context, node)[:3])
        scaled = getattr(mb, op_type)(x=b, y=c)
        value = float(known_value(argument(context, node, 3, "value", 1)))
        if value != 1:
            scaled = mb.mul(x=scaled, y=types.nptype_from_builtin(scaled.dtype)(value))
        context.add(mb.add(x=a, y=scaled, name=node.name))

    return convert


def matrix_transpose(context: Any, node: Any) -> None:
    """`x.mT`: the last two axes change places."""
    x = inputs_of(context, node)[0]
    perm = [*range(x.rank - 2), x.rank - 1, x.rank - 2]
    context.add(mb.transpose(x=x, perm=perm, name=node.name))


def _promoting(host: Convert) -> Convert:
    """A product whose operands coremltools has given two dtypes: `arange` of floats becomes integers there."""

    def convert(context: Any, node: Any) -> None:
        arguments = inputs_of(context, node)
        if len({v.dtype for v in arguments[:2] if isinstance(v, Var)}) > 1:
            inputs = list(node.inputs)
            for i, var in enumerate(promoted(arguments[:2])):
                inputs[i] = f"{node.name}_operand_{i}"
                context.add(mb.identity(x=var, name=inputs[i]))
            node.inputs = inputs
        host(context, node)

    return convert


SMOOTH = resampled("_upsample_bilinear2d_aa")

CONVERSIONS: dict[str, Convert] = {
    "diff": diff,
    "new_ones": _filled(1.0, like=True),
    "where.scalarother": where_scalar,
    "alias": alias,
    **dict.fromkeys(("__and__", "iand"), _logical("logical_and")),
    **dict.fromkeys(("or", "__or__", "ior", "bitwise_or"), _logical("logical_or")),
    **dict.fromkeys(("xor", "__xor__", "ixor", "bitwise_xor"), _logical("logical_xor")),
    **dict.fromkeys(("upsample_bicubic2d", "upsample_bicubic2d.vec"), resampled("upsample_bicubic2d")),
    **dict.fromkeys(
        ("_upsample_bicubic2d_aa", "_upsample_bicubic2d_aa.vec"), resampled("_upsample_bicubic2d_aa")
    ),
    "pythonop": python_op,
    "mt": matrix_transpose,
    "histc": histogram,
    **dict.fromkeys(
        ("grouped_mm", "_grouped_mm", "grouped_mm_fallback", "transformers::grouped_mm_fallback"),
        grouped_product,
    ),
    "lerp": lerp,
    "bucketize": bucketize,
    "polar": polar,
    "round.decimals": rounded,
    "view_as_complex": view_as_complex,
    **dict.fromkeys(("_conj", "conj", "conj_physical"), conjugate),
    **dict.fromkeys(("resolve_conj", "resolve_neg"), resolved),
    "addcmul": _with_scaled("mul"),
    "addcdiv": _with_scaled("real_div"),
    "unfold": unfold,
    "_transformer_encoder_layer_fwd": encoder_layer,
    "_native_multi_head_attention": multi_head_attention,
    "sym_ite": sym_ite,
    "sym_not": sym_not,
    "as_strided": as_strided,
    **{f"{kind}.input": of_export(kind) for kind in OUTPUTS},
    "linalg_solve_triangular": solve_triangular,
    **SCATTERING,
    **ELEMENTARY,
}
"""Torch operation, as the front end names it -> converter; one that coremltools has of its own is kept."""

ALIASES = {
    "multiply": "mul",
    "subtract": "sub",
    "divide": "div",
    "negative": "neg",
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
    "special_softmax": "softmax",
    "special_log_softmax": "log_softmax",
    **PRIMITIVES,
}
"""Other names that torch gives to what coremltools converts -> its name there."""

MOVING = (
    *(
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
        "transpose",
        "permute",
        "reshape",
        "view",
        "flatten",
        "expand",
    ),
    *("cat", "stack", "neg", "sum", "mean", "sum.dim_intlist", "mean.dim"),
)
"""What treats the real and the imaginary parts of complex numbers alike."""


def _summing(kind: str, position: int) -> Callable[[Convert], Convert]:
    return lambda host: computing(kind)(with_factor(position)(host))


WRAPPERS: dict[str, Callable[[Convert], Convert]] = {
    "scaled_dot_product_attention": with_grouped_heads,
    **dict.fromkeys(("matmul", "bmm", "mm", "outer"), _promoting),
    "mul": computing("mul"),
    "masked_fill": _with_wide_masks,
    **dict.fromkeys(("pad", "constant_pad_nd"), lambda host: lost_parts.circular(_with_crops(host))),
    "remainder": lost_parts.remainder,
    "atan2": lambda _: lost_parts.angle_of_two,
    "logcumsumexp": lambda _: lost_parts.running_log_sum,
    "zeros": _with_dtype,
    **dict.fromkeys(("zeros_like", "ones_like"), _like),
    "full_like": lambda host: of_real_numbers(_like(host)),
    **dict.fromkeys(("full", "new_full"), of_real_numbers),
    **dict.fromkeys(("to", "_to_copy"), keeping_complex),
    "linspace": _with_sizes,
    **dict.fromkeys(MOVING, by_parts),
    "square": squared,
    "flip": copying,
    **dict.fromkeys(
        ("repeat_interleave", "repeat_interleave.self_tensor", "repeat_interleave.self_int"), repeating
    ),
    "gelu": lambda _: with_word("approximate", 1)(gelu),
    "div": lambda host: computing("div")(with_word("rounding_mode", 2)(rounding_whole_numbers(host))),
    "reciprocal": lambda _: inverse(reciprocal),
    **{kind: _summing(kind, 1) for kind in ("add", "sub")},
    "rsub": _summing("rsub", 0),
    **dict.fromkeys(("var", "var.dim", "var.correction"), lambda _: variance(root=False)),
    **dict.fromkeys(("std", "std.dim", "std.correction"), lambda _: variance(root=True)),
    "rms_norm": lambda _: rms_norm,
    "linear": one_row,
    "col2im": folding,
    **{f"max_pool{n}d": pooling(n + 2) for n in (1, 2, 3)},
    **{f"avg_pool{n}d": _mean_of_windows(n + 2) for n in (1, 2, 3)},
    "round": lambda _: rounded,
    "softplus": with_threshold,
    "new_zeros": lambda _: _filled(0.0, like=True),  # the host's own takes no dtype and no empty size
    "_upsample_bilinear2d_aa": lambda _: SMOOTH,  # the host's own does not smooth
    "_upsample_bilinear2d_aa.vec": lambda _: SMOOTH,
    **dict.fromkeys(("where", "where.self"), choosing),
    "where.scalarself": lambda _: where_scalar,  # the host's own takes no number of another dtype
    **ELEMENTARY_WRAPPERS,
    **SCATTERING_WRAPPERS,
    **TRIANGULAR_WRAPPERS,
    "exp": lambda host: exponential(ELEMENTARY_WRAPPERS["exp"](host)),
    **dict.fromkeys(SHORTENED, completed),
}
"""Operations that coremltools converts in part -> what replaces its own converter, given that one."""
