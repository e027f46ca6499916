"""Branches, loops and custom layers: each side, each way out of a loop, against the same in Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.errors import LoadError
from anesurgery.files.protobuf import proto
from anesurgery.mil import Array, mb, quiet_host, walk_ops
from anesurgery.neuralnetwork.blob_shapes import Blobs
from anesurgery.neuralnetwork.context import LAYERS
from anesurgery.neuralnetwork.importing import import_network
from anesurgery.neuralnetwork.layers import load_families
from anesurgery.placement.networks import inspect_network
from anesurgery.placement.target import Target

with quiet_host():
    from coremltools.models import datatypes
    from coremltools.models.neural_network import NeuralNetworkBuilder


def builder(inputs: dict[str, tuple[int, ...]], outputs: tuple[str, ...] = ("y",)) -> Any:
    return NeuralNetworkBuilder(
        [(n, datatypes.Array(*s)) for n, s in inputs.items()],
        [(n, None) for n in outputs],
        disable_rank5_shape_mapping=True,
    )


def inside(network: Any) -> Any:
    """A builder of a network nested in a layer."""
    return NeuralNetworkBuilder(nn_spec=network, disable_rank5_shape_mapping=True)


def run(made: Any, **inputs: Any) -> dict[str, Array]:
    values = {n: np.array(v, np.float32) for n, v in inputs.items()}
    found: dict[str, Array] = ane.run(import_network(made.spec), values)
    return found


def linear(b: Any, source: str, target: str, alpha: float = 1, beta: float = 0) -> None:
    """Target = alpha source + beta, by `copy`, so that it may exist already."""
    between = f"{target}_{alpha}_{beta}"
    b.add_activation(between, "LINEAR", source, between, params=[alpha, beta])
    b.add_copy(f"{between}_copy", between, target)


# -- branches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("condition", "factor"), [(1, 2), (-3, 2), (1e-5, 2), (0, -1), (1e-7, -1)])
def test_a_branch_takes_one_side(condition: float, factor: float) -> None:
    made = builder({"c": (1,), "x": (2, 3)})
    layer = made.add_branch("b", "c")
    inside(layer.branch.ifBranch).add_activation("double", "LINEAR", "x", "y", params=[2, 0])
    inside(layer.branch.elseBranch).add_activation("minus", "LINEAR", "x", "y", params=[-1, 0])
    x = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(run(made, c=[condition], x=x)["y"], factor * x)


@pytest.mark.parametrize("condition", [0, 1])
def test_a_branch_without_another_side_leaves_what_was(condition: int) -> None:
    made = builder({"c": (1,), "x": (3,)}, ("y", "z"))
    linear(made, "x", "y", beta=10)
    layer = made.add_branch("b", "c")
    linear(inside(layer.branch.ifBranch), "x", "y", alpha=5)
    made.add_activation("after", "LINEAR", "y", "z", params=[1, 1])
    found = run(made, c=[condition], x=[1, 2, 3])
    expected = np.array([5, 10, 15] if condition else [11, 12, 13])
    np.testing.assert_array_equal(found["y"], expected)
    np.testing.assert_array_equal(found["z"], expected + 1)


@pytest.mark.parametrize("a", [0, 1])
@pytest.mark.parametrize("b", [0, 1])
def test_branches_nest(a: int, b: int) -> None:
    made = builder({"a": (1,), "b": (1,), "x": (1,)})
    made.add_copy("start", "x", "y")
    outer = made.add_branch("outer", "a").branch.ifBranch
    network = inside(outer)
    linear(network, "y", "y", beta=1)
    linear(inside(network.add_branch("inner", "b").branch.ifBranch), "y", "y", alpha=10)
    assert run(made, a=[a], b=[b], x=[3])["y"] == (((3 + 1) * (10 if b else 1)) if a else 3)


@pytest.mark.parametrize("taken", [0, 1])
def test_a_constant_condition_builds_the_side_that_it_chooses(taken: int) -> None:
    """Lists of TensorFlow grow under a constant condition; the side that is never taken need not fit."""
    made = builder({"x": (3,)}, ("z",))
    made.add_load_constant_nd("c", "c", np.array([float(taken)]), (1,))
    made.add_copy("start", "x", "y")
    layer = made.add_branch("grow", "c")
    sides = [inside(layer.branch.ifBranch), inside(layer.branch.elseBranch)]
    fits, misfits = sides if taken else sides[::-1]
    linear(fits, "y", "y", alpha=3)
    misfits.add_load_constant_nd("more", "more", np.zeros((1, 3)), (1, 3))
    misfits.add_concat_nd("new", ["y", "more"], "new", axis=0)
    misfits.add_copy("assign", "new", "y")
    made.add_activation("after", "LINEAR", "y", "z", params=[1, 1])
    np.testing.assert_array_equal(run(made, x=[1, 2, 3])["z"], [4, 7, 10])


@pytest.mark.parametrize("one_sided", [False, True])
def test_a_blob_of_one_side_alone_does_not_outlive_a_constant_branch(one_sided: bool) -> None:
    made = builder({"x": (3,)}, ("z",))
    made.add_load_constant_nd("c", "c", np.array([1.0]), (1,))
    layer = made.add_branch("b", "c")
    linear(inside(layer.branch.ifBranch), "x", "y", alpha=3)
    if not one_sided:
        linear(inside(layer.branch.elseBranch), "x", "y", alpha=5)
    made.add_activation("after", "LINEAR", "y", "z", params=[1, 1])
    if one_sided:
        with pytest.raises(LoadError, match="reads the blob 'y', which nothing makes"):
            import_network(made.spec)
    else:
        np.testing.assert_array_equal(run(made, x=[1, 2, 3])["z"], [4, 7, 10])


def test_a_branch_that_cannot_be_built_leaves_what_it_writes_unknown() -> None:
    made = builder({"c": (1,), "x": (3,)}, ("z",))
    made.add_copy("start", "x", "y")
    side = inside(made.add_branch("b", "c").branch.ifBranch)
    side.add_custom("swish", ["y"], ["new"], proto.NeuralNetwork_pb2.CustomLayerParams(className="Swish"))
    side.add_copy("assign", "new", "y")
    made.add_activation("after", "LINEAR", "y", "z", params=[1, 1])
    blobs = Blobs(made.spec.neuralNetwork, made.spec.description)
    assert blobs.shape("x") == (3,)
    assert blobs.shape("y") is None
    assert "class 'Swish'" in blobs.missing["z"]
    found = inspect_network(made.spec, Target.parse("iPhone 13"), "m")
    assert [row.op_type for row in found.ops] == ["copy", "branch", "custom", "copy", "activation"]
    assert any("whose code is not in the file" in note for note in found.notes)


def test_a_network_with_a_loop_is_read_the_same_twice() -> None:
    """The wrong version: what a loop carries is named by a counter that goes on, and `diff` shows that."""
    made = builder({"x": (1,)})
    counting(made, max_iterations=3)
    texts = [ane.to_text(import_network(made.spec).program) for _ in range(2)]
    assert texts[0] == texts[1]


# -- loops -------------------------------------------------------------------------------------------------


def counting(made: Any, **how: Any) -> Any:
    """A loop that doubles y each round, with x as its start; its body."""
    made.add_copy("start", "x", "y")
    layer = made.add_loop("l", **how)
    linear(inside(layer.loop.bodyNetwork), "y", "y", alpha=2)
    return layer.loop


@pytest.mark.parametrize("rounds", [1, 4])
def test_a_loop_runs_so_many_times(rounds: int) -> None:
    made = builder({"x": (2,)})
    counting(made, max_iterations=rounds)
    np.testing.assert_array_equal(run(made, x=[1, 3])["y"], [2**rounds, 3 * 2**rounds])


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_a_loop_runs_as_often_as_an_input_says(rounds: int) -> None:
    made = builder({"n": (1,), "x": (2,)})
    counting(made, input_name="n")
    np.testing.assert_array_equal(run(made, n=[rounds], x=[1, 3])["y"], [2**rounds, 3 * 2**rounds])


@pytest.mark.parametrize(("limit", "expected"), [(None, 128), (3, 8)])
def test_a_loop_runs_while_a_condition_holds(limit: int | None, expected: int) -> None:
    made = builder({"x": (1,)})
    loop = counting(made, max_iterations=limit)
    condition = inside(loop.conditionNetwork)
    condition.add_less_than("less", ["y"], "again", alpha=100)
    loop.conditionVar = "again"
    assert run(made, x=[1])["y"] == expected


def test_a_body_sees_what_the_condition_network_makes() -> None:
    made = builder({"x": (1,)})
    made.add_copy("start", "x", "y")
    loop = made.add_loop("l").loop
    condition = inside(loop.conditionNetwork)
    condition.add_activation("step", "LINEAR", "y", "step", params=[0.5, 1])
    condition.add_less_than("less", ["y"], "again", alpha=10)
    loop.conditionVar = "again"
    body = inside(loop.bodyNetwork)
    body.add_add_broadcastable("sum", ["y", "step"], "sum")
    body.add_copy("keep", "sum", "y")
    y = 1.0
    while y < 10:
        y += 0.5 * y + 1
    assert run(made, x=[1])["y"] == y


def test_a_round_may_set_a_constant() -> None:
    made = builder({"x": (1,)})
    made.add_copy("start", "x", "y")
    body = inside(made.add_loop("l", max_iterations=2).loop.bodyNetwork)
    body.add_load_constant_nd("five", "five", np.array([5.0]), (1,))
    body.add_copy("set", "five", "y")
    assert run(made, x=[1])["y"] == 5


def jumping(jump: str, behind: Callable[[Any], None] | None = None) -> Any:
    """Eight rounds of n += 1; if n = 5: jump; y += n."""
    made = builder({"x": (1,)}, ("y", "n"))
    made.add_copy("y0", "x", "y")
    made.add_copy("n0", "x", "n")
    body = inside(made.add_loop("l", max_iterations=8).loop.bodyNetwork)
    linear(body, "n", "n", beta=1)
    body.add_equal("is_5", ["n"], "is_5", alpha=5)
    hit = inside(body.add_branch("hit", "is_5").branch.ifBranch)
    if behind is not None:
        behind(hit)
    getattr(hit, f"add_loop_{jump}")(jump)
    body.add_add_broadcastable("sum", ["y", "n"], "sum")
    body.add_copy("keep", "sum", "y")
    return made


@pytest.mark.parametrize(("jump", "y", "n"), [("break", 1 + 2 + 3 + 4, 5), ("continue", sum(range(9)) - 5, 8)])
def test_a_jump_skips_the_rest(jump: str, y: int, n: int) -> None:
    found = run(jumping(jump), x=[0])
    assert [*found["y"], *found["n"]] == [y, n]


def test_what_stands_in_front_of_a_jump_happens() -> None:
    made = jumping("break", lambda hit: linear(hit, "y", "y", alpha=-1))
    assert run(made, x=[0])["y"] == -10


def test_a_loop_in_a_loop_has_its_own_jumps() -> None:
    made = builder({"x": (1,)})
    made.add_copy("start", "x", "y")
    outer = inside(made.add_loop("outer", max_iterations=3).loop.bodyNetwork)
    inner = inside(outer.add_loop("inner", max_iterations=5).loop.bodyNetwork)
    linear(inner, "y", "y", beta=1)
    inner.add_loop_break("break")
    linear(outer, "y", "y", alpha=10)
    assert run(made, x=[0])["y"] == ((0 + 1) * 10 + 1) * 10 * 10 + 10


def test_a_loop_that_only_a_break_ends() -> None:
    made = builder({"x": (1,)})
    loop = counting(made)
    body = inside(loop.bodyNetwork)
    body.add_greater_than("large", ["y"], "large", alpha=100)
    inside(body.add_branch("stop", "large").branch.ifBranch).add_loop_break("break")
    assert run(made, x=[3])["y"] == 192


@pytest.mark.parametrize("jump", ["break", "continue"])
def test_a_loop_is_saved_and_read_again(jump: str, tmp_path: Path) -> None:
    loaded = import_network(jumping(jump).spec)
    ane.save(loaded, tmp_path / "loop.mlpackage")
    x = {"x": np.zeros(1, np.float32)}
    before, after = ane.run(loaded, x), ane.run(tmp_path / "loop.mlpackage", x)
    assert [*after["y"], *after["n"]] == [*before["y"], *before["n"]]


@pytest.mark.parametrize(
    ("fill", "words"),
    [
        (lambda b: counting(b), "layer 'l' .*never ends"),
        (lambda b: b.add_loop_break("stop"), "layer 'stop' .*is outside a loop"),
        (lambda b: b.add_loop_continue("on"), "layer 'on' .*is outside a loop"),
    ],
)
def test_wrong_loops_are_explained(fill: Callable[[Any], Any], words: str) -> None:
    made = builder({"x": (1,)})
    fill(made)
    with pytest.raises(LoadError, match=words):
        import_network(made.spec)


def test_a_condition_that_nothing_makes_is_explained() -> None:
    made = builder({"x": (1,)})
    counting(made).conditionVar = "again"
    with pytest.raises(LoadError, match="layer 'l' .*condition from the blob 'again', which nothing makes"):
        import_network(made.spec)


def test_a_branch_on_many_numbers_is_explained() -> None:
    made = builder({"x": (3,)})
    layer = made.add_branch("b", "x")
    inside(layer.branch.ifBranch).add_copy("c", "x", "y")
    inside(layer.branch.elseBranch).add_copy("c", "x", "y")
    with pytest.raises(
        LoadError, match=r"layer 'b' \(branch\): takes one number, but its input is of shape \(3\)"
    ):
        import_network(made.spec)


# -- custom layers -----------------------------------------------------------------------------------------


def with_custom() -> Any:
    made = builder({"x": (2, 3)})
    params = proto.NeuralNetwork_pb2.CustomLayerParams(className="Swish")
    params.parameters["beta"].doubleValue = 2.0
    made.add_custom("swish", ["x"], ["y"], params)
    return made


def swish(ctx: Any, params: Any, inputs: list[Any]) -> Any:
    beta = np.float32(params.parameters["beta"].doubleValue)
    return mb.mul(x=inputs[0], y=mb.sigmoid(x=mb.mul(x=inputs[0], y=beta)))


def test_a_custom_layer_is_what_the_caller_makes_of_it() -> None:
    loaded = import_network(with_custom().spec, custom={"Swish": swish})
    x = np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3)
    found = ane.run(loaded, {"x": x})["y"]
    np.testing.assert_allclose(found, x / (1 + np.exp(-2 * x)), rtol=1e-6)
    assert {op.op_type for op in walk_ops(loaded.program)} >= {"sigmoid", "mul"}


def test_a_custom_layer_without_code_is_explained() -> None:
    with pytest.raises(
        LoadError, match=r"layer 'swish' \(custom\): .*class 'Swish'.*custom=\{'Swish': build\}"
    ):
        import_network(with_custom().spec)
    with pytest.raises(LoadError, match="did you mean 'swish'"):
        import_network(with_custom().spec, custom={"swish": swish})


def test_a_custom_layer_that_fails_is_named() -> None:
    def wrong(ctx: Any, params: Any, inputs: list[Any]) -> Any:
        raise ValueError("no beta")

    with pytest.raises(LoadError, match="layer 'swish' .*no beta"):
        import_network(with_custom().spec, custom={"Swish": wrong})


# -- all layer types ---------------------------------------------------------------------------------------

MISSING: dict[str, str] = {}
"""Layer type that cannot be built -> why."""


def test_every_layer_type_is_built_or_has_a_reason() -> None:
    kinds = proto.NeuralNetwork_pb2.NeuralNetworkLayer.DESCRIPTOR.oneofs_by_name["layer"].fields
    load_families()
    unknown = {f.name for f in kinds} - LAYERS.keys()
    print(f"{len(kinds)} layer types, not built: {sorted(unknown)}")
    assert unknown == MISSING.keys()
