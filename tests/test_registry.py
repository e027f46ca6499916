"""Passes and recipes by name: found without importing, near misses told, known to coremltools."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from anesurgery import registry
from anesurgery.errors import SurgeryError, UnknownName
from anesurgery.mil import Program, Var, ct, mb, quiet_host, walk_ops
from anesurgery.passes.negate_subtract import NegateSubtract, example
from anesurgery.rewriting import host
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.pattern import Match, OpPattern, Ops, var
from anesurgery.rewriting.rewrite import Rewrite
from anesurgery.surgery import Recipe, find_recipe, steps_of


@dataclass(frozen=True)
class SquareToMul(Rewrite):
    """`square(x)` becomes `x * x`.

    More words.
    """

    name: ClassVar[str] = "square_to_mul"
    factor: float = 1.0
    """An option."""

    def pattern(self, op: Ops) -> OpPattern:
        return op.square(x=var("x"))

    def rewrite(self, mb: Builder, m: Match) -> Any:
        return mb.mul(x=m.x, y=mb.mul(x=m.x, y=np.float32(self.factor)))


@pytest.fixture
def own() -> Iterator[type[SquareToMul]]:
    """A pass of the user's, registered and forgotten again."""
    yield host.register(SquareToMul)
    registry._OWN.pop("square_to_mul", None)


def squared() -> Program:
    made: Program = mb.program(input_specs=[mb.TensorSpec((2, 3))])(lambda x: mb.square(x=x, name="y"))
    return made


def test_names_are_the_files() -> None:
    names = registry.pass_names()
    assert "negate_subtract" in names
    assert not [n for n in names if n.startswith("_")]
    assert names == sorted(registry.op_pass_names()) + sorted(registry.layer_pass_names())
    assert "gpt2_ane" in registry.recipe_names()


def test_the_first_sentence_and_the_whole() -> None:
    assert registry.summary("negate_subtract") == (
        "Write a subtraction as the addition of the negated operand."
    )
    assert "Before::" in registry.documentation("negate_subtract")
    assert "gpt2_ane" in registry.documentation("gpt2_ane")


