"""Integers as floats: exact up to 2048, compared rightly up to 2047, refused beyond."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, rewrites, stays, table

from anesurgery.facts.integer_masks import is_mask
from anesurgery.mil import Program, Var, ct, mb, new_symbol, types
from anesurgery.ops import COMPARISONS
from anesurgery.passes.integers_as_floats import IntegersAsFloats
from anesurgery.testing import apply_pass

EDGES = [-(2**31), -70000, -2049, -2048, -2047, -1, 0, 1, 2046, 2047, 2048, 2049, 2050, 65505, 2**31 - 1]
MASK = {"a": (0, 1)}


def program_of(body: Callable[[Var], Any], shape: tuple[Any, ...]) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape, dtype=types.int32)])(lambda a: body(a))


def half(x: Var) -> Any:
    return mb.cast(x=x, dtype="fp16")


WHOLE: dict[str, Callable[[Var], Any]] = {
    "bounds": lambda a: half(mb.minimum(x=mb.maximum(x=a, y=np.int32(2)), y=np.int32(7))),
    "size": lambda a: half(mb.mul(x=mb.abs(x=a), y=mb.sign(x=a))),
    "division": lambda a: half(mb.floor_div(x=a, y=np.int32(7))),
    "remainder": lambda a: half(mb.mod(x=a, y=np.int32(7))),
    "choice": lambda a: half(mb.select(cond=mb.less(x=a, y=np.int32(3)), a=a, b=mb.sub(x=a, y=np.int32(1)))),
    "count": lambda a: half(mb.reduce_sum(x=mb.sign(x=a), axes=[0])),
    "running": lambda a: half(mb.cumsum(x=mb.sign(x=a), axis=0, exclusive=True)),
    "joined": lambda a: half(mb.stack(values=(a, mb.reverse(x=a, axes=[0])), axis=0)),
    "looked up": lambda a: half(mb.gather(x=a, indices=np.array([3, 1], np.int32), axis=0)),
    "from a condition": lambda a: half(mb.add(x=mb.cast(x=mb.equal(x=a, y=np.int32(3)), dtype="int32"), y=a)),
    "as a condition": lambda a: mb.cast(x=mb.sub(x=a, y=np.int32(3)), dtype="bool"),
    "not": lambda a: mb.logical_not(x=mb.less(x=a, y=np.int32(3))),
    "between": lambda a: mb.logical_and(x=mb.greater(x=a, y=np.int32(-3)), y=mb.less(x=a, y=np.int32(5))),
    "outside": lambda a: mb.logical_not(
        x=mb.logical_or(
            x=mb.equal(x=a, y=np.int32(4)), y=mb.expand_dims(x=mb.cast(x=a, dtype="bool"), axes=[0])
        )
    ),
    "either": lambda a: half(mb.logical_xor(x=mb.less(x=a, y=np.int32(3)), y=mb.cast(x=a, dtype="bool"))),
}
"""What is done to integers of [-20, 20]; the pass leaves one cast of the input."""


def as_another_integer(dtype: str) -> Program:
    return mb.program(input_specs=[mb.TensorSpec((4,), dtype=types.int32)], opset_version=ct.target.iOS17)(
        lambda a: half(mb.add(x=mb.cast(x=mb.cast(x=a, dtype=dtype), dtype="int32"), y=np.int32(1)))
    )


def masked(seen: Callable[[Var], Var]) -> Program:
    """Attention of four positions under the condition that `seen` makes of a mask of the caller."""

    @mb.program(
        input_specs=[mb.TensorSpec((4, 2), dtype=types.fp16), mb.TensorSpec((1, 4), dtype=types.int32)],
        opset_version=ct.target.iOS17,
    )
    def program(x: Var, a: Var) -> Any:
        scores = mb.matmul(x=x, y=x, transpose_y=True)
        kept = mb.select(cond=seen(a), a=scores, b=np.float16(-1e4))
        return mb.matmul(x=mb.softmax(x=kept), y=x)

    return program


def both_ways(a: Var) -> Var:
    """DeBERTa's: a position that is masked neither sees nor is seen."""
    short = mb.cast(x=mb.cast(x=mb.squeeze(x=a, axes=[0]), dtype="uint16"), dtype="int32")
    made: Var = mb.cast(x=mb.mul(x=a, y=mb.expand_dims(x=short, axes=[1])), dtype="bool")
    return made


def test_where_no_promise_is_needed_none_is_noted() -> None:
    program = masked(lambda a: mb.cast(x=mb.expand_dims(x=a, axes=[0]), dtype="bool"))
    _, session = apply_pass(IntegersAsFloats(masks=True), program)
    assert session.changes
    assert not session.notes


