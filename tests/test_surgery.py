"""apply and Surgery: the model given stays, the interface is kept, wrong passes are caught, reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import anesurgery as ane
from anesurgery import files, loading, registry
from anesurgery.errors import InterfaceError, PassError, ProofError, Refusal, SurgeryError, UnknownName
from anesurgery.files.interface import Interface, InterfaceChange, Port, Signature
from anesurgery.files.protobuf import proto
from anesurgery.loading import interface, load
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.network_editing.layer_pass import LayerPass
from anesurgery.network_editing.network import Network
from anesurgery.neuralnetwork.making import make_layer, make_network
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.pattern import Match, OpPattern, Ops, var
from anesurgery.rewriting.session import Session
from anesurgery.surgery import Recipe
from anesurgery.text import to_text

PACKAGES = [
    "anemll_multifunction",
    "basic_pitch_nmp",
    "dtln_aec_128_part1_fp16",
    "silero_unified",
    "silero_unified_palette_4bit",
]


def squares() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 3))], opset_version=ct.target.iOS16)(
        lambda x: mb.add(x=mb.square(x=x, name="square"), y=np.float32(1), name="y")
    )


@dataclass(frozen=True)
class SquareToMul(ane.Rewrite):
    """A user's own pass; `factor` makes it wrong on purpose."""

    name: ClassVar[str] = "square_to_mul"
    factor: float = 1.0

    def pattern(self, op: Ops) -> OpPattern:
        return op.square(x=var("x"))

    def rewrite(self, mb: Builder, m: Match) -> Var:
        y = mb.mul(x=m.x, y=m.x)
        return y if self.factor == 1 else mb.mul(x=y, y=np.float32(self.factor))


def test_a_users_own_pass_works_on_a_copy() -> None:
    program = squares()
    before = to_text(program)
    surgery = ane.apply(program, SquareToMul(), prove="both", quiet=True)
    assert to_text(program) == before
    assert "%square: 2x3 = mul(x=%x, y=%x)" in to_text(surgery.program)
    (change,) = surgery.changes
    assert change.where == "square"
    assert change.before == ("square square",)
    assert change.after == ("mul square",)
    assert change.proof is not None
    assert change.proof.max_abs == 0
    assert surgery.proof is not None
    assert surgery.proof.ok


@pytest.mark.parametrize("prove", ["sites", "model"])
def test_a_wrong_pass_is_caught_by_either_proof(prove: str) -> None:
    with pytest.raises(ProofError):
        ane.apply(squares(), SquareToMul(factor=1.01), prove=prove, quiet=True)


def test_without_proof_nothing_is_compared() -> None:
    surgery = ane.apply(squares(), SquareToMul(factor=1.01), prove=None, quiet=True)
    assert surgery.changes[0].proof is None
    assert surgery.proof is None


def test_an_undeclared_change_of_the_interface_is_an_error() -> None:
    @dataclass(frozen=True)
    class Rename(ane.Pass):
        name: ClassVar[str] = "rename"

        def run(self, program: Program, session: Any) -> None:
            program.functions["main"].outputs[0].name = "z"

    with pytest.raises(InterfaceError, match="output y .2x3 fp32. is gone; output z .2x3 fp32. is new"):
        ane.apply(squares(), Rename(), quiet=True)


@dataclass(frozen=True)
class Halve(ane.Rewrite):
    """The output becomes its first row, which is declared."""

    name: ClassVar[str] = "halve"

    def pattern(self, op: Ops) -> OpPattern:
        return op.add(x=op.square(x=var("x")), y=var("one"))

    def rewrite(self, mb: Builder, m: Match) -> Var:
        words = "y holds the first row alone"
        mb.declare(InterfaceChange(words, ("y",), outputs=lambda out, _: {"y": out["y"][:1]}))
        row = mb.slice_by_index(x=m.x, begin=[0, 0], end=[1, 3])
        return mb.add(x=mb.mul(x=row, y=row), y=m.one)


def test_a_declared_change_is_compared_through_its_adapter() -> None:
    surgery = ane.apply(squares(), Halve(), prove="both", quiet=True)
    assert surgery.proof is not None
    assert surgery.proof.ok
    assert surgery.proof.words == ("y holds the first row alone",)
    assert "interface: y holds the first row alone" in surgery.details


