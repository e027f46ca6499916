"""`prove="both"` is no weaker than comparing the models with `prove=True` afterwards, but for named repairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.errors import ProofError, Refusal
from anesurgery.mil import Program, Var, mb, types
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.pattern import Match, OpPattern, Ops
from anesurgery.rewriting.rewrite import Rewrite


@dataclass(frozen=True)
class DropSelect(Rewrite):
    """A select becomes its second choice, and nobody looks at the site."""

    name: ClassVar[str] = "drop_select"

    def pattern(self, op: Ops) -> OpPattern:
        return op.select()

    def uncompared(self, m: Match) -> Refusal | None:
        return Refusal("not compared here")

    def rewrite(self, mb: Builder, m: Match) -> Any:
        return mb.identity(x=m.root.b)


def chosen(unlike: float) -> Program:
    """Three times a number, six times where it is this one."""

    @mb.program(input_specs=[mb.TensorSpec((4, 16))])
    def program(x: Var) -> Any:
        there = mb.equal(x=x, y=np.float32(unlike))
        return mb.mul(x=mb.select(cond=there, a=mb.mul(x=x, y=np.float32(2)), b=x), y=np.float32(3))

    return program


@pytest.mark.one_of(3)
@pytest.mark.parametrize("unlike", [5.0, -3000.0, 1e-5])
def test_both_tries_adversarial_inputs(unlike: float) -> None:
    program = chosen(unlike)
    sampled = ane.apply(program, [DropSelect()], prove="model", quiet=True)
    assert not ane.compare(program, sampled.program, prove=True).ok
    with pytest.raises(ProofError, match="adversarial inputs give another"):
        ane.apply(program, [DropSelect()], prove="both", quiet=True)


def test_both_says_how_sure_it_is() -> None:
    surgery = ane.apply(chosen(np.inf), "remove_identity", prove="both", quiet=True)
    assert surgery.proof is not None
    assert surgery.proof.proof is not None
    assert surgery.proof.proof.proved
    assert surgery.proof.proof.trial is not None


def lookup(rows: int) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((1, 4), dtype=types.int32)])
    def program(ids: Var) -> Any:
        there = mb.less(x=ids, y=np.int32(6))
        table = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
        return mb.gather(x=table, indices=mb.select(cond=there, a=ids, b=np.zeros((1, 4), np.int32)), axis=0)

    return program


@dataclass(frozen=True)
class DropGuard(DropSelect):
    """The ids are what they are."""

    def rewrite(self, mb: Builder, m: Match) -> Any:
        return mb.identity(x=m.root.a)


def test_both_gives_what_the_caller_promises() -> None:
    ane.apply(lookup(9), [DropGuard()], prove="both", assume={"ids": (0, 5)}, quiet=True)
    with pytest.raises(ProofError, match="not shown to agree"):
        ane.apply(lookup(9), [DropGuard()], prove="both", assume={"ids": (0, 6)}, quiet=True)


def with_logarithm(unlike: float) -> Program:
    """log(1 + exp(x)), which is infinite from 89 on, beside what `DropSelect` makes wrong at one number."""

    @mb.program(input_specs=[mb.TensorSpec((4, 16)), mb.TensorSpec((4, 16))])
    def program(x: Var, z: Var) -> Any:
        there = mb.equal(x=z, y=np.float32(unlike))
        other = mb.mul(x=mb.select(cond=there, a=mb.mul(x=z, y=np.float32(2)), b=z), y=np.float32(3))
        return mb.log(x=mb.add(x=mb.exp(x=x), y=np.float32(1)), name="y"), other

    return program


def test_a_repair_is_right_where_the_model_before_it_is_not() -> None:
    surgery = ane.apply(with_logarithm(5.0), "fuse_exponential", prove="both", quiet=True)
    (note,) = [note for note in surgery.notes if "the repairs by fuse_exponential" in note]
    assert "old inf" in note
    assert surgery.proof is not None
    assert surgery.proof.ok


def test_a_repair_excuses_nothing_else() -> None:
    with pytest.raises(ProofError, match="give another"):
        ane.apply(with_logarithm(5.0), ["fuse_exponential", DropSelect()], prove="both", quiet=True)


@dataclass(frozen=True)
class DropMore(DropSelect):
    """What is dropped is told of any number, and it says that it repairs."""

    name: ClassVar[str] = "drop_more"
    mends: ClassVar[bool] = True

    def rewrite(self, mb: Builder, m: Match) -> Any:
        return mb.mul(x=m.root.b, y=np.float32(1.01))


def test_what_plain_inputs_show_no_repair_excuses() -> None:
    with pytest.raises(ProofError, match="worst PSNR"):
        ane.apply(chosen(5.0), [DropMore()], prove="both", quiet=True)


@dataclass(frozen=True)
class DropUnseen(DropSelect):
    """The same wrong edit, which says that it repairs; nobody looks at its site either."""

    name: ClassVar[str] = "drop_unseen"
    mends: ClassVar[bool] = True


def test_a_repair_that_was_not_checked_at_its_site_excuses_nothing() -> None:
    with pytest.raises(ProofError, match="give another"):
        ane.apply(chosen(5.0), [DropUnseen()], prove="both", quiet=True)


def test_whole_models_alone_excuse_no_repair() -> None:
    """`prove="model"` looks at no site: what a repair makes finite stays a difference."""

    @mb.program(input_specs=[mb.TensorSpec((4, 16))])
    def shifted(x: Var) -> Any:
        high = mb.add(x=x, y=np.float32(200))
        return mb.log(x=mb.add(x=mb.exp(x=high), y=np.float32(1)), name="y")

    with pytest.raises(ProofError, match="NaN or infinite on one side only"):
        ane.apply(shifted, "fuse_exponential", prove="model", quiet=True)
    assert ane.apply(shifted, "fuse_exponential", prove="both", quiet=True).changes