@pytest.mark.parametrize(
    "seen",
    [
        lambda a: mb.equal(x=a, y=mb.transpose(x=a, perm=[1, 0])),
        lambda a: mb.greater(x=mb.cumsum(x=a, axis=1), y=np.int32(0)),
        lambda a: mb.cast(x=mb.mul(x=a, y=np.array([[3000, 1, 1, 1]], np.int32)), dtype="bool"),
        lambda a: mb.greater(x=mb.mul(x=a, y=a), y=np.int32(7)),
        lambda a: mb.cast(x=mb.gather(x=np.arange(9, dtype=np.int32), indices=a), dtype="bool"),
    ],
    ids=["segments", "counted", "scaled", "compared with 7", "looked up"],
)
def test_what_is_more_than_yes_and_no_is_no_mask(seen: Callable[[Var], Var]) -> None:
    program = masked(seen)
    _, session = apply_pass(IntegersAsFloats(masks=True), program)
    assert not session.notes
    assert not is_mask(program.functions["main"].inputs["a"])


def a_float_that_becomes_an_integer_is_rounded_towards_zero() -> Program:
    @mb.program(input_specs=[mb.TensorSpec((5,))])
    def program(x: Var) -> Any:
        cut = mb.cast(x=mb.mul(x=mb.tanh(x=x), y=np.float32(9)), dtype="int32")
        return half(mb.add(x=cut, y=np.int32(1)))

    return program


