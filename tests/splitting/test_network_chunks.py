"""Models cut at what the ANE cannot run: chunks of one kind each, together equal to the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands import app as cli
from anesurgery.errors import LoadError, SurgeryError, UnknownName
from anesurgery.files.protobuf import proto
from anesurgery.files.source import SourceFile
from anesurgery.mil import Var, ct, mb, quiet_host, types
from anesurgery.splitting import network_cut
from anesurgery.splitting.network_cut import cut_network
from anesurgery.splitting.phases import merged_phases, phases_of

with quiet_host():
    from coremltools.models.neural_network import NeuralNetworkBuilder

TARGET = "M1/macOS 14"
RNG = np.random.default_rng(8)


def builder(shape: tuple[int, ...], exact: bool, mode: str | None = None) -> Any:
    inputs = [("x", ct.models.datatypes.Array(*shape))]
    with quiet_host():
        return NeuralNetworkBuilder(inputs, [("y", None)], mode=mode, disable_rank5_shape_mapping=exact)


def conv(made: Any, name: str, source: str, target: str, channels: tuple[int, int] = (4, 4)) -> None:
    weights = RNG.standard_normal((3, 3, *channels)).astype(np.float32)
    made.add_convolution(
        name,
        channels[0],
        channels[1],
        3,
        3,
        1,
        1,
        "same",
        1,
        weights,
        None,
        False,
        input_name=source,
        output_name=target,
    )


def gathering(exact: bool) -> Any:
    """Two convolutions with layers between that do not run on the ANE, and a skip around these."""
    made = builder((1, 4, 6, 6) if exact else (4, 6, 6), exact)
    conv(made, "first", "x", "a")
    made.add_load_constant_nd("order", "order", np.array([3, 1, 0, 2], np.float32), (4,))
    made.add_gather("pick", ["a", "order"], "b", axis=-3)
    conv(made, "second", "b", "c")
    made.add_elementwise("sum", ["a", "c"], "y", "ADD")
    made.add_elementwise("unread", ["a", "c"], "z", "ADD")
    made.spec.description.output[0].type.multiArrayType.dataType = 65568
    return made.spec


def recurrent() -> Any:
    """The rank 5 mapping, where arrays have one axis or three, and a classifier at the end."""
    made = builder((6,), False, "classifier")
    eye = RNG.standard_normal((6, 6)).astype(np.float32)
    made.add_inner_product("in", eye, None, 6, 6, False, "x", "a")
    made.add_simple_rnn("turn", eye, eye, None, 6, 6, "TANH", ["a", "h"], ["b", "h2"])
    made.add_inner_product("out", eye[:3], None, 6, 3, False, "b", "s")
    made.add_softmax("scores", "s", "y")
    made.set_class_labels(["p", "q", "r"], "label", "y")
    state = made.spec.description.input.add(name="h")
    state.type.multiArrayType.shape.append(6)
    state.type.multiArrayType.dataType = 65568
    return made.spec


def saved(spec: Any, folder: Path) -> Path:
    path = folder / "whole.mlmodel"
    path.write_bytes(spec.SerializeToString())
    return path


@pytest.mark.one_of(6)
@pytest.mark.parametrize("build", [lambda: gathering(True), lambda: gathering(False), recurrent])
@pytest.mark.parametrize("name", ["chain", "chain.mlmodel", "chain.mlpackage"])
def test_chunks_of_a_network_are_networks_that_together_equal_it(
    build: Callable[[], Any], name: str, tmp_path: Path
) -> None:
    path = saved(build(), tmp_path)
    chain = ane.split(path, at="unsupported", target=TARGET)
    assert [c.spec.WhichOneof("Type").startswith("neuralNetwork") for c in chain.chunks] == [True] * 3
    assert [placed.ops for placed in chain.placed] == [1.0, 0.0, 1.0]
    stored = chain.save(tmp_path / name)
    values = ane.Predictor(path).sample(seed=1)
    assert ane.compare(path, stored, values, precision="fp32").psnr == np.inf
    found, expected = ane.run(stored, values), ane.run(path, values)
    assert list(found) == list(expected)
    parts = ane.inspect(stored, target=TARGET).parts.values()
    assert [part.residency["ops"] for part in parts] == [1.0, 0.0, 1.0]
    assert all(row.op_type != "add" or row.name != "unread" for part in parts for row in part.ops)


@pytest.mark.parametrize("how", [{"at": "unsupported"}, {"parts": 2}])
def test_the_file_is_read_once(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, opened = saved(gathering(True), tmp_path), list[Path]()
    read = SourceFile.read

    def counted(file: SourceFile) -> bytes:
        opened.append(file.path)
        return read(file)

    monkeypatch.setattr(SourceFile, "read", counted)
    chain = ane.split(path, **how, target=TARGET)
    assert chain.compared == "bit-identical to the whole model, as stored, on one random input"
    assert opened == [path]


def test_the_whole_is_proved_against_its_chunks(tmp_path: Path) -> None:
    path = saved(gathering(True), tmp_path)
    found = ane.compare(path, ane.split(path, at="unsupported"), prove=True)
    assert found.proof is not None
    assert found.proof.proved


def test_a_network_has_no_function_of_another_name(tmp_path: Path) -> None:
    path = saved(gathering(True), tmp_path)
    with pytest.raises(UnknownName, match="nonexistent"):
        ane.split(path, at="unsupported", function="nonexistent")


def test_what_passes_is_described_with_its_shape(tmp_path: Path) -> None:
    chain = ane.split(saved(gathering(False), tmp_path), at="unsupported", target=TARGET)
    assert [border.names for border in chain.borders] == [("a",), ("a", "b")]
    assert chain.borders[0].kinds == ("4x6x6xfp32",)
    assert chain.borders[0].bytes == 4 * 4 * 6 * 6
    assert "4x6x6xfp32" in str(chain)
    assert "1 gather" in chain.placed[1].elsewhere


def test_a_shape_that_a_chunk_would_read_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: axes of the rank 5 mapping in another order."""
    right = network_cut._NetworkCut._array_shape
    monkeypatch.setattr(network_cut._NetworkCut, "_array_shape", lambda self, name: right(self, name)[::-1])
    with pytest.raises(SurgeryError, match="'a' of shape 1x1x4x6x6 would enter chunk 2 as 1x1x6x6x4"):
        cut_network(gathering(False), ane.Target.parse(TARGET))


