"""The one recogniser of attention: what is one, what stands between, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from anesurgery.interpret.attentions import Attention, attentions, recognise
from anesurgery.mil import Program, Var, ct, mb, walk_ops

Q = (1, 2, 4, 8)
W = np.ones((4, 4), np.float32)


def program(body: Callable[..., Any], shape: tuple[int, ...] = Q) -> Program:
    specs = [mb.TensorSpec(shape), mb.TensorSpec(shape)]
    made: Program = mb.program(input_specs=specs, opset_version=ct.target.iOS18)(lambda q, k: body(q, k))
    return made


def scores(q: Var, k: Var) -> Any:
    return mb.matmul(x=q, y=k, transpose_y=True, name="scores")


def only(found: Program) -> Attention:
    (one,) = attentions(found)
    return one


def between(one: Attention) -> list[str]:
    return [op.op_type for op in one.between]


def test_what_stands_between_in_order() -> None:
    def body(q: Var, k: Var) -> Any:
        x = mb.add(x=W, y=mb.mul(x=scores(q, k), y=np.float32(0.5)))
        x = mb.reshape(x=mb.select(cond=W > 0, a=x, b=np.float32(-1e4)), shape=[2, 4, 4])
        weights = mb.reshape(x=mb.softmax(x=x, axis=-1), shape=[1, 2, 4, 4])
        return mb.matmul(x=weights, y=k, name="sum")

    one = only(program(body))
    assert between(one) == ["mul", "add", "select", "reshape"]
    assert one.product is not None
    assert (one.product.name, [op.name for op in one.sums]) == ("scores", ["sum"])


def test_zeros_may_hide_weights() -> None:
    """Masked weights are filled with 0 again, after the softmax; another number would be a sum of values."""

    def body(fill: float) -> Callable[[Var, Var], Any]:
        return lambda q, k: mb.matmul(
            x=mb.select(cond=W > 0, a=mb.softmax(x=scores(q, k), axis=-1), b=np.float32(fill)), y=k, name="sum"
        )

    assert [op.name for op in only(program(body(0.0))).sums] == ["sum"]
    assert not list(attentions(program(body(1.0))))


def test_a_soft_cap_stands_between() -> None:
    """The scores are capped, and a dynamic mask is added."""

    def body(q: Var, k: Var) -> Any:
        mask = mb.log(x=mb.reduce_sum(x=q, axes=[-1], keep_dims=True))
        capped = mb.mul(x=mb.tanh(x=mb.real_div(x=scores(q, k), y=np.float32(50))), y=np.float32(50))
        return mb.matmul(x=mb.softmax(x=mb.add(x=mask, y=capped), axis=-1), y=k)

    assert between(only(program(body))) == ["real_div", "tanh", "mul", "add"]


def test_a_mask_that_is_computed_is_not_taken_for_the_scores() -> None:
    """A dynamic mask on either side of the sum."""
    for swapped in (False, True):

        def body(q: Var, k: Var) -> Any:
            mask = mb.log(x=mb.reduce_sum(x=q, axes=[-1], keep_dims=True))
            x, y = (mask, scores(q, k)) if swapped else (scores(q, k), mask)  # noqa: B023 - used at once
            return mb.matmul(x=mb.softmax(x=mb.add(x=x, y=y), axis=-1), y=k)

        assert between(only(program(body))) == ["add"]


def test_fused_and_einsum() -> None:
    fused = program(lambda q, k: mb.scaled_dot_product_attention(query=q, key=k, value=k))
    assert only(fused).product is None

    def split(q: Var, k: Var) -> Any:
        made = mb.einsum(values=(k, q), equation="nchw,nwhu->nchu")  # k, h, c and c, h, q to k, h, q
        return mb.einsum(values=(k, mb.softmax(x=made, axis=1)), equation="nchw,nwhu->nchu")

    one = only(program(split, (1, 4, 2, 4)))
    assert one.product is not None
    assert one.product.op_type == "einsum"


@pytest.mark.parametrize(
    "body",
    [
        lambda q, k: mb.matmul(x=mb.softmax(x=mb.matmul(x=q, y=np.ones((8, 4), np.float32)), axis=-1), y=k),
        lambda q, k: mb.matmul(x=mb.softmax(x=mb.relu(x=scores(q, k)), axis=-1), y=k),
        lambda q, k: mb.softmax(x=q, axis=-1),
        lambda q, k: mb.relu(x=mb.softmax(x=scores(q, k), axis=-1)),
    ],
    ids=["a product with weights", "an activation between", "no product", "nothing is summed"],
)
def test_what_only_looks_like_attention(body: Callable[..., Any]) -> None:
    assert not list(attentions(program(body)))


def test_a_softmax_over_products_is_recognised_before_it_is_whole() -> None:
    found = program(lambda q, k: mb.softmax(x=scores(q, k), axis=-1))
    (softmax,) = (op for op in walk_ops(found) if op.op_type == "softmax")
    one = recognise(softmax)
    assert one is not None
    assert not one.is_whole


@pytest.mark.quick_cases("gpt2-2", "bert-2", "vit-2")
@pytest.mark.one_of(3)
@pytest.mark.parametrize(("name", "count"), [("gpt2", 2), ("llama", 2), ("bert", 2), ("t5", 6), ("vit", 2)])
def test_converted_models(name: str, count: int, converted: Callable[..., Any]) -> None:
    assert len(list(attentions(converted(name).model._mil_program))) == count
