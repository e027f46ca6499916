"""The recipes of families: what they gain, that they lose nothing, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scores import scored

import anesurgery as ane
from anesurgery import recipes
from anesurgery.checking.output_comparison import compare_arrays
from anesurgery.errors import SurgeryError
from anesurgery.facts.makeup import makeup
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.embedding_matmul import EmbeddingMatmul
from anesurgery.placement.score import OFF, SAME, Score
from anesurgery.placement.target import Target
from anesurgery.rewriting.session import counts

TARGETS = ("M1/macOS 14", "M4/macOS 15", "A15/iOS 17")
MEMBERS = [
    ("encoder_ane", "bert", True),
    ("encoder_ane", "t5_encoder", True),
    ("decoder_ane", "gpt2", False),
    ("decoder_ane", "llama", True),
    ("decoder_ane", "qwen2", False),
    ("whisper_ane", "whisper", False),
    ("vit_ane", "vit", False),
    ("seq2seq_ane", "trocr", False),
]
"""Recipe, model, with an attention mask."""


def score_of(program: Program, target: str) -> Score:
    return scored(program, Target.parse(target))[0]


@pytest.mark.quick_cases("vit_ane-vit-False")
@pytest.mark.parametrize(("recipe", "name", "mask"), MEMBERS)
def test_nothing_is_lost_and_the_numbers_stay(
    converted: Callable[..., Any], recipe: str, name: str, mask: bool
) -> None:
    made = converted(name, mask=mask)
    surgery = ane.apply(made.model, recipe, target=TARGETS[0], prove="both", quiet=True)
    assert surgery.proof is None or surgery.proof.psnr >= 60
    before, after = score_of(made.model._mil_program, TARGETS[0]), score_of(surgery.program, TARGETS[0])
    measured = any("measured, which counts more than that the expected time" in n for n in surgery.notes)
    assert not (after.loss(before, OFF) if measured else after.loss(before))
    again = ane.apply(surgery.program, recipe, target=TARGETS[0], prove=None, quiet=True)
    assert not again.changes, counts(again.changes)


SMALL = [("gpt2_ane", "gpt2", False), ("auto", "gpt2", False), ("encoder_ane", "bert", True)]
SMALL += [("decoder_ane", "gpt2", False), ("vit_ane", "vit", False)]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("recipe", "name", "mask"), SMALL)
def test_a_recipe_makes_no_model_slower(
    converted: Callable[..., Any], recipe: str, name: str, mask: bool, target: str
) -> None:
    """By the estimate; where a measurement speaks against it, a note says which."""
    program = converted(name, mask=mask).model._mil_program
    surgery = ane.apply(program, recipe, target=target, prove=None, quiet=True)
    before, after = score_of(program, target), score_of(surgery.program, target)
    measured = [
        note for note in surgery.notes if "measured, which counts more than that the expected time" in note
    ]
    assert after.estimate <= before.estimate * (1 + SAME) or "DistilBERT" in str(measured)
    if after.is_over_bound(before, "weights"):
        assert after.over(before).clear
        assert any("for which the model grew: weights" in note for note in surgery.notes) or recipe == "auto"


@pytest.mark.parametrize("target", TARGETS)
def test_mirrored_edges_stay_where_slices_take_longer(target: str) -> None:
    program = picture_to_picture()
    surgery = ane.apply(program, "unet_ane", target=target, prove=None, quiet=True)
    assert score_of(surgery.program, target).estimate <= score_of(program, target).estimate * (1 + SAME)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_of_a_decoder_the_lookup_alone_stays_off(converted: Callable[..., Any], target: str) -> None:
    made = converted("llama")
    surgery = ane.apply(made.model, "decoder_ane", target=target, prove=None, quiet=True)
    _, (inspection,) = scored(surgery.program, Target.parse(target))
    illegal = [row.op_type for row in inspection.ops if row.legal is False]
    assert illegal == ["gather"]
    assert "assumed of the inputs: token ids are never negative" in surgery.notes


def test_a_picture_beside_text_that_is_not_written_is_no_encoder_with_a_decoder() -> None:
    """Pictures and texts that are compared, as in CLIP: no attention reads both."""
    rng = np.random.default_rng(0)
    table, patches = rng.standard_normal((9, 8)), rng.standard_normal((8, 3, 8, 8))
    table, patches = table.astype(np.float16), patches.astype(np.float16)
    ahead = np.triu(np.full((4, 4), -1e4, np.float16), 1)

    def attention(x: Var, mask: Any) -> Var:
        scores = mb.matmul(x=x, y=x, transpose_y=True)
        return mb.matmul(x=mb.softmax(x=scores if mask is None else mb.add(x=scores, y=mask)), y=x)

    @mb.program(
        input_specs=[mb.TensorSpec((1, 3, 32, 32), types.fp16), mb.TensorSpec((1, 4), types.int32)],
        opset_version=ct.target.iOS17,
    )
    def program(image: Var, ids: Var) -> Var:
        text = attention(mb.gather(x=table, indices=ids, validate_indices=False), ahead)
        seen = mb.reshape(x=mb.conv(x=image, weight=patches, strides=[8, 8]), shape=[1, 8, 16])
        seen = attention(mb.transpose(x=seen, perm=[0, 2, 1]), None)
        both = [mb.reduce_mean(x=x, axes=[1]) for x in (seen, text)]
        return mb.matmul(x=both[0], y=both[1], transpose_y=True)

    with pytest.raises(SurgeryError, match="is sound or a picture: see whisper_ane, vit_ane"):
        ane.apply(program, "seq2seq_ane", prove=None, quiet=True)


def tower(patches: bool, rank: int = 3, *, causal: bool = False, masked: bool = False) -> Program:
    """Vectors with one attention: patches that are embedded, or words that a norm reads."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((64, 48)).astype(np.float16)
    ahead = np.triu(np.full((16, 16), -1e4, np.float16), 1)

    def program(given: Var, *masks: Var) -> Var:
        x = mb.mul(x=mb.sub(x=given, y=np.float16(0.5)), y=np.float16(2))
        x = x if patches else mb.layer_norm(x=x, axes=[-1])
        x = mb.linear(x=x, weight=weight)
        scores = mb.matmul(x=x, y=x, transpose_y=True)
        for mask in (*masks, *[ahead] * causal):
            scores = mb.add(x=scores, y=mask)
        return mb.matmul(x=mb.softmax(x=scores, axis=-1), y=x)

    def with_mask(given: Var, mask: Var) -> Var:
        return program(given, mask)

    shapes = [(1, 16, 48)[3 - rank :], *[(1, 1, 16)[3 - rank :]] * masked]
    made: Program = mb.program(
        input_specs=[mb.TensorSpec(shape, dtype=types.fp16) for shape in shapes], opset_version=ct.target.iOS17
    )(with_mask if masked else lambda given: program(given))
    return made


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rank", [2, 3])
def test_a_tower_takes_patches_that_were_cut_before(rank: int, masked: bool) -> None:
    """The wrong versions: only an input of rank 4 or 5 is a picture; a mask that is an input hides it."""
    surgery = ane.apply(
        tower(patches=True, rank=rank, masked=masked), "vit_ane", target="M4/macOS 15", quiet=True
    )
    assert surgery.program is not None