def test_a_pass_that_raises_is_named() -> None:
    @dataclass(frozen=True)
    class Broken(SquareToMul):
        name: ClassVar[str] = "broken"

        def check(self, m: Match) -> Match:
            raise KeyError("lost")

    with pytest.raises(PassError, match="pass broken.*KeyError.*lost"):
        ane.apply(squares(), Broken(), quiet=True)


@dataclass(frozen=True)
class Fails(SquareToMul):
    """Builds and declares something at `z`, and then raises there."""

    name: ClassVar[str] = "fails"

    def rewrite(self, mb: Builder, m: Match) -> Var:
        y = mb.mul(x=m.x, y=m.x, name="built")
        if m.root.name != "z":
            return y
        mb.declare(InterfaceChange("give the scale", ("scale",)))
        mb.add_input((1, 1), types.fp32, InterfaceChange("give another", ("other",)))
        mb.leave_beside("table", np.zeros(3))
        raise ValueError("no")


def twice_squared() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 3))], opset_version=ct.target.iOS16)(
        lambda x: mb.square(x=mb.square(x=x, name="y"), name="z")
    )


def test_a_failure_at_one_op_keeps_the_edits_before_it(tmp_path: Path) -> None:
    with pytest.raises(
        PassError, match=r"pass fails at z \(square\).*negate_subtract.*holds the 1 edits"
    ) as failure:
        ane.apply(twice_squared(), ["negate_subtract", Fails()], quiet=True)
    surgery = failure.value.surgery
    assert isinstance(surgery, ane.Surgery)
    assert [change.where for change in surgery.changes] == ["y"]
    assert to_text(surgery.program).splitlines()[1:3] == [
        "  %y: 2x3 = mul(x=%x, y=%x)",
        "  %z: 2x3 = square(x=%y)",
    ]
    assert not surgery.contract
    assert not surgery.artifacts
    saved = surgery.save(tmp_path / "m.mlpackage")
    assert ane.compare(twice_squared(), saved).psnr == float("inf")


def test_a_pass_that_fails_half_way_by_itself_keeps_nothing() -> None:
    @dataclass(frozen=True)
    class Half(ane.Pass):
        name: ClassVar[str] = "half"

        def run(self, program: Program, session: Any) -> None:
            program.functions["main"].outputs[0].name = "q"
            raise ValueError("no")

    with pytest.raises(
        PassError, match="pass half failed: ValueError: no.*passes before it: square_to_mul"
    ) as failure:
        ane.apply(squares(), [SquareToMul(), Half()], quiet=True)
    assert failure.value.surgery is None


def package(tmp_path: Path) -> Path:
    """A package whose description says more of its features than the program does."""
    return ane.apply(squares(), [], quiet=True).save(tmp_path / "squares.mlpackage")


@dataclass(frozen=True)
class MakeOptional(LayerPass):
    """Makes an input of a network optional without a word, and may declare another change."""

    name: ClassVar[str] = "make_optional"
    declares: str = ""

    def run(self, network: Network, session: Session) -> None:
        network.spec.description.input[0].type.isOptional = True
        if self.declares:
            session.contract.append(InterfaceChange("something else", (self.declares,)))


@pytest.mark.parametrize("declares", ["", "y"])
def test_an_undeclared_change_of_a_described_feature_is_an_error(declares: str) -> None:
    spec = make_network({"x": (1, 3, 2, 2)}, [make_layer("unary", ["x"], ["y"], type="ABS")], ["y"])
    with pytest.raises(InterfaceError, match="without being declared: the description of input x changed"):
        ane.apply(spec, MakeOptional(declares), quiet=True)
    assert ane.apply(spec, MakeOptional("x"), quiet=True).contract


def test_the_interface_is_that_of_the_saved_package(tmp_path: Path) -> None:
    surgery = ane.apply(package(tmp_path), Halve(), quiet=True)
    compared = surgery.subject.interface
    assert set(compared.description) == {"input x", "output y", "metadata"}
    assert interface(load(surgery.save(tmp_path / "halved.mlpackage"))) == compared
    before = interface(load(tmp_path / "squares.mlpackage"))
    words = "output y (2x3 fp32) became y (1x3 fp32); the description of output y changed"
    assert before.difference(compared) == words
    assert not before.difference(compared, ignore=("y",))