def test_a_copied_file_whose_class_was_not_renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thing that goes wrong with a copy of the template."""
    monkeypatch.setattr(registry, "camel", lambda _: "Other")
    with pytest.raises(SurgeryError, match=r"passes/pad_last_axis.py has no class Other; rename its class"):
        registry.pass_class("pad_last_axis")


def test_a_pass_with_options() -> None:
    step = registry.make_pass("explicit_broadcast", tile=True)
    assert step.options()["tile"] is True
    assert str(step) == "explicit_broadcast(tile=True)"
    assert str(registry.make_pass("negate_subtract")) == "negate_subtract"


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: registry.make_pass("negate_substract"), "'negate_substract'; did you mean 'negate_subtract'"),
        (lambda: registry.pass_class("zzz"), "unknown pass 'zzz'; `anesurgery list` lists them"),
        (lambda: find_recipe("gpt2-ane"), "unknown recipe 'gpt2-ane'; did you mean 'gpt2_ane'"),
        (lambda: registry.documentation("gtp2_ane"), "did you mean 'gpt2_ane'"),
        (lambda: registry.make_pass("explicit_broadcast", tiles=True), "'tiles'; did you mean 'tile'"),
        (lambda: registry.make_pass("negate_subtract", x=1), "option of negate_subtract: 'x'; there are none"),
    ],
)
def test_unknown_names_list_near_ones(ask: Any, words: str) -> None:
    with pytest.raises(UnknownName) as caught:
        ask()
    assert words in str(caught.value)
    assert isinstance(caught.value, SurgeryError)


def test_camel() -> None:
    assert registry.camel("pad_last_axis") == "PadLastAxis"


def test_classes_by_attribute() -> None:
    passes = importlib.import_module("anesurgery.passes")
    assert passes.NegateSubtract is NegateSubtract
    assert "NegateSubtract" in dir(passes)
    with pytest.raises(AttributeError, match=r"there is no pass 'Nothing'; known: .*NegateSubtract"):
        _ = passes.Nothing


def test_a_pass_of_ones_own(own: type[SquareToMul]) -> None:
    assert registry.pass_names()[-1] == "square_to_mul"
    assert registry.pass_class("square_to_mul") is own
    assert registry.make_pass("square_to_mul", factor=2.0) == SquareToMul(2.0)
    assert registry.summary("square_to_mul") == "`square(x)` becomes `x * x`."
    assert [type(s) for s in steps_of(["square_to_mul", NegateSubtract, NegateSubtract()])] == [
        SquareToMul,
        NegateSubtract,
        NegateSubtract,
    ]


def test_registering_again_replaces(own: type[SquareToMul]) -> None:
    @dataclass(frozen=True)
    class Other(SquareToMul):
        """Another of the same name, as a notebook cell that is run again makes it."""

    assert host.register(Other) is Other
    assert registry.pass_names().count("square_to_mul") == 1
    assert registry.pass_class("square_to_mul") is Other


def test_names_of_the_library_are_not_for_taking() -> None:
    @dataclass(frozen=True)
    class NegateSubtract2(SquareToMul):
        """Named like a pass of the library."""

        name: ClassVar[str] = "negate_subtract"

    with pytest.raises(SurgeryError, match=r"already registered .* import it as anesurgery.passes"):
        host.register(NegateSubtract2)


def test_coremltools_knows_them_with_their_options(own: type[SquareToMul]) -> None:
    from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

    host.register_with_coremltools()
    host.register_with_coremltools()  # twice is harmless
    for name in registry.op_pass_names():
        assert f"anesurgery::{name}" in PASS_REGISTRY.passes

    pipeline = ct.PassPipeline.EMPTY
    pipeline.append_pass("anesurgery::square_to_mul")
    pipeline.set_options("anesurgery::square_to_mul", {"factor": "3"})
    program = squared()
    with quiet_host():
        PassPipelineManager.apply_pipeline(program, pipeline)
    kinds = [op.op_type for op in walk_ops(program) if op.op_type != "const"]
    assert kinds == ["mul", "mul"]


def test_a_pipeline_of_coremltools_runs_a_pass_of_ours() -> None:
    from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager

    host.register_with_coremltools()
    pipeline = ct.PassPipeline.DEFAULT
    pipeline.append_pass("anesurgery::negate_subtract")
    program = example()
    with quiet_host():
        PassPipelineManager.apply_pipeline(program, pipeline)
    assert not [op for op in walk_ops(program) if op.op_type == "sub"]


def test_recipes_take_options_for_their_steps() -> None:
    @dataclass(frozen=True)
    class Scaled(SquareToMul):
        """Another name."""

        name: ClassVar[str] = "scaled"
        other: int = 0

    recipe = Recipe("r", (NegateSubtract(), SquareToMul(), Scaled()))
    assert [str(s) for s in recipe.with_options(scaled={"factor": 2.0}).steps] == [
        "negate_subtract",
        "square_to_mul",
        "scaled(factor=2.0)",
    ]
    assert [s.name for s in recipe.with_options(negate_subtract=False).steps] == ["square_to_mul", "scaled"]
    assert recipe.with_options(other=3).steps[2] == Scaled(other=3)
    assert recipe.steps[2] == Scaled()  # the recipe itself stays
    for wrong in ({"facto": 1.0}, {"factor": 1.0}, {"scaled": {"facto": 1.0}}, {"scald": False}):
        with pytest.raises(UnknownName):
            recipe.with_options(**wrong)
    assert str(recipe) == "r:\n  1. negate_subtract\n  2. square_to_mul\n  3. scaled"


def test_repairs_take_options_and_may_be_left_out() -> None:
    recipe = Recipe("r", (NegateSubtract(),), repairs=(SquareToMul(), NegateSubtract()))
    assert recipe.with_options(square_to_mul=False).repairs == (NegateSubtract(),)
    assert recipe.with_options(square_to_mul=False).steps == recipe.steps
    assert recipe.with_options(square_to_mul={"factor": 2.0}).repairs[0] == SquareToMul(factor=2.0)
    without = recipe.with_options(negate_subtract=False)
    assert (without.steps, without.repairs) == ((), (SquareToMul(),))
    assert "first, where outputs are wrong without: square_to_mul, negate_subtract" in str(recipe)
    for wrong in ({"square_to_mul": {"facto": 2.0}}, {"square_to_mull": False}):
        with pytest.raises(UnknownName):
            recipe.with_options(**wrong)
    for name in ("square_to_mul", "negate_subtract"):
        with pytest.raises(SurgeryError, match=f"{name}=3; give True, False, or a dictionary"):
            recipe.with_options(**{name: 3})


def test_passes_are_values() -> None:
    assert NegateSubtract() == NegateSubtract()
    assert hash(SquareToMul(2.0)) == hash(SquareToMul(2.0))
    assert isinstance(SquareToMul(), Pass)
    assert isinstance(squared().functions["main"].outputs[0], Var)
