"""gpt2_ane on everything it promises: spellings, opsets, precisions; twice; after coremltools' own passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from closeness import assert_close

import anesurgery as ane
from anesurgery import recipes
from anesurgery.errors import SurgeryError, UnknownName
from anesurgery.interpret import run
from anesurgery.mil import Program, Var, ct, mb, quiet_host, walk_ops
from anesurgery.rewriting.ml_program import op_counts
from anesurgery.rewriting.session import counts

FORMS = [
    ("trace", "eager", False, "iOS16", "fp16"),
    ("trace", "sdpa", True, "iOS18", "fp16"),
    ("export", "sdpa", False, "iOS17", "fp16"),
    ("export", "eager", True, "iOS15", "fp32"),
]


def check(made: Any) -> ane.Surgery:
    """All that the steps of the recipe promise for one converted model, whether or not it gains by them."""
    surgery = ane.apply(made.model, list(recipes.gpt2_ane.steps), prove="both", quiet=True)
    assert surgery.proof is not None
    assert surgery.proof.psnr >= 60
    edits = counts(surgery.changes)
    assert edits["causal_mask_tensor"] == 2
    assert edits["embedding_matmul"] == 1
    assert edits["select_last_token"] == 1
    assert edits["pad_last_axis"] >= 1
    left = op_counts(surgery.program)
    assert not left.keys() & {"gather", "band_part", "range_1d", "sub"}
    (logits,) = run(surgery.program, made.inputs, precision="fp16").values()
    (before,) = run(made.model, made.inputs, precision="fp16").values()
    assert logits.shape == (1, 1, 101)
    worst = np.abs(logits[:, 0].astype(np.float64) - before[:, -1]).max()
    assert worst <= 1e-3 * np.abs(before).max()
    masks = [v for op in walk_ops(surgery.program) for v in op.outputs if v.name.startswith("causal_mask")]
    assert len([v for v in masks if v.op is not None and v.op.op_type == "const"]) == 1
    again = ane.apply(surgery.program, list(recipes.gpt2_ane.steps), quiet=True)
    assert not again.changes, counts(again.changes)
    return surgery


@pytest.mark.quick_cases("trace-eager-False-iOS16-fp16")
@pytest.mark.parametrize(("how", "attn", "mask", "target", "precision"), FORMS)
def test_hugging_face_gpt2(
    converted: Callable[..., Any], how: str, attn: str, mask: bool, target: str, precision: str
) -> None:
    check(converted("gpt2", how, attn=attn, mask=mask, target=target, precision=precision))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "attn", "target", "precision"),
    [
        ("trace", "eager", "iOS15", "fp16"),
        ("export", "eager", "iOS17", "fp32"),
        ("trace", "sdpa", "iOS18", "fp16"),
    ],
)
def test_nanogpt(converted: Callable[..., Any], how: str, attn: str, target: str, precision: str) -> None:
    check(converted("nanogpt", how, attn=attn, target=target, precision=precision))


@pytest.mark.slow
def test_an_untied_head(converted: Callable[..., Any]) -> None:
    check(converted("gpt2_untied"))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("target", ["iOS15", "iOS16", "iOS17", "iOS18"])
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize(
    ("name", "mask"),  # nanoGPT takes no mask
    [("gpt2", False), ("gpt2", True), ("gpt2_untied", False), ("gpt2_untied", True), ("nanogpt", False)],
)
def test_hugging_face_gpt2_in_every_form(
    converted: Callable[..., Any], name: str, how: str, attn: str, mask: bool, target: str, precision: str
) -> None:
    check(converted(name, how, attn=attn, mask=mask, target=target, precision=precision))


@pytest.mark.slow
def test_stable_under_coremltools_own_passes(
    converted: Callable[..., Any], settled: Callable[[Program], Program]
) -> None:
    made = converted("gpt2")
    surgery = ane.apply(made.model, list(recipes.gpt2_ane.steps), quiet=True)  # whatever they gain
    after = settled(surgery.program)
    assert "gather" not in op_counts(after)
    for name, value in run(surgery.program, made.inputs).items():
        found = run(after, made.inputs)[name]
        assert_close(found, value, rtol=1e-5)


def test_the_one_liner_gives_an_mlmodel_and_leaves_the_input(
    converted: Callable[..., Any], tmp_path: Path
) -> None:
    made = converted("gpt2")
    made.model.save(str(tmp_path / "gpt2.mlpackage"))
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "gpt2.mlpackage").rglob("*")}
    model = recipes.gpt2_ane(tmp_path / "gpt2.mlpackage", quiet=True)
    assert isinstance(model, ct.models.MLModel)
    model.save(str(tmp_path / "gpt2_ane.mlpackage"))
    (expected,) = run(model, made.inputs).values()
    (found,) = run(tmp_path / "gpt2_ane.mlpackage", made.inputs).values()
    np.testing.assert_array_equal(found, expected)
    assert {p: p.stat().st_mtime_ns for p in stamps} == stamps


def test_the_description_follows_the_interface(converted: Callable[..., Any]) -> None:
    spec = recipes.gpt2_ane(converted("gpt2").model, select_last_token=True, quiet=True).get_spec()
    shape = list(spec.description.output[0].type.multiArrayType.shape)
    assert shape in ([], [1, 1, 101])


def test_in_the_middle_of_a_conversion(converted: Callable[..., Any]) -> None:
    import torch

    from anesurgery import frontend

    made = converted("gpt2")
    frontend.register()
    example = tuple(torch.from_numpy(v).long() for v in made.inputs.values())
    traced: Any = torch.jit.trace(made.module, example, check_trace=False)  # type: ignore[no-untyped-call]
    base = ct.PassPipeline.DEFAULT
    passes = list(base.passes)
    with quiet_host():
        model = ct.convert(
            traced,
            inputs=[ct.TensorType("input_ids", shape=(1, 16), dtype=np.int32)],
            minimum_deployment_target=ct.target.iOS17,
            pass_pipeline=recipes.gpt2_ane.pipeline(base),
            skip_model_load=True,
        )
    assert base.passes == passes
    (found,) = run(model, made.inputs).values()
    edited = ane.apply(made.model, list(recipes.gpt2_ane.steps), quiet=True).model
    (expected,) = ane.run(edited, made.inputs).values()
    assert_close(found, expected, rtol=1e-4)


@pytest.mark.slow
def test_options(converted: Callable[..., Any]) -> None:
    model = converted("gpt2").model
    whole = ane.apply(model, recipes.gpt2_ane.with_options(select_last_token=False), quiet=True)
    assert not whole.contract
    with_input = recipes.gpt2_ane.with_options(as_input=True, embedding_matmul={"mode": "input"})
    surgery = ane.apply(model, with_input, prove="both", quiet=True)
    assert {"causal_mask", "input_ids_embeds"} <= set(surgery.program.functions["main"].inputs)
    assert "input_ids" not in surgery.program.functions["main"].inputs
    with pytest.raises(UnknownName, match="did you mean 'multiple'"):
        recipes.gpt2_ane.with_options(multipel=32)
    with pytest.raises(UnknownName, match="option of pad_last_axis"):
        recipes.gpt2_ane.with_options(pad_last_axis={"multipel": 32})


def test_the_table_leaves_the_model_and_lies_beside_it(converted: Callable[..., Any], tmp_path: Path) -> None:
    made = converted("gpt2")
    recipe = recipes.gpt2_ane.with_options(embedding_matmul={"mode": "input"})
    surgery = ane.apply(made.model, recipe, quiet=True)
    path = surgery.save(tmp_path / "gpt2_ane.mlpackage")
    table = np.load(tmp_path / "gpt2_ane.input_ids_embeds.npy")
    embedded = {"input_ids_embeds": table[made.inputs["input_ids"]]}
    (found,) = run(path, embedded).values()
    (expected,) = run(made.model, made.inputs).values()
    assert_close(found[:, 0], expected[:, -1], rtol=1e-5)


def test_a_model_of_another_kind_is_refused_with_reasons() -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 64))], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        return mb.relu(x=x)

    with pytest.raises(SurgeryError, match="gpt2_ane changed nothing: no attention was recognized"):
        ane.apply(program, "gpt2_ane", quiet=True)


@pytest.mark.slow
def test_a_step_that_cannot_act_gets_a_line(converted: Callable[..., Any]) -> None:
    surgery = ane.apply(converted("t5_encoder").model, list(recipes.gpt2_ane.steps), quiet=True)
    assert "skipped: select_last_token: no head leads to" in surgery.details
    assert "embedding_matmul" in counts(surgery.changes)