@pytest.mark.parametrize("made", [tower(patches=False), tower(patches=True, causal=True)])
def test_words_are_no_patches(made: Program) -> None:
    with pytest.raises(SurgeryError, match="no input is a picture"):
        ane.apply(made, "vit_ane", prove=None, quiet=True)


def picture_to_picture() -> Program:
    """A convolution down, one up, and attention between them."""
    rng = np.random.default_rng(0)
    down, up = (rng.standard_normal(shape).astype(np.float16) for shape in ((8, 4, 3, 3), (4, 8, 3, 3)))

    @mb.program(input_specs=[mb.TensorSpec((1, 4, 16, 16), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(sample: Var) -> Var:
        x = mb.reshape(x=mb.conv(x=sample, weight=down, pad_type="same"), shape=[1, 8, 256])
        seen = mb.softmax(x=mb.matmul(x=x, y=x, transpose_x=True), axis=-1)
        x = mb.reshape(x=mb.matmul(x=x, y=seen), shape=[1, 8, 16, 16])
        return mb.conv(x=mb.sub(x=x, y=mb.reduce_mean(x=x)), weight=up, pad_type="same")

    return program


def test_a_network_from_picture_to_picture() -> None:
    surgery = ane.apply(picture_to_picture(), "unet_ane", target="M4/macOS 15", prove="both", quiet=True)
    assert not score_of(surgery.program, "M4/macOS 15").loss(score_of(picture_to_picture(), "M4/macOS 15"))


@pytest.mark.one_of(6)
@pytest.mark.parametrize(
    ("recipe", "name", "said"),
    [
        (
            "decoder_ane",
            "bert",
            "no attention is causal, as in an encoder: see encoder_ane; found 2 attentions",
        ),
        ("decoder_ane", "vit", r"the input %pixel_values \(1x3x32x32\) is a picture: see vit_ane"),
        ("encoder_ane", "llama", r"a causal decoder with the head %\w+ \(1x16x101\): see decoder_ane"),
        ("encoder_ane", "vit", "is a picture: see vit_ane"),
        ("vit_ane", "bert", "no input is a picture"),
        ("whisper_ane", "gpt2", "no input is sound, or the output of an encoder"),
        ("whisper_ane", "vit", "is a picture: see vit_ane"),
        ("seq2seq_ane", "bert", "it does not look up two sequences: see encoder_ane and decoder_ane"),
        ("seq2seq_ane", "vit", "is sound or a picture: see whisper_ane, vit_ane"),
        ("unet_ane", "llama", "the model has no convolution; found 2 attentions, 2 causal attentions"),
        ("unet_ane", "vit", "no output is a picture"),
    ],
)
def test_models_of_another_family_are_refused(
    converted: Callable[..., Any], recipe: str, name: str, said: str
) -> None:
    with pytest.raises(SurgeryError, match=f"{recipe} is not for this model: .*{said}"):
        ane.apply(converted(name).model, recipe, prove=None, quiet=True)


@pytest.mark.parametrize("recipe", ["encoder_ane", "decoder_ane", "seq2seq_ane", "whisper_ane", "vit_ane"])
def test_models_without_attention_are_refused(recipe: str) -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 64))], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        return mb.relu(x=x)

    with pytest.raises(SurgeryError, match=f"{recipe} is not for this model: no attention was recognized"):
        ane.apply(program, recipe, quiet=True)


