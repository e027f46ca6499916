"""Convert complex numbers by their real and imaginary parts, and the Fourier transforms that give them.

Covered are complex numbers made from angles, pairs or literals; sums, differences, products and quotients,
also with real numbers and buffers; products of matrices, convolutions, choices, powers, logarithms,
exponentials, conjugates, and operations that only move or sum numbers. So are transforms over two axes, and
`torch.istft`, with which vocoders end. The error of any other operation names it (`frontend._reads_complex`).
Conditions are replaced here too, where the reader of torch.export's graphs is wrapped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy, deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.frontend.arguments import (
    Convert,
    Wrap,
    argument,
    converted,
    inputs_of,
    keyword,
    known_value,
    option,
    promoted,
    wrapper,
)
from anesurgery.mil import Array, Var, is_symbolic, mb, np_dtype, types
from anesurgery.ops import names


def polar(context: Any, node: Any) -> None:
    """Convert `torch.polar(length, angle)`."""
    length, angle = inputs_of(context, node)[:2]
    real, imaginary = (mb.mul(x=length, y=side) for side in (mb.cos(x=angle), mb.sin(x=angle)))
    context.add(mb.complex(real_data=real, imag_data=imaginary, name=node.name))


def view_as_complex(context: Any, node: Any) -> None:
    """Convert `torch.view_as_complex(x)`: the last axis holds the real and the imaginary part."""
    x = inputs_of(context, node)[0]
    real, imaginary = (mb.squeeze(x=v, axes=[-1]) for v in mb.split(x=x, num_splits=2, axis=-1))
    context.add(mb.complex(real_data=real, imag_data=imaginary, name=node.name))


Parts = tuple[Var | None, Var | None]
"""(real part, imaginary part) as floats; None, which is false, for a part that is 0: at most one."""


def is_complex(x: Any) -> bool:
    """Return whether a value is a variable of complex numbers."""
    return isinstance(x, Var) and bool(types.is_complex(x.dtype))


def _both_parts(x: Var) -> tuple[Var, Var]:
    """Return the parts of which a complex number was made, those of a constant, or ops that take them."""
    if x.op is not None and x.op.op_type == "complex":
        return x.op.real_data, x.op.imag_data
    if x.val is not None:
        return mb.const(val=np.float32(np.real(x.val))), mb.const(val=np.float32(np.imag(x.val)))
    return mb.complex_real(data=x), mb.complex_imag(data=x)


def _parts(x: Any) -> Parts:
    if not isinstance(x, Var):
        x = mb.const(val=np.float32(x))
    if not is_complex(x):
        return x if types.is_float(x.dtype) else mb.cast(x=x, dtype="fp32"), None
    real, imaginary = _both_parts(x)
    if _is_zero(imaginary):
        return real, None
    return None if _is_zero(real) else real, imaginary


def _is_zero(part: Var) -> bool:
    return part.val is not None and not np.any(part.val)


def _added(x: Var | None, y: Var | None) -> Var | None:
    return mb.add(x=x, y=y) if x and y else x or y


def _times(x: Var | None, y: Var | None, multiply: Callable[[Var, Var], Var]) -> Var | None:
    return multiply(x, y) if x and y else None


def _negative(x: Var | None) -> Var | None:
    return x and mb.mul(x=x, y=np.float32(-1))


def _sum(x: Parts, y: Parts) -> Parts:
    return _added(x[0], y[0]), _added(x[1], y[1])


def _difference(x: Parts, y: Parts) -> Parts:
    return _sum(x, (_negative(y[0]), _negative(y[1])))


def _product(x: Parts, y: Parts, multiply: Callable[[Var, Var], Var] = lambda x, y: mb.mul(x=x, y=y)) -> Parts:
    (a, b), (c, d) = x, y
    first, second = _times(a, c, multiply), _times(b, d, multiply)
    imaginary = _added(_times(a, d, multiply), _times(b, c, multiply))
    if first and second:  # one op fewer than the sum with the negative
        return mb.sub(x=first, y=second), imaginary
    return first or _negative(second), imaginary


def bilinear(multiply: Callable[[Var, Var], Var]) -> Callable[[Var, Var], Var]:
    """Return a product of complex numbers, such as an einsum, from that of real ones."""
    return lambda x, y: _as_complex(_product(_parts(x), _parts(y), multiply))


def _quotient(x: Parts, y: Parts) -> Parts:
    """Return a quotient. The divisor is divided by its larger part first, so that its square stays in range."""
    c, d = y
    if d is None:
        return x[0] and mb.real_div(x=x[0], y=c), x[1] and mb.real_div(x=x[1], y=c)
    if c is None:  # x / (d i) = -i x / d
        return _quotient((x[1], _negative(x[0])), (d, None))
    size = mb.maximum(x=mb.abs(x=c), y=mb.abs(x=d))
    c, d = (mb.real_div(x=v, y=size) for v in (c, d))
    square = mb.mul(x=mb.add(x=mb.square(x=c), y=mb.square(x=d)), y=size)
    return _quotient(_product(x, (c, _negative(d))), (square, None))


ARITHMETIC: dict[str, Callable[[Parts, Parts], Parts]] = {
    "add": _sum,
    "sub": _difference,
    "rsub": lambda x, y: _difference(y, x),
    "mul": _product,
    "div": _quotient,
}


def with_complex_arithmetic(kind: str) -> Wrap:
    """Wrap the converter of a sum, difference, product or quotient, to take complex numbers."""

    @wrapper
    def wrap(host: Convert, context: Any, node: Any) -> None:
        operands = inputs_of(context, node)[:2]
        alpha = argument(context, node, 2, "alpha", 1) if kind in ("add", "sub", "rsub") else 1
        if not any(map(is_complex, (*operands, alpha))):
            return host(context, node)
        parts = [_parts(v) for v in operands]
        if known_value(alpha) != 1:
            which = int(kind != "rsub")  # x + alpha y and x - alpha y, but y - alpha x
            parts[which] = _product(parts[which], _parts(alpha))
        context.add(_as_complex(ARITHMETIC[kind](*parts)), torch_name=node.name)

    return wrap


def _as_complex(parts: Parts) -> Var:
    """Return a complex number of its parts, in their common shape."""
    real, imaginary = parts
    real, imaginary = real or _zeros(imaginary), imaginary or _zeros(real)
    if real.shape != imaginary.shape:
        real, imaginary = mb.add(x=real, y=_zeros(imaginary)), mb.add(x=imaginary, y=_zeros(real))
    return mb.complex(real_data=real, imag_data=imaginary)


def _zeros(like: Var | None) -> Var:
    return mb.fill(shape=mb.shape(x=like), value=0.0)


def _exponential(a: Var, b: Var) -> Parts:
    size = mb.exp(x=a)
    return mb.mul(x=size, y=mb.cos(x=b)), mb.mul(x=size, y=mb.sin(x=b))


def with_complex_function(of_parts: Callable[[Var, Var], Parts]) -> Callable[[Convert | None], Convert]:
    """Return a wrapper for a function of one number that computes complex ones by `of_parts`.

    Real numbers go to the wrapped converter; without one they stay as they are.
    """

    def wrap(host: Convert | None) -> Convert:
        def convert(context: Any, node: Any) -> None:
            x = inputs_of(context, node)[0]
            if is_complex(x):
                context.add(_as_complex(of_parts(*_both_parts(x))), torch_name=node.name)
            elif host is None:
                context.add(x, torch_name=node.name)
            else:
                host(context, node)

        return convert

    return wrap


def _power(exponent: float) -> Callable[[Var, Var], Parts]:
    """Return a function of the parts of x that gives x^exponent: small whole ones by products."""

    def of_parts(a: Var, b: Var) -> Parts:
        if exponent in (1, 2, 3, 4):
            power: Parts = (a, b)
            for _ in range(int(exponent) - 1):
                power = _product(power, (a, b))
            return power
        size = mb.pow(x=_size(a, b), y=np.float32(exponent))
        turned = mb.mul(x=_angle(b, a), y=np.float32(exponent))
        return mb.mul(x=size, y=mb.cos(x=turned)), mb.mul(x=size, y=mb.sin(x=turned))

    return of_parts


def _size(a: Var, b: Var) -> Var:
    """Return the magnitude; the parts are divided by the larger one first, so that squares stay in range.

    The divisor is at least a normal number of fp16, since less may count as 0.
    """
    largest = mb.maximum(x=mb.maximum(x=mb.abs(x=a), y=mb.abs(x=b)), y=np_dtype(a).type(fp16.NORMAL))
    a, b = (mb.square(x=mb.real_div(x=v, y=largest)) for v in (a, b))
    return mb.mul(x=mb.sqrt(x=mb.add(x=a, y=b)), y=largest)


@wrapper
def with_complex_power(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `x ** y`, to take complex x and a known number y."""
    x, y = inputs_of(context, node)[:2]
    exponent = known_value(y)
    known = exponent is not None and np.ndim(exponent) == 0 and not np.iscomplexobj(exponent)
    convert = with_complex_function(_power(float(exponent)))(host) if is_complex(x) and known else host
    convert(context, node)