def test_a_change_of_a_feature_whose_name_has_spaces_can_be_declared() -> None:
    spec = make_network({"my x": (1, 3, 2, 2)}, [make_layer("unary", ["my x"], ["y"], type="ABS")], ["y"])
    assert ane.apply(spec, MakeOptional("my x"), quiet=True).contract
    with pytest.raises(InterfaceError, match="the description of input my x changed"):
        ane.apply(spec, MakeOptional("x"), quiet=True)


@pytest.mark.parametrize("part", ["input x", "decode: input x", "decode: output my x"])
def test_images_of_every_function_are_known(part: str) -> None:
    feature = proto.Model_pb2.FeatureDescription(name=part.partition("put ")[2])
    feature.type.imageType.height = 4
    described = {part: feature.SerializeToString(), "decode: metadata": b"", "default decode": b""}
    assert Interface({}, described).images == {feature.name}


def test_differences_name_the_function_in_the_order_of_the_functions() -> None:
    """The wrong version has the order of a set of strings, which differs from process to process."""
    names = [f"function{i}" for i in range(6)]
    before, after = (
        Interface({name: Signature((Port("x", "fp16", (size,)),), ()) for name in names}) for size in (1, 2)
    )
    expected = "; ".join(f"{name}: input x (1 fp16) became x (2 fp16)" for name in names)
    assert before.difference(after) == expected


def test_the_model_is_made_once_and_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = package(tmp_path), []
    parse = files.package.read_spec

    def counting(file: Any) -> Any:
        read.append(file)
        return parse(file)

    monkeypatch.setattr(loading, "read_spec", counting)
    surgery = ane.apply(path, SquareToMul(), prove="both", quiet=True)
    assert len(read) == 1
    assert surgery.model is surgery.model


def test_refusals_are_shown_with_reason_and_place() -> None:
    @dataclass(frozen=True)
    class Picky(SquareToMul):
        name: ClassVar[str] = "picky"

        def check(self, m: Match) -> Refusal:
            return Refusal(f"%{m.x.name} is an input", m.root)

    surgery = ane.apply(squares(), Picky(), quiet=True)
    assert "skipped: picky: %x is an input (at square)" in surgery.details
    assert str(surgery).startswith("Nothing was changed")


def test_names_passes_and_recipes_may_be_given() -> None:
    for steps in (
        "negate_subtract",
        ["negate_subtract", SquareToMul],
        Recipe("own", (SquareToMul(),), chosen=frozenset(["square_to_mul"])),
    ):
        assert ane.apply(squares(), steps, quiet=True).steps
    with pytest.raises(UnknownName, match="did you mean 'negate_subtract'"):
        ane.apply(squares(), "negate_subtrackt", quiet=True)
    with pytest.raises(SurgeryError, match="prove='always'; it may be 'sites', 'model', 'both', None"):
        ane.apply(squares(), "negate_subtract", prove="always")


def test_reports_in_every_form() -> None:
    surgery = ane.apply(squares(), SquareToMul(), target="M1/macOS 14", prove="both", quiet=True)
    assert "1 bit for bit" in surgery.details
    assert "ops 2 -> 2: mul 0 -> 1, square 1 -> 0" in surgery.details
    assert "square_to_mul" in surgery._repr_html_()
    plain = json.loads(json.dumps(surgery.to_json()))
    assert plain["edits"] == {"square_to_mul": 1}
    assert plain["target"] == "M1/macOS 14"
    assert plain["proof"]["psnr_db"] == "inf"


def test_a_registered_pass_is_one_of_coremltools_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager

    monkeypatch.setattr(registry, "_OWN", {})
    ane.register(SquareToMul)
    ane.register(SquareToMul)
    assert "square_to_mul" in registry.pass_names()
    program = squares()
    pipeline = ct.PassPipeline(["anesurgery::square_to_mul"], "own")
    pipeline.set_options("anesurgery::square_to_mul", {"factor": 2.0})
    PassPipelineManager.apply_pipeline(program, pipeline)
    assert "y=2)" in to_text(program)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", PACKAGES)
