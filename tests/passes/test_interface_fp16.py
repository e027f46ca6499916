"""fp16 at the ends: the casts go, the change is declared, the package says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from pass_cases import refuses, rewrites, table

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, quiet_host
from anesurgery.passes.interface_fp16 import InterfaceFp16
from anesurgery.placement.target import Target
from anesurgery.rewriting.session import Session
from anesurgery.testing import apply_pass, assert_same_numbers
from anesurgery.text import to_text


def program_of(body: Any, *shapes: tuple[int, ...], opset: Any = ct.target.iOS16) -> Program:
    specs = [mb.TensorSpec(shape) for shape in shapes]

    def one(a: Var) -> Any:
        return body(a)

    built: Program = mb.program(input_specs=specs, opset_version=opset)(one)
    return built


def test_a_value_that_is_read_and_returned_gets_an_output_of_its_own() -> None:
    def body(a: Var) -> Any:
        r = mb.relu(x=mb.cast(x=a, dtype="fp16"))
        return mb.cast(x=r, dtype="fp32", name="y"), mb.cast(x=r, dtype="fp32", name="z")

    program = program_of(body, (2, 3))
    after, session = apply_pass(InterfaceFp16(), program)
    assert len({id(v) for v in after.functions["main"].outputs}) == 2
    assert_same_numbers(program, after, rtol=1e-3, session=session)


def test_images_and_values_handed_through_keep_their_type() -> None:
    program = program_of(lambda a: mb.relu(x=a, name="y"), (2, 3))
    session = Session(images=frozenset({"a", "y"}))
    before = to_text(program)
    InterfaceFp16().run(program, session)
    assert to_text(program) == before
    assert [r.reason for _, r in session.refusals] == ["%a is an image", "%y is an image"]


def test_the_package_says_fp16(tmp_path: Path) -> None:
    model = program_of(lambda a: mb.relu(x=mb.cast(x=a, dtype="fp16"), name="y"), (2, 3))
    changed = ane.apply(model, "interface_fp16", prove="model", quiet=True)
    changed.save(tmp_path / "half.mlpackage")
    with quiet_host():
        spec = ct.models.MLModel(str(tmp_path / "half.mlpackage"), skip_model_load=True).get_spec()
    half = ct.proto.FeatureTypes_pb2.ArrayFeatureType.FLOAT16
    features = [*spec.description.input, *spec.description.output]
    assert [f.type.multiArrayType.dataType for f in features] == [half, half]


def test_a_converted_image_model_keeps_its_images(tmp_path: Path) -> None:
    import torch

    module = torch.nn.Conv2d(3, 4, 3).eval()
    with quiet_host():
        traced = torch.jit.trace(module, torch.zeros(1, 3, 8, 8))  # type: ignore[no-untyped-call]
        model = ct.convert(
            traced,
            inputs=[ct.ImageType("picture", (1, 3, 8, 8))],
            outputs=[ct.TensorType("y")],
            minimum_deployment_target=ct.target.iOS16,
            skip_model_load=True,
        )
    surgery = ane.apply(model, "interface_fp16", prove=None, quiet=True)
    assert any(r.reason == "%picture is an image" for _, r in surgery.refusals)
    names = {name for change in surgery.contract for name in change.names}
    assert "picture" not in names


def test_it_is_tried_where_every_chip_pays_for_the_casts() -> None:
    targets = ("M1/macOS 14", "A14/iOS 17", "M1", "M1/macOS 15", "M2/macOS 14", "M1-M3/macOS 14", "M4", "any")
    tried = {text: bool(InterfaceFp16.variants(Target.parse(text))) for text in targets}
    assert [text for text, some in tried.items() if some] == ["M1/macOS 14", "A14/iOS 17", "M1"]


def test_a_program_for_ios_15_becomes_one_for_ios_16_on_request(tmp_path: Path) -> None:
    """A gather and a topk, which have other parameters there; the weights come back as they were."""
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float16)

    def body(a: Var) -> Any:
        y = mb.linear(x=mb.cast(x=a, dtype="fp16"), weight=weight)
        best = mb.topk(x=mb.gather(x=y, indices=[3, 1, 2], axis=1), k=2, axis=1)[0]
        return mb.cast(x=best, dtype="fp32", name="y")

    with quiet_host():
        model = ct.convert(
            program_of(body, (4, 64), opset=ct.target.iOS15),
            minimum_deployment_target=ct.target.iOS15,
            pass_pipeline=ct.PassPipeline.EMPTY,
            skip_model_load=True,
        )
        model.save(str(tmp_path / "old.mlpackage"))
    surgery = ane.apply(tmp_path / "old.mlpackage", InterfaceFp16(newer_opset=True), prove="both", quiet=True)
    assert [c.words for c in surgery.contract] == ["it needs iOS 16 or macOS 13", "give a as fp16", "y is fp16"]
    saved = surgery.save(tmp_path / "new.mlpackage")
    spec = ct.utils.load_spec(str(saved))
    assert spec.specificationVersion == 7
    assert {f.opset for f in spec.mlProgram.functions.values()} == {"CoreML6"}
    assert ane.compare(tmp_path / "old.mlpackage", saved, contract=surgery.contract, precision="fp16").ok
    with quiet_host():
        assert ct.models.MLModel(str(saved), skip_model_load=True).get_spec().specificationVersion == 7


def test_auto_raises_the_opset_where_the_os_of_the_target_takes_it() -> None:
    targets = ("M1/macOS 14", "M1/macOS 12", "M1", "A14/iOS 15", "A14/iOS 16")
    raised = {t: [s.options()["newer_opset"] for s in InterfaceFp16.variants(Target.parse(t))] for t in targets}
    assert raised == dict(zip(targets, [[True], [False], [False], [False], [True]], strict=True))


test_cases, test_surroundings = table(
    InterfaceFp16(),
    refuses("the program is for iOS 15", program_of, lambda a: mb.relu(x=a), (2, 3), opset=ct.target.iOS15),
    rewrites(program_of, lambda a: (mb.relu(x=a, name="y"), mb.exp(x=a, name="z")), (2, 3), rtol=0.001),
)