@wrapper
def with_complex_choice(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `where(condition, a, b)` or `a.masked_fill(condition, b)`, for complex numbers."""
    cond, a, b = (inputs_of(context, node)[i] for i in ((1, 2, 0) if "fill" in node.kind else (0, 1, 2)))
    if not (is_complex(a) or is_complex(b)):
        return host(context, node)
    sides = [_both_parts(v if is_complex(v) else _as_complex(_parts(v))) for v in (a, b)]
    chosen = [mb.select(cond=cond, a=one, b=other) for one, other in zip(*sides, strict=True)]
    context.add(_as_complex((chosen[0], chosen[1])), torch_name=node.name)


@wrapper
def with_complex_products(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of a matrix product or convolution, to multiply the parts of complex numbers."""
    x, y, *rest = inputs_of(context, node)
    if not (is_complex(x) or is_complex(y)):
        return host(context, node)
    biased = "conv" in node.kind or node.kind == "linear"
    bias = argument(context, node, 2, "bias") if biased else None

    def product(a: Var, b: Var) -> Var:
        names = [f"{node.name}_{i}" for i in range(3 if biased and rest else 2)]
        read = copy(node)
        read.inputs = [*names, *node.inputs[len(names) :]]
        read.kwinputs = {k: v for k, v in (node.kwinputs or {}).items() if k != "bias"}
        (made,) = converted(host, context, read, dict(zip(names, (a, b, None), strict=False)))
        return made

    parts = _product(_parts(x), _parts(y), product)
    if bias is not None:
        after = 0 if node.kind == "linear" else x.rank - 2
        shifts = [v and mb.reshape(x=v, shape=[-1] + [1] * after) for v in _parts(bias)]
        parts = _sum(parts, (shifts[0], shifts[1]))
    context.add(_as_complex(parts), torch_name=node.name)


@wrapper
def with_complex_product_of_all(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `torch.prod(x, axis=None, keepdim=False)`: complex numbers, half by half."""
    x, axis, keep, *_ = [*inputs_of(context, node), None, None]
    if not is_complex(x):
        return host(context, node)
    parts: Any = _both_parts(x)
    if whole := not node.kind.endswith("dim_int") and keep is None:  # a trace gives the dtype second
        parts = [mb.reshape(x=v, shape=[-1]) for v in parts]
    at = 0 if whole else int(known_value(axis)) % x.rank
    while (length := parts[0].shape[at]) > 1:
        sizes = [length // 2] * 2 + [1] * (length % 2)
        first, second, *odd = zip(*(mb.split(x=v, split_sizes=sizes, axis=at) for v in parts), strict=True)
        parts = _product(first, second)
        if odd:
            parts = [mb.concat(values=pair, axis=at) for pair in zip(parts, odd[0], strict=True)]
    if whole or not option(context, node, 2, "keepdim", False):
        parts = [mb.squeeze(x=v, axes=[at]) for v in parts]
    context.add(_as_complex(parts), torch_name=node.name)


def with_complex_comparison(*, same: bool) -> Wrap:
    """Return a wrapper for the converter of `==` or `!=`, to compare both parts of complex numbers."""

    @wrapper
    def wrap(host: Convert, context: Any, node: Any) -> None:
        x, y = inputs_of(context, node)[:2]
        if not (is_complex(x) or is_complex(y)):
            return host(context, node)
        x, y = (_both_parts(v if is_complex(v) else _as_complex(_parts(v))) for v in (x, y))
        compare, join = (mb.equal, mb.logical_and) if same else (mb.not_equal, mb.logical_or)
        sides = [compare(x=a, y=b) for a, b in zip(x, y, strict=True)]
        context.add(join(x=sides[0], y=sides[1], name=node.name))

    return wrap


def _tanh(a: Var, b: Var) -> Parts:
    """Return the parts of the quotient, by tanh and 1 - tanh^2 of the real part, which do not overflow."""
    one = np_dtype(a).type
    bent, sine, cosine = mb.tanh(x=a), mb.sin(x=b), mb.cos(x=b)
    small = mb.exp(x=mb.mul(x=mb.abs(x=a), y=one(-2)))
    slope = mb.real_div(x=mb.mul(x=small, y=one(4)), y=mb.square(x=mb.add(x=small, y=one(1))))
    below = mb.add(x=mb.square(x=cosine), y=mb.square(x=mb.mul(x=bent, y=sine)))
    turned = mb.mul(x=mb.mul(x=sine, y=cosine), y=slope)
    return mb.real_div(x=bent, y=below), mb.real_div(x=turned, y=below)


tangent = with_complex_function(_tanh)
exponential = with_complex_function(_exponential)
logarithm = with_complex_function(lambda a, b: (mb.log(x=_size(a, b)), _angle(b, a)))
root = with_complex_function(_power(0.5))
squared = with_complex_function(lambda a, b: _product((a, b), (a, b)))
inverse = with_complex_function(lambda a, b: _quotient((mb.const(val=np.float32(1)), None), (a, b)))
conjugate = with_complex_function(lambda a, b: (a, _negative(b)))(None)
# `torch.resolve_conj` computes a conjugate that was put off; here none is
resolved = with_complex_function(lambda a, b: (a, b))(None)


def atan2(context: Any, node: Any) -> None:
    """Convert `torch.atan2(y, x)`, in all four quadrants and on the axes; -0.0 counts as 0.0."""
    y, x = promoted(inputs_of(context, node)[:2])
    context.add(_angle(y, x), torch_name=node.name)


def angle(context: Any, node: Any) -> None:
    """Convert `torch.angle(x)`; for a real number it is 0, or pi below 0."""
    real, imaginary = _both_parts(_as_complex(_parts(inputs_of(context, node)[0])))
    context.add(_angle(imaginary, real), torch_name=node.name)


def _angle(y: Var, x: Var) -> Var:
    one = np_dtype(x).type
    sizes = [mb.abs(x=v) for v in (y, x)]
    most = mb.maximum(x=mb.maximum(x=sizes[0], y=sizes[1]), y=one(np.finfo(one).tiny))
    angle = mb.atan(x=mb.real_div(x=mb.minimum(x=sizes[0], y=sizes[1]), y=most))
    steep = mb.greater(x=sizes[0], y=sizes[1])
    angle = mb.select(cond=steep, a=mb.sub(x=one(math.pi / 2), y=angle), b=angle)
    angle = mb.select(cond=mb.less(x=x, y=one(0)), a=mb.sub(x=one(math.pi), y=angle), b=angle)
    below: Var = mb.less(x=y, y=one(0))
    return mb.select(cond=below, a=mb.mul(x=angle, y=one(-1)), b=angle)


def keeping_modules(host: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap the lowering of complex ops: it forgets the module of some ops, and coremltools refuses those."""

    def lower(function: Any) -> None:
        host(function)
        for source in function._essential_scope_sources:
            held = [op.scopes[source] for op in function.operations if op.scopes.get(source)]
            where = held[0] if held else [""]
            for op in function.operations:
                where = op.scopes.get(source) or where
                op.scopes[source] = list(where)

    return lower


def _literal_node(kind: Any, name: str, value: complex, **more: Any) -> Any:
    """Return a constant node. Its array has no axes: coremltools takes parts of arrays only."""
    return kind("constant", [], [name], attr={"value": np.asarray(value, np.complex64)}, **more)


def with_literals_in_trace(host: Any) -> Any:
    """Wrap the reader of a trace's nodes, in which a literal is a node of its own."""

    def from_torchscript_node(kind: Any, node: Any, parent: Any) -> Any:
        value = node.output().toIValue() if node.kind() == "prim::Constant" else None
        if not isinstance(value, complex):
            return host(node=node, parent=parent)
        name, where = node.output().debugName(), node.getModuleHierarchy()
        return _literal_node(kind, name, value, parent=parent, model_hierarchy=where)

    return from_torchscript_node


def with_literals_in_export(host: Any) -> Any:
    """Wrap the reader of torch.export's nodes, in which a literal is an argument: it gets a name."""

    def from_exir_node(kind: Any, node: Any) -> Any:
        if not any(isinstance(v, complex) for v in (*node.args, *node.kwargs.values())):
            return host(node=node)
        literals: list[Any] = []

        def named(value: Any) -> Any:
            if not isinstance(value, complex):
                return value
            literals.append(_literal_node(kind, f"{node.name}_literal_{len(literals)}", value, meta=node.meta))
            return literals[-1].name

        read = SimpleNamespace(target=node.target, name=node.name, meta=node.meta)
        read.args, read.kwargs = tuple(map(named, node.args)), {k: named(v) for k, v in node.kwargs.items()}
        made = host(node=read)
        made.attr["literals"] = literals
        return made

    return from_exir_node


LOOPS = "{kind} is not converted: write a Python loop with a number of steps that is known"


def _without_conditions(exported: Any) -> Any:
    """Return a program of torch.export in which both branches of each `torch.cond` are computed.

    One result is selected: a branch has no effects. coremltools takes no op that holds a graph.
    """
    if any(isinstance(child, torch.fx.GraphModule) for child in exported.graph_module.children()):
        exported = copy(exported)  # the caller's stays as it is
        exported._graph_module = deepcopy(exported.graph_module)
        _compute_both_branches(exported.graph_module)
    return exported


def _compute_both_branches(module: Any) -> None:
    """Replace each condition in a graph, and in the graphs of its branches, by selections."""
    graph = module.graph
    for node in [n for n in graph.nodes if isinstance(n.target, torch._ops.HigherOrderOperator)]:
        if node.target is not torch.ops.higher_order.cond:
            raise NotImplementedError(LOOPS.format(kind=node.target))
        condition, *branches, operands = node.args
        value = condition.meta.get("val") if isinstance(condition, torch.fx.Node) else None
        if isinstance(value, torch.Tensor) and value.ndim:  # it must not give the results its axes
            with graph.inserting_before(node):
                meta = {**condition.meta, "val": value.new_empty(())}
                condition = graph.call_function(torch.ops.aten.squeeze.default, (condition,))
                condition.meta = meta
        sides = []
        for name in branches:
            branch = getattr(module, name.target)
            _compute_both_branches(branch)
            places = (n for n in branch.graph.nodes if n.op == "placeholder")
            with graph.inserting_before(node):
                sides.append(graph.graph_copy(branch.graph, dict(zip(places, operands, strict=True))))
        for result in list(node.users):  # each selects one result of the condition
            chosen = [side[result.args[1]] for side in sides]
            result.target, result.args = torch.ops.aten.where.self, (condition, *chosen)
        graph.erase_node(node)
        for unread in {name for name in branches if not name.users}:
            graph.erase_node(unread)


def with_literals(host: Any) -> Any:
    """Wrap the reader of a graph of torch.export, to put the nodes of literals before their readers.

    Conditions are replaced before it is read.
    """

    def from_exir(kind: Any, exir: Any, *positional: Any, **named: Any) -> Any:
        graph = host(_without_conditions(exir), *positional, **named)
        graph.nodes = [each for node in graph.nodes for each in (*node.attr.get("literals", ()), node)]
        return graph

    return from_exir


@wrapper
def refusing_complex_fill(host: Convert, context: Any, node: Any) -> None:
    """Wrap a converter that fills a tensor: coremltools would drop the imaginary part of the number."""
    if any(map(is_complex, inputs_of(context, node))):
        raise NotImplementedError(f"{node.name}: {node.kind} with a complex number; multiply ones by it")
    host(context, node)


@wrapper
def with_complex_update(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of a write into a part of a tensor, to write both parts of complex numbers."""
    names, values = list(node.inputs[:2]), inputs_of(context, node)[:2]
    if not any(map(is_complex, values)):
        return host(context, node)
    numbers = [v if isinstance(v, Var) else mb.const(val=np.float32(v)) for v in values]
    zero = mb.const(val=np.float32(0))
    pairs = [_both_parts(v) if is_complex(v) else (v, zero if v.rank == 0 else _zeros(v)) for v in numbers]
    parts = [dict(zip(names, part, strict=True)) for part in zip(*pairs, strict=True)]
    (real,), (imaginary,) = (converted(host, context, node, part) for part in parts)
    context.add(_as_complex((real, imaginary)), torch_name=node.name)


COMPLEX_CODES = (9, 10)
"""Torch's codes of complex64 and complex128."""


@wrapper
def with_complex_cast(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of a cast: complex numbers stay, and real ones may become complex."""
    x, *rest = inputs_of(context, node)
    asked = [known_value(v) for v in (*rest[:1], keyword(context, node, "dtype")) if v is not None]
    if isinstance(x, Var) and types.is_complex(x.dtype):
        context.add(x, torch_name=node.name)
    elif any(np.ndim(v) == 0 and not isinstance(v, (bool, str)) and v in COMPLEX_CODES for v in asked):
        context.add(_as_complex((mb.cast(x=x, dtype="fp32"), None)), torch_name=node.name)
    else:
        host(context, node)


@wrapper
def with_complex_parts(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of an operation that moves or sums numbers, to treat both parts alike."""
    name, x = node.inputs[0], inputs_of(context, node)[0]
    values = list(x) if isinstance(x, (list, tuple)) else [x]
    if not any(map(is_complex, values)):
        return host(context, node)
    pairs = [_both_parts(v if is_complex(v) else _as_complex(_parts(v))) for v in values]
    moved = []
    for part in map(list, zip(*pairs, strict=True)):
        if not isinstance(name, str):  # torch.export names the values of a list, a trace the list
            named = dict(zip(name, part, strict=True))
        else:
            named = {name: part if x is not values[0] else part[0]}
        moved.append(converted(host, context, node, named))
    for output, real, imaginary in zip(node.outputs, *moved, strict=True):
        context.add(_joined(real, imaginary), torch_name=output)


def _joined(real: Any, imaginary: Any) -> Any:
    """Return complex numbers of their parts; lists of parts make a list."""
    if isinstance(real, Var):
        return mb.complex(real_data=real, imag_data=imaginary)
    return [mb.complex(real_data=a, imag_data=b) for a, b in zip(real, imaginary, strict=True)]


TRANSFORMS = {f"fft_{kind}fft2": f"fft_{kind}fftn" for kind in ("", "i", "r", "ir")}
"""Transform over two axes -> the transform over any number of axes, which has the same arguments."""
FOURIER = tuple(f"fft_{half}fft{axes}" for half in ("", "i", "r", "ir") for axes in ("", "2", "n"))
INVERSE_TRANSFORMS = tuple(f"fft_{kind}fft{axes}" for kind in ("i", "ir") for axes in ("", "2", "n"))


@wrapper
def with_fixed_lengths(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of a Fourier transform, to refuse lengths that vary: its waves are constants."""
    x, *sizes = inputs_of(context, node)[:2]
    if any(map(is_symbolic, x.shape)) or any(isinstance(n, Var) and n.val is None for n in sizes):
        raise NotImplementedError(
            f"{node.name}: {node.kind} of a shape that varies; fix the shape, or make several sizes (ane.sizes)"
        )
    host(context, node)


@wrapper
def with_real_spectra(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of an inverse transform, to take spectra that are real."""
    x = inputs_of(context, node)[0]
    spectrum = x if is_complex(x) else _as_complex(_parts(x))
    (signal,) = converted(host, context, node, {node.inputs[0]: spectrum})
    context.add(signal, torch_name=node.name)


def centred(*, back: bool) -> Convert:
    """Return the converter of `fftshift(x, dim=None)`: frequency 0 moves to the middle; or of its inverse."""

    @with_complex_parts
    def convert(context: Any, node: Any) -> None:
        x, axes = inputs_of(context, node)[0], known_value(argument(context, node, 1, "dim"))
        for axis in range(x.rank) if axes is None else np.ravel(axes).tolist():
            length = x.shape[axis]
            if is_symbolic(length):
                raise NotImplementedError(f"{node.name}: {node.kind} along an axis whose length varies")
            ahead = length // 2 if back else length - length // 2
            first, last = (
                mb.split(x=x, split_sizes=[ahead, length - ahead], axis=axis) if length > 1 else (x, x)
            )
            x = mb.concat(values=[last, first], axis=axis) if length > 1 else x
        context.add(mb.identity(x=x, name=node.name))

    return convert


def istft(context: Any, node: Any) -> None:
    """Convert `torch.istft(x, n_fft, ...)` of real signals to one transposed convolution.

    The inverse transform of each frame, its window and the sum of overlapping frames are linear: the weight has
    a cosine and a sine for each frequency. The result is divided by the sum of the squared windows.
    """
    x = inputs_of(context, node)[0]
    n, hop, window, options = _arguments(context, node)
    frames = x.shape[-1]
    if not is_complex(x) or is_symbolic(frames) or not options["onesided"] or options["return_complex"]:
        raise NotImplementedError(f"{node.name}: istft of one-sided spectra with a fixed number of frames only")
    real, imaginary = mb.complex_real(data=x), mb.complex_imag(data=x)
    if x.rank == 2:
        real, imaginary = (mb.expand_dims(x=v, axes=[0]) for v in (real, imaginary))
    scale = np.sqrt(n) if options["normalized"] else 1.0
    y = mb.conv_transpose(
        x=mb.concat(values=[real, imaginary], axis=1),
        weight=(_waves(n) * window * scale).astype(np_dtype(real)),
        strides=[hop],
        pad_type="valid",
    )
    begin = n // 2 if options["center"] else 0
    total = n + hop * (frames - 1)
    end = total - begin if options["length"] is None else min(begin + options["length"], total)
    share = _overlapped(window[0, 0] ** 2, hop, frames)[begin:end]
    y = mb.slice_by_index(
        x=y, begin=[0, 0, begin], end=[0, 0, end], begin_mask=[True, True, False], end_mask=[True, True, False]
    )
    y = mb.mul(x=y, y=(1 / np.maximum(share, 1e-11)).astype(np_dtype(y)))
    missing = (options["length"] or 0) - (end - begin)
    if missing > 0:
        y = mb.pad(x=y, pad=[0, 0, 0, 0, 0, missing], mode="constant", constant_val=np_dtype(y).type(0))
    context.add(mb.squeeze(x=y, axes=[0, 1] if x.rank == 2 else [1], name=node.name))


def _arguments(context: Any, node: Any) -> tuple[int, int, Array, dict[str, Any]]:
    """Return the length of a frame, the hop, the window, and the other arguments by name."""
    names = ("n_fft", "hop_length", "win_length", "window", "center", "normalized", "onesided", "length")
    given = {name: option(context, node, i, name, None) for i, name in enumerate((*names, "return_complex"), 1)}
    if isinstance(given["window"], Var):
        raise NotImplementedError(f"{node.name}: istft with a window that is computed; make it a buffer")
    n = int(given["n_fft"])
    width = n if given["win_length"] is None else int(given["win_length"])
    hop = n // 4 if given["hop_length"] is None else int(given["hop_length"])  # as torch does; its page differs
    window = np.ones(width) if given["window"] is None else np.asarray(given["window"], np.float64)
    before = (n - width) // 2
    window = np.pad(window, (before, n - width - before))[None, None]
    options = {name: given[name] for name in (*names[4:], "return_complex")}
    options["center"] = True if options["center"] is None else bool(options["center"])
    sides = inputs_of(context, node)[0].shape[-2]
    options["onesided"] = sides != n if options["onesided"] is None else bool(options["onesided"])
    return n, hop, window, options


def _waves(n: int) -> Array:
    """Return the inverse transform to real signals: a cosine and a sine per frequency, (channels, 1, n)."""
    frequencies = np.arange(n // 2 + 1)
    twice = np.where((frequencies == 0) | (2 * frequencies == n), 1, 2)[:, None] / n
    angles = 2 * np.pi * frequencies[:, None] * np.arange(n) / n
    return np.concatenate([twice * np.cos(angles), -twice * np.sin(angles)])[:, None]


def _overlapped(squares: Array, hop: int, frames: int) -> Array:
    """Return the sum of a window's squares over frames that overlap."""
    total = np.zeros(len(squares) + hop * (frames - 1))
    for frame in range(frames):
        total[frame * hop : frame * hop + len(squares)] += squares
    return total


CONVERSIONS: dict[str, Convert] = {
    "polar": polar,
    "view_as_complex": view_as_complex,
    "istft": istft,
    "angle": angle,
    **dict.fromkeys(("_conj", "conj", "conj_physical"), conjugate),
    **dict.fromkeys(("resolve_conj", "resolve_neg"), resolved),
}
MOVING = names("slice select unsqueeze squeeze transpose permute reshape view flatten expand cat neg")
SUMS = ("sum", "mean", "sum.dim_intlist", "mean.dim")
PARTWISE = names(
    "repeat tile index index_select gather roll flip fliplr repeat_interleave repeat_interleave.self_tensor "
    "repeat_interleave.self_int split split_with_sizes constantchunk unbind narrow unflatten numpy_t t "
    "tril triu cumsum zeros_like diagonal stack"
)
"""Operations, with `MOVING` and `SUMS`, that treat the real and the imaginary part alike."""
CONVOLUTIONS = (
    "_convolution",
    "convolution",
    *(f"conv{n}d{how}" for n in (1, 2, 3) for how in ("", ".padding")),
)
UPDATES = (
    *(f"_internal_op_tensor_inplace_{how}{end}" for how in ("copy", "fill") for end in ("", "_")),
    *("full_like", "fill", "copy", "expand_as", "slice_scatter", "select_scatter"),
)
WRAPPERS: dict[str, Wrap] = {
    **{kind: with_complex_arithmetic(kind) for kind in ARITHMETIC},
    **{kind: with_complex_comparison(same=kind == "eq") for kind in ("eq", "ne")},
    **dict.fromkeys(("matmul", "bmm", "mm", "linear", *CONVOLUTIONS), with_complex_products),
    **dict.fromkeys(("where", "where.self", "where.scalarself", "masked_fill"), with_complex_choice),
    **dict.fromkeys((*MOVING, *SUMS, *PARTWISE), with_complex_parts),
    **dict.fromkeys(UPDATES, with_complex_update),
    **dict.fromkeys(("full", "new_full"), refusing_complex_fill),
    **dict.fromkeys(("to", "_to_copy"), with_complex_cast),
    **dict.fromkeys(FOURIER, with_fixed_lengths),
    **dict.fromkeys(INVERSE_TRANSFORMS, lambda host: with_fixed_lengths(with_real_spectra(host))),
    "atan2": lambda _: atan2,
    "pow": with_complex_power,
    "square": squared,
    "reciprocal": inverse,
    "tanh": tangent,
    "exp": exponential,
    "log": logarithm,
    "sqrt": root,
}
"""Operation -> what lets its converter take complex numbers."""
