"""The search for bad inputs: what holds on random numbers and fails on others within their range."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.mil import Program, Var, mb, types
from anesurgery.placement import certifying
from anesurgery.placement.certifying import Slopes, Trial, drawn_anew, moved, ranges_of

HALF = np.float16


def aligned() -> Program:
    """A norm of rows: the square overflows only where all numbers have the signs of a weight."""
    rng = np.random.default_rng(0)
    weight = (rng.choice([-1.0, 1.0], (1, 512)) * 0.3).astype(HALF)

    @mb.program(input_specs=[mb.TensorSpec((2, 512), dtype=types.fp16)])
    def program(x: Var) -> Any:
        along = mb.linear(x=mb.mul(x=x, y=HALF(1), name="scaled"), weight=weight, name="along")
        return mb.sqrt(x=mb.add(x=mb.square(x=along, name="square"), y=HALF(0.1), name="guarded"), name="y")

    return program


def counted() -> Program:
    """A sum over tokens: its square overflows where one of eight comes often."""
    table = np.array([[1.0], [-1], [0.5], [2], [-2], [0.25], [1], [30]], HALF)

    @mb.program(input_specs=[mb.TensorSpec((1, 16), dtype=types.int32)])
    def program(ids: Var) -> Any:
        rows = mb.gather(x=table, indices=ids, axis=0)
        total = mb.reduce_sum(x=rows, axes=[1], name="total")
        return mb.sqrt(x=mb.add(x=mb.square(x=total, name="square"), y=HALF(0.1), name="guarded"), name="y")

    return program


def uniform() -> dict[str, Any]:
    return {"x": np.random.default_rng(1).uniform(-3, 3, (2, 512)).astype(HALF)}


def ids() -> dict[str, Any]:
    return {"ids": np.array([[0, 1, 2, 3, 4, 5, 6, 7, 1, 4, 1, 4, 0, 1, 2, 5]], np.int32)}


def test_gradients_find_what_random_inputs_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version only walks at random: it calls the model good."""
    assert ane.certify(aligned(), uniform()).verdict == "holds"
    found = ane.certify(aligned(), uniform(), search=4)
    assert (found.verdict, found.searched) == ("at risk", 4)
    assert "y is NaN or infinite in 50% of its elements in fp16" in found.why
    assert "on inputs that the search found by the gradient of guarded; x from -2.99 to 3" in found.why
    low, high = uniform()["x"].min(), uniform()["x"].max()
    assert low <= found.worst_inputs["x"].min() <= found.worst_inputs["x"].max() <= high
    assert found.worst_inputs["x"].dtype == HALF
    assert ane.certify(aligned(), found.worst_inputs).verdict == "fails"
    monkeypatch.setattr(certifying, "_trials", lambda *rest: [Trial("random changes", rest[2])])
    blind = ane.certify(aligned(), uniform(), search=40)
    assert (blind.verdict, blind.searched) == ("holds", 40)


def test_a_greedy_walk_finds_bad_tokens() -> None:
    assert ane.certify(counted(), ids()).verdict == "holds"
    found = ane.certify(counted(), ids(), search=80)
    assert found.verdict == "at risk"
    assert "the search found by random changes; ids from 1 to 7" in found.why
    assert (found.worst_inputs["ids"] == 7).sum() >= 8
    assert found.worst_inputs["ids"].dtype == np.int32


def test_nothing_is_searched_where_given_inputs_fail() -> None:
    worst = ane.certify(aligned(), uniform(), search=4).worst_inputs
    found = ane.certify(aligned(), [uniform(), worst], search=4)
    assert (found.verdict, found.searched, found.samples) == ("fails", 0, 2)


def test_a_gradient_is_that_of_the_largest_value() -> None:
    slopes = Slopes(aligned(), None, ["x"])
    (largest, *_) = slopes.largest(uniform())
    assert largest.outputs[0].name == "guarded"
    height, gradients = slopes.of(largest, uniform())
    nudged = moved(uniform(), gradients, {"x": (-3, 3)}, 0.01)
    assert slopes.of(largest, nudged)[0] > height > 0
    assert np.count_nonzero(gradients["x"]) == 512  # of the row with the largest value


def test_a_gradient_of_the_error_makes_it_larger() -> None:
    slopes = Slopes(aligned(), None, ["x"])
    height, gradients = slopes.of_error(uniform())
    assert np.any(gradients["x"] != 0)
    assert np.isfinite(height)


def test_a_step_and_a_change_stay_within_the_range() -> None:
    point: dict[str, Any] = {"x": np.array([0.0, 1.0, -1.0], HALF), "n": np.array([1, 2, 3], np.int32)}
    ranges = ranges_of([point])
    assert ranges == {"x": (-1, 1), "n": (1, 3)}
    assert moved(point, {"x": np.array([1, 1, 0])}, ranges, 0.25)["x"].tolist() == [0.5, 1, -1]
    for seed in range(20):
        new = drawn_anew(point, ranges, np.random.default_rng(seed))
        assert set(new["n"].tolist()) <= {1, 2, 3}
        assert np.abs(new["x"]).max() <= 1
    assert ranges_of([{"x": np.array([np.nan, np.inf]), "b": np.array([True])}]) == {}


def test_where_torch_gives_no_gradient_it_walks_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*rest: Any) -> Any:
        raise RuntimeError("no derivative")

    monkeypatch.setattr(Slopes, "of", refused)
    monkeypatch.setattr(Slopes, "of_error", refused)
    found = ane.certify(aligned(), uniform(), search=3)
    assert (found.verdict, found.searched) == ("holds", 3)