def test_a_decoder_that_counts_positions_from_its_mask_is_no_encoder_with_a_decoder(
    converted: Callable[..., Any],
) -> None:
    """It has two inputs of integers and two lookups, as such a model has."""
    with pytest.raises(SurgeryError, match="every attention is causal, .*: see decoder_ane; .*, 2 lookups"):
        ane.apply(converted("opt", mask=True).model, "seq2seq_ane", prove=None, quiet=True)


def test_the_mask_of_a_decoder_may_be_an_input() -> None:
    """What a mask that is given at run time hides is not known, so nothing speaks against the model."""

    @mb.program(input_specs=[mb.TensorSpec((1, 4, 8)), mb.TensorSpec((1, 4, 4))], opset_version=ct.target.iOS17)
    def program(x: Var, mask: Var) -> Var:
        scores = mb.add(x=mb.matmul(x=x, y=x, transpose_y=True), y=mask)
        return mb.matmul(x=mb.softmax(x=scores, axis=-1), y=x)

    found = makeup(program)
    assert (found.attentions, found.causal, found.open) == (1, 0, 0)
    ane.apply(program, "decoder_ane", prove=None, quiet=True)


def test_the_running_sums_of_a_hybrid_decoder_become_products() -> None:
    """A scan beside attention adds up over positions; no running sum stays, and the numbers do."""
    rng = np.random.default_rng(0)
    ahead = np.triu(np.full((512, 512), -1e4, np.float16), 1)
    head = (0.1 * rng.standard_normal((64, 512))).astype(np.float16)

    @mb.program(input_specs=[mb.TensorSpec((1, 512, 512), types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        scores = mb.add(x=mb.matmul(x=x, y=x, transpose_y=True), y=ahead)
        mixed = mb.matmul(x=mb.softmax(x=scores, axis=-1), y=x)
        return mb.linear(x=mb.cumsum(x=mb.sigmoid(x=mixed), axis=1), weight=head)

    for target in TARGETS:
        whole = recipes.decoder_ane.with_options(select_last_token=False)
        surgery = ane.apply(program, whole, target=target, prove="model", quiet=True)
        assert "cumsum" not in {op.op_type for op in walk_ops(surgery.program)}
        _, (inspection,) = scored(surgery.program, Target.parse(target))
        assert not [row.op_type for row in inspection.ops if row.legal is False]


def test_options_follow_the_target(converted: Callable[..., Any]) -> None:
    """Heads of 50257 words are cut for the M1 and left whole for the M4."""
    most = {t: [s for s in recipes.decoder_ane.for_target(t).steps if s.name == "split_head"] for t in TARGETS}
    assert [str(step) for (step,) in most.values()] == ["split_head", "split_head(most=65536)", "split_head"]
    chosen = recipes.decoder_ane.with_options(split_head={"most": 16384})
    (step,) = [s for s in chosen.for_target("M4/macOS 15").steps if s.name == "split_head"]
    assert str(step) == "split_head"


def test_a_long_table_leaves_the_model_on_request() -> None:
    """With it inside nothing is known of the model; the rows as an input bring it back."""
    rng = np.random.default_rng(0)
    shapes = [(70000, 8), (512, 8), (900, 512), *[(512, 512)] * 4]
    table, wide, head, *maps = ((0.1 * rng.standard_normal(shape)).astype(np.float16) for shape in shapes)
    ahead = np.triu(np.full((128, 128), -1e4, np.float16), 1)

    @mb.program(input_specs=[mb.TensorSpec((1, 128), dtype=types.int32)], opset_version=ct.target.iOS17)
    def program(ids: Var) -> Var:
        x = mb.linear(x=mb.gather(x=table, indices=ids, axis=0), weight=wide)
        q, k, v = (mb.linear(x=x, weight=one) for one in maps[:3])
        shares = mb.softmax(x=mb.add(x=mb.matmul(x=q, y=k, transpose_y=True), y=ahead), axis=-1)
        x = mb.add(x=x, y=mb.linear(x=mb.matmul(x=shares, y=v), weight=maps[3]))
        return mb.linear(x=x, weight=head)

    target = "M4/macOS 15"
    inside = ane.apply(program, "decoder_ane", target=target, prove=None, quiet=True)
    (finding,) = (
        f for f in scored(inside.program, Target.parse(target))[1][0].findings if f.rule == "embedding-rows"
    )
    assert 'embedding_matmul(mode="input")' in finding.advice
    assert not score_of(inside.program, target).share["ops"]
    step = EmbeddingMatmul(mode="input", nonnegative_ids=True)
    outside = ane.apply(inside.program, [step], target=target, prove="model", quiet=True)
    assert score_of(outside.program, target).share["flop"] == 1


def test_the_gate_takes_back_what_takes_longer(converted: Callable[..., Any]) -> None:
    """gpt2_ane multiplies a table where that takes less time; its steps as a list do so anywhere."""
    made, target = converted("gpt2"), "M4/macOS 15"
    before = score_of(made.model._mil_program, target)
    ungated = ane.apply(made.model, list(recipes.gpt2_ane.steps), target=target, prove=None, quiet=True)
    gated = ane.apply(made.model, "gpt2_ane", target=target, prove=None, quiet=True)
    assert not score_of(gated.program, target).loss(before)
    undone = [str(r) for name, r in gated.refusals if name == "embedding_matmul" and "undone" in str(r)]
    assert score_of(gated.program, target).estimate < score_of(ungated.program, target).estimate
    (said,) = undone
    assert said.startswith("undone: the expected time would rise")
    assert any(op.op_type == "gather" for op in walk_ops(gated.program))
    assert all(op.op_type != "gather" for op in walk_ops(ungated.program))


def pooled(x: Any, mask: Any) -> Any:
    """An attention whose scores are scaled late, and the mean of the tokens that a mask keeps."""
    scores = mb.mul(x=mb.matmul(x=x, y=x, transpose_y=True), y=np.float16(1 / 64))
    tokens = mb.matmul(x=mb.softmax(x=scores, axis=-1), y=x)
    total = mb.reduce_sum(x=mb.mul(x=tokens, y=mask), axes=[1], keep_dims=False)
    return mb.real_div(x=total, y=mb.reduce_sum(x=mask, axes=[1], keep_dims=False), name="y")


@pytest.mark.one_of(3)
@pytest.mark.parametrize("target", TARGETS)
def test_a_family_s_recipe_repairs_what_costs_no_time(target: str) -> None:
    shapes = ((1, 512, 64), (1, 512, 1))

    @mb.program(input_specs=[mb.TensorSpec(s, dtype=types.fp16) for s in shapes], opset_version=ct.target.iOS17)
    def encoder(x: Var, mask: Var) -> Var:
        return pooled(x, mask)

    rng = np.random.default_rng(0)
    x = (180 + 20 * rng.standard_normal(shapes[0])).astype(np.float16)
    values = {"x": x, "mask": np.ones(shapes[1], np.float16)}
    (right,) = ane.run(encoder, values).values()
    (was,) = ane.run(encoder, values, precision="fp16").values()
    assert not np.isfinite(was).all()
    surgery = ane.apply(encoder, "encoder_ane", target=target, quiet=True)
    assert {"mean_quotient", "scale_scores"} <= {change.pass_name for change in surgery.changes}
    (now,) = ane.run(surgery.program, values, precision="fp16").values()
    assert np.allclose(now, right, rtol=1e-2)
    assert not score_of(surgery.program, target).loss(score_of(encoder, target))


def test_where_nothing_is_to_be_repaired_nothing_is_said_of_it() -> None:
    shape = (1, 16, 64)

    @mb.program(input_specs=[mb.TensorSpec(shape, dtype=types.fp16)], opset_version=ct.target.iOS17)
    def encoder(x: Var) -> Var:
        return pooled(mb.tanh(x=x), mb.sigmoid(x=x))

    for recipe, said in (("encoder_ane", False), ("safe_numbers", True), ("scale_scores", True)):
        surgery = ane.apply(encoder, recipe, quiet=True)
        found = [name for name, _ in surgery.refusals if name in ("scale_scores", "mean_quotient")]
        assert bool(found) is said, recipe


@mb.program(input_specs=[mb.TensorSpec((1, 8, 16), dtype=types.fp16)], opset_version=ct.target.iOS17)
def loud_attention(x: Var) -> Var:
    """Attention over tokens that are divided by their length, whose squares may be beyond fp16."""
    squares = mb.reduce_sum(x=mb.square(x=x), axes=[-1], keep_dims=True)
    tokens = mb.real_div(x=x, y=mb.sqrt(x=squares))
    shares = mb.softmax(x=mb.matmul(x=tokens, y=tokens, transpose_y=True), axis=-1)
    return mb.matmul(x=shares, y=tokens, name="y")


@pytest.mark.filterwarnings("ignore:scale_roots repairs what goes wrong")
@pytest.mark.parametrize("prove", ["both", None])
def test_a_family_repairs_what_the_inputs_reach(prove: str | None) -> None:
    """The wrong version: the recipe without its repairs, after which the outputs are as wrong as before."""
    quiet = {"x": np.linspace(-1, 1, 128, dtype=np.float16).reshape(1, 8, 16)}
    loud = {"x": quiet["x"] * np.float16(900)}
    given: dict[str, Any] = {"target": "M1/macOS 14", "prove": prove, "quiet": True}
    assert not ane.apply(loud_attention, "gpt2_ane", inputs=quiet, **given).changes
    surgery = ane.apply(loud_attention, "gpt2_ane", inputs=loud, **given)
    assert "scale_roots" in {change.pass_name for change in surgery.changes}
    assert any("scale_roots: without it outputs are wrong on the inputs at hand" in n for n in surgery.notes)
    without = recipes.gpt2_ane.with_options(scale_roots=False, widen_to_fp32=False)
    left = ane.apply(loud_attention, without, inputs=loud, **given)
    exact = ane.run(loud_attention, loud)["y"]
    near, far = (ane.run(one.program, loud, precision="fp16")["y"] for one in (surgery, left))
    assert compare_arrays("y", exact, far).psnr < 10 < 60 < compare_arrays("y", exact, near).psnr