def with_custom() -> Any:
    made = builder((1, 4, 6, 6), True)
    conv(made, "first", "x", "a")
    params = proto.NeuralNetwork_pb2.CustomLayerParams(className="Mine")
    made.add_custom("mine", ["a"], ["b"], params)
    conv(made, "second", "b", "y", (8, 4))
    return made.spec


def test_a_custom_layer_stands_alone_once_its_shape_is_given(tmp_path: Path) -> None:
    path = saved(with_custom(), tmp_path)
    words = r"custom layers \('mine'\) is not in the file; give shapes=\{'b': \(C, H, W\)\}"
    with pytest.raises(SurgeryError, match=words):
        ane.split(path, at="unsupported", target=TARGET)
    chain = ane.split(path, at="unsupported", target=TARGET, shapes={"b": (1, 8, 6, 6)})
    assert [placed.elsewhere for placed in chain.placed] == [(), ("1 custom",), ()]
    folder = chain.save(tmp_path / "chain")
    assert len(ane.inspect(folder, target=TARGET).parts) == 3
    assert ane.run(folder / "chunk_3.mlmodel", {"b": np.ones((1, 8, 6, 6), np.float32)})["y"].shape == (
        1,
        4,
        6,
        6,
    )
    with pytest.raises(LoadError, match="custom layer of class 'Mine'"):
        ane.run(folder, {"x": np.ones((1, 4, 6, 6), np.float32)})
    given = [
        "split",
        str(path),
        "--at",
        "unsupported",
        "--shape",
        "b=1x8x6x6",
        "--out",
        str(tmp_path / "c.mlmodel"),
    ]
    result = CliRunner().invoke(cli.app, given)
    assert result.exit_code == 0, result.output
    assert [name.split("/")[-1] for name in ane.inspect(tmp_path / "c.mlmodel").parts] == [
        "chunk_1",
        "chunk_2",
        "chunk_3",
    ]


def test_a_shape_that_contradicts_the_next_layer_is_refused(tmp_path: Path) -> None:
    path = saved(with_custom(), tmp_path)
    with pytest.raises(SurgeryError, match="second"):
        ane.split(path, at="unsupported", target=TARGET, shapes={"b": (1, 7, 6, 6)})


def test_a_network_without_such_layers_is_not_cut(tmp_path: Path) -> None:
    made = builder((4, 6, 6), False)
    conv(made, "first", "x", "y")
    with pytest.raises(SurgeryError, match="every layer of the model can run on the ANE"):
        ane.split(saved(made.spec, tmp_path), at="unsupported", target=TARGET)


