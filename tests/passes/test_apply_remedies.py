"""The remedies of an inspection: which are kept, which are not, and what is said of the rest."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pass_cases import stays, table
from scores import scored

import anesurgery as ane
from anesurgery.checking.output_comparison import compare_arrays
from anesurgery.interpret.sampling import sample_inputs
from anesurgery.loading import load
from anesurgery.mil import Program, Var, ct, mb, quiet_host, types, walk_ops
from anesurgery.passes.apply_remedies import ApplyRemedies, example
from anesurgery.placement.score import Score
from anesurgery.placement.target import Target
from anesurgery.surgery import find_recipe
from anesurgery.testing import apply_pass

HALF = types.fp16


def built(build: Callable[[Var], Any], shape: tuple[int, ...]) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape, dtype=HALF)], opset_version=ct.target.iOS17)(
        lambda x: build(x)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target"), [("gpt2", "M1/macOS 14"), ("llama", "M4/macOS 15"), ("bert", "M4+")]
)
def test_no_share_falls_and_a_second_run_changes_nothing(
    converted: Callable[..., Any], name: str, target: str
) -> None:
    model, aim = converted(name).model, Target.parse(target)
    surgery = ane.apply(model, "auto", target=target, quiet=True)
    before, after = scored(load(model).program, aim)[0], scored(surgery.program, aim)[0]
    assert not after.loss(before)
    again = ane.apply(surgery.program, "auto", target=target, quiet=True)
    assert not again.changes


@pytest.mark.slow
def test_masks_without_inputs_are_folded(converted: Callable[..., Any]) -> None:
    """Masks of Hugging Face's decoders are constants of the program; of a tiny one `auto` gains too little."""
    model, aim = converted("llama").model, Target.parse("M4/macOS 15")
    left = ane.apply(model, "auto", target="M4/macOS 15", quiet=True)
    assert not left.changes
    assert left.plan.gain == "nothing to gain on M4/macOS 15"
    folded = ane.apply(model, "fold_constants", target="M4/macOS 15", quiet=True)
    before, after = (scored(load(one).program, aim)[0] for one in (model, folded.program))
    assert len(after.illegal) < len(before.illegal)
    assert not after.loss(before)


@pytest.mark.slow
def test_a_decoder_is_repaired_and_checked(converted: Callable[..., Any]) -> None:
    surgery = ane.apply(converted("gpt2").model, "auto", target="M4/macOS 27", prove="both", quiet=True)
    assert "select_last_token" in {change.pass_name for change in surgery.changes}
    assert surgery.proof is not None
    assert surgery.proof.ok
    assert "  select_last_token" in surgery.details


def noisy(x: Var) -> Any:
    """Random numbers, which no pass can bring onto the engine."""
    noise = mb.random_normal(shape=(1, 8, 4, 4), mean=np.float16(0), stddev=np.float16(1))
    return mb.add(x=x, y=noise, name="y")


def test_what_no_pass_repairs_is_told_with_the_op() -> None:
    after, session = apply_pass(ApplyRemedies(), built(noisy, (1, 8, 4, 4)))
    assert not session.changes
    (reason,) = {str(r) for _, r in session.refusals}
    assert "random_normal stays off the ANE: the ANE has no random numbers" in reason
    assert "make the noise an input" in reason
    assert [op.op_type for op in walk_ops(after) if op.op_type != "const"] == ["random_normal", "add"]


def encoder(x: Var) -> Any:
    """Every position sees every other, and logits come out for each."""
    weight = np.random.default_rng(0).standard_normal((4096, 32)).astype(np.float16)
    shares = mb.softmax(x=mb.matmul(x=x, y=x, transpose_y=True), axis=-1)
    return mb.linear(x=mb.matmul(x=shares, y=x), weight=weight, name="logits")


