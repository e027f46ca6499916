"""Random ops with their parameters: one op in a function of its own, and the numbers it is tried on.

`RECIPES` holds what each op type needs beside its element types, which are those of coremltools' input specs.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from anesurgery import ops
from anesurgery.mil import Array, Function, Operation, Var, ct, mb, np_dtype, quiet_host, types

with quiet_host():
    from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

OPSETS = (ct.target.iOS15, ct.target.iOS16, ct.target.iOS17, ct.target.iOS18)
FIRST_OPSET = dict.fromkeys(("fill_like", "pixel_unshuffle", "reshape_like"), 1) | dict.fromkeys(
    ("scaled_dot_product_attention", "slice_update"), 3
)
"""Op type -> its first opset among `OPSETS`, where that is not the first."""
ONLY_FIRST = frozenset({"crop"})
"""Ops that later opsets do not have."""
TYPES = {"fp32": types.fp32, "fp16": types.fp16, "int32": types.int32, "bool": types.bool}
NUMPY = {"fp32": np.float32, "fp16": np.float16, "int32": np.int32, "bool": np.bool_}
INT32 = (-(2.0**31), 2.0**31 - 1)
INTERVALS = (
    *(
        (-math.inf, math.inf),
        (0.0, math.inf),
        (-math.inf, 0.0),
        (-3.0, 5.0),
        (1.0, 4.0),
        (-5.0, -2.0),
        (0.0, 1.0),
    ),
    *((0.0, 0.0), (5.0, 5.0), (-1.0, -1.0), (-3.0, -3.0), (2.0, 7.0), (-7.0, 1.0), (0.25, 0.75), INT32),
    *((INT32[0], INT32[0]), (0.0, 4096.0), (-40.0, 90.0)),
)
"""What is promised of an operand."""
SPECIAL = (
    *(
        0.0,
        -0.0,
        1.0,
        -1.0,
        2.0,
        -2.0,
        3.0,
        -3.0,
        0.5,
        -0.5,
        1.5,
        2.5,
        1e-45,
        -1e-45,
        1e-40,
        6e-8,
        2047.0,
        2049.0,
    ),
    *(65504.0, -65504.0, 1e30, -1e30, 3e38, 2.0**31, -(2.0**31), 2.0**31 - 1, math.inf, -math.inf, math.nan),
)
"""Numbers that are tried where they lie in the interval."""


@dataclass(frozen=True)
class Operand:
    """A value that the op reads while the model runs."""

    shape: tuple[int, ...]
    dtype: str
    low: float = -math.inf
    high: float = math.inf
    """Where its numbers must lie: indices, say."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One op, alone in its function; another one for each draw."""

    op: Operation
    operands: dict[Var, Operand]
    """What it reads while the model runs."""
    function: Function
    seed: str
    ops: tuple[Operation, ...]
    """All ops of the function but constants."""

    def __str__(self) -> str:
        fixed = {
            k: np.asarray(v.val).tolist()
            for k, v in self.op.inputs.items()
            if isinstance(v, Var) and v.val is not None
        }
        read = {v.name: (*o.shape, o.dtype) for v, o in self.operands.items()}
        return f"{self.op.op_type} {read} {fixed} (seed {self.seed})"


