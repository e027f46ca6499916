"""Lift branches, loops, states, calls of other graphs, and images at the interface.

A composite is a private graph that states by its name which op it is. Where MIL has such an op, `COMPOSITES`
builds it from the operands; otherwise, or where MIL's op is narrower, the ops inside the graph are lifted one
by one. Images are such composites: Core AI has bytes of pixels, MIL arrays [1, channels, height, width].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from anesurgery.coreai.lifts import (
    IMAGE,
    TABLE,
    TOKEN,
    Described,
    LiftedOp,
    Unliftable,
    Value,
    as_var,
    cast,
    dtype_of,
    lift,
    like,
    made_by,
    mil_type,
    numbers_of,
    pad_arguments,
    static_sizes,
)
from anesurgery.coreai.names import FROM_IMAGE, OWN, TO_IMAGE, enters
from anesurgery.mil import Array, Var, mb, parameters

COMPOSITES: dict[str, Callable[[Mapping[str, Value], Mapping[str, Any]], Value]] = {}
"""Name -> its builder in MIL, from operands by name and attributes. It raises `Unliftable` where MIL's op is
narrower."""
composite = enters(COMPOSITES)


def as_list(made: Any) -> list[Value]:
    """Return the results of a builder as a list, also a single one."""
    return list(made) if isinstance(made, (list, tuple)) else [made]


def composite_of(name: str) -> Callable[..., Any] | None:
    """Return the builder of a composite in MIL; None where there is none."""
    return partial(build_mil_op, name.removeprefix(OWN)) if name.startswith(OWN) else COMPOSITES.get(name)


def build_mil_op(op_type: str, named: Mapping[str, Value], attributes: Mapping[str, Any]) -> list[Value]:
    """Build the MIL op whose name, operands and attributes a composite of `to_coreai` states."""
    x = next(iter(named.values()))
    takes = parameters(op_type)  # factors of a resize are fp32 beside values of any dtype
    shared = {k for k in attributes if k not in takes or dtype_of(x) in takes[k].dtypes}
    floats = {k: like(x, v)[()] for k, v in attributes.items() if isinstance(v, float) and k in shared}
    # a float that the dtype of x does not hold is a default, which MIL keeps in fp32
    described = {k: floats.get(k, v) for k, v in attributes.items() if k not in floats or float(floats[k]) == v}
    given = {k: v if isinstance(v, Var) else v[()] for k, v in named.items()}
    return as_list(getattr(mb, op_type)(**given, **described))


def _constant_parameters(x: Value, **given: Value | None) -> dict[str, Array]:
    """Return parameters that MIL takes as constants in the dtype of x."""
    found = {name: numbers_of(value) for name, value in given.items() if value is not None}
    held = {name: numbers for name, numbers in found.items() if numbers is not None}
    if len(held) < len(found) or any(numbers.dtype != dtype_of(x) for numbers in held.values()):
        raise Unliftable("a parameter is computed, or of another type than the input")
    return held


@composite("scaled_dot_product_attention")
def attention(named: Mapping[str, Value], attributes: Mapping[str, Any]) -> Value:
    """Build attention without a causal mask, a window, or key heads that several queries share."""
    plain = {"is_causal": False, "window_size": 0, "enable_gqa": False}
    if any(attributes.get(k, v) != v for k, v in plain.items()) or "scale" in {*named, *attributes}:
        raise Unliftable("MIL has no causal rule, window, scale or shared heads")
    q, k, v = (as_var(named[n]) for n in ("query", "key", "value"))
    if q.rank < 3 or q.shape[:-2] != k.shape[:-2]:
        raise Unliftable("MIL takes keys of the heads that the queries have")
    mask = {"attn_mask": named["attn_mask"]} if "attn_mask" in named else {}
    return mb.scaled_dot_product_attention(query=q, key=k, value=v, **mask)


def _norm(
    op_type: str, ranks: Sequence[int], named: Mapping[str, Value], attributes: Mapping[str, Any]
) -> Value:
    """Build a normalization, whose parameters must be constants."""
    x, more = named["input"], {}
    given = _constant_parameters(x, **{name: named.get(name) for name in ("gamma", "beta", "mean", "variance")})
    if op_type == "layer_norm":
        axes = more["axes"] = [int(a) for a in attributes["axes"]]
        if any(list(p.shape) != [x.shape[a] for a in axes] for p in given.values()):
            raise Unliftable("MIL takes a scale and a shift of the shape of the axes")
    elif len(x.shape) not in ranks:
        raise Unliftable(f"MIL takes it of the ranks {ranks}")
    return getattr(mb, op_type)(x=x, epsilon=like(x, attributes["eps"]), **more, **given)


@composite("pixel_shuffle")
def _pixel_shuffle(named: Mapping[str, Value], attributes: Mapping[str, Any]) -> Value:
    if len(named["input"].shape) != 4:
        raise Unliftable("MIL takes images of the rank 4")
    return mb.pixel_shuffle(x=named["input"], upscale_factor=int(attributes["upscale_factor"]))


@composite("avg_pool_2d", "avg_pool_3d")
def _avg_pool(named: Mapping[str, Value], attributes: Mapping[str, Any]) -> Value:
    """Build the mean of each window, with or without the padding."""
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")
    held = [numbers for n in names if (numbers := numbers_of(named[n])) is not None]
    override = numbers_of(named.get("divisor_override", np.zeros(1)))
    if len(held) < len(names) or override is None or np.any(override):
        raise Unliftable("its form is computed, or it divides by a number of its own")
    kernel, strides, padding, ceil, counted = ([int(n) for n in numbers.reshape(-1)] for numbers in held)
    how: dict[str, Any] = {"kernel_sizes": kernel, "strides": strides}
    how |= {"exclude_padding_from_average": not counted[0]} | ({"ceil_mode": True} if ceil[0] else {})
    return mb.avg_pool(x=named["input"], **how, **pad_arguments([n for n in padding for _ in range(2)]))


COMPOSITES |= {
    "hard_sigmoid": lambda named, _: mb.sigmoid_hard(
        x=named["input"], alpha=like(named["input"], 1 / 6), beta=like(named["input"], 0.5)
    ),
    "layer_norm": partial(_norm, "layer_norm", ()),
    "batch_norm": partial(_norm, "batch_norm", (3, 4, 5)),
    "instance_norm": partial(_norm, "instance_norm", (3, 4)),
}


@lift("if")
def _if_(o: LiftedOp) -> Sequence[Value]:
    yes, no = o.op["blocks"]
    branches = [lambda block=block: tuple(map(as_var, o.scope.nested(block))) for block in (yes, no)]
    return as_list(mb.cond(pred=cast(o[0], "bool"), _true_fn=branches[0], _false_fn=branches[1]))


@lift("while")
def while_(o: LiftedOp) -> Sequence[Value]:
    """Build a loop; the condition's block may hand on only the loop's own variables."""
    before, after = o.op["blocks"]
    carried = [argument["number"] for argument in before["arguments"]]
    if before["ops"][-1]["operands"][1:] != carried:
        raise Unliftable("its condition hands other values to the body than the loop carries")
    return as_list(
        mb.while_loop(
            _cond=lambda *values: as_var(o.scope.nested(before, values)[0]),
            _body=lambda *values: tuple(map(as_var, o.scope.nested(after, values))),
            loop_vars=tuple(as_var(o[i]) for i in range(len(o.operands))),
        )
    )


def _write_handle(o: LiftedOp) -> Sequence[Value]:
    mb.coreml_update_state(state=o[0], value=as_var(cast(o[1], "fp16")))
    return [TOKEN]


TABLE |= {
    **dict.fromkeys(("create_token", "join_token"), lambda o: [TOKEN]),
    "read_handle": lambda o: [cast(mb.read_state(input=o[0]), mil_type(o.result["dtype"])), TOKEN],
    "write_handle": _write_handle,
    "invoke": lambda o: o.scope.called(o),
}
"""States, which hold fp16 in Core ML, and calls of other graphs. Tokens order reads and writes of states, which
in MIL the order of the ops does."""


CHANNELS = {"32BGRA": "BGRA", "32ARGB": "ARGB", "24RGB": "RGB"}
"""Format -> its channels in the order of the bytes, as the text of `coreai.image_to_tensor` states them."""
OPAQUE = 255.0
"""What stands in the channel A, which MIL's images have not."""
STEPS = ("pad", "gather", "transpose", "squeeze", "cast")
"""The ops that `_pixels` writes."""


