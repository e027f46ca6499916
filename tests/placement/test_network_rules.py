"""Neural networks, inspected layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anesurgery import registry
from anesurgery.errors import LoadError
from anesurgery.files.package import read_spec
from anesurgery.mil import ct
from anesurgery.neuralnetwork.spec import NETWORKS
from anesurgery.placement import Grade, Inspection, Target
from anesurgery.placement.networks import inspect_network
from anesurgery.placement.rules.layer_rules import RULES

Build = Callable[[Any], None]
ANY = Target.parse(None)


def network(build: Build, shape: tuple[int, ...] = (4, 16, 16), **options: Any) -> Any:
    """The specification of a network from `x` to `y`; `build` adds the layers, `more` names other inputs."""
    array = ct.models.datatypes.Array
    inputs = {"x": shape} | options.pop("more", {})
    builder = ct.models.neural_network.NeuralNetworkBuilder(
        [(name, array(*size)) for name, size in inputs.items()], [("y", array(*shape))], **options
    )
    build(builder)
    return builder.spec


def look(build: Build, target: Target = ANY, **options: Any) -> Inspection:
    return inspect_network(network(build, **options), target, "a network")


def conv(b: Any, name: str, x: str, y: str, **more: Any) -> None:
    options: dict[str, Any] = {"kernel": 3, "dilation": 1, "deconv": False} | more
    kernel = options["kernel"]
    height, width = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    b.add_convolution(
        name,
        4,
        4,
        height,
        width,
        1,
        1,
        "same",
        1,
        np.zeros((height, width, 4, 4)),
        None,
        False,
        is_deconv=options["deconv"],
        input_name=x,
        output_name=y,
        dilation_factors=[options["dilation"]] * 2,
    )


def pool(b: Any, kernel: int, stride: int, whole: bool = False) -> None:
    b.add_pooling("pool", kernel, kernel, stride, stride, "MAX", "VALID", "x", "y", is_global=whole)


def chain(b: Any) -> None:
    """Conv, LSTM-like break, conv: what the ANE runs, what it does not, and again what it does."""
    conv(b, "first", "x", "a")
    b.add_custom("swish", ["a"], ["b"])
    conv(b, "second", "b", "c")
    b.add_activation("relu", "RELU", "c", "y")


def test_rows_units_and_segments() -> None:
    found = look(chain)
    assert [(r.name, r.op_type, r.legal, r.preferred, r.segment) for r in found.ops] == [
        ("first", "convolution", True, "ane", 0),
        ("swish", "custom", False, "cpu", 1),
        ("second", "convolution", True, "ane", 2),
        ("relu", "activation", True, "ane", 2),
    ]
    assert (found.status, found.switches, found.counts) == (1, 2, {"ane": 3, "cpu": 1})
    first, middle, last = found.segments
    assert (first.inputs, first.outputs) == ({"x": (4, 16, 16)}, {"a": (4, 16, 16)})
    assert (middle.ops, middle.readers) == (("swish",), (2,))
    assert last.outputs == {"y": (4, 16, 16)}
    assert last.readers == ()
    assert found.ops[3].shape == "4x16x16"
    assert found.ops[0].shape == "4x16x16"


def test_a_finding_says_what_why_and_what_to_do() -> None:
    (finding,) = look(chain).row("swish").findings
    assert (finding.rule, finding.op, finding.grade) == ("nn-custom", "swish", Grade.REPORTED)
    assert finding.message == "layer type custom"
    assert "split the model" in finding.advice
    assert finding.remedy is None


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ("CPU_AND_NE", ["ane", "cpu", "ane", "ane"]),
        ("ALL", ["ane", None, "ane", "ane"]),
        ("CPU_ONLY", ["cpu"] * 4),
        ("CPU_AND_GPU", [None] * 4),
    ],
)
def test_compute_units_decide_what_may_be_chosen(units: str, expected: list[str | None]) -> None:
    found = look(chain, Target.parse("M1", units))
    assert [r.preferred for r in found.ops] == expected
    gpu = [n for n in found.notes if "GPU" in n]
    assert bool(gpu) == ("ALL" in units or "GPU" in units)
    assert any("no cost model" in n for n in found.notes) == found.target.uses_ane


@pytest.mark.parametrize(
    ("build", "rule", "message"),
    [
        (lambda b: conv(b, "c", "x", "y", dilation=2), "nn-dilated", "dilated by 2x2"),
        (lambda b: pool(b, 14, 1), "nn-pool", "kernel 14x14, more than 13"),
        (lambda b: pool(b, 14, 3), "nn-pool", "kernel 14x14, more than 13; stride 3x3, more than 2"),
        (lambda b: b.add_upsample("u", 4, 4, "x", "y"), "nn-upsample", "factor 4x4, more than 2"),
        (lambda b: b.add_gather("g", ["x", "x"], "y"), "nn-gather", "layer type gather"),
        (lambda b: b.add_concat_nd("c", ["x", "x"], "y", 0), "nn-rank-free", "layer type concatND"),
        (
            lambda b: b.add_add_broadcastable("a", ["x", "x"], "y"),
            "nn-broadcastable",
            "layer type addBroadcastable",
        ),
        (
            lambda b: conv(b, "c", "x", "y", kernel=(1, 20)),
            "nn-conv-kernel",
            "kernel 1x20; width 20 is more than 13 (A12)",
        ),
        (lambda b: b.add_reshape_static("r", "x", "y", (1, 1, 1, 1, 1, -1)), "nn-rank", "6 axes, more than 5"),
        (lambda b: b.add_argmax("m", "x", "y", axis=0), "nn-as-in-programs", "layer type argMax"),
    ],
)
def test_layers_that_the_engine_does_not_run(build: Build, rule: str, message: str) -> None:
    found = look(build, disable_rank5_shape_mapping=True)
    row = found.ops[-1]
    assert (row.legal, row.preferred) == (False, "cpu")
    assert [(f.rule, f.message) for f in row.findings] == [(rule, message)]
    assert found.status == 2


def test_recurrent_layers_stay_on_the_cpu() -> None:
    weights = [np.zeros((4, 4))] * 4
    inner = [np.zeros((4, 4))] * 4

    def build(b: Any) -> None:
        b.add_unilstm("lstm", inner, weights, None, 4, 4, ["x", "h", "c"], ["y", "h2", "c2"])

    found = look(build, shape=(4,), more={"h": (4,), "c": (4,)})
    assert found.row("lstm").findings[0].rule == "nn-recurrent"


@pytest.mark.parametrize(
    "build",
    [
        lambda b: conv(b, "c", "x", "y"),
        lambda b: conv(b, "c", "x", "y", kernel=(1, 20), deconv=True),
        lambda b: pool(b, 13, 2),
        lambda b: pool(b, 14, 3, whole=True),  # the window of the file is not used
        lambda b: b.add_upsample("u", 2, 2, "x", "y"),
        lambda b: b.add_elementwise("a", ["x", "x"], "y", "ADD"),
        lambda b: b.add_elementwise("a", ["x", "x"], "y", "MULTIPLY"),
        lambda b: b.add_activation("a", "RELU", "x", "y"),
    ],
)
def test_layers_at_the_limits_are_legal(build: Build) -> None:
    found = look(build)
    assert found.ops[-1].legal is True
    assert (found.status, found.all_findings) == (0, ())


def test_a_wider_kernel_depends_on_the_chip() -> None:
    for chip, legal in (("M1", False), ("M4", True)):
        found = look(lambda b: conv(b, "c", "x", "y", kernel=(1, 15)), Target.parse(chip))
        assert found.ops[0].legal is legal


def test_nothing_is_said_about_layers_that_nobody_tried() -> None:
    found = look(lambda b: b.add_sin("s", "x", "y"), shape=(1, 16), disable_rank5_shape_mapping=True)
    assert (found.ops[0].legal, found.ops[0].preferred) == (None, None)
    assert "nothing is known about these layers: sin (1)" in found.notes
    assert found.counts == {"unknown": 1}


def test_layers_that_only_move_numbers_follow_the_op_of_ml_programs() -> None:
    """A guess, and graded as one."""
    found = look(
        lambda b: b.add_squeeze("s", "x", "y", axes=[0]), shape=(1, 16), disable_rank5_shape_mapping=True
    )
    assert (found.ops[0].legal, found.ops[0].preferred) == (True, "ane")
    (rule,) = [r for r in RULES if r.legal and "squeeze" in r.ops]
    assert (rule.id, rule.grade) == ("nn-as-legal-in-programs", Grade.GUESS)


@pytest.mark.parametrize(("rows", "legal"), [(9, None), (32768, None), (32769, False)])
def test_an_embedding_is_refused_above_the_limit_and_unknown_below(rows: int, legal: bool | None) -> None:
    found = look(lambda b: b.add_embedding("e", np.zeros((2, rows)), None, rows, 2, False, "x", "y"))
    said = [("nn-lookup", "32,769 rows, more than 32,768")] if legal is False else []
    assert found.ops[0].legal is legal
    assert [(f.rule, f.message) for f in found.ops[0].findings] == said


@pytest.mark.parametrize(
    ("shape", "chip", "legal", "said"),
    [
        ((4, 1, 16385), "M1", False, "%x is 4x1x16385: an axis above 16384"),
        ((4, 20000, 2), "M4", True, "%x is 4x20000x2: an axis above 16384"),
        ((4, 1, 16384), "M1", True, ""),
        ((4, 70000, 2), "M4", False, "%x is 4x70000x2: an axis above 16384"),
    ],
)
def test_a_long_axis_leaves_the_engine_and_may_not_load(
    shape: tuple[int, ...], chip: str, legal: bool, said: str
) -> None:
    found = look(lambda b: conv(b, "c", "x", "y"), Target.parse(chip), shape=shape)
    assert found.ops[0].legal is legal
    assert [f.message for f in found.findings if f.rule == "nn-axis-load"] == [
        f"reported to fail: {said}"
    ] * bool(said)


@pytest.mark.parametrize("size", [25088, 50257])
def test_a_long_vector_of_channels_is_not_a_long_axis(size: int) -> None:
    weights = np.zeros((4, size))

    def build(b: Any) -> None:
        b.add_inner_product("p", weights, None, size, 4, False, "x", "y")

    found = look(build, Target.parse("M1"), shape=(size,))
    assert found.ops[0].legal is True
    assert "nn-axis-load" not in {f.rule for f in found.findings}


def test_a_product_over_channels_is_told_by_the_shapes() -> None:
    def build(b: Any) -> None:
        b.add_elementwise("m", ["x", "f"], "y", "MULTIPLY")

    assert look(build, more={"f": (4, 16, 16)}).ops[0].legal is True
    (finding,) = look(build, more={"f": (4, 1, 1)}).ops[0].findings
    assert (finding.rule, finding.message) == ("nn-channel-broadcast", "4x16x16 times 4x1x1")


def test_constants_do_not_break_a_segment() -> None:
    def build(b: Any) -> None:
        conv(b, "first", "x", "a")
        b.add_load_constant_nd("k", "k", np.ones((4, 16, 16)), (4, 16, 16))
        b.add_elementwise("sum", ["a", "k"], "y", "ADD")

    found = look(build, disable_rank5_shape_mapping=True)
    assert [(s.unit, s.ops) for s in found.segments] == [("cpu", ("k",)), ("ane", ("first", "sum"))]
    assert [r.segment for r in found.ops] == [1, 0, 1]
    assert found.segments[1].inputs == {"x": (4, 16, 16), "k": found.segments[0].outputs["k"]}
    (whole,) = found.findings
    assert (whole.rule, whole.op) == ("nn-format", "")
    assert "1 loadConstantND" in whole.message


def test_the_first_kind_of_constant_has_no_row() -> None:
    def build(b: Any) -> None:
        b.add_load_constant("k", "k", np.ones(4), (4, 1, 1))
        b.add_elementwise("sum", ["x", "k"], "y", "ADD")

    assert [r.name for r in look(build).ops] == ["sum"]


def test_nested_networks_are_walked() -> None:
    def build(b: Any) -> None:
        branch = b.add_branch("branch", "x")
        for name, side in (("inner", branch.branch.ifBranch), ("other", branch.branch.elseBranch)):
            inner = ct.models.neural_network.NeuralNetworkBuilder(nn_spec=side)
            inner.add_activation(name, "RELU", "x", "y")

    found = look(build, shape=(1,), disable_rank5_shape_mapping=True)
    assert [(r.name, r.depth) for r in found.ops] == [("branch", 0), ("inner", 1), ("other", 1)]
    assert found.row("branch").findings[0].rule == "nn-control"


def test_a_classifier_is_a_network_too_and_images_have_shapes() -> None:
    def build(b: Any) -> None:
        b.add_activation("a", "RELU", "x", "y")
        b.set_class_labels([str(n) for n in range(3 * 10 * 20)], "label")

    spec = network(build, mode="classifier")
    spec.description.input[0].type.imageType.width = 20
    spec.description.input[0].type.imageType.height = 10
    spec.description.input[0].type.imageType.colorSpace = 20
    assert spec.WhichOneof("Type") == "neuralNetworkClassifier"
    assert inspect_network(spec, ANY, "").segments[0].inputs == {"x": (3, 10, 20)}


def test_a_network_without_layers_is_damaged() -> None:
    spec = network(lambda b: None)
    spec.neuralNetwork.SetInParent()
    with pytest.raises(LoadError, match="a network: the network has no layers"):
        inspect_network(spec, ANY, "a network")


def test_a_network_that_reads_what_nothing_makes_is_damaged() -> None:
    with pytest.raises(LoadError, match="reads the blob 'f', which nothing makes"):
        look(lambda b: b.add_elementwise("m", ["x", "f"], "y", "MULTIPLY"))


def test_rules_are_of_one_format_and_named_once() -> None:
    assert len({(r.id, r.remedy) for r in RULES}) == len(RULES)
    said = [(r.id, op) for r in RULES for op in r.ops]
    assert len(set(said)) == len(said), "a rule speaks once about a layer type, with one remedy"
    assert {r.scope.model_type for r in RULES} == {"neuralnetwork"}
    assert all(r.source and r.because and r.ops for r in RULES)
    assert {r.remedy for r in RULES if r.remedy is not None} <= set(registry.layer_pass_names())
    assert all(r.advice for r in RULES if r.legal is False and r.id != "nn-as-in-programs")
    allowed = [r.ops for r in RULES if r.legal]
    flat = {op for r in RULES if r.legal is False and r.test is None for op in r.ops}
    assert not flat & frozenset().union(*allowed)


def test_rules_name_layers_that_exist() -> None:
    from coremltools.proto import NeuralNetwork_pb2

    known = {f.name for f in NeuralNetwork_pb2.NeuralNetworkLayer.DESCRIPTOR.oneofs_by_name["layer"].fields}
    assert not {op for r in RULES for op in r.ops} - known


REAL: dict[str, tuple[int, str]] = {
    "blazeface_scaled.mlmodel": (1, "nn-rank-free"),
    "custom_swish_mcneural.mlmodel": (1, "nn-custom"),
    "mlc_edsr_f32b5.mlmodel": (1, "nn-broadcastable"),
    "mlt_es2en_char_decoder16.mlmodel": (1, "nn-recurrent"),
    "mlt_gesture_classifier.mlmodel": (1, "nn-conv-kernel"),
    "pose_cpm.mlmodel": (1, "nn-upsample"),
    "sinet_portrait_seg.mlmodel": (1, "nn-pool"),
    "waifu2x_anime_noise0.mlmodel": (0, ""),
}


@pytest.mark.one_of(9)
@pytest.mark.parametrize("name", REAL)
def test_real_networks(corpus: Path, name: str) -> None:
    spec = read_spec(corpus / name)
    status, rule = REAL[name]
    found = inspect_network(spec, ANY, name)
    assert spec.WhichOneof("Type") in NETWORKS
    assert found.status == status
    assert (rule in {f.rule for f in found.all_findings}) == bool(rule)
    assert [r.index for r in found.ops] == list(range(len(found.ops)))
    assert sum(len(s.ops) for s in found.segments) == len(found.ops)
    for segment in found.segments:
        assert {r.preferred for r in found.ops if r.segment == segment.index} == {segment.unit}


def test_a_damaged_file_is_an_error(corpus: Path) -> None:
    with pytest.raises(LoadError, match="is not a Core ML model, or is damaged"):
        read_spec(corpus / "nnv2_simple_layer.mlmodel")


def deconvolve(b: Any, **more: Any) -> None:
    options = {"is_deconv": True, "has_bias": False, "input_name": ["x", "w"], "output_name": "y"} | more
    b.add_convolution("d", 4, 4, 3, 3, 1, 1, "valid", 1, None, None, **options)


def enlarge(b: Any, factor: float, mode: str, corners: str) -> None:
    b.add_upsample("u", factor, factor, "x", "y", mode=mode, linear_upsample_mode=corners)


def edited(build: Build, kind: str, **fields: int) -> Build:
    """A network whose first layer has these fields, which the builder checks itself."""

    def changed(b: Any) -> None:
        build(b)
        for name, value in fields.items():
            setattr(getattr(b.spec.neuralNetwork.layers[0], kind), name, value)

    return changed


def fraction(b: Any) -> None:
    enlarge(b, 1.5, "BILINEAR", "ALIGN_CORNERS_FALSE")


def nearest(b: Any) -> None:
    enlarge(b, 2, "NN", "DEFAULT")


def multiply(b: Any) -> None:
    b.add_batched_mat_mul("m", ["x", "w"], "y")


def empty_constant(b: Any) -> None:
    b.add_load_constant_nd("k", "k", np.zeros((0, 16, 16)), [0, 16, 16])
    b.add_concat_nd("c", ["x", "k"], "y", 0)


WEIGHTS, FACTOR = {"w": (4, 4, 3, 3)}, {"w": (4, 16, 16)}


@pytest.mark.parametrize(
    ("build", "more", "words"),
    [
        (deconvolve, WEIGHTS, "d is a deconvolution of computed weights"),
        (
            lambda b: deconvolve(b, is_deconv=False, dilation_factors=[2, 2]),
            WEIGHTS,
            "d is a dilated convolution of computed weights",
        ),
        (edited(multiply, "batchedMatmul", hasBias=1), FACTOR, "m multiplies two computed values and adds"),
        (
            edited(multiply, "batchedMatmul", int8DynamicQuantize=1),
            FACTOR,
            "m multiplies two computed values in",
        ),
        (edited(fraction, "upsample", linearUpsampleMode=0), {}, "u upsamples by a fraction"),
        (edited(nearest, "upsample", linearUpsampleMode=1), {}, "u takes the nearest pixel"),
        (lambda b: b.add_copy("c", "x", "x"), {}, "c copies a value to its own name"),
        (lambda b: b.add_reshape_static("r", "x", "y", (2, 2, 4, 4, 4, 4)), {}, "r makes 6 axes"),
        (lambda b: b.add_split_nd("s", "x", ["y"], 0, 1), {}, "s splits into a single part"),
        (lambda b: b.add_argsort("s", "x", "y", axis=-1), {}, "s sorts along the axis -1"),
        (empty_constant, {}, "k holds a constant without elements"),
        (lambda b: b.add_reshape_static("r", "x", "y", (2, 2, 4, 4, 16)), {}, ""),
        (lambda b: deconvolve(b, is_deconv=False), WEIGHTS, ""),
        (lambda b: conv(b, "c", "x", "y", deconv=True), {}, ""),
        (fraction, {}, ""),
        (nearest, {}, ""),
        (multiply, FACTOR, ""),
    ],
)
def test_layers_that_core_ml_refuses_to_load(build: Build, more: dict[str, Any], words: str) -> None:
    spec = network(build, (1, 4, 16, 16) if more is WEIGHTS else (4, 16, 16), more=more)
    said = [f for f in inspect_network(spec, ANY, "a network", advice=False).findings if f.rule == "nn-refused"]
    assert [f.kind for f in said] == (["load"] if words else [])
    assert all(f.message.startswith(f"Core ML does not load it: {words}") for f in said)


def test_an_image_of_a_network_that_is_black() -> None:
    spec = network(lambda b: b.add_activation("s", "SIGMOID", "x", "y"), (3, 16, 16))
    image = spec.description.output[0].type.imageType
    image.width = image.height = 16
    image.colorSpace = image.RGB
    assert "image-dark" in [f.rule for f in inspect_network(spec, ANY, "a network").findings]


def learning(b: Any, between: Callable[[Any, str, str], None]) -> None:
    """Two dense layers, of which the first learns, with a layer between them and the loss of a classifier."""
    dense = np.ones((6, 6)), np.zeros(6), 6, 6, True
    b.add_inner_product("first", *dense, "x", "a")
    between(b, "a", "b")
    b.add_inner_product("second", *dense, "b", "c")
    b.add_softmax("s", "c", "y")
    b.make_updatable(["first"])
    b.set_categorical_cross_entropy_loss("loss", "y")
    b.set_sgd_optimizer(ct.models.neural_network.SgdParams(lr=0.01, batch=1))
    b.set_epochs(1)


def norm(b: Any, x: str, y: str) -> None:
    ones, zeros = np.ones(6), np.zeros(6)
    b.add_batchnorm("n", 6, ones, zeros, zeros, ones, input_name=x, output_name=y)


@pytest.mark.parametrize(
    ("between", "said"),
    [
        (norm, [("nn-training", "interface", "training may fail: batchnorm n is after a layer that learns")]),
        (
            lambda b, x, y: b.add_elementwise("m", [x, x], y, mode="MULTIPLY"),
            [
                (
                    "nn-refused",
                    "load",
                    "Core ML does not load it: m (multiply) passes no gradients to a layer that learns",
                )
            ],
        ),
        (
            lambda b, x, y: b.add_activation("e", "ELU", x, y, params=1.0),
            [
                (
                    "nn-refused",
                    "load",
                    "Core ML does not load it: e (activation) passes no gradients to a layer that learns",
                )
            ],
        ),
        (lambda b, x, y: b.add_activation("r", "RELU", x, y), []),
    ],
)
def test_layers_through_which_a_network_cannot_be_trained(
    between: Callable[[Any, str, str], None], said: list[tuple[str, str, str]]
) -> None:
    spec = network(lambda b: learning(b, between), (6,))
    found = inspect_network(spec, ANY, "a network", advice=False).findings
    assert [(f.rule, f.kind, f.message) for f in found if f.rule.startswith("nn-")] == said
    spec.isUpdatable = False
    assert not inspect_network(spec, ANY, "a network", advice=False).findings


def test_a_batchnorm_before_the_layer_that_learns_is_trained() -> None:
    def build(b: Any) -> None:
        norm(b, "x", "n")
        learning(b, lambda b, x, y: b.add_activation("r", "RELU", x, y))
        b.spec.neuralNetwork.layers[1].input[0] = "n"

    spec = network(build, (6,))
    assert spec.isUpdatable
    assert not inspect_network(spec, ANY, "a network", advice=False).findings


def test_a_vector_of_the_exact_mapping_has_one_axis() -> None:
    """The wrong version gives inputs and outputs the shape that a vector has in the older mapping."""

    def build(b: Any) -> None:
        b.add_activation("a", "RELU", "x", "h")
        b.add_activation("b", "RELU", "h", "y")

    found = look(build, shape=(10,), disable_rank5_shape_mapping=True)
    assert [row.shape for row in found.ops] == ["10", "10"]
    assert found.segments[0].inputs == {"x": (10,)}
    older = look(build, shape=(10,))
    assert [row.shape for row in older.ops] == ["10x1x1", "10x1x1"]
