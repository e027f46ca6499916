"""A public statement about the Neural Engine, and the small models that statements are about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement import Inspection

Read = Callable[[Inspection], Any]
Build = Callable[..., Any]


@dataclass(frozen=True)
class Statement:
    """What somebody saw, and the model to ask about.

    Attributes:
        name: id in the table of evidence, and what is said, in words.
        build: makes the program.
        target: chip and OS.
        read: takes the answer out of an inspection.
        seen: the answer of the statement.
        sure: "unknown" does not do.
        units: compute units.
        inputs: of a run, for what depends on numbers.
    """

    name: str
    build: Callable[[], Program]
    target: str
    read: Read
    seen: Any
    sure: bool = True
    units: str = "CPU_AND_NE"
    inputs: Any = None


def legal(found: Inspection) -> Any:
    """Of the last op."""
    return found.ops[-1].legal


def unit(found: Inspection) -> Any:
    """Of the last op."""
    return found.ops[-1].preferred


def all_on(found: Inspection) -> Any:
    """The unit of every op, where it is one."""
    units = {row.preferred for row in found.ops}
    return units.pop() if len(units) == 1 else None if None in units else tuple(sorted(map(str, units)))


def says(rule: str) -> Read:
    """Is there a finding of a rule?"""
    return lambda found: rule in {f.rule for f in found.all_findings}


def can(name: str, build: Callable[[], Program], target: str, **more: Any) -> Statement:
    """The engine can run the last op."""
    return Statement(name, build, target, legal, True, **more)


def cannot(name: str, build: Callable[[], Program], target: str, **more: Any) -> Statement:
    """The engine cannot run the last op."""
    return Statement(name, build, target, legal, False, **more)


def warns(rule: str, name: str, build: Callable[[], Program], target: str, **more: Any) -> Statement:
    """There is a finding of a rule."""
    return Statement(name, build, target, says(rule), True, **more)


def no_warning(rule: str, name: str, build: Callable[[], Program], target: str, **more: Any) -> Statement:
    """There is no finding of a rule."""
    return Statement(name, build, target, says(rule), False, **more)


def half(*shape: int) -> Any:
    return np.full(shape, 0.01, np.float16)


def program(
    build: Build, *shapes: tuple[Any, ...], dtype: Any = types.fp16, states: tuple[Any, ...] = ()
) -> Program:
    inputs = [mb.TensorSpec(shape, dtype=dtype) for shape in shapes]
    inputs += [mb.StateTensorSpec(shape, types.fp16) for shape in states]
    made: Program = mb.program(input_specs=inputs, opset_version=ct.target.iOS18)(build)
    return made


def of(build: Build, *shapes: tuple[Any, ...], **more: Any) -> Callable[[], Program]:
    return lambda: program(build, *(shapes or ((1, 64, 32, 32),)), **more)


def conv(outputs: int, inputs: int, *kernel: int, **more: Any) -> Build:
    options = {"pad_type": "same", **more}
    groups = options.get("groups", 1)
    return lambda x: mb.conv(x=x, weight=half(outputs, inputs // groups, *kernel), **options)


def pool(kind: str, *window: int) -> Build:
    return lambda x: getattr(mb, kind)(x=x, kernel_sizes=list(window), strides=[1, 1], pad_type="same")


def op(kind: str, **more: Any) -> Build:
    return lambda x: getattr(mb, kind)(x=x, **more)


def linear(outputs: int, inputs: int) -> Build:
    return lambda x: mb.linear(x=x, weight=half(outputs, inputs))


def chained(width: int, count: int) -> Build:
    """1x1 convolutions of one width, one after the other."""

    def body(x: Var) -> Var:
        for _ in range(count):
            x = mb.conv(x=x, weight=half(width, width, 1, 1))
        return x

    return body


def repeated(width: int, count: int) -> Build:
    """Linear ops of one width, one after the other."""

    def body(x: Var) -> Var:
        for _ in range(count):
            x = mb.linear(x=x, weight=half(width, width))
        return x

    return body


def product(rows: int, inner: int, columns: int) -> Callable[[], Program]:
    """A product of two inputs."""
    return of(lambda x, y: mb.matmul(x=x, y=y), (rows, inner), (inner, columns))


def attention(*shape: int) -> Callable[[], Program]:
    return of(lambda q, k, v: mb.scaled_dot_product_attention(query=q, key=k, value=v), shape, shape, shape)


def masked(mask_of: Callable[[Var], Any]) -> Callable[[], Program]:
    """Fused attention with a mask that is made of the second input."""
    shape = (1, 2, 8, 16)

    def body(q: Var, m: Var) -> Var:
        return mb.scaled_dot_product_attention(query=q, key=q, value=q, attn_mask=mask_of(m))

    return of(body, shape, (1, 1, 8, 8))


def ints(build: Build, *shapes: tuple[int, ...], dtype: Any = types.int32) -> Callable[[], Program]:
    return of(build, *shapes, dtype=dtype)


def lookup(rows: int, dtype: Any = types.int32) -> Callable[[], Program]:
    return ints(
        lambda x: mb.gather(x=half(rows, 4), indices=x, axis=0, validate_indices=False), (1, 8), dtype=dtype
    )


def palette(bits: int, *shape: int, groups: int = 1) -> Var:
    """Weights out of 2^bits values, with tables for groups of outputs."""
    kinds = {1: types.np_uint1_dtype, 2: types.np_uint2_dtype, 4: types.np_uint4_dtype, 6: types.np_uint6_dtype}
    tables = half(groups, *[1] * (len(shape) - 1), 2**bits, 1)
    return mb.constexpr_lut_to_dense(indices=np.zeros(shape, kinds[bits]), lut=tables)


def blocks(kind: Any, shape: tuple[int, ...], *scales: int) -> Var:
    return mb.constexpr_blockwise_shift_scale(data=np.ones(shape, kind), scale=half(*scales))


def sparse(*shape: int) -> Var:
    mask = np.zeros(shape, types.np_uint1_dtype)
    mask.reshape(-1)[::4] = 1
    return mb.constexpr_sparse_to_dense(nonzero_data=half(int(np.asarray(mask, np.int32).sum())), mask=mask)


def quantized(x: Var) -> Var:
    """Activations of 8 bits around a convolution."""
    scale = np.float16(0.1)
    small = mb.dequantize(input=mb.quantize(input=x, scale=scale, output_dtype="int8"), scale=scale)
    return mb.conv(x=small, weight=blocks(np.int8, (64, 64, 3, 3), 64, 1, 1, 1), pad_type="same")


def states(*shapes: tuple[int, ...]) -> Callable[[], Program]:
    def total(x: Var, *kept: Var) -> Var:
        for state in kept:
            x = mb.add(x=x, y=mb.reduce_sum(x=mb.read_state(input=state)))
        return x

    bodies: dict[int, Build] = {  # the builder counts the names
        1: lambda x, a: total(x, a),
        2: lambda x, a, b: total(x, a, b),
        3: lambda x, a, b, c: total(x, a, b, c),
    }
    return of(bodies[len(shapes)], (1, 64), states=shapes)


def updated(update: Callable[[Var, Var], Var]) -> Callable[[], Program]:
    """A state is read, changed and written."""

    def body(x: Var, state: Var) -> Var:
        new = update(mb.read_state(input=state), x)
        return mb.relu(x=mb.coreml_update_state(state=state, value=new))

    return of(body, (1, 64), states=((32, 64),))


def written(old: Var, x: Var) -> Var:
    return mb.slice_update(x=old, update=x, begin=[0, 0], end=[1, 64])


def weighing(megabytes: int) -> Callable[[], Program]:
    """A program with so many bytes of weights, which nobody reads from memory."""
    return of(lambda x: mb.linear(x=x, weight=np.zeros((megabytes << 6, 8192), np.float16)), (1, 8192))


def convolutions(spec: Any) -> Callable[[], Program]:
    """Eight convolutions over images of many sizes."""

    def build() -> Program:
        import torch

        layers = [torch.nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1) for i in range(8)]
        traced: Any = torch.jit.trace(torch.nn.Sequential(*layers).eval(), torch.zeros(1, 3, 256, 256))  # type: ignore[no-untyped-call]
        model = ct.convert(
            traced,
            inputs=[ct.TensorType("x", shape=spec)],
            skip_model_load=True,
            minimum_deployment_target=ct.target.iOS16,
        )
        made: Program = model._mil_program
        return made

    return cache(build)


SIDES = ct.RangeDim(64, 512, default=256)
RANGED = convolutions((1, 3, SIDES, SIDES))
LISTED = convolutions(ct.EnumeratedShapes([(1, 3, n, n) for n in (128, 256)], default=(1, 3, 256, 256)))

M4, M1, M2, M3, M6 = "M4/macOS 27", "M1/macOS 14", "M2/macOS 15", "M3/macOS 15", "M6/macOS 27"
ANY = "any"
A12, A13, A14, A19 = "A12/iOS 16", "A13/iOS 17", "A14/iOS 17", "A19/iOS 26"
LONG, LONGER = (1, 1, 1, 16385), (1, 1, 1, 65537)
