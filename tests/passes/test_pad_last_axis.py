"""The last axis of products is padded by their weights, carried by elementwise ops, cut once at the edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from padded_axes import EVEN, ODD, RTOL, STEP, check, conv, hidden, kinds, lengths, program_of, taken, weight
from pass_cases import rewrites, table

from anesurgery.errors import PassError
from anesurgery.mil import Var, mb
from anesurgery.passes.pad_last_axis import PadLastAxis
from anesurgery.testing import apply_pass
from anesurgery.text import to_text

# Regions without a cut


def test_an_mlp_of_odd_width_needs_no_cut() -> None:
    after = check(program_of(lambda x: taken(mb.gelu(x=hidden(x), mode="EXACT"))), 0)
    assert lengths(after, "linear", "gelu") == [EVEN] * 3
    assert kinds(after, "linear")[1].weight.shape == (EVEN, EVEN)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("multiple", [1, 2, 16, 32, 37, 48, 64, 100])
def test_the_multiple_is_an_option(multiple: int) -> None:
    program = program_of(lambda x: taken(mb.relu(x=hidden(x)), 3200))
    step = PadLastAxis(multiple=multiple)
    if multiple == 1:
        assert not apply_pass(step, program)[1].changes
        return
    after = check(program, int(3200 % multiple > 0), step)
    assert lengths(after, "relu") == [-(-ODD // multiple) * multiple]


@pytest.mark.parametrize("multiple", [0, -64, 1.5, "64", None, True])
def test_the_multiple_must_be_a_positive_integer(multiple: Any) -> None:
    with pytest.raises(PassError, match=r"multiple=.* must be a positive integer"):
        PadLastAxis(multiple=multiple)


@pytest.mark.parametrize("up_first", [False, True])
def test_a_gated_mlp_in_either_order(up_first: bool) -> None:
    def body(x: Var) -> Any:
        up = hidden(x, seed=1) if up_first else None
        gate = mb.silu(x=hidden(x, seed=2))
        return taken(mb.mul(x=gate, y=up if up is not None else hidden(x, seed=1)))

    check(program_of(body), 0)


@pytest.mark.slow
def test_linear_without_a_bias_and_a_long_chain() -> None:
    def body(x: Var) -> Any:
        x = mb.linear(x=x, weight=weight(ODD, 8))
        for _ in range(1500):
            x = mb.relu(x=x)
        return taken(x)

    program = program_of(body)
    after, session = apply_pass(STEP, program, prove=False)
    assert len(session.changes) == 1
    assert lengths(after, "relu") == [EVEN] * 1500
    assert not kinds(after, "slice_by_index")


# matmul


@pytest.mark.one_of(2)
@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("shape", [(2, 8), (3, 2, 8), (1, 3, 2, 8)])
def test_matmul_and_its_flag(shape: tuple[int, ...], flag: bool) -> None:
    def body(x: Var) -> Any:
        first = weight(ODD, 8) if flag else weight(8, ODD)
        second = weight(EVEN, ODD) if flag else weight(ODD, EVEN)
        h = mb.sigmoid(x=mb.matmul(x=x, y=first, transpose_y=flag))
        return mb.matmul(x=h, y=second, transpose_y=flag)

    after = check(program_of(body, shape), 0)
    assert lengths(after, "matmul") == [EVEN, EVEN]


def test_attention_of_one_head() -> None:
    """Scores sum over the padding of queries and keys; values carry it through the product with weights."""

    def body(x: Var) -> Any:
        q, k, v = (hidden(x, seed=s) for s in (1, 2, 3))
        scores = mb.matmul(x=mb.mul(x=q, y=np.float32(0.2)), y=k, transpose_y=True)
        return taken(mb.matmul(x=mb.softmax(x=scores, axis=-1), y=v))

    after = check(program_of(body, (1, 5, 8)), 0)
    assert lengths(after, "matmul") == [5, EVEN]


MIXED: dict[str, Callable[[Var], Var]] = {
    "bias of each channel": lambda h: conv(h, 4),
    "sums of ones": lambda h: mb.matmul(x=weight(3, 5), y=mb.exp(x=h)),
    "sums of the unknown": lambda h: mb.matmul(x=weight(3, 5), y=conv(h, 4)),
}


@pytest.mark.parametrize("name", MIXED)
def test_scores_of_lanes_that_are_not_known_are_an_edge(name: str) -> None:
    def body(x: Var) -> Any:
        q, k = (MIXED[name](hidden(x, seed=s)) for s in (1, 2))
        return mb.matmul(x=q, y=k, transpose_y=True)

    check(program_of(body, (2, 4, 5, 8)), 2)


def test_products_of_dynamic_values_alone_are_unchanged() -> None:
    program = program_of(lambda x, y: mb.matmul(x=x, y=y), (5, 8), (8, ODD))
    after, session = apply_pass(STEP, program)
    assert not session.changes
    assert not session.refusals
    assert to_text(after) == to_text(program)


def a_partner_after_other_carriers(x: Var) -> Any:
    first, second = (hidden(x, seed=s) for s in (1, 2))
    other = mb.tanh(x=mb.mul(x=mb.sigmoid(x=second), y=np.float32(3)))
    return taken(mb.add(x=mb.relu(x=first), y=other))


def a_residual_around_an_mlp_of_the_same_width(x: Var) -> Any:
    h = hidden(x)
    inner = hidden(mb.gelu(x=hidden(h, ODD, 3), mode="EXACT"), ODD, 4)
    return taken(mb.add(x=h, y=inner))


def a_residual_around_two_products_and_nothing_else(x: Var) -> Any:
    h = hidden(x)
    inner = hidden(taken(h), ODD, 4)
    return mb.softmax(x=mb.add(x=h, y=inner), axis=-1), mb.mul(x=h, y=hidden(h, 1, 5))


def matmul_of_a_batch_of_weights(x: Var) -> Any:
    h = mb.relu(x=mb.matmul(x=x, y=weight(3, 8, ODD)))
    return mb.matmul(x=h, y=weight(3, ODD, EVEN))


def a_transposed_x_is_an_edge(x: Var) -> Any:
    h = hidden(x)
    return mb.matmul(x=h, y=weight(2, EVEN), transpose_x=True)


def a_transposed_x_inside_its_own_region(x: Var) -> Any:
    h = hidden(x)
    turned = mb.matmul(x=h, y=weight(ODD, ODD), transpose_x=True)
    return mb.softmax(x=mb.add(x=h, y=turned), axis=-1)


def scores_whose_keys_are_not_padded_are_an_edge(x: Var, k: Var) -> Any:
    return mb.matmul(x=hidden(x), y=k, transpose_y=True)


def scores_of_lanes_that_are_not_zero_are_an_edge(x: Var) -> Any:
    q, k = (mb.exp(x=hidden(x, seed=s)) for s in (1, 2))
    return mb.matmul(x=q, y=k, transpose_y=True)


def scores_of_transposed_queries_are_an_edge(x: Var, y: Var) -> Any:
    return mb.matmul(x=hidden(x), y=hidden(y), transpose_x=True, transpose_y=True)


test_cases, test_surroundings = table(
    STEP,
    rewrites(program_of, a_partner_after_other_carriers, rtol=RTOL),
    rewrites(program_of, a_residual_around_an_mlp_of_the_same_width, rtol=RTOL),
    # The second product reads what replaces a result of the region, not the old result.
    rewrites(program_of, a_residual_around_two_products_and_nothing_else, rtol=RTOL),
    rewrites(program_of, lambda x: taken(mb.mul(x=(h := hidden(x)), y=h)), rtol=RTOL),
    rewrites(program_of, lambda x: taken(hidden(mb.relu(x=hidden(x)), ODD, 2)), rtol=RTOL),
    rewrites(program_of, matmul_of_a_batch_of_weights, (3, 2, 8), rtol=RTOL),
    # The padded axis of h becomes rows of the result, which must not be seen.
    rewrites(program_of, a_transposed_x_is_an_edge, rtol=RTOL),
    rewrites(program_of, a_transposed_x_inside_its_own_region, (ODD, 8), rtol=RTOL),
    rewrites(program_of, scores_whose_keys_are_not_padded_are_an_edge, (5, 8), (6, ODD), rtol=RTOL),
    rewrites(program_of, scores_of_lanes_that_are_not_zero_are_an_edge, (5, 8), rtol=RTOL),
    rewrites(program_of, scores_of_transposed_queries_are_an_edge, (ODD, 8), (5, 8), rtol=RTOL),
)