def test_results_that_are_read_at_every_position_are_not_cut() -> None:
    program = built(encoder, (1, 8, 32))
    findings = ane.inspect(program, "M1").row("logits").findings
    assert "select_last_token" in {f.remedy for f in findings}
    after, session = apply_pass(ApplyRemedies(target="M1"), program)
    assert after.functions["main"].outputs[0].shape == (1, 8, 4096)
    (said,) = (r.reason for name, r in session.refusals if name == "select_last_token")
    assert "no causal mask" in said
    assert "logits now has the last position only" in said


def test_a_result_changes_where_that_takes_less_time() -> None:
    """The last position alone: the head computes less. What is slower by the estimate is left out beside it."""
    weights = np.random.default_rng(0).standard_normal

    def decoder(x: Var) -> Any:
        ahead = np.triu(np.full((64, 64), -1e4, np.float16), 1)
        for _ in range(2):
            maps = [(0.1 * weights((64, 64))).astype(np.float16) for _ in range(4)]
            q, k, v = (mb.linear(x=x, weight=one) for one in maps[:3])
            shares = mb.softmax(x=mb.add(x=mb.matmul(x=q, y=k, transpose_y=True), y=ahead), axis=-1)
            x = mb.add(x=x, y=mb.linear(x=mb.matmul(x=shares, y=v), weight=maps[3]))
            wide = mb.silu(x=mb.linear(x=x, weight=(0.1 * weights((256, 64))).astype(np.float16)))
            x = mb.add(x=x, y=mb.linear(x=wide, weight=(0.1 * weights((64, 256))).astype(np.float16)))
        return mb.linear(x=x, weight=(0.1 * weights((20003, 64))).astype(np.float16), name="logits")

    program = built(decoder, (1, 64, 64))
    surgery = ane.apply(program, "auto", target="M1/macOS 14", prove=None, quiet=True)
    assert {change.pass_name for change in surgery.changes} == {"select_last_token", "split_head"}
    (said,) = (r.reason for name, r in surgery.refusals if name == "pointwise_convolution")
    assert said.startswith("tried and undone: the expected time would rise")


def test_every_function_counts() -> None:
    program = built(lambda x: mb.relu(x=x, name="y"), (1, 8, 4, 4))
    program.add_function("other", built(noisy, (1, 8, 4, 4)).functions["main"])
    _, session = apply_pass(ApplyRemedies(), program)
    assert any("random_normal stays off the ANE" in r.reason for _, r in session.refusals)


@pytest.mark.parametrize(("trials", "open_"), [(0, True), (1, True), (60, False)])
def test_what_was_not_tried_is_said(trials: int, open_: bool) -> None:
    """The wrong version: a search that ends early looks like one that found nothing more."""
    _, session = apply_pass(ApplyRemedies(trials=trials), example())
    assert any("the trials ran out" in note for note in session.notes) == open_
    assert not any("fix them first" in note for note in session.notes)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("prove", ["sites", None])
def test_fp16_that_ruins_an_output_is_not_kept(prove: str | None) -> None:
    """In fp16 the large term swallows the rest; at the same place a small one does not."""

    def far(offset: float) -> Program:
        weight = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32) / 32

        @mb.program(input_specs=[mb.TensorSpec((256, 1024))], opset_version=ct.target.iOS17)
        def program(x: Var) -> Any:
            h = mb.linear(x=mb.linear(x=x, weight=weight), weight=weight)
            return mb.sub(x=mb.add(x=h, y=np.float32(offset)), y=np.float32(offset))

        return program

    kept, lost = (
        ane.apply(far(offset), "auto", target="M4/macOS 15", prove=prove, quiet=True) for offset in (0.5, 3e4)
    )
    assert "compute_fp16" in {change.pass_name for change in kept.changes}
    assert not lost.changes
    said = [r.reason for name, r in lost.refusals if name == "compute_fp16"]
    assert any(re.search(r"keeps -?[\d.]+ dB of 60 on a sampled input", reason) for reason in said), said