def looping() -> Any:
    """A blob that a loop overwrites, read on both sides."""
    made = builder((1, 4, 6, 6), True)
    conv(made, "first", "x", "a")
    made.add_copy("start", "a", "state")
    layer = made.add_loop("l", max_iterations=3)
    with quiet_host():
        body = NeuralNetworkBuilder(
            input_features=None, output_features=None, spec=None, nn_spec=layer.loop.bodyNetwork
        )
    body.add_unary("double", "state", "twice", "abs")
    body.add_copy("set", "twice", "state")
    conv(made, "second", "state", "y")
    return made.spec


def test_a_blob_that_a_loop_overwrites_stays_in_one_chunk(tmp_path: Path) -> None:
    path = saved(looping(), tmp_path)
    with pytest.raises(SurgeryError, match="'state' is overwritten, and the layers that use it must stay"):
        ane.split(path, at="unsupported", target=TARGET)


def test_a_constant_that_a_copy_overwrites_is_read_with_its_new_value(tmp_path: Path) -> None:
    made = builder((1, 4, 6, 6), True)
    conv(made, "first", "x", "a")
    for name, numbers in {"i": [2], "j": [5], "order": [3, 1, 0, 2]}.items():
        made.add_load_constant_nd(name, name, np.array(numbers, np.float32), (len(numbers),))
    made.add_add_broadcastable("old", ["a", "i"], "b")
    made.add_gather("pick", ["b", "order"], "c", axis=-3)
    made.add_copy("set", "j", "i")
    conv(made, "second", "c", "d")
    made.add_add_broadcastable("new", ["d", "i"], "y")
    assert_equals_its_chunks(made.spec, tmp_path)


def test_a_constant_may_be_an_output(tmp_path: Path) -> None:
    made = builder((4, 6, 6), False)
    made.add_load_constant("k", "k", np.arange(4, dtype=np.float32), (4, 1, 1))
    conv(made, "first", "x", "a")
    made.add_load_constant_nd("order", "order", np.array([3, 1, 0, 2], np.float32), (4,))
    made.add_gather("pick", ["a", "order"], "y", axis=-3)
    output = made.spec.description.output.add(name="k")
    output.type.multiArrayType.shape.extend([4, 1, 1])
    assert_equals_its_chunks(made.spec, tmp_path)


def assert_equals_its_chunks(spec: Any, folder: Path) -> None:
    for output in spec.description.output:
        output.type.multiArrayType.dataType = 65568
    path = saved(spec, folder)
    stored = ane.split(path, at="unsupported", target=TARGET).save(folder / "chain")
    values = ane.Predictor(path).sample(seed=1)
    found, expected = ane.run(stored, values), ane.run(path, values)
    assert list(found) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


def test_phases_are_few_and_in_order() -> None:
    before = [set(), {0}, {1}, {0}, {2, 3}]
    assert phases_of(before, [False, True, False, True, False]) == [0, 1, 2, 1, 2]
    assert merged_phases([0, 1, 2, 1, 2], [[1, 2]]) == [0, 1, 1, 1, 1]
    assert merged_phases([1, 3], []) == [0, 1]


def program() -> Any:
    """Layers with an op between that the ANE cannot run, whose mask of booleans no input can be."""

    @mb.program(input_specs=[mb.TensorSpec((1, 8, 1, 16), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def made(x: Var) -> Var:
        weight = RNG.standard_normal((8, 8, 1, 1)).astype(np.float16)
        h = mb.conv(x=mb.relu(x=x), weight=weight)
        h = mb.cumsum(x=h, axis=3, name="off")
        keep = mb.greater(x=h, y=np.float16(0))
        return mb.conv(x=mb.select(cond=keep, a=h, b=x), weight=weight, name="y")

    return made


def test_a_program_is_cut_before_and_after_what_stays_on_the_cpu(tmp_path: Path) -> None:
    path = ane.save(ane.load(program()), tmp_path / "whole.mlpackage")
    chain = ane.split(path, at="unsupported", target=TARGET)
    kinds = [{row.op_type for row in part.ops} for part in ane.inspect(chain, target=TARGET).parts.values()]
    assert [("conv" in kind, "cumsum" in kind) for kind in kinds] == [
        (True, False),
        (False, True),
        (True, False),
    ]
    values = ane.Predictor(path).sample(seed=2)
    assert ane.compare(path, chain.save(tmp_path / "chain"), values, precision="fp16").psnr == np.inf