def a_size_that_is_not_known_is_refused() -> Program:
    @mb.program(input_specs=[mb.TensorSpec((new_symbol(), 4))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        length = mb.gather(x=mb.shape(x=x), indices=np.int32(0), axis=0, name="length")
        return mb.mul(x=x, y=mb.cast(x=mb.equal(x=length, y=np.int32(3)), dtype="fp32"))

    return program


SMALL = IntegersAsFloats(assume={"a": (-20, 20)})
EVERY = np.arange(-2048, 2049, dtype=np.int32)
SHORT = np.array([0, 1, 6, 7, 8, 2046, 2047, 2048, 2049, 65504, 65519, 65520, 65535], np.uint16)
"""65535 is infinite in fp16, and still larger than any limit."""


def compared(kind: str, limit: int) -> Callable[[Var], Any]:
    return lambda a: getattr(mb, kind)(x=a, y=np.int32(limit))


def divided(by: int) -> Callable[[Var], Any]:
    """fp16 quotients are rounded, but never up to the next integer."""
    return lambda a: half(mb.floor_div(x=a, y=np.int32(by)))


def views_and_sums(a: Var) -> Any:
    seen = mb.expand_dims(x=mb.reshape(x=a, shape=[2, 3]), axes=[1])
    kept = mb.sub(x=np.int32(1), y=seen)
    return mb.cast(x=kept, dtype="fp16"), mb.equal(x=mb.transpose(x=seen, perm=[1, 0, 2]), y=np.int32(0))


def before_steps(a: Var) -> Any:
    """Positions up to a length need no promise."""
    return mb.less(x=np.arange(2040, dtype=np.int32).reshape(1, -1), y=mb.expand_dims(x=a, axes=[1]))


def routed() -> Program:
    """The choice of a router, as coremltools writes it: indices of 16 bits, made wider to be compared."""

    @mb.program(input_specs=[mb.TensorSpec((5, 8), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Any:
        shares, chosen = mb.topk(x=x, k=2, axis=-1, output_indices_dtype="uint16")
        wide = mb.expand_dims(x=mb.cast(x=chosen, dtype="int32"), axes=[2])
        own = mb.cast(x=mb.equal(x=wide, y=np.arange(8, dtype=np.int32)), dtype="fp16")
        return mb.reduce_sum(x=mb.mul(x=own, y=mb.expand_dims(x=shares, axes=[2])), axes=[1])

    return program


def short(limit: int) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(SHORT.shape, types.uint16)], opset_version=ct.target.iOS17)(
        lambda a: (mb.less(x=mb.cast(x=a, dtype="int32"), y=np.int32(limit)), mb.identity(x=a))
    )


test_cases, test_surroundings = table(
    IntegersAsFloats(),
    *(
        refuses(reason, program_of, body, (4,), step=IntegersAsFloats(assume=assume))
        for body, assume, reason in [
            (lambda a: mb.less(x=a, y=np.int32(2048)), None, "one of them must stay within 2047"),
            (lambda a: mb.equal(x=a, y=mb.reverse(x=a, axes=[0])), None, "%a has an unknown range"),
            (
                lambda a: mb.cast(x=mb.add(x=a, y=np.int32(1)), dtype="fp16"),
                None,
                "has an unknown range, above 2048",
            ),
            (
                lambda a: mb.greater(x=mb.mul(x=a, y=np.int32(40)), y=np.int32(3)),
                {"a": (0, 100)},
                "reaches 4000, above 2048",
            ),
        ]
    ),
    refuses(
        "has the symbolic shape",
        program_of,
        lambda a: mb.cast(x=mb.expand_dims(x=a, axes=[0]), dtype="fp16"),
        (new_symbol(),),
    ),
    rewrites(
        program_of,
        lambda a: mb.greater(x=mb.mul(x=a, y=np.int32(40)), y=np.int32(3)),
        (4,),
        inputs={"a": np.array([-50, 0, 1, 50], np.int32)},
        step=IntegersAsFloats(assume={"a": (-50, 50)}),
    ),
    rewrites(
        a_float_that_becomes_an_integer_is_rounded_towards_zero,
        inputs={"x": np.array([-3, -0.3, 0, 0.1, 2], np.float32)},
    ),
    refuses(
        "reaches 3000, above 2048",
        program_of,
        lambda a: half(mb.cumsum(x=a, axis=0)),
        (3000,),
        step=IntegersAsFloats(assume=MASK),
    ),
    refuses(
        "has an unknown range",
        program_of,
        lambda a: half(mb.floor_div(x=a, y=np.int32(-3))),
        (4,),
        step=IntegersAsFloats(assume=MASK),
    ),
    refuses("%length is counted from a symbolic shape", a_size_that_is_not_known_is_refused),
    *(
        rewrites(
            as_another_integer,
            dtype,
            inputs={
                "a": np.array(
                    [*(((0, 5), (-5, 5)) if dtype == "uint16" else ((-5, 127), (-5, 128)))[0], 1, 2], np.int32
                )
            },
            step=IntegersAsFloats(
                assume={"a": (((0, 5), (-5, 5)) if dtype == "uint16" else ((-5, 127), (-5, 128)))[0]}
            ),
        )
        for dtype in ["uint16", "int8"]
    ),
    *(
        refuses(
            "reaches 65536, above" if dtype == "uint16" else "has an unknown range",
            as_another_integer,
            dtype,
            step=IntegersAsFloats(
                assume={"a": (((0, 5), (-5, 5)) if dtype == "uint16" else ((-5, 127), (-5, 128)))[1]}
            ),
        )
        for dtype in ["uint16", "int8"]
    ),
    *(
        rewrites(
            program_of,
            compared(kind, limit),
            (len(EDGES),),
            inputs={"a": np.array(EDGES, np.int32)},
            id=f"{kind} {limit}",
        )
        for kind in sorted(COMPARISONS)
        for limit in (-2047, -3, 0, 1, 2047)
    ),
    rewrites(
        program_of,
        views_and_sums,
        (1, 6),
        inputs={"a": np.array([[0, 1, 1, 0, 1, 0]], np.int32)},
        step=IntegersAsFloats(assume=MASK),
    ),
    rewrites(program_of, before_steps, (2,), inputs={"a": np.array([1999, 5000], np.int32)}),
    *(rewrites(routed, step=step) for step in (IntegersAsFloats(), IntegersAsFloats(of_inputs=False))),
    *(
        case(
            program_of,
            lambda a: half(mb.equal(x=mb.reshape(x=a, shape=[3, 2]), y=np.int32(1))),
            (2, 3),
            step=step,
        )
        for case, step in ((rewrites, IntegersAsFloats()), (stays, IntegersAsFloats(of_inputs=False)))
    ),
    *(rewrites(short, limit, inputs={"a": SHORT}) for limit in (7, 2047)),
    *(
        rewrites(
            program_of,
            WHOLE[name],
            (41,),
            inputs={"a": np.arange(-20, 21, dtype=np.int32)},
            step=SMALL,
            id=name,
        )
        for name in WHOLE
    ),
    *(
        rewrites(
            program_of,
            divided(by),
            EVERY.shape,
            inputs={"a": EVERY},
            step=IntegersAsFloats(assume={"a": (-2048, 2048)}),
            id=f"divided by {by}",
        )
        for by in (1, 3, 7, 31, 100, 2047)
    ),
    refuses("has an unknown range", masked, both_ways),
    rewrites(
        masked,
        both_ways,
        inputs={
            "x": np.random.default_rng(0).standard_normal((4, 2)).astype(np.float16),
            "a": np.array([[1, 1, 0, 1]], np.int32),
        },
        step=IntegersAsFloats(masks=True),
    ),
)