def test_an_empty_recipe_changes_nothing(corpus: Path, tmp_path: Path, name: str) -> None:
    surgery = ane.apply(corpus / f"{name}.mlpackage", Recipe("nothing", ()), quiet=True)
    path = surgery.save(tmp_path / "out.mlpackage")
    before, after = ane.load(corpus / f"{name}.mlpackage"), ane.load(path)
    assert interface(before) == interface(after)
    for function in before.program.functions:
        reference = ane.Predictor(before, function=function)
        inputs = reference.sample()
        old, new = reference(inputs), ane.run(after, inputs, function=function)
        for output, value in old.items():
            np.testing.assert_array_equal(new[output], value)


@pytest.mark.quick_cases("anemll_multifunction", "silero_unified")
@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "basic_pitch_nmp")) for n in PACKAGES]
)
def test_every_pass_leaves_real_packages_whole(corpus: Path, tmp_path: Path, name: str) -> None:
    steps = [n for n in registry.op_pass_names() if n != "select_last_token"]
    surgery = ane.apply(corpus / f"{name}.mlpackage", steps, prove="sites", quiet=True)
    path = surgery.save(tmp_path / "out.mlpackage")
    for function in surgery.program.functions:
        source, options = (
            corpus / f"{name}.mlpackage",
            dict[str, Any](function=function, contract=surgery.contract),
        )
        found = ane.compare(source, path, **options)
        if any(o.is_vacuous for o in found.outputs):  # it takes magnitudes, and makes NaN of anything below 0
            sampled = ane.Predictor(source, function=function).sample()
            found = ane.compare(source, path, {n: np.abs(v) for n, v in sampled.items()}, **options)
        undefined = {o.name: o.bad for o in found.outputs if o.bad}
        assert not undefined
        assert found.psnr >= 60


def test_the_same_numbers_whatever_the_source(converted: Callable[..., Any], tmp_path: Path) -> None:
    made = converted("gpt2")
    made.model.save(str(tmp_path / "gpt2.mlpackage"))
    texts = {
        to_text(ane.apply(source, "gpt2_ane", prove=None, quiet=True).program)
        for source in (made.model, tmp_path / "gpt2.mlpackage", str(tmp_path / "gpt2.mlpackage"))
    }
    assert len(texts) == 1


@pytest.mark.slow
def test_the_model_leaves_nothing_behind(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from anesurgery.mil import Program, ct, mb\n"
        "import anesurgery as ane\n"
        "@mb.program(input_specs=[mb.TensorSpec((2, 3))], opset_version=ct.target.iOS16)\n"
        "def program(x): return mb.sub(x=x, y=2.0)\n"
        "model = ane.apply(program, 'negate_subtract', quiet=True).model\n"
        "model.save(sys.argv[1])\n"
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    words = [sys.executable, "-c", script, str(tmp_path / "out.mlpackage")]
    subprocess.run(words, check=True, env={**os.environ, "TMPDIR": str(scratch)})
    assert list(scratch.iterdir()) == []
    assert (tmp_path / "out.mlpackage").is_dir()


def test_a_lower_grade_than_required_is_an_error() -> None:
    assert ane.apply(squares(), SquareToMul(), require="bits", quiet=True).changes

    @dataclass(frozen=True)
    class ToPower(SquareToMul):
        name: ClassVar[str] = "to_power"

        def rewrite(self, mb: Any, m: Match) -> Any:
            return mb.pow(x=m.x, y=np.float32(2))

    assert ane.apply(squares(), ToPower(), require="proved", quiet=True).changes
    with pytest.raises(
        ProofError, match=r"1 of 1 edits have a lower grade than 'bits'; first to_power at .* \(proved\)"
    ):
        ane.apply(squares(), ToPower(), require="bits", quiet=True)
    with pytest.raises(SurgeryError, match="require='certain'; it may be checked, exhaustive, proved, bits"):
        ane.apply(squares(), SquareToMul(), require="certain", quiet=True)
    with pytest.raises(SurgeryError, match='with prove="sites" or "both"'):
        ane.apply(squares(), SquareToMul(), prove=None, require="proved", quiet=True)
