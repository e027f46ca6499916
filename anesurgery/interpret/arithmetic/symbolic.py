"""What the algebraic and the bitwise arithmetic share: an element stands for how it is computed.

Both run a program on hashes instead of numbers, so that two programs can be compared for equality. An `Image`
(see `field`) holds each element as a few residues, one for each prime. The residues of all elements modulo one
prime are a lane; those of one element, packed into one number, are its name. A random function is a keyed hash:
the same function of the same arguments gives the same residues, and any other gives unrelated ones.

An op that only moves elements moves them in every lane. Elementwise ops are random functions of the element,
row functions (softmax, topk, ...) of the whole row, and any other op of all that it reads; the rules of the two
arithmetics know more about some ops. Integers and conditions that no input reaches stay plain tensors.

A list that is only read and written at constant places stays a list of its elements (`LIST_RULES`). One that is
written at a dynamic place becomes one hash of its history, and so does whatever is read from it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from anesurgery.interpret.arithmetic import field
from anesurgery.interpret.arithmetic.field import Image, hash_of, joined, mix, opaque, packed
from anesurgery.interpret.arithmetic.precision import narrows
from anesurgery.interpret.ops.computing import BINARY, UNARY
from anesurgery.interpret.table import TABLE, Implementation, Unsupported, ints
from anesurgery.mil import Operation, Var, np_dtype, static_shape
from anesurgery.ops import ALONG, LOOKUPS, MOVING, UNROUNDED, names

Tensor = torch.Tensor
Rule = Callable[..., Any]
"""(arithmetic, op, operands by name) -> the result. In these functions `a` is the arithmetic."""

LARGEST = 1 << 22
"""The most elements of a value: sites with larger ones are not looked at. A choice, as an element takes several
numbers of 64 bits."""

ELEMENTWISE = (
    frozenset(UNARY)
    | frozenset(BINARY)
    | names(
        """
    inverse log rsqrt clip threshold cast select gelu elu leaky_relu clamped_relu linear_activation scaled_tanh
    sigmoid_hard thresholded_relu
    """
    )
)
"""Ops that compute each element by itself, from elements at the same place and from numbers."""

RANDOM = names("random_normal random_uniform random_bernoulli random_categorical")
"""Ops that are not functions of what they read."""
UNLIKE = {*RANDOM, "classify"}
"""Ops that are not functions of what they read, or give no tensors."""


class Symbolic:
    """An arithmetic; the algebraic and the bitwise one have their own `rules` and `lift`.

    Args:
        seed: of the random functions.
        largest: the most elements of a value.
    """

    name = "symbolic"
    reads_stored: ClassVar[bool] = True
    """Does it read weights as they are stored? It only needs to name their numbers."""
    rules: ClassVar[dict[str, Rule]] = {}

    def __init__(self, seed: int = 0, largest: int = LARGEST) -> None:
        self.seed, self.largest = seed, largest
        self.primes = field.PRIMES
        """The prime of each lane."""
        self.evaluations = 0
        """Elements that a random function made so far."""
        self.degree = 1.0
        """The largest degree of an argument of a random function."""
        self.cut: dict[Var, tuple[int, int]] = {}
        """Constants of which only the first elements along an axis are read: the axis, and how many."""
        self.stand_ins: Mapping[Var, Tensor] = {}
        """Constants that may hold anything -> the numbers that stand for each."""

    def __str__(self) -> str:
        return self.name

    def fresh(self) -> Symbolic:
        """Return a new arithmetic of the same kind."""
        other = type(self)(self.seed, self.largest)
        other.stand_ins = self.stand_ins
        return other

    def lift(self, value: Any) -> Image:
        """Return the image of constant numbers."""
        raise NotImplementedError

    def image(self, value: Any) -> Image:
        """Return the image of a value, which may be an image already."""
        if isinstance(value, Image):
            return value
        return self.lift(value.numpy() if isinstance(value, Tensor) else value)

    def function(self, name: Any, *arguments: Any) -> Image:
        """Apply a random function to images and constants, element by element."""
        images = [self.image(a) for a in arguments]
        result = opaque(self.primes, hash_of(self.seed, name), *map(packed, images))
        self.evaluations += result.numel()
        self.degree = max([self.degree, *(x.degree for x in images)])
        return result

    def digest(self, x: Image, axes: Sequence[int]) -> Image:
        """Return one element for all those along some axes, in their order; the axes keep the length 1."""
        count = math.prod(x.shape[a] for a in axes)
        row = field.weighted(
            self.hashed(x), field.place_factors(self.primes, count, hash_of(self.seed, "row")), axes
        )
        row.degree = 2.0  # of a random element times a random weight
        return row

    def hashed(self, x: Image) -> Image:
        """Return elements as random numbers."""
        return self.function("element", x)

    def meaning(self, op: Operation, row: Implementation) -> Rule:
        """Return the function that computes an op in this arithmetic."""
        operands = [(k, v) for k, v in op.inputs.items() if isinstance(v, Var)]
        cut = {k: self.cut[v] for k, v in operands if v in self.cut}
        others = {k: self.stand_ins[v] for k, v in operands if v in self.stand_ins}

        def run(**arguments: Any) -> Any:
            arguments |= others
            arguments |= {k: arguments[k].narrow(axis, 0, n) for k, (axis, n) in cut.items()}
            result = self._run(op, row, arguments)
            for value in result if isinstance(result, (list, tuple)) else [result]:
                if isinstance(value, Image) and value.numel() > self.largest:
                    raise Unsupported(f"{value.numel()} elements")
            return result

        return run

    def _run(self, op: Operation, implementation: Implementation, arguments: dict[str, Any]) -> Any:
        """Compute an op in the first of these ways that applies.

        1. On known values, as the interpreter does, if the op only moves, or rounds nothing that it computes.
           Other results of known floats become images, since two programs may round them differently.
        2. In blocks, if a weight is large; each block comes here again. Only then is a large constant refused.
        3. As a random function, if the result is undefined, such as a lookup beyond the table.
        4. By moving elements in every lane.
        5. By the rule of the arithmetic for the op.
        6. As a random function.
        """
        if op.op_type in UNLIKE:
            raise Unsupported(f"{op.op_type} is not a function of its inputs")
        values = [t for v in arguments.values() for t in (v if isinstance(v, list) else [v])]
        tensors = [t for t in values if isinstance(t, (Image, Tensor))]
        images = [t for t in tensors if isinstance(t, Image)]
        has_floats = any(isinstance(t, Tensor) and t.is_floating_point() for t in tensors)
        is_exact = op.op_type in UNROUNDED and not narrows(op)
        if not images and (implementation.moves or is_exact or not has_floats):
            return implementation.function(**arguments)
        if (split := split_of(op, arguments)) is not None:
            return self._in_blocks(op, implementation, arguments, split)
        if any(isinstance(t, Tensor) and t.numel() > self.largest for t in tensors):
            raise Unsupported(f"a constant of {max(t.numel() for t in tensors)} elements")
        if _undefined(op.op_type, arguments):
            return self.uninterpreted(op, arguments)
        if op.op_type in MOVE_RULES:
            return MOVE_RULES[op.op_type](self, op, **arguments)
        if implementation.moves and _moves_only(arguments, images):
            return self._moved(op, implementation, arguments)
        rule = self.rules.get(op.op_type)
        if rule is not None:
            return rule(self, op, **arguments)
        return self.uninterpreted(op, arguments)

    def _in_blocks(
        self, op: Operation, implementation: Implementation, arguments: dict[str, Any], split: Split
    ) -> Image:
        """Compute an op with large weights some outputs at a time, to bound the memory."""
        weight, axis = next(iter(split.operands.items()))
        length = arguments[weight].shape[axis]
        step = max(1, BLOCK * length // arguments[weight].numel())  # 512 rows of a 4096x1024 weight
        parts = []
        for start in range(0, length, step):
            block = {
                name: arguments[name].narrow(along, start, min(step, length - start))
                for name, along in split.operands.items()
                if isinstance(arguments.get(name), Tensor)
            }
            parts.append(self._run(op, implementation, {**arguments, **block}))
        return field.joined(parts, lambda each: torch.cat(each, split.result))

    def _moved(self, op: Operation, implementation: Implementation, arguments: dict[str, Any]) -> Any:
        """Compute an op that only moves the elements of one image, or pads it with a constant."""
        name, x = next((k, v) for k, v in arguments.items() if isinstance(v, Image))
        if x.names is not None and op.op_type in MOVING:  # one tensor to move in place of one for each lane
            moved = implementation.function(**{**arguments, name: x.names})
            several = isinstance(moved, (list, tuple))
            parts = tuple(Image.of(v, x.primes, x.degree, x.fraction) for v in (moved if several else [moved]))
            return parts if several else parts[0]
        lanes_of_arguments = [{**arguments, name: lane} for lane in x.lanes]
        if str(arguments.get("mode", "constant" if "pad" in arguments else "")) == "constant":
            fill = self.lift(np.float32(arguments.get("constant_val", 0.0)))
            for lane, value in zip(lanes_of_arguments, fill.lanes, strict=True):
                lane["constant_val"] = float(value)  # exact, as a residue is below 2^20
        lanes = [implementation.function(**lane) for lane in lanes_of_arguments]
        if isinstance(lanes[0], (list, tuple)):
            return tuple(x.with_lanes(part) for part in zip(*lanes, strict=True))
        return x.with_lanes(lanes)

    def uninterpreted(self, op: Operation, arguments: dict[str, Any]) -> Any:
        """Compute an op as a random function: of the element, of the row, or of all that it reads."""
        attributes = sorted((k, repr(v)) for k, v in arguments.items() if _is_attribute(v))
        named = {k: v for k, v in arguments.items() if not _is_attribute(v) and v is not None}
        what = (op.op_type, attributes, sorted(named), self.rounds_to(op))
        values = [named[k] for k in sorted(named)]
        if op.op_type in ELEMENTWISE:
            return self.function(what, *values)
        reads_rows_only = [*named] == ["x"] or op.op_type == "layer_norm"
        if op.op_type in ALONG and isinstance(arguments.get("x"), Image) and reads_rows_only:
            return self._by_row(op, what, arguments)
        return self._of_everything(op, what, values)

    def _by_row(self, op: Operation, what: Any, arguments: dict[str, Any]) -> Any:
        """Compute an op as a random function of each row along its axes; `what` names the function."""
        x = arguments["x"]
        axes = _axes(arguments.get(ALONG[op.op_type]), x.ndim, op)
        op_type, attributes, *others = what
        what = (op_type, [(k, v) for k, v in attributes if k not in ("axis", "axes")], tuple(others))
        row = self.digest(x, axes)
        if op.op_type == "layer_norm":
            shape = [x.shape[a] if a in axes else 1 for a in range(x.ndim)]
            affine = [arguments[k] for k in ("beta", "gamma") if arguments.get(k) is not None]
            return self.function(what, row, x, *(self.image(v).map(lambda t: t.reshape(shape)) for v in affine))
        if op.op_type.startswith("reduce"):
            rows = self.function(what, row)
            return field.without_axes(rows, axes, bool(arguments.get("keep_dims")))
        if op.op_type == "softmax":
            return self.function(what, row, x)
        count, length = len(op.outputs), x.shape[axes[0]]  # the other ops are along one axis
        if op.op_type == "topk":
            wanted = ints(arguments.get("k", 1))[0]
            length = wanted if wanted >= 0 else length
        shape = [length if a == axes[0] else 1 for a in range(x.ndim)]
        places = field.place_factors(self.primes, length, hash_of(self.seed, "place")).map(
            lambda v: v.reshape(shape)
        )
        several = [self.function((what, i), row, places) for i in range(count)]
        return tuple(several) if count > 1 else several[0]

    def _of_everything(self, op: Operation, what: Any, values: list[Any]) -> Any:
        """Compute an op as a random function of all that it reads, and of the place of each result."""
        total = torch.zeros((), dtype=torch.int64)
        for value in values:
            total = mix(total ^ _hash_value(self, value))
        results = [_by_place(self, var, hash_of(self.seed, what, i), total) for i, var in enumerate(op.outputs)]
        return tuple(results) if len(results) > 1 else results[0]

    def choose(self, cond: Image, x: Image, y: Image) -> Image:
        """Return x where the condition holds, else y."""
        return self.function("select", cond, x, y)

    def rounds_to(self, op: Operation) -> str:
        """Return the dtype to which an op rounds, if that matters in this arithmetic."""
        return ""


def _is_attribute(value: Any) -> bool:
    """Is an argument plain Python, rather than a tensor, an image or a list with one?"""
    if isinstance(value, list):
        return not any(isinstance(v, (Image, Tensor)) for v in value)
    return value is not None and not isinstance(value, (Image, Tensor))


def _moves_only(arguments: dict[str, Any], symbolic: list[Image]) -> bool:
    """Is there one image, the one that is moved, and is everything else known?"""
    moved = [v for k, v in arguments.items() if k in ("x", "input") and isinstance(v, Image)]
    return len(symbolic) == 1 and len(moved) == 1


def _axes(listed: Any, rank: int, op: Operation) -> list[int]:
    if listed is None:
        default = {"softmax": [-1], "argsort": [-1], "topk": [-1], "cumsum": [0]}
        listed = default.get(op.op_type, [-1] if op.op_type.startswith("reduce_arg") else list(range(rank)))
    return [a % rank for a in ints(listed)]


def _concat(a: Symbolic, op: Operation, values: list[Any], **how: Any) -> Any:
    images = [a.image(v) for v in values]
    function = TABLE[op.op_type].function
    return field.joined(images, lambda each: function(each, **how))


def _lane_by_lane(a: Symbolic, op: Operation, first: str, second: str, arguments: dict[str, Any]) -> Any:
    if any(isinstance(v, Image) for k, v in arguments.items() if k not in (first, second)):
        return a.uninterpreted(op, arguments)
    x, y = a.image(arguments[first]), a.image(arguments[second])
    function = TABLE[op.op_type].function
    return field.joined([x, y], lambda each: function(**{**arguments, first: each[0], second: each[1]}))


def _scatter(a: Symbolic, op: Operation, **arguments: Any) -> Any:
    written = _lane_by_lane(a, op, "data", "updates", {**arguments, "mode": "update"})
    mode = arguments.get("mode", "add")
    if mode == "update" or isinstance(arguments["indices"], Image):
        return written if mode == "update" else a.uninterpreted(op, arguments)
    counted = {k: torch.full(a.image(arguments[k]).shape, n) for k, n in (("data", 0), ("updates", 1))}
    counts = TABLE[op.op_type].function(**{**arguments, **counted, "mode": "add"})
    is_float = np_dtype(op.outputs[0]).kind == "f"  # integers may wrap around
    is_ordered = int(counts.max()) <= 1  # the order of several sums at one place is not known
    if not is_float or mode != "add" or not is_ordered:
        return a.uninterpreted(op, arguments)
    data = a.image(arguments["data"])
    return field.where(counts > 0, a.rules["add"](a, op, data, written), data)


def _space_to_batch(a: Symbolic, op: Operation, x: Any, **how: Any) -> Any:
    """Move elements, and put the image of 0 where the op fills with zeros.

    The op runs on the numbers of the elements, from 1 on, so that a 0 in its result was filled in.
    """
    image, zero = a.image(x), a.lift(0.0)
    at = TABLE[op.op_type].function(x=torch.arange(1, image.numel() + 1).reshape(image.shape), **how)
    lanes = [torch.cat([z.reshape(1), v.reshape(-1)])[at] for v, z in zip(image.lanes, zero.lanes, strict=True)]
    return image.with_lanes(lanes)


def _reshape_like(a: Symbolic, op: Operation, x: Any, ref_tensors: list[Any], **how: Any) -> Any:
    """Reshape by the shapes of the other tensors, whose elements are not read."""
    likes = [torch.empty(ref.shape, device="meta") for ref in ref_tensors]
    return a.image(x).map(lambda v: TABLE[op.op_type].function(x=v, ref_tensors=likes, **how))


def _gather(a: Symbolic, op: Operation, **arguments: Any) -> Any:
    """Move rows at known places; else an element is a random function of its column and the index."""
    x, indices = arguments["x"], arguments["indices"]
    if isinstance(indices, Tensor) and isinstance(x, Image):
        return x.map(lambda lane: TABLE["gather"].function(**{**arguments, "x": lane}))
    if int(arguments.get("batch_dims", 0) or 0):
        return a.uninterpreted(op, arguments)
    x, places = a.image(x), a.image(indices)
    axis = int(arguments.get("axis", 0) or 0) % x.ndim
    column = a.digest(x, [axis]).map(
        lambda v: v.reshape(*v.shape[:axis], *(1,) * places.ndim, *v.shape[axis + 1 :])
    )
    after = x.ndim - axis - 1
    places = places.map(lambda v: v.reshape(*v.shape, *(1,) * after))
    return a.function(("gather", x.shape[axis], arguments.get("validate_indices")), column, places)


def _select(a: Symbolic, op: Operation, /, **arguments: Any) -> Any:
    cond, x, y = arguments["cond"], a.image(arguments["a"]), a.image(arguments["b"])
    if isinstance(cond, Image):
        return a.choose(cond, x, y)
    return field.where(cond.bool(), x, y)


def _sampled(a: Symbolic, op: Operation, /, **arguments: Any) -> Any:
    """Resize images: move pixels if each is one of the input's, else make random functions of their plane.

    The op runs on the numbers of the pixels: whole numbers in its result are the pixels that it may have moved.
    It also runs on these numbers in random order, since a mean of pixels can be a whole number by chance.
    """
    x = arguments.pop("x")
    if not isinstance(x, Image) or any(isinstance(v, Image) for v in arguments.values()):
        return a.uninterpreted(op, {"x": x, **arguments})
    order = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(a.seed)).double()
    function = TABLE[op.op_type].function
    first = function(x=torch.arange(x.numel(), dtype=torch.float64).reshape(x.shape), **arguments)
    at = first.round().long().clamp(0, x.numel() - 1)
    if torch.equal(at.double(), first) and torch.equal(
        order[at], function(x=order.reshape(x.shape), **arguments)
    ):
        return x.map(lambda v: v.reshape(-1)[at])
    axes = range(x.ndim - max(2, int(arguments.get("resized_dims", 2))), x.ndim)
    row = a.digest(x, list(axes))
    places = torch.arange(math.prod(first.shape[axes[0] :])).reshape(first.shape[axes[0] :])
    attributes = sorted((k, repr(v)) for k, v in arguments.items())
    what = (op.op_type, attributes, tuple(x.shape[axes[0] :]), a.rounds_to(op))
    return a.function(what, row, opaque(a.primes, hash_of("place"), places))


SAMPLING = names(
    """
    upsample_nearest_neighbor torch_upsample_nearest_neighbor resize_nearest_neighbor resize resize_bilinear
    upsample_bilinear torch_upsample_bilinear
    """
)
"""Ops that resize images, plane by plane."""

MOVE_RULES: dict[str, Rule] = {
    **dict.fromkeys(SAMPLING, _sampled),
    "concat": _concat,
    "stack": _concat,
    "slice_update": lambda a, op, **arguments: _lane_by_lane(a, op, "x", "update", arguments),
    "scatter": _scatter,
    "scatter_nd": _scatter,
    "scatter_along_axis": _scatter,
    "space_to_batch": _space_to_batch,
    "reshape_like": _reshape_like,
    "shape": lambda a, op, x: torch.tensor(x.shape, dtype=torch.int32),
    "gather": _gather,
    "select": _select,
}
"""Ops that only move elements of several tensors, or need a rule of their own for other reasons."""


BLOCK = 1 << 19
"""Weights with more elements are computed in blocks, if an op can be split along its outputs."""


class Split(NamedTuple):
    """How an op with a large weight can be split along its outputs."""

    operands: Mapping[str, int]
    """Each constant -> the axis along which it is split, the largest first."""
    result: int
    """The axis along which the results are joined."""


SPLITS = {
    "linear": Split({"weight": 0, "bias": 0}, -1),
    "conv": Split({"weight": 0, "bias": 0}, 1),
    "matmul": Split({"y": 1}, -1),
    "gather": Split({"x": 1}, -1),
}


def split_of(op: Operation, arguments: Mapping[str, Any]) -> Split | None:
    """Return how an op is split if its weight is large and nothing forbids it; else None."""
    if (split := SPLITS.get(op.op_type)) is None:
        return None
    name, axis = next(iter(split.operands.items()))
    weight = arguments.get(name)
    if not isinstance(weight, torch.Tensor) or weight.numel() <= BLOCK or weight.shape[axis] < 2:
        return None
    if any(isinstance(arguments.get(n), Image) for n in split.operands):
        return None
    plain = {
        "conv": int(arguments.get("groups") or 1) == 1,
        "matmul": weight.ndim == 2 and not arguments.get("transpose_y"),
        "gather": weight.ndim == 2 and int(arguments.get("axis") or 0) == 0 and not arguments.get("batch_dims"),
    }
    return split if plain.get(op.op_type, True) else None


def _hash_value(a: Symbolic, value: Any) -> Tensor:
    """Return one number for a tensor, or for the elements of a list in their order."""
    if value is None:
        return torch.tensor(hash_of("nothing"))
    if isinstance(value, list):
        total = torch.tensor(hash_of("list", len(value)))
        for element in value:
            total = mix(total ^ _hash_value(a, element))
        return total
    x = a.image(value)
    flat = x.map(lambda v: v.reshape(-1))
    elements = packed(a.digest(flat, [0])).reshape(()) if x.numel() else torch.tensor(hash_of("empty"))
    return mix(elements ^ hash_of(tuple(x.shape)))


def _hash_op(a: Symbolic, op: Operation, *operands: Any) -> Tensor:
    """Return one number for an op on these operands."""
    total = torch.tensor(hash_of(a.seed, op.op_type))
    for value in operands:
        total = mix(total ^ _hash_value(a, value))
    return total


def _unknown_list(a: Symbolic, op: Operation, *operands: Any) -> Image:
    """Return a list that depends on a dynamic place, as one hash."""
    return opaque(a.primes, hash_of("list"), _hash_op(a, op, *operands))


def _unknown(a: Symbolic, op: Operation, *operands: Any) -> Image:
    """Return a tensor that is read at a dynamic place, or from a list that was written at one."""
    return _by_place(a, op.outputs[0], hash_of("element"), _hash_op(a, op, *operands))


def _by_place(a: Symbolic, var: Var, name: int, total: Tensor) -> Image:
    """Return a result whose elements are random functions of one hash and of their places."""
    shape = static_shape(var)
    if shape is None:
        raise Unsupported(f"{var.op.op_type if var.op else 'an input'} with a dynamic shape")
    image = opaque(a.primes, name, total, torch.arange(math.prod(shape)).reshape(shape))
    a.evaluations += image.numel()
    return image


def _elements(a: Symbolic, ls: list[Any]) -> list[Image]:
    """Return the elements; those that were never written are zeros."""
    written = next((v for v in ls if v is not None), None)
    if written is None:
        raise Unsupported("a list that is read before anything was written to it")
    zero = a.lift(torch.zeros(written.shape).numpy())
    return [zero if v is None else a.image(v) for v in ls]


def _write(a: Symbolic, op: Operation, ls: Any, index: Any, value: Any) -> Any:
    if isinstance(ls, Image) or isinstance(index, Image):
        return _unknown_list(a, op, ls, index, value)
    return TABLE["list_write"].function(ls=ls, index=index, value=value)


def _list_scatter(a: Symbolic, op: Operation, ls: Any, indices: Any, value: Any) -> Any:
    if isinstance(ls, Image) or isinstance(indices, Image):
        return _unknown_list(a, op, ls, indices, value)
    rows = a.image(value)
    for i, at in enumerate(ints(indices)):
        ls = TABLE["list_write"].function(ls=ls, index=at, value=rows.map(operator.itemgetter(i)))
    return ls


def _read(a: Symbolic, op: Operation, ls: Any, index: Any) -> Image:
    if isinstance(ls, Image) or isinstance(index, Image):
        return _unknown(a, op, ls, index)
    return _elements(a, ls)[ints(index)[0]]


def _list_gather(a: Symbolic, op: Operation, ls: Any, indices: Any) -> Image:
    if isinstance(ls, Image) or isinstance(indices, Image):
        return _unknown(a, op, ls, indices)
    every = _elements(a, ls)
    return joined([every[i] for i in ints(indices)], torch.stack)


def _length(a: Symbolic, op: Operation, ls: Any) -> Any:
    return _unknown(a, op, ls) if isinstance(ls, Image) else torch.tensor(len(ls), dtype=torch.int32)


def _update_state(a: Symbolic, op: Operation, state: Any, value: Any) -> Any:
    """Write a state, and return the value written."""
    state.value = value
    return value


LIST_RULES: dict[str, Rule] = {
    "list_write": _write,
    "list_scatter": _list_scatter,
    "list_read": _read,
    "list_gather": _list_gather,
    "list_length": _length,
    "coreml_update_state": _update_state,
}
"""Rules for lists and for writing a state, which both arithmetics use."""


def _undefined(op_type: str, arguments: Mapping[str, Any]) -> bool:
    """Is an op a lookup of which a known index lies outside, so that its result is undefined?"""
    x, index = arguments.get("x"), arguments.get("indices")
    if (
        op_type not in LOOKUPS
        or arguments.get("validate_indices") is None
        or not isinstance(index, torch.Tensor)
    ):
        return False
    axis, first = int(arguments.get("axis") or 0), int(arguments.get("batch_dims") or 0)
    nd = op_type == "gather_nd"
    lengths = torch.tensor(x.shape[first : first + index.shape[-1]] if nd else x.shape[axis])  # type: ignore[union-attr]
    return bool(((index < 0) | (index >= lengths)).any())