def ends(shape: tuple[int, ...] = (1, 64, 64, 64), classes: int = 0) -> Program:
    """Convolutions in fp16 between casts, as a conversion leaves them, and a head of so many classes."""
    weight = np.random.default_rng(0).standard_normal((64, 64, 3, 3)).astype(np.float16) / 24

    @mb.program(input_specs=[mb.TensorSpec(shape)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Any:
        y = mb.cast(x=x, dtype="fp16")
        for _ in range(4):
            y = mb.relu(x=mb.conv(x=y, weight=weight, pad_type="same"))
        if classes:
            head = np.ones((classes, 64), np.float16)
            y = mb.linear(x=mb.reduce_mean(x=y, axes=[2, 3], keep_dims=False), weight=head)
        return mb.cast(x=y, dtype="fp32", name="y")

    return program


@pytest.mark.slow
def test_casts_at_the_ends_go_where_the_target_pays_for_them() -> None:
    surgery = ane.apply(ends(), "auto", target="M1/macOS 14", prove="both", quiet=True)
    assert [change.words for change in surgery.contract] == ["give x as fp16", "y is fp16"]
    assert scored(surgery.program, Target.parse("M1/macOS 14"))[0].can_run["ops"] == 1
    assert surgery.proof is not None
    assert surgery.proof.ok
    assert not ane.apply(ends(), "auto", target="M4/macOS 15", quiet=True).changes


@pytest.mark.parametrize("classes", [0, 10], ids=["as it is", "with a step that pays beside it"])
def test_callers_change_nothing_for_a_model_that_stays_on_the_cpu(classes: int) -> None:
    """The wrong version: a pair whose second step has nothing to do with the interface."""
    surgery = ane.apply(ends((1, 64, 8, 8), classes), "auto", target="M1/macOS 14", quiet=True)
    assert "interface_fp16" not in {change.pass_name for change in surgery.changes}
    assert "no more would run on the ANE, and no run time is known" in str([r for _, r in surgery.refusals])


def test_an_interface_that_is_kept_costs_the_casts() -> None:
    recipe = find_recipe("auto").with_options(keep_interface=True)
    surgery = ane.apply(ends(), recipe, target="M1/macOS 14", quiet=True)
    assert not surgery.changes
    assert "interface_fp16" in str([r for r in surgery.refusals if "keep_interface is set" in r[1].reason])


def test_a_flexible_model_is_judged_at_its_default_shape(tmp_path: Path) -> None:
    """Judged without its description it would have no flop, and every repair would be as good as none."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = torch.nn.ModuleList(torch.nn.Conv2d(64, 64, 3, padding=1) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for conv in self.convs:
                x = torch.nn.functional.threshold(conv(x), 0.1, 0.1)
            return x

    side = ct.RangeDim(8, 128, default=96)
    with quiet_host():
        traced = torch.jit.trace(Net().eval(), torch.zeros(1, 64, 96, 96))  # type: ignore[no-untyped-call]
        kind = ct.TensorType("x", (1, 64, side, side))
        ct.convert(traced, inputs=[kind], minimum_deployment_target=ct.target.iOS17, skip_model_load=True).save(
            str(tmp_path / "net.mlpackage")
        )
    target = "M4/macOS 27"
    expected = Score.of([ane.inspect(tmp_path / "net.mlpackage", target)])
    assert expected.flop > 1e9
    surgery = ane.apply(tmp_path / "net.mlpackage", "auto", target=target, quiet=True)
    assert surgery.notes[0] == f"before: {expected}"
    assert any("the sizes of %x vary" in note and "fix them first" in note for note in surgery.notes)


@pytest.mark.slow
def test_patches_of_a_film_go_where_two_things_speak_against_them() -> None:
    """The kernel is too large for the M1, which is said first, and has three axes, which stands in the way."""
    weight = np.random.default_rng(0).standard_normal((96, 3, 2, 16, 16)).astype(np.float16) / 40

    def patches(x: Var) -> Any:
        y = mb.conv(x=x, weight=weight, strides=[2, 16, 16], pad_type="valid")
        y = mb.transpose(x=mb.reshape(x=y, shape=[1, 96, 392]), perm=[0, 2, 1])
        for _ in range(3):
            y = mb.relu(x=mb.linear(x=y, weight=np.eye(96, dtype=np.float16)))
        return y

    program = built(patches, (1, 3, 4, 224, 224))
    surgery = ane.apply(program, "auto", target="M1/macOS 14", prove="sites", quiet=True)
    assert {change.pass_name for change in surgery.changes} >= {"split_conv3d", "long_convolution"}
    before, after = (scored(p, Target.parse("M1/macOS 14"))[0] for p in (program, surgery.program))
    assert before.illegal_flop
    assert not after.illegal_flop
    assert not after.loss(before)


def gated_norm(largest: float) -> Program:
    """A root mean square norm of what a gate multiplies, as in Mamba-2: numbers beyond 255 have no square."""
    weight = (largest * np.eye(32)).astype(np.float16)

    @mb.program(input_specs=[mb.TensorSpec((1, 4, 32), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        gated = mb.mul(x=mb.linear(x=x, weight=weight), y=mb.silu(x=x))
        mean = mb.reduce_mean(x=mb.square(x=gated, name="squares"), axes=[-1], keep_dims=True)
        return mb.mul(x=gated, y=mb.rsqrt(x=mb.add(x=mean, y=np.float16(1e-5))))

    return program


@pytest.mark.parametrize(
    ("largest", "words"), [(500, "rms_norm: without it outputs are wrong"), (40, "squares reach 2e+04")]
)
def test_auto_changes_norms_whose_squares_overflow_and_no_others(largest: float, words: str) -> None:
    """The wrong version, without it: where squares are infinite, the root is, and the row becomes 0."""
    program = gated_norm(largest)
    surgery = ane.apply(program, "auto", target="M1/macOS 14", quiet=True)
    assert [c.pass_name for c in surgery.changes] == ["rms_norm"]
    assert any(words in note for note in surgery.notes)
    if largest < 500:
        return
    exact = ane.run(program, inputs := sample_inputs(program))
    before, after = (ane.run(p, inputs, precision="fp16") for p in (program, surgery.program))
    assert psnr(exact, before) < 30 < 60 < psnr(exact, after)
    assert not ane.apply(gated_norm(1), "auto", target="M1/macOS 14", quiet=True).changes


def two_hazards(a: Var) -> Any:
    """A product that a third factor makes small, and a root of squares: each hides the other."""
    small = mb.sigmoid(x=mb.mul(x=a, y=np.float16(-0.01)))
    product = mb.mul(x=mb.mul(x=a, y=mb.add(x=a, y=np.float16(1))), y=small, name="product")
    squares = mb.reduce_mean(x=mb.square(x=a), axes=[-1], keep_dims=True)
    return product, mb.sqrt(x=squares, name="length")


def test_auto_repairs_what_the_inputs_reach_and_nothing_else() -> None:
    program = built(two_hazards, (2, 8))
    loud = {"x": np.linspace(290, 310, 16, dtype=np.float16).reshape(2, 8)}
    surgery = ane.apply(program, "auto", target="M1/macOS 14", inputs=loud, quiet=True)
    exact = ane.run(program, loud)
    before, after = (ane.run(p, loud, precision="fp16") for p in (program, surgery.program))
    assert not any(np.isfinite(value).all() for value in before.values())
    assert all(compare_arrays(name, value, after[name]).psnr > 60 for name, value in exact.items())
    (said,) = (note for note in surgery.notes if "without it outputs are wrong" in note)
    assert said.startswith("scale_residual, scale_roots: ")
    assert "not finite -> " in said
    quiet = {"x": np.full((2, 8), 0.5, np.float16)}
    left = ane.apply(program, "auto", target="M1/macOS 14", inputs=quiet, quiet=True)
    assert not any("wrong on the inputs at hand" in note for note in left.notes)


def psnr(expected: dict[str, Any], found: dict[str, Any]) -> float:
    (x,), (y,) = expected.values(), found.values()
    return compare_arrays("y", x, y).psnr


test_cases, test_surroundings = table(
    ApplyRemedies(),
    stays(built, lambda x: mb.relu(x=x, name="y"), (1, 64, 32, 32)),
    stays(example, step=ApplyRemedies(trials=0)),
)
