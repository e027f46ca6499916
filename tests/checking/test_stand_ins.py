"""A proof for any weights serves the next layer too, but nothing that depends on what the weights are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from both_sides import checked

from anesurgery.checking import proofs, site
from anesurgery.checking.grades import Grade, SiteCheck
from anesurgery.checking.proofs import StandIns
from anesurgery.errors import ProofError
from anesurgery.mil import Array, Program, Var, mb, types
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.pattern import Match, OpPattern, Ops
from anesurgery.rewriting.rewrite import Rewrite
from anesurgery.testing import apply_pass

RNG = np.random.default_rng(0)
WIDTH = 12


def matrix() -> Array:
    return RNG.standard_normal((WIDTH, WIDTH)).astype(np.float16).astype(np.float32)


def layers(*weights: Array, width: int = WIDTH) -> Program:
    """Products one after the other."""

    @mb.program(input_specs=[mb.TensorSpec((1, 5, width))])
    def program(x: Var) -> Var:
        for weight in weights:
            x = mb.tanh(x=mb.linear(x=x, weight=weight))
        return x

    return program


def plain(weight: Array) -> Array:
    return weight


@dataclass(frozen=True)
class AsConvolution(Rewrite):
    """A product with a weight becomes a convolution with what is made of the weight."""

    name: ClassVar[str] = "as_convolution"
    make: Callable[[Array], Array] = plain

    def pattern(self, op: Ops) -> OpPattern:
        return op.linear()

    def rewrite(self, mb: Builder, m: Match) -> Any:
        x = mb.expand_dims(x=mb.transpose(x=m.root.x, perm=[0, 2, 1]), axes=[2])
        weight = np.ascontiguousarray(self.make(m.root.weight.val))[:, :, None, None]
        made = mb.conv(x=x, weight=weight)
        return mb.transpose(x=mb.squeeze(x=made, axes=[2]), perm=[0, 2, 1])


@pytest.fixture
def proved(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was looked at with any weights."""
    found: list[Any] = []
    prove = proofs.prove_for_any_weights

    def watched(*args: Any, **options: Any) -> Any:
        found.append(prove(*args, **options))
        return found[-1]

    monkeypatch.setattr(site, "prove_for_any_weights", watched)
    return found


def test_layers_that_are_alike_are_proved_once(proved: list[Any]) -> None:
    _, session = apply_pass(AsConvolution(), layers(*(matrix() for _ in range(4))))
    grades = [change.proof.grade for change in session.changes if change.proof is not None]
    assert grades == [Grade.BITS] * 4
    assert len(proved) == 1


def test_large_layers_are_proved_once_after_the_first(
    proved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "AT_ONCE", 2 * WIDTH**2 - 1)
    apply_pass(AsConvolution(), layers(matrix()))
    assert not proved
    _, session = apply_pass(AsConvolution(), layers(*(matrix() for _ in range(4))))
    grades = [change.proof.grade for change in session.changes if change.proof is not None]
    assert grades == [Grade.BITS] * 4
    assert len(proved) == 1


def test_another_weight_in_the_second_layer_is_found(proved: list[Any]) -> None:
    good = matrix()
    others: Iterator[Callable[[Array], Array]] = iter([plain, np.negative])
    with pytest.raises(ProofError, match="differ"):
        apply_pass(AsConvolution(lambda w: next(others)(w)), layers(good, matrix()))
    assert proved[0]


def test_what_is_right_for_the_first_weight_only_is_found() -> None:
    first, second = matrix(), matrix()
    symmetric = first + first.T
    apply_pass(AsConvolution(np.transpose), layers(symmetric))
    with pytest.raises(ProofError, match="differ"):
        apply_pass(AsConvolution(np.transpose), layers(symmetric, second))


@dataclass(frozen=True)
class Turned(Rewrite):
    """The rows of a weight are reversed, and then what the product makes."""

    name: ClassVar[str] = "turned"

    def pattern(self, op: Ops) -> OpPattern:
        return op.linear()

    def check(self, m: Match) -> Match | None:
        return None if any(op.op_type == "gather" for op in m.root.outputs[0].child_ops) else m

    def rewrite(self, mb: Builder, m: Match) -> Any:
        order = np.arange(WIDTH, dtype=np.int32)[::-1].copy()
        made = mb.linear(x=m.root.x, weight=np.ascontiguousarray(m.root.weight.val[order]))
        return mb.gather(x=made, indices=order, axis=2)


def test_weights_that_are_reordered_are_proved_as_they_are(proved: list[Any]) -> None:
    _, session = apply_pass(Turned(), layers(matrix()))
    (change,) = session.changes
    assert not any(proved)
    assert change.proof is not None
    assert change.proof.grade is Grade.BITS


Weights = tuple[Array, Array, Array]


def combined(a: Array, b: Array, c: Array) -> Callable[[Var], Any]:
    """One product less the product of two others."""
    return lambda x: mb.sub(
        x=mb.linear(x=x, weight=a), y=mb.mul(x=mb.linear(x=x, weight=b), y=mb.linear(x=x, weight=c))
    )


def transposed(width: int) -> Weights:
    """Weights that are not contiguous: what is made of one to read it is gone when the next one is read."""
    a, b, c = (RNG.standard_normal((width, width)).astype(np.float32).T for _ in range(3))
    return a, b, c


@pytest.mark.one_of(2)
@pytest.mark.parametrize("width", [64, 128, 300])
def test_weights_that_are_not_contiguous_are_told_apart(width: int) -> None:
    a, b, c = transposed(width)
    other = checked(combined(a, b, c), combined(c, b, a), (types.fp32, (2, width)))
    assert isinstance(other, SiteCheck)
    assert other.max_abs > 0
    assert other.grade is Grade.NUMBERS
    same = checked(combined(a, b, c), combined(a, b, c), (types.fp32, (2, width)))
    assert isinstance(same, SiteCheck)
    assert same.grade is Grade.BITS


def test_numbers_of_contents() -> None:
    """The same content has one number, in whatever layout it lies."""
    a, b, c = transposed(128)
    program = layers(a, b, c, np.ascontiguousarray(a), a.T, width=128)
    found = StandIns(list(program.functions["main"].operations), [], seed=0).numbers
    assert list(found.values()) == [0, 1, 2, 0, 3]