class Draw:
    """What a recipe draws from: shapes, axes and operands, all of one element type."""

    def __init__(self, rng: random.Random, dtype: str, opset: Any = OPSETS[-1]) -> None:
        self.rng, self.dtype, self.opset = rng, dtype, opset

    def chance(self, of: float = 0.5) -> bool:
        return self.rng.random() < of

    def one(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def length(self) -> int:
        return self.one(1, 2, 3, 4)

    def shape(self, least: int = 0, most: int = 5) -> tuple[int, ...]:
        return tuple(self.length() for _ in range(self.rng.randint(least, most)))

    def axis(self, rank: int) -> int:
        """Any axis, counted from either end."""
        return self.rng.randrange(-rank, rank)

    def axes(self, rank: int, least: int = 1) -> list[int]:
        """Some axes, each counted from either end."""
        some = self.rng.sample(range(rank), self.rng.randint(min(least, rank), rank))
        return [a - rank if self.chance(0.3) else a for a in some]

    def operand(
        self, shape: Sequence[int], dtype: str = "", low: float = -math.inf, high: float = math.inf
    ) -> Operand:
        """A value that is read while the model runs."""
        return Operand(tuple(shape), dtype or self.dtype, low, high)

    def constant(self, shape: Sequence[int], dtype: str = "") -> Array:
        """Small numbers, whole ones among them."""
        dtype = dtype or self.dtype
        numbers = np.array([self.one(0, 1, -1, 2, -3, 0.5, -0.25, 7) for _ in range(math.prod(shape))])
        return numbers.reshape(tuple(shape)).astype(NUMPY[dtype])

    def either(self, shape: Sequence[int]) -> Any:
        """An operand, or a constant."""
        return self.constant(shape) if self.chance(0.3) else self.operand(shape)

    def scalar(self, *choices: float) -> Any:
        """A parameter in the element type of the op."""
        return NUMPY[self.dtype](self.one(*choices))

    def some(self, **given: Callable[[], Any]) -> dict[str, Any]:
        """Optional parameters, each there or not."""
        return {name: make() for name, make in given.items() if self.chance()}


Recipe = Callable[[Draw], dict[str, Any]]
RECIPES: dict[str, Recipe] = {}
"""Op type -> its inputs."""


def recipe(*op_types: str) -> Callable[[Recipe], Recipe]:
    """Enter a recipe for some op types."""

    def enter(make: Recipe) -> Recipe:
        RECIPES.update(dict.fromkeys(op_types, make))
        return make

    return enter


def _broadcast(d: Draw, count: int) -> list[tuple[int, ...]]:
    """Shapes that broadcast to one another; each may lack axes in front."""
    full = d.shape()
    shapes = [
        tuple(1 if d.chance(0.25) else n for n in full)[d.rng.randint(0, len(full)) :] for _ in range(count)
    ]
    shapes[d.rng.randrange(count)] = full
    return shapes


@recipe(*(ops.UNARY - {"cast", "logical_not"}), "logical_not")
def _unary(d: Draw) -> dict[str, Any]:
    return {"x": d.operand(d.shape())}


def _with(**parameters: tuple[float, ...]) -> Recipe:
    """A unary op with parameters, of which each is one of some numbers."""
    return lambda d: {**_unary(d), **{k: d.scalar(*v) for k, v in parameters.items()}}


@recipe("clip")
def _clip(d: Draw) -> dict[str, Any]:
    low, high = d.one((-2.0, -1.0), (0.0, 1.0), (1.0, 7.0), (-6e4, 6e4), (-1.0, 0.0))
    return {**_unary(d), "alpha": d.scalar(low), "beta": d.scalar(high)}


RECIPES |= {
    "clamped_relu": _with(alpha=(-0.5, 0.5, 2.0), beta=(1.0, 6.0, -1.0)),
    "elu": _with(alpha=(1.0, -2.0, 0.5)),
    "leaky_relu": _with(alpha=(0.01, -2.0, 3.0)),
    "linear_activation": _with(alpha=(1.0, -0.5, 0.0), beta=(0.0, 3.0)),
    "scaled_tanh": _with(alpha=(1.0, -2.0), beta=(0.5, 3.0)),
    "sigmoid_hard": _with(alpha=(0.2, -1.0), beta=(0.5, 3.0)),
    "threshold": _with(alpha=(-1.0, 0.0, 1.0)),
    "thresholded_relu": _with(alpha=(1.0, -1.0, 0.0)),
    **dict.fromkeys(("inverse", "log", "rsqrt"), _with(epsilon=(1e-4, 1e-2, 0.0))),
}


@recipe(*ops.BINARY)
def _binary(d: Draw) -> dict[str, Any]:
    one, other = _broadcast(d, 2)
    sides = [d.operand(one), d.scalar(1, -1, 2, -2, -3, 7) if d.chance(0.4) else d.either(other)]
    sides = sides if d.chance(0.7) else sides[::-1]
    return {"x": sides[0], "y": sides[1]}


@recipe("select")
def _select(d: Draw) -> dict[str, Any]:
    a, b = _broadcast(d, 2)
    full = max(a, b, key=len)
    cond = tuple(1 if d.chance(0.25) else n for n in full)[d.rng.randint(0, len(full)) :]
    return {"cond": d.operand(cond, "bool"), "a": d.operand(a), "b": d.either(b)}


@recipe("prelu")
def _prelu(d: Draw) -> dict[str, Any]:
    shape = d.shape(3, 5)
    alpha = d.constant(shape[1:2])
    return {"x": d.operand(shape), "alpha": alpha if len(shape) == 4 else np.full_like(alpha, alpha[0])}


@recipe("softplus_parametric")
def _softplus_parametric(d: Draw) -> dict[str, Any]:
    shape = d.shape(3, 5)
    both = {name: d.constant(shape[1:2]) for name in ("alpha", "beta")}
    return {
        "x": d.operand(shape),
        **(both if len(shape) == 4 else {k: np.full_like(v, v[0]) for k, v in both.items()}),
    }


@recipe(*ops.REDUCTIONS)
def _reduction(d: Draw) -> dict[str, Any]:
    shape = d.shape(1)
    return {"x": d.operand(shape), **d.some(axes=lambda: d.axes(len(shape)), keep_dims=d.chance)}


@recipe("reduce_argmax", "reduce_argmin")
def _argument(d: Draw) -> dict[str, Any]:
    shape = d.shape(1)
    kinds = {"output_dtype": d.one("int32", "uint16")} if d.opset >= ct.target.iOS17 and d.chance() else {}
    return {"x": d.operand(shape), **d.some(axis=lambda: d.axis(len(shape)), keep_dims=d.chance), **kinds}


@recipe("softmax")
def _softmax(d: Draw) -> dict[str, Any]:
    shape = d.shape(1)
    return {"x": d.operand(shape), **d.some(axis=lambda: d.axis(len(shape)))}


@recipe("cumsum")
def _cumsum(d: Draw) -> dict[str, Any]:
    given = _softmax(d)
    given["axis"] = max(-1, given.get("axis", 0))  # its spec takes no other negative axis
    return {**given, **d.some(exclusive=d.chance, reverse=d.chance)}


@recipe("topk")
def _topk(d: Draw) -> dict[str, Any]:
    shape = d.shape(1)
    axis = d.axis(len(shape))
    return {
        "x": d.operand(shape),
        "axis": axis,
        "k": d.rng.randint(1, shape[axis]),
        **d.some(ascending=d.chance),
        **_indices_too(d),
    }


def _indices_too(d: Draw) -> dict[str, Any]:
    """Are the places given as well, and as what?"""
    more = d.some(sort=d.chance, return_indices=d.chance) if d.opset >= ct.target.iOS16 else {}
    if d.opset >= ct.target.iOS17 and more.get("return_indices", True):
        more |= d.some(output_indices_dtype=lambda: d.one("int32", "uint16"))
    return more


@recipe("layer_norm")
def _layer_norm(d: Draw) -> dict[str, Any]:
    shape = d.shape(1)
    first = d.rng.randrange(len(shape))
    axes = [a - len(shape) if d.chance() else a for a in range(first, len(shape))]
    of_axes = {name: d.constant(shape[first:]) for name in d.one((), ("gamma", "beta"), ("gamma", "beta"))}
    return {"x": d.operand(shape), "axes": axes, "epsilon": d.scalar(1e-5, 1e-3), **of_axes}


@recipe("l2_norm", "instance_norm")
def _l2_norm(d: Draw) -> dict[str, Any]:
    return {"x": d.operand(d.shape(3, 4)), "epsilon": d.scalar(1e-5, 1e-3)}


@recipe("instance_norm")
def _instance_norm(d: Draw) -> dict[str, Any]:
    given = _l2_norm(d)
    return {**given, **_scaled(d, given["x"].shape)}


def _scaled(d: Draw, shape: Sequence[int]) -> dict[str, Any]:
    """What a norm multiplies and adds for each channel, or not."""
    return {name: d.constant(shape[1:2]) for name in d.one((), ("gamma", "beta"))}


@recipe("batch_norm")
def _batch_norm(d: Draw) -> dict[str, Any]:
    shape = d.shape(3, 5)
    spread = np.abs(d.constant(shape[1:2])) + d.scalar(0.5)
    return {
        "x": d.operand(shape),
        "mean": d.constant(shape[1:2]),
        "variance": spread,
        "epsilon": d.scalar(1e-3, 1e-2),
        **_scaled(d, shape),
    }


@recipe("local_response_norm")
def _response(d: Draw) -> dict[str, Any]:
    more = d.some(alpha=lambda: d.scalar(0.5), beta=lambda: d.scalar(1.0, 0.5), k=lambda: d.scalar(2.0))
    return {"x": d.operand(d.shape(3, 4)), "size": d.one(1, 3), **more}


@recipe("linear")
def _linear(d: Draw) -> dict[str, Any]:
    shape, width = d.shape(1, 3), d.length()
    bias = d.some(bias=lambda: d.constant((width,)))
    return {"x": d.operand(shape), "weight": d.constant((width, shape[-1])), **bias}


@recipe("matmul")
def _matmul(d: Draw) -> dict[str, Any]:
    (one, other), (rows, inner, columns) = _broadcast(d, 2), (d.length(), d.length(), d.length())
    one, other = one[-3:], other[-3:]
    flags = {"transpose_x": d.chance(), "transpose_y": d.chance()}
    x = (*one, inner, rows) if flags["transpose_x"] else (*one, rows, inner)
    y = (*other, columns, inner) if flags["transpose_y"] else (*other, inner, columns)
    if len(x) == 2 == len(y) and d.chance(0.1) and not flags["transpose_x"]:
        x = (inner,)
    return {"x": d.operand(x), "y": d.either(y), **flags}


@recipe("conv")
def _conv(d: Draw) -> dict[str, Any]:
    spatial, groups = d.rng.randint(1, 3), d.one(1, 2)
    kernel = [d.one(1, 1, 2, 3) for _ in range(spatial)]
    weight = d.constant((groups * d.one(1, 2), d.one(1, 2), *kernel))
    x = (d.one(1, 2), groups * weight.shape[1], *(d.rng.randint(3, 5) for _ in kernel))
    more = d.some(
        strides=lambda: [d.one(1, 2) for _ in kernel],
        pad_type=lambda: d.one("valid", "same"),
        bias=lambda: d.constant(weight.shape[:1]),
    )
    return {"x": d.operand(x), "weight": weight, "groups": groups, **more}


@recipe("conv_transpose")
def _conv_transpose(d: Draw) -> dict[str, Any]:
    spatial, groups = d.rng.randint(1, 2), d.one(1, 2)
    kernel = [d.one(1, 2, 3) for _ in range(spatial)]
    weight = d.constant((groups * d.one(1, 2), d.one(1, 2), *kernel))
    x = (d.one(1, 2), weight.shape[0], *(d.rng.randint(2, 4) for _ in kernel))
    more = d.some(
        strides=lambda: [d.one(1, 2)] * spatial,
        dilations=lambda: [d.one(1, 2)] * spatial,
        bias=lambda: d.constant((groups * weight.shape[1],)),
    )
    if d.chance():
        more |= {"pad_type": "custom", "pad": [d.one(0, k // 2) for k in kernel for _ in range(2)]}
    return {"x": d.operand(x), "weight": weight, "groups": groups, **more}


@recipe("einsum")
def _einsum(d: Draw) -> dict[str, Any]:
    sizes = {name: d.length() for name in "bchkquw"}
    equation = d.one("bchw,bwhu->bchu", "chw,whu->chu")
    one, other = ([sizes[n] for n in part] for part in equation.split("->")[0].split(","))
    return {"values": (d.operand(one), d.operand(other)), "equation": equation}


@recipe("scaled_dot_product_attention")
def _attention(d: Draw) -> dict[str, Any]:
    batch, width = (d.one(1, 2), d.one(1, 2)), d.length()
    rows, columns = d.length(), d.length()
    mask = d.some(attn_mask=lambda: d.operand((rows, columns)))
    shapes = {"query": (rows, width), "key": (columns, width), "value": (columns, d.length())}
    return {**{k: d.operand((*batch, *s)) for k, s in shapes.items()}, **mask}


@recipe("rnn", "gru", "lstm")
def _recurrent(d: Draw) -> dict[str, Any]:
    raise NotImplementedError  # replaced below, once for each op type


def _recurrent_of(gates: int, state: tuple[str, ...]) -> Recipe:
    def make(d: Draw) -> dict[str, Any]:
        steps, batch, width, hidden = d.length(), d.length(), d.length(), d.length()
        both = gates == 4 and d.chance()
        weights: dict[str, tuple[int, ...]] = {
            "weight_ih": (gates * hidden, width),
            "weight_hh": (gates * hidden, hidden),
        }
        if both:
            weights |= {f"{k}_back": v for k, v in weights.items()}
        given = {name: d.operand((batch, hidden * (1 + both))) for name in state}
        weights |= _of_gates(d, gates, hidden, both)
        more = {"direction": "bidirectional"} if both else d.some(direction=lambda: d.one("forward", "reverse"))
        return {
            "x": d.operand((steps, batch, width)),
            **given,
            **{k: d.constant(v) for k, v in weights.items()},
            **more,
            **_bending(d, gates),
            "output_sequence": d.chance(),
        }

    return make


def _of_gates(d: Draw, gates: int, hidden: int, both: bool) -> dict[str, tuple[int, ...]]:
    """The shapes of biases and peepholes, there or not."""
    found: dict[str, tuple[int, ...]] = {"bias": (gates * hidden,)} if d.chance() else {}
    if gates == 3 and found and d.opset >= ct.target.iOS18 and d.chance():
        found["input_bias"] = (gates * hidden,)
    if gates == 4 and d.chance(0.3):
        found["peephole"] = (3 * hidden,)
    return found | ({f"{k}_back": v for k, v in found.items()} if both else {})


def _bending(d: Draw, gates: int) -> dict[str, Any]:
    """The functions of a step, and what limits it."""
    bends = lambda: d.one("tanh", "sigmoid", "relu")  # noqa: E731
    more = d.some(activation=bends)
    if gates > 1:
        more |= d.some(recurrent_activation=bends)
    if gates == 3 and d.opset >= ct.target.iOS18:
        more |= d.some(reset_after=d.chance)
    if gates == 4:
        more |= d.some(cell_activation=bends, clip=lambda: d.scalar(0.5, 3.0))
    return more


RECIPES |= {
    "rnn": _recurrent_of(1, ("initial_h",)),
    "gru": _recurrent_of(3, ("initial_h",)),
    "lstm": _recurrent_of(4, ("initial_h", "initial_c")),
}


@recipe("avg_pool", "l2_pool", "max_pool")
def _pool(d: Draw) -> dict[str, Any]:
    spatial = d.rng.randint(1, 2)
    kernel = [d.one(1, 2, 3) for _ in range(spatial)]
    x = (d.one(1, 2), d.one(1, 2), *(d.rng.randint(3, 5) for _ in kernel))
    padding = {"pad_type": d.one("valid", "same", "custom")}
    if padding["pad_type"] == "custom":
        padding["pad"] = [d.rng.randint(0, k // 2) for k in kernel for _ in range(2)]
    if padding["pad_type"] != "same":
        padding |= d.some(ceil_mode=d.chance)
    if padding.get("ceil_mode"):  # then both ends are padded alike
        padding["pad"] = [d.rng.randint(0, k) for k in kernel for _ in range(2)]
        padding["pad"][1::2] = padding["pad"][::2]
    return {"x": d.operand(x), "kernel_sizes": kernel, "strides": [d.one(1, 2) for _ in kernel], **padding}


@recipe("transpose")
def _transpose(d: Draw) -> dict[str, Any]:
    shape = d.shape(1)
    perm = d.rng.sample(range(len(shape)), len(shape))
    return {"x": d.operand(shape), "perm": [a - len(shape) if d.chance(0.2) else a for a in perm]}


def _regrouped(d: Draw, shape: Sequence[int]) -> list[int]:
    """Another shape of as many elements: neighbours merged, axes cut, ones put in and left out."""
    lengths = list(shape)
    for _ in range(d.rng.randint(1, 3)):
        at = d.rng.randint(0, len(lengths))
        if at + 1 < len(lengths) and d.chance(0.4):
            lengths[at : at + 2] = [lengths[at] * lengths[at + 1]]
        elif at < len(lengths) and lengths[at] % 2 == 0 and d.chance():
            lengths[at : at + 1] = d.one([2, lengths[at] // 2], [lengths[at] // 2, 2])
        elif len(lengths) < 5:
            lengths.insert(at, 1)
    return lengths


@recipe("reshape")
def _reshape(d: Draw) -> dict[str, Any]:
    shape = d.shape()
    new = _regrouped(d, shape)
    if new and d.chance(0.3):
        new[d.rng.randrange(len(new))] = -1
    return {"x": d.operand(shape), "shape": np.array(new, np.int32)}


@recipe("expand_dims")
def _expand_dims(d: Draw) -> dict[str, Any]:
    shape, new = d.shape(0, 4), d.one(1, 1, 2)
    new = min(new, 5 - len(shape))
    rank = len(shape) + new
    return {
        "x": d.operand(shape),
        "axes": [a - rank if d.chance(0.3) else a for a in d.rng.sample(range(rank), new)],
    }


@recipe("squeeze")
def _squeeze(d: Draw) -> dict[str, Any]:
    shape = list(d.shape(1))
    shape[d.rng.randrange(len(shape))] = 1
    ones = [a for a, n in enumerate(shape) if n == 1]
    some = [a - len(shape) if d.chance(0.3) else a for a in d.rng.sample(ones, d.rng.randint(1, len(ones)))]
    return {"x": d.operand(shape), **d.some(axes=lambda: some)}


def _slices(d: Draw, shape: Sequence[int], squeezes: bool) -> dict[str, Any]:
    """Begin, end, stride and masks of a slice that takes something of each axis."""
    rows = []
    for n in shape:
        stride = d.one(1, 1, 2, -1)
        begin, end = sorted((d.rng.randint(0, n - 1), d.rng.randint(0, n - 1)))
        squeezed = squeezes and d.chance(0.15)
        begin, end = (end, begin - 1) if stride < 0 else (begin, end + 1)
        masks = (d.chance(0.4), d.chance(0.4) or end < 0)
        rows.append((begin - n if d.chance(0.2) else begin, max(end, 0), stride, *masks, squeezed))
    begin_, end_, stride_, first, last, single = (list(v) for v in zip(*rows, strict=True))
    plain = all(s == 1 for s in stride_) and d.chance()
    more = {} if plain else {"stride": stride_}
    masked = {"begin_mask": first, "end_mask": last}
    if not any(v == 0 and s < 0 for v, s in zip(end_, stride_, strict=True)) and d.chance(0.3):
        masked = {}
    return {"begin": begin_, "end": end_, **more, **masked, **({"squeeze_mask": single} if any(single) else {})}


@recipe("slice_by_index")
def _slice(d: Draw) -> dict[str, Any]:
    shape = d.shape(1)
    return {"x": d.operand(shape), **_slices(d, shape, True)}


@recipe("slice_update")
def _slice_update(d: Draw) -> dict[str, Any]:
    shape = d.shape(1)
    part = _slices(d, shape, False)
    size = list(np.zeros(shape)[_as_slices(part, shape)].shape)
    single = [n == 1 and d.chance(0.3) for n in size]
    more = {"squeeze_mask": single} if any(single) else {}
    single[0] = single[0] and not all(single)  # coremltools wants an axis
    kept = [n for n, gone in zip(size, single, strict=True) if not gone]
    return {"x": d.either(shape), "update": d.operand(kept), **part, **more}


def _as_slices(part: dict[str, Any], shape: Sequence[int]) -> tuple[slice, ...]:
    """The slices of numpy; parts are written so that they take forward slices only."""
    if "stride" in part:
        part["stride"] = [abs(s) for s in part["stride"]]
    found = []
    for a, n in enumerate(shape):
        begin, end = sorted((part["begin"][a] % n, max(part["end"][a], 1) - 1))
        part["begin"][a], part["end"][a] = begin, end + 1
        first = 0 if part.get("begin_mask", [False] * len(shape))[a] else begin
        last = n if part.get("end_mask", [False] * len(shape))[a] else end + 1
        found.append(slice(first, last, part.get("stride", [1] * len(shape))[a]))
    return tuple(found)


@recipe("slice_by_size")
def _slice_by_size(d: Draw) -> dict[str, Any]:
    shape = d.shape(1)
    begin = [d.rng.randrange(n) for n in shape]
    size = [d.one(-1, d.rng.randint(1, n - b)) for n, b in zip(shape, begin, strict=True)]
    return {"x": d.operand(shape), "begin": np.array(begin, np.int32), "size": np.array(size, np.int32)}


@recipe("split")
def _split(d: Draw) -> dict[str, Any]:
    shape = list(d.shape(1))
    axis, parts = d.axis(len(shape)), d.one(2, 3)
    if d.chance():
        shape[axis] = parts * d.one(1, 2)
        return {"x": d.operand(shape), "num_splits": parts, "axis": axis}
    sizes = [d.length() for _ in range(parts)]
    shape[axis] = sum(sizes)
    return {"x": d.operand(shape), "split_sizes": sizes, "axis": axis}


@recipe("tile")
def _tile(d: Draw) -> dict[str, Any]:
    shape = d.shape(1)
    return {"x": d.operand(shape), "reps": [d.one(1, 1, 2, 3) for _ in shape]}


@recipe("reverse")
def _reverse(d: Draw) -> dict[str, Any]:
    shape = d.shape(1)
    return {"x": d.operand(shape), **d.some(axes=lambda: d.axes(len(shape)))}


@recipe("reverse_sequence")
def _reverse_sequence(d: Draw) -> dict[str, Any]:
    shape = d.shape(2)
    batch, along = d.rng.sample(range(len(shape)), 2)
    lengths = np.array([d.rng.randint(0, shape[along]) for _ in range(shape[batch])], np.int32)
    return {"x": d.operand(shape), "lengths": lengths, "seq_axis": along, "batch_axis": batch}


@recipe("gather")
def _gather(d: Draw) -> dict[str, Any]:
    shape = d.shape(1, 3)
    axis = d.axis(len(shape))
    given = {"x": d.either(shape), "axis": axis, **_batches(d, axis % len(shape))}
    if given.get("batch_dims"):
        given["axis"] = axis % len(shape)  # coremltools counts others from the end of one of the batch
    picked = (*shape[: given.get("batch_dims", 0)], *d.shape(0, 2))
    return {**given, "indices": _indices(d, picked, shape[axis])}


def _batches(d: Draw, most: int) -> dict[str, Any]:
    """Leading axes that data and indices share, from iOS 16 on; indices are checked from iOS 17 on."""
    more = d.some(batch_dims=lambda: d.rng.randint(0, most)) if d.opset >= ct.target.iOS16 else {}
    return more | (d.some(validate_indices=d.chance) if d.opset >= ct.target.iOS17 else {})


def _indices(d: Draw, shape: Sequence[int], size: int) -> Any:
    if d.chance(0.3):
        return np.array([d.rng.randrange(size) for _ in range(math.prod(shape))], np.int32).reshape(
            tuple(shape)
        )
    return d.operand(shape, "int32", 0, size - 1)


@recipe("gather_along_axis")
def _gather_along_axis(d: Draw) -> dict[str, Any]:
    shape = d.shape(1, 4)
    axis = d.axis(len(shape))
    picked = list(shape)
    picked[axis] = d.length()
    more = d.some(validate_indices=d.chance) if d.opset >= ct.target.iOS17 else {}
    return {"x": d.operand(shape), "indices": _indices(d, picked, shape[axis]), "axis": axis, **more}


MODES = ("add", "sub", "mul", "div", "max", "min", "update")
"""What is done to a number by one that is written to its place."""


@recipe("scatter_along_axis")
def _scatter_along_axis(d: Draw) -> dict[str, Any]:
    shape = d.shape(1, 4)
    axis = d.axis(len(shape))
    written = list(shape)
    written[axis] = d.rng.randint(1, shape[axis])
    places = {"indices": _indices(d, written, shape[axis]), "axis": axis, "mode": d.one(*MODES)}
    places |= d.some(validate_indices=d.chance) if d.opset >= ct.target.iOS17 else {}
    return {"data": d.operand(shape), "updates": d.operand(written), **places}


@recipe("gather_nd")
def _gather_nd(d: Draw) -> dict[str, Any]:
    shape = d.shape(1, 4)
    more = _batches(d, len(shape) - 1)
    shared = more.get("batch_dims", 0)
    depth = d.rng.randint(1, len(shape) - shared)
    if shared or depth < len(shape):
        more.pop("validate_indices", None)  # coremltools compares them with the whole shape
    count = math.prod(shape[:shared]) * 3
    rows = [[d.rng.randrange(n) for n in shape[shared : shared + depth]] for _ in range(count)]
    indices = np.array(rows, np.int32).reshape(*shape[:shared], 3, depth)
    return {"x": d.operand(shape), "indices": indices, **more}


@recipe("concat")
def _concat(d: Draw) -> dict[str, Any]:
    shape = d.shape(1)
    axis, interleave = d.axis(len(shape)), d.chance(0.2)
    shapes = [list(shape) for _ in range(d.one(1, 2, 3))]
    for s in shapes:
        s[axis] = s[axis] if interleave else d.length()
    values = [d.operand(shapes[0]), *(d.either(s) for s in shapes[1:])]
    return {"values": tuple(values), "axis": axis, **({"interleave": True} if interleave else {})}


@recipe("stack")
def _stack(d: Draw) -> dict[str, Any]:
    shape = d.shape(0, 4)
    values = [d.operand(shape), *(d.either(shape) for _ in range(d.one(0, 1, 2)))]
    return {"values": tuple(values), "axis": d.rng.randrange(-len(shape) - 1, len(shape) + 1)}


@recipe("pad")
def _pad(d: Draw) -> dict[str, Any]:
    shape = d.shape(1, 4)
    mode = d.one("constant", "constant", "reflect", "replicate")
    count = d.rng.randint(1, len(shape) if mode == "constant" else min(2, len(shape)))
    if mode == "constant":
        added = [d.rng.randint(0, 2) for _ in range(2 * count)]
        return {"x": d.operand(shape), "pad": added, "mode": mode, "constant_val": d.scalar(0.0, 9.0, -2.0)}
    shape = tuple(d.one(3, 4) for _ in range(count + d.one(1, 2)))
    added = [d.rng.randint(0, 2) for _ in range(2 * count)]
    return {"x": d.operand(shape), "pad": added, "mode": mode, "constant_val": d.scalar(0.0)}


@recipe("crop")
def _crop(d: Draw) -> dict[str, Any]:
    x = d.operand((*d.shape(2, 2), d.one(3, 4), d.one(3, 4)))
    return {"x": x, "crop_height": [d.one(0, 1), d.one(0, 1)], "crop_width": [d.one(0, 1), d.one(0, 1)]}


@recipe("sliding_windows")
def _sliding_windows(d: Draw) -> dict[str, Any]:
    shape = d.shape(1, 4)
    axis = d.axis(len(shape))
    return {"x": d.operand(shape), "axis": axis, "size": d.rng.randint(1, shape[axis]), "stride": d.one(1, 2)}


@recipe("batch_to_space")
def _batch_to_space(d: Draw) -> dict[str, Any]:
    block = [d.one(1, 2), d.one(1, 2)]
    x = (math.prod(block) * d.one(1, 2), d.length(), d.one(2, 3), d.one(2, 3))
    return {"x": d.operand(x), "block_shape": block, "crops": [[0, d.one(0, 1)], [d.one(0, 1), 0]]}


@recipe("space_to_batch")
def _space_to_batch(d: Draw) -> dict[str, Any]:
    x = (d.one(1, 2), d.length(), 2, 4)
    paddings = [d.one([0, 0], [1, 1], [0, 2]), d.one([0, 0], [2, 0])]
    return {"x": d.operand(x), "block_shape": [2, d.one(1, 2)], "paddings": paddings}


def _to_space(name: str) -> Recipe:
    """Channels become pixels."""

    def make(d: Draw) -> dict[str, Any]:
        size = d.one(2, 2, 3)
        return {"x": d.operand((d.one(1, 2), size**2 * d.one(1, 2), d.length(), d.length())), name: size}

    return make


def _from_space(name: str) -> Recipe:
    """Pixels become channels."""

    def make(d: Draw) -> dict[str, Any]:
        size = d.one(2, 2, 3)
        x = d.operand((d.one(1, 2), d.length(), size * d.one(1, 2), size * d.one(1, 2)))
        return {"x": x, name: np.uint32(size) if name == "downscale_factor" else size}

    return make


RECIPES |= {
    "depth_to_space": _to_space("block_size"),
    "pixel_shuffle": _to_space("upscale_factor"),
    "space_to_depth": _from_space("block_size"),
    "pixel_unshuffle": _from_space("downscale_factor"),
}


@recipe("flatten2d")
def _flatten2d(d: Draw) -> dict[str, Any]:
    shape = d.shape(1)
    return {"x": d.operand(shape), "axis": d.rng.randrange(len(shape))}


@recipe("reshape_like")
def _reshape_like(d: Draw) -> dict[str, Any]:
    shape = d.shape(1, 4)
    like = d.operand(tuple(reversed(shape)))
    return {
        "x": d.operand(shape),
        "ref_tensors": (like,),
        "begins": [0],
        "ends": [len(shape)],
        "end_masks": [False],
    }


@recipe("one_hot")
def _one_hot(d: Draw) -> dict[str, Any]:
    size = d.length()
    shape = d.shape(0, 3)
    return {
        "indices": d.operand(shape, "int32", 0, size - 1),
        "one_hot_vector_size": size,
        **d.some(axis=lambda: d.axis(len(shape) + 1)),
        "on_value": d.scalar(1, 5, -1),
        "off_value": d.scalar(0, -2),
    }


@recipe("range_1d")
def _range_1d(d: Draw) -> dict[str, Any]:
    start, step = d.one(-4, 0, 3), d.one(1, 2, -1)
    return {"start": d.scalar(start), "end": d.scalar(start + step * d.length()), "step": d.scalar(step)}


@recipe("upsample_nearest_neighbor")
def _upsample(d: Draw) -> dict[str, Any]:
    return {
        "x": d.operand(d.shape(3, 4)),
        "scale_factor_height": d.one(1, 2),
        "scale_factor_width": d.one(1, 2),
    }


@recipe("upsample_bilinear")
def _bilinear(d: Draw) -> dict[str, Any]:
    given = {**_upsample(d), "align_corners": d.chance()}
    halves = d.opset >= ct.target.iOS16 and not given["align_corners"]
    return given | (d.some(half_pixel_centers=d.chance) if halves else {})


@recipe("resize_nearest_neighbor")
def _resize(d: Draw) -> dict[str, Any]:
    return {"x": d.operand(d.shape(3, 4)), "target_size_height": d.length(), "target_size_width": d.length()}


RECIPES |= {
    "gelu": lambda d: {
        **_unary(d),
        **d.some(mode=lambda: d.one("EXACT", "TANH_APPROXIMATION", "SIGMOID_APPROXIMATION")),
    },
    "cast": lambda d: {**_unary(d), "dtype": d.one("int32", "fp32", "fp16", "bool")},
    "argsort": lambda d: {**_softmax(d), **d.some(ascending=d.chance)},
    "avg_pool": lambda d: {**_pool(d), **d.some(exclude_padding_from_average=d.chance)},
    "fill": lambda d: {"shape": d.shape(1), "value": d.scalar(0, -3, 7)},
    "fill_like": lambda d: {"ref_tensor": d.operand(d.shape(1)), "value": d.scalar(0, -3, 7)},
    "shape": lambda d: {"x": d.operand(d.shape(1))},
    "non_zero": lambda d: {"x": d.operand(d.shape(1, 3))},
    "band_part": lambda d: {"x": d.operand(d.shape(2)), "lower": d.one(-1, 0, 1), "upper": d.one(-1, 0, 1)},
    "resize_bilinear": lambda d: {
        **_resize(d),
        "sampling_mode": d.one("DEFAULT", "STRICT_ALIGN_CORNERS", "ALIGN_CORNERS", "OFFSET_CORNERS"),
    },
}


Chain = Callable[[Draw, Var], Any]
"""Makes a few ops of an input of 3 by 3."""


def _largest(d: Draw, x: Any) -> Any:
    return mb.reduce_max(x=x, axes=[d.axis(2)], keep_dims=d.chance())


def _below_the_largest(d: Draw, x: Var) -> Any:
    return mb.sub(x=x, y=_largest(d, x))


def _by_the_largest(d: Draw, x: Var) -> Any:
    """Divided by the largest magnitude, with something between."""
    top = _largest(d, mb.abs(x=x))
    for _ in range(d.one(0, 1, 2)):
        number = d.scalar(1e-3, -2.0, 0.5)
        between = {
            "add": lambda: mb.add(x=top, y=number),  # noqa: B023
            "maximum": lambda: mb.maximum(x=top, y=number),  # noqa: B023
            "clip": lambda: mb.clip(x=top, alpha=d.scalar(1e-3, -1.0), beta=d.scalar(1.0, 1e4)),  # noqa: B023
        }
        top = between[d.one(*between)]()
    return mb.real_div(x=x, y=top)


def _by_its_root_mean_square(d: Draw, x: Var) -> Any:
    mean = mb.reduce_mean(x=d.one(mb.square(x=x), mb.mul(x=x, y=x)), axes=[d.axis(2)], keep_dims=d.chance(0.7))
    if d.chance():
        mean = mb.add(x=mean, y=d.one(d.scalar(1e-5, -0.5), mb.sin(x=x)))
    factors = [x, mb.rsqrt(x=mean, epsilon=d.scalar(1e-5, 1e-12))]
    d.rng.shuffle(factors)
    return mb.mul(x=factors[0], y=factors[1])


def _guarded(d: Draw, x: Var) -> Any:
    test = mb.greater_equal(x=x, y=d.scalar(0, -1))
    return mb.select(cond=test, a=d.one(x, mb.add(x=x, y=d.scalar(1))), b=d.scalar(0, -2, 5))


def _limited_and_whole(d: Draw, x: Var) -> Any:
    return mb.cast(x=mb.clip(x=x, alpha=d.scalar(1, -3), beta=d.scalar(4, 7)), dtype="int32")


def _raised(d: Draw, x: Var) -> Any:
    return mb.pow(x=x, y=d.scalar(2, 3, 0.5, -1))


def _times_itself(d: Draw, x: Var) -> Any:
    return mb.mul(x=x, y=x)


CHAINS: dict[str, Chain] = {
    "below the largest": _below_the_largest,
    "by the largest": _by_the_largest,
    "by its root mean square": _by_its_root_mean_square,
    "guarded": _guarded,
    "limited and whole": _limited_and_whole,
    "raised": _raised,
    "times itself": _times_itself,
}
"""Forms of a few ops that tables know as one."""


DTYPES = {
    "scatter_along_axis": ("fp32", "fp16", "int32"),
    **dict.fromkeys(ops.LOGICAL | {"logical_not"}, ("bool",)),
    **dict.fromkeys(ops.CONTRACTIONS - ops.RECURRENT - {"matmul"}, ("fp32", "fp16")),
    **dict.fromkeys(ops.RECURRENT, ("fp32",)),
    **dict.fromkeys(
        ("fill", "fill_like", "one_hot", "range_1d", "real_div", "select"), ("fp32", "fp16", "int32")
    ),
}
"""Element types where the input spec has more (which our interpreter computes as these), or names none."""


def dtypes_of(op_type: str, opset: Any) -> tuple[str, ...]:
    """The element types that an op takes as `x`, of those that are tried."""
    form = SSAOpRegistry.core_ops[op_type][opset]
    of_x = form.type_domains.get(getattr(form.input_spec.input_types.get("x"), "type_domain_id", None), ())
    domain = {t.__type_info__().name for t in of_x} or set(TYPES)
    return DTYPES.get(op_type) or tuple(name for name in TYPES if name in domain)


def parameters_of(op_type: str) -> set[str]:
    """The names of all inputs of an op, in any opset that has it."""
    forms = [SSAOpRegistry.core_ops[op_type][o] for o in OPSETS if o in SSAOpRegistry.core_ops[op_type]]
    return {name for form in forms for name in form.input_spec.input_types}


def latest(op_type: str) -> Any:
    """The last opset that has an op."""
    return OPSETS[0 if op_type in ONLY_FIRST else -1]


def sample(op_type: str, seed: str, dtypes: Sequence[str] = ()) -> Sample:
    """The random op that belongs to a seed."""
    rng = random.Random(zlib.crc32(f"{op_type} {seed}".encode()))
    opset = OPSETS[0 if op_type in ONLY_FIRST else rng.randrange(FIRST_OPSET.get(op_type, 0), len(OPSETS))]
    d = Draw(rng, rng.choice(list(dtypes or dtypes_of(op_type, opset))), opset)
    return built(op_type, RECIPES[op_type](d), opset, seed)


def chain(name: str, seed: str) -> Sample:
    """The random form of a few ops that belongs to a seed."""
    rng = random.Random(zlib.crc32(f"{name} {seed}".encode()))
    d = Draw(rng, "int32" if name in ("guarded", "times itself") and rng.random() < 0.5 else "fp32")
    return _built(
        {"x": d.operand((3, 3))}, lambda given: CHAINS[name](d, given["x"]), OPSETS[-1], f"{seed} of {name}"
    )


def built(op_type: str, inputs: dict[str, Any], opset: Any, seed: str) -> Sample:
    """An op in a function of its own, whose inputs are the operands."""
    held: dict[str, Operand] = {}
    for name, value in inputs.items():
        several = value if isinstance(value, tuple) else (value,)
        held |= {
            f"{name}{i}" if value is several else name: v
            for i, v in enumerate(several)
            if isinstance(v, Operand)
        }

    def make(given: dict[str, Var]) -> Any:
        read = {
            name: tuple(given.get(f"{name}{i}", v) for i, v in enumerate(value))
            if isinstance(value, tuple)
            else given.get(name, value)
            for name, value in inputs.items()
        }
        return getattr(mb, op_type)(**read, name="result")

    return _built(held, make, opset, seed)


def _built(held: dict[str, Operand], make: Callable[[dict[str, Var]], Any], opset: Any, seed: str) -> Sample:
    with quiet_host():
        places = {
            name: mb.placeholder(o.shape, dtype=TYPES[o.dtype], name=name, allow_rank0_input=True)
            for name, o in held.items()
        }
        with Function(places, opset_version=opset) as function:
            result = make(dict(function.inputs))
            outputs = list(result) if isinstance(result, (tuple, list)) else [result]
            function.set_outputs(outputs)
    op = outputs[0].op
    assert op is not None
    operands = {function.inputs[name]: o for name, o in held.items()}
    computed = tuple(op for op in function.operations if op.op_type != "const")
    return Sample(op, operands, function, seed, computed)


def promised(sample: Sample, rng: random.Random) -> dict[Var, tuple[float, float]]:
    """A random interval for each operand, within what it may hold."""
    chosen = {}
    for var, operand in sample.operands.items():
        if operand.dtype == "bool":
            chosen[var] = (0.0, 1.0)
            continue
        low, high = rng.choice(INTERVALS)
        if operand.dtype == "fp16":
            low, high = (v if math.isinf(v) else min(max(v, -65504.0), 65504.0) for v in (low, high))
        if operand.dtype == "int32":
            low, high = (
                math.ceil(low) if low > -math.inf else low,
                math.floor(high) if high < math.inf else high,
            )
        low, high = max(low, operand.low), min(high, operand.high)
        chosen[var] = (low, high) if low <= high else (operand.low, operand.high)
    return chosen


def numbers(operand: Operand, within: tuple[float, float], rng: random.Random) -> torch.Tensor:
    """Numbers of an interval: its ends, special ones, and any."""
    count = math.prod(operand.shape)
    if operand.dtype == "bool":
        return torch.tensor([rng.random() < 0.5 for _ in range(count)]).reshape(operand.shape)
    whole, (low, high) = operand.dtype == "int32", within
    largest = 65504.0 if operand.dtype == "fp16" else math.inf
    ends = [v for v in within if math.isfinite(v)]
    if whole:
        low, high = max(INT32[0], low), min(INT32[1], high)
        ends = [low, high]
    special = [v for v in SPECIAL if (low <= v <= high and abs(v) <= largest) or v != v]
    special = [v for v in special if not whole or (math.isfinite(v) and v == round(v))]
    start, stop = max(low, min(-9.0, high)), min(high, max(9.0, low))
    alike = rng.choice(ends) if ends and rng.random() < 0.3 else None

    def one() -> float:
        if alike is not None and rng.random() < 0.9:
            return alike
        kind = rng.random()
        if kind < 0.3 and ends:
            return rng.choice(ends)
        if kind < 0.5 and special:
            return rng.choice(special)
        drawn = rng.uniform(start, stop)
        return min(max(float(round(drawn)), math.ceil(low)), math.floor(high)) if whole else drawn

    held = np.array([one() for _ in range(count)], np.float64).reshape(operand.shape)
    return torch.from_numpy(held.astype(NUMPY[operand.dtype]))


def plain_numbers(sample: Sample, rng: np.random.Generator) -> dict[Var, torch.Tensor]:
    """Finite numbers of ordinary size, all of them different where the type has enough."""
    found = {}
    for var, operand in sample.operands.items():
        kind = np_dtype(var).kind
        if kind == "f":
            value = rng.uniform(0.3, 3.0, operand.shape) * rng.choice([-1, 1], operand.shape)
        elif kind == "b":
            value = rng.random(operand.shape) < 0.5
        else:
            low, high = max(operand.low, -50), min(operand.high, 50)
            value = rng.integers(int(low), int(high) + 1, operand.shape)
        found[var] = torch.from_numpy(
            np.asarray(value).astype({"f": np.float64, "b": np.bool_}.get(kind, np.int32))
        )
    return found