def _channels(kind: Described) -> str:
    found = IMAGE.fullmatch(kind["type"])
    if found is None or found[1] not in CHANNELS:
        raise Unliftable(f"its pixels are {kind['type']}; of images {', '.join(CHANNELS)} are known")
    return CHANNELS[found[1]]


def _pixels(x: Value, channels: str, colors: str) -> Var:
    """Return the pixels [height, width, channels] of an image of MIL as int32; `colors` are its channels."""
    order = [3 if channel == "A" else colors.index(channel) for channel in channels]
    x = mb.pad(x=x, pad=[0, 0, 0, 1, 0, 0, 0, 0], mode="constant", constant_val=np.float32(OPAQUE))
    x = mb.transpose(x=mb.gather(x=x, indices=order, axis=1), perm=[0, 2, 3, 1])
    return mb.cast(x=mb.squeeze(x=x, axes=[0]), dtype="int32")


def _upstream_of(value: Value, *op_types: str) -> Var | None:
    """Return the operand of a chain of ops of these types, the last one first; None for other ops."""
    for op_type in op_types:
        if (op := made_by(value, op_type)) is None:
            return None
        value = op.x
    return as_var(value)


@lift("image_to_tensor")
def _image_to_tensor(o: LiftedOp) -> Value:
    image = as_var(o[0])
    return _pixels(image, _channels(o.stored(0)), o.scope.reader.images.get(image.name, "RGB"))


@lift("tensor_to_image")
def tensor_to_image(o: LiftedOp) -> Value:
    """Build an image from bytes; an image that `to_coreai` rounded to bytes is restored."""
    channels = _channels(o.result)
    if (image := _upstream_of(o[0], *reversed(STEPS), "clip", "round")) is not None:
        return image
    if len(static_sizes(o[0])) != len("HWC"):
        raise Unliftable(f"its pixels lie in planes, and MIL's images have the channels {channels}")
    x = mb.gather(x=cast(o[0], "fp32"), indices=[channels.index(c) for c in "RGB"], axis=2)
    return mb.expand_dims(x=mb.transpose(x=x, perm=[2, 0, 1]), axes=[0])


@composite(FROM_IMAGE)
def from_image(named: Mapping[str, Value], attributes: Mapping[str, Any]) -> Value:
    """Return the image itself as the numbers of its pixels."""
    if (image := _upstream_of(named["x"], *reversed(STEPS))) is None:
        raise Unliftable("its pixels are computed")
    return image


@composite(TO_IMAGE)
def to_image(named: Mapping[str, Value], attributes: Mapping[str, Any]) -> Value:
    """Round numbers to the bytes of an image."""
    x = cast(named["x"], "fp32")
    return _pixels(mb.clip(x=mb.round(x=x), alpha=0.0, beta=OPAQUE), "BGRA", attributes["colors"])
