"""Models cut into chunks: the chain computes what the whole does, within the limit, and passes little on."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from classifiers import classifier
from closeness import assert_close
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands import app as cli
from anesurgery.errors import LoadError, SurgeryError, UnknownName
from anesurgery.files.interface import new_spec
from anesurgery.files.package import Loaded
from anesurgery.files.sequence import Chain
from anesurgery.files.weights import WeightWriter
from anesurgery.interpret import Predictor
from anesurgery.interpret.arithmetic import constant_memory
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.splitting import split

WIDTH, LAYERS = 64, 6
RNG = np.random.default_rng(3)
WEIGHTS = [RNG.standard_normal((WIDTH, WIDTH)).astype(np.float16) / 8 for _ in range(LAYERS)]
LAYER = WEIGHTS[0].nbytes


def stack(opset: Any = ct.target.iOS17) -> Program:
    """Layers of equal weight on a residual stream, each masked by a tensor that is made of an input."""

    @mb.program(input_specs=[mb.TensorSpec((1, 8, WIDTH)), mb.TensorSpec((1, 8, 1))], opset_version=opset)
    def program(x: Var, keep: Var) -> Var:
        mask = mb.sub(x=mb.cast(x=keep, dtype="fp16"), y=np.float16(1), name="mask")
        h = mb.cast(x=x, dtype="fp16")
        for number, weight in enumerate(WEIGHTS):
            wide = mb.concat(values=[h, h, h], axis=-1)  # more bytes inside a layer than between two
            inner = mb.relu(x=mb.add(x=wide, y=mask))
            part = mb.slice_by_index(x=inner, begin=[0, 0, 0], end=[1, 8, WIDTH])
            h = mb.add(x=h, y=mb.linear(x=part, weight=weight), name=f"layer_{number}")
        return mb.cast(x=h, dtype="fp32", name="y")

    return program


INPUTS = {"x": RNG.standard_normal((1, 8, WIDTH)).astype(np.float32), "keep": np.ones((1, 8, 1), np.float32)}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stack")
    return ane.save(ane.load(stack()), folder / "stack.mlpackage")


def test_chunks_of_even_weight_compute_what_the_whole_does(package: Path) -> None:
    chain = ane.split(package, 3)
    assert len(set(chain.weights)) == 1
    assert 2 * LAYER <= chain.weights[0] < 2.1 * LAYER  # with the bias of zeros
    assert [border.names for border in chain.borders] == [("layer_1",), ("layer_3",)]
    assert ane.compare(package, chain, INPUTS, precision="fp16").psnr == np.inf
    found, expected = Predictor(chain)(INPUTS), ane.run(package, INPUTS)
    assert_close(found["y"], expected["y"], rtol=2e-3)


def test_the_mask_is_made_again_and_not_passed_on(package: Path) -> None:
    chain = ane.split(package, 2)
    assert [sum(op.op_type == "sub" for op in walk_ops(c.program)) for c in chain.chunks] == [1, 1]
    assert all("mask" not in border.names for border in chain.borders)


@pytest.mark.one_of(2)
@pytest.mark.parametrize(("limit", "count"), [(1.1 * LAYER, 6), (2.5 * LAYER, 3), (6.1 * LAYER, 1)])
def test_as_few_chunks_as_the_limit_needs(package: Path, limit: float, count: int) -> None:
    chain = ane.split(package, max_bytes=int(limit))
    assert len(chain.chunks) == count
    assert max(chain.weights) <= limit


def test_a_limit_that_one_op_exceeds_is_an_error_that_names_it(package: Path) -> None:
    with pytest.raises(
        SurgeryError, match="need 8.32 kB of weights, and cannot be cut between; the limit is 1 kB"
    ):
        ane.split(package, max_bytes="1 KB")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "give either parts=N or max_bytes"),
        ({"parts": 2, "max_bytes": 5}, "give either"),
        ({"parts": 1}, "2 or more"),
        ({"parts": 99}, "parts at most, and not into 99"),
        ({"max_bytes": "much"}, "is not a size"),
        ({"max_bytes": 0}, "is not a size"),
        ({"parts": 2, "at": "unsupported"}, "give either"),
        ({"at": "everywhere"}, "everywhere"),
        ({"parts": 2, "balance": "time"}, "time"),
        ({"max_bytes": "1 MB", "balance": "estimate"}, "for parts=N"),
        ({"parts": 2, "shapes": {"x": (1,)}}, "for at='unsupported'"),
        ({"at": "unsupported", "shapes": {"x": (1,)}}, "for the custom layers of a neural network"),
    ],
)
def test_wrong_options(package: Path, given: dict[str, Any], reason: str) -> None:
    with pytest.raises(SurgeryError, match=reason):
        ane.split(package, **given)


@pytest.mark.parametrize("name", ["chain", "chain.mlpackage"])
def test_a_chain_on_disk_is_one_model(package: Path, tmp_path: Path, name: str) -> None:
    chain = ane.split(package, 3)
    saved = chain.save(tmp_path / name)
    assert ane.compare(package, saved, INPUTS, precision="fp16").psnr == np.inf
    np.testing.assert_array_equal(ane.run(saved, INPUTS)["y"], Predictor(chain)(INPUTS)["y"])
    parts = ane.inspect(saved, target="M1/macOS 14").parts
    assert len(parts) == 3
    assert sum(len(p.ops) for p in parts.values()) >= len(ane.inspect(package, target="M1/macOS 14").ops)


def test_coremltools_loads_every_chunk(package: Path, tmp_path: Path) -> None:
    folder = ane.split(package, 2).save(tmp_path / "chain")
    for file in sorted(folder.glob("*.mlpackage")):
        assert ct.models.MLModel(str(file), skip_model_load=True).get_spec().mlProgram.functions


def test_halves_pass_as_floats_where_the_opset_has_no_half_inputs(tmp_path: Path) -> None:
    old = ane.save(ane.load(stack(ct.target.iOS15)), tmp_path / "old.mlpackage")
    chain = ane.split(old, 2)
    kinds = [f.type.multiArrayType.dataType for f in chain.chunks[1].spec.description.input]
    assert set(kinds) == {ct.proto.FeatureTypes_pb2.ArrayFeatureType.FLOAT32}
    assert chain.borders[0].names == ("layer_2",)
    assert ane.compare(old, chain, INPUTS, precision="fp16").psnr == np.inf


def test_saving_refuses_what_would_be_lost(package: Path, tmp_path: Path) -> None:
    chain = ane.split(package, 2)
    (tmp_path / "mine").mkdir()
    with pytest.raises(LoadError, match="is not a folder of chunks"):
        chain.save(tmp_path / "mine", overwrite=True)
    with pytest.raises(LoadError):
        chain.save(package / "chunks")
    with pytest.raises(LoadError, match="let it end in .mlpackage"):
        chain.save(tmp_path / "chain.mlmodel")
    chain.save(tmp_path / "chain")
    with pytest.raises(LoadError, match="exists"):
        chain.save(tmp_path / "chain")
    ane.split(package, 3).save(tmp_path / "chain", overwrite=True)
    assert len(list((tmp_path / "chain").glob("*.mlpackage"))) == 3


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "names a place elsewhere": lambda c: c | {"models": ["../stack.mlpackage"]},
    "names a missing model": lambda c: c | {"models": ["none.mlpackage"]},
    "another format": lambda c: c | {"format": "chain"},
    "no models": lambda c: c | {"models": []},
    "an unknown output": lambda c: c | {"outputs": ["z"]},
    "numbers": lambda c: c | {"inputs": [1]},
    "a list": lambda c: [c],
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_manifest_is_an_error(package: Path, tmp_path: Path, name: str) -> None:
    folder = ane.split(package, 2).save(tmp_path / "chain")
    file = folder / "chain.json"
    file.write_text(json.dumps(DAMAGE[name](json.loads(file.read_text()))))
    with pytest.raises(LoadError):
        ane.run(folder, INPUTS)


def counter() -> Loaded:
    """Two states, each read and written in one place, with weights before, between and after them."""

    @mb.program(
        input_specs=[mb.TensorSpec((4, 8), types.fp16), mb.StateTensorSpec((4, 8), types.fp16),
                     mb.StateTensorSpec((4, 8), types.fp16)],
        opset_version=ct.target.iOS18,
    )  # fmt: skip
    def program(x: Var, first: Var, second: Var) -> Var:
        for number, state in enumerate((first, second)):
            x = mb.linear(x=x, weight=np.eye(8, dtype=np.float16) * np.float16(number + 2))
            held = mb.add(x=mb.read_state(input=state), y=x)
            x = mb.coreml_update_state(state=state, value=held)
        return mb.relu(x=x, name="y")

    return Loaded(program, new_spec(program, 9))


def test_a_state_stays_in_one_chunk_and_lives_between_calls() -> None:
    whole = counter()
    chain = ane.split(whole, 4)
    inputs = [c.program.functions["main"].inputs for c in chain.chunks]
    states = [name for held in inputs for name, var in held.items() if types.is_state(var.sym_type)]
    assert states == ["first", "second"]
    one, many = Predictor(whole, precision="fp16"), Predictor(chain, precision="fp16")
    kept, shared = one.make_state(), many.make_state()
    for step in range(3):
        x = {"x": np.full((4, 8), 0.5 + step, np.float16)}
        np.testing.assert_array_equal(one(x, state=kept)["y"], many(x, state=shared)["y"])


def test_merged_functions_share_weights_and_can_be_taken_out_again(package: Path, tmp_path: Path) -> None:
    made = ane.merge({"one": package, "two": package}, tmp_path / "both.mlpackage", default="two")
    weights = [p / "Data/com.apple.CoreML/weights/weight.bin" for p in (package, made)]
    assert weights[0].stat().st_size == weights[1].stat().st_size
    spec = ane.load(made).spec
    assert [f.name for f in spec.description.functions] == ["one", "two"]
    assert spec.description.defaultFunctionName == "two"
    taken = ane.extract(made, "one", tmp_path / "one.mlpackage")
    for function in ("one", "two"):
        np.testing.assert_array_equal(
            ane.run(made, INPUTS, function=function)["y"], ane.run(taken, INPUTS)["y"]
        )
    assert ane.compare(package, taken, INPUTS, precision="fp16").psnr == np.inf


def nearly(path: Path, target: Path, at: int) -> Path:
    """A copy of a package in which one byte of the first weight is another."""
    shutil.copytree(path, target)
    loaded = ane.load(target)
    assert loaded.weights is not None
    blob = next(iter(loaded.weights._blobs.values()))
    with (target / "Data/com.apple.CoreML/weights/weight.bin").open("r+b") as file:
        file.seek(blob.data + at)
        byte = file.read(1)
        file.seek(blob.data + at)
        file.write(bytes([byte[0] ^ 1]))
    return target


@pytest.mark.quick_cases("0", "8191")
@pytest.mark.one_of(2)
@pytest.mark.parametrize("at", [0, LAYER // 4, LAYER // 2, LAYER - 1])
def test_weights_that_differ_in_one_byte_are_not_shared(package: Path, tmp_path: Path, at: int) -> None:
    other = nearly(package, tmp_path / "other.mlpackage", at)
    made = ane.merge({"one": package, "two": other, "three": package}, tmp_path / "all.mlpackage")
    sizes = [(p / "Data/com.apple.CoreML/weights/weight.bin").stat().st_size for p in (package, made)]
    assert 0 < sizes[1] - sizes[0] <= LAYER + 128  # one weight more, and its place
    for name, path in (("one", package), ("two", other), ("three", package)):
        np.testing.assert_array_equal(ane.run(made, INPUTS, function=name)["y"], ane.run(path, INPUTS)["y"])


def test_weights_are_compared_and_not_only_sampled(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong version: what agrees in a few bytes counts as equal."""
    other = nearly(package, tmp_path / "other.mlpackage", LAYER // 4)
    monkeypatch.setattr(WeightWriter, "_is_written_at", lambda self, start, size, read: True)
    made = ane.merge({"one": package, "two": other}, tmp_path / "both.mlpackage")
    found = ane.run(made, INPUTS, function="two")["y"]
    assert not np.array_equal(found, ane.run(other, INPUTS)["y"])


def test_a_function_of_several_is_cut_by_name(package: Path, tmp_path: Path) -> None:
    made = ane.merge({"one": package, "two": package}, tmp_path / "both.mlpackage")
    chain = ane.split(made, 2, function="two")
    assert isinstance(chain, Chain)
    assert ane.compare(package, chain, INPUTS, precision="fp16").psnr == np.inf


def two_functions(package: Path, folder: Path) -> Path:
    return ane.merge({"one": package, "two": package}, folder / "both.mlpackage")


def test_functions_are_cut_at_the_same_places_and_share_weights(package: Path, tmp_path: Path) -> None:
    chain = ane.split(two_functions(package, tmp_path), max_bytes=int(2.5 * LAYER))
    alone = ane.split(package, max_bytes=int(2.5 * LAYER))
    assert chain.weights == alone.weights  # each weight once
    saved = chain.save(tmp_path / "chain")
    sizes = [sorted(p.stat().st_size for p in c.save(tmp_path / str(i)).rglob("weight.bin")) for i, c in
             enumerate((chain, alone))]  # fmt: skip
    assert sizes[0] == sizes[1]
    expected = ane.run(package, INPUTS, precision="fp16")["y"]
    for function in ("one", "two"):
        for made in (chain, saved):
            found = ane.run(made, INPUTS, function=function, precision="fp16")["y"]
            np.testing.assert_array_equal(found, expected)
    with pytest.raises(UnknownName, match="function"):
        ane.run(saved, INPUTS, function="three")
    with pytest.raises(LoadError, match="a pipeline has one function; give a folder"):
        chain.save(tmp_path / "chain.mlpackage")


def test_a_damaged_manifest_of_functions_is_an_error(package: Path, tmp_path: Path) -> None:
    folder = ane.split(two_functions(package, tmp_path), 2).save(tmp_path / "chain")
    file = folder / "chain.json"
    content = json.loads(file.read_text())
    for wrong in (3, {"one": {"inputs": ["x"]}}, {"one": {"inputs": ["x"], "outputs": ["z"]}}):
        file.write_text(json.dumps(content | {"functions": wrong}))
        with pytest.raises(LoadError, match="chain.json"):
            ane.run(folder, INPUTS)


def test_a_state_that_functions_use_in_different_chunks_is_an_error(tmp_path: Path) -> None:
    whole = counter()

    @mb.program(
        input_specs=[mb.TensorSpec((4, 8), types.fp16), mb.StateTensorSpec((4, 8), types.fp16),
                     mb.StateTensorSpec((4, 8), types.fp16)],
        opset_version=ct.target.iOS18,
    )  # fmt: skip
    def turned(x: Var, first: Var, second: Var) -> Var:
        for state, name in ((second, "coreml_update_state_0"), (first, "coreml_update_state_1")):
            held = mb.add(x=mb.read_state(input=state), y=mb.linear(x=x, weight=np.eye(8, dtype=np.float16)))
            x = mb.coreml_update_state(state=state, value=held, name=name)
        return mb.relu(x=x, name="y")

    made = ane.merge({"a": whole, "b": Loaded(turned, new_spec(turned, 9))}, tmp_path / "both.mlpackage")
    with pytest.raises(SurgeryError, match=r"cut the functions one by one \(function=\)"):
        ane.split(made, 2)


def test_merge_and_extract_keep_which_output_is_the_label(tmp_path: Path) -> None:
    given = classifier(tmp_path)
    both = ane.merge({"a": given, "b": given}, tmp_path / "both.mlpackage")
    ports = {f.name: f.predictedFeatureName for f in ane.load(both).spec.description.functions}
    assert ports == {"a": "classLabel", "b": "classLabel"}
    one = ane.load(ane.extract(both, "a", tmp_path / "one.mlpackage")).spec.description
    assert one.predictedProbabilitiesName == "classLabel_probs"


def test_a_program_of_a_classifier_can_be_saved(tmp_path: Path) -> None:
    """The wrong version: coremltools "only supports fp32 and int32 outputs"."""
    given = classifier(tmp_path)
    saved = ane.save(ane.load(ane.load(given).program), tmp_path / "saved.mlpackage")
    before, after = (ane.load(path).spec.description for path in (given, saved))
    assert after.output == before.output
    assert after.predictedFeatureName == before.predictedFeatureName


@pytest.mark.parametrize("functions", [1, 2])
def test_the_last_chunk_of_a_classifier_says_which_output_is_the_label(functions: int, tmp_path: Path) -> None:
    whole = classifier(tmp_path)
    if functions > 1:
        whole = ane.merge({"a": whole, "b": whole}, tmp_path / "both.mlpackage")
    first, last = (c.spec.description for c in ane.split(whole, 2, compare=False).chunks)
    for before, after in zip(first.functions or [first], last.functions or [last], strict=True):
        assert (before.predictedFeatureName, before.predictedProbabilitiesName) == ("", "")
        assert after.predictedFeatureName == "classLabel"
        assert after.predictedProbabilitiesName == "classLabel_probs"


def test_merge_and_extract_say_what_is_wrong(package: Path, tmp_path: Path) -> None:
    with pytest.raises(SurgeryError, match="merge takes two models or more"):
        ane.merge({"one": package}, tmp_path / "out.mlpackage")
    with pytest.raises(SurgeryError, match="unknown default function .three.; known: one, two"):
        ane.merge({"one": package, "two": package}, tmp_path / "out.mlpackage", default="three")
    with pytest.raises(UnknownName):
        ane.extract(package, "prefill", tmp_path / "out.mlpackage")
    assert not (tmp_path / "out.mlpackage").exists()


def test_the_commands(package: Path, tmp_path: Path) -> None:
    folder, both, one = tmp_path / "chain", tmp_path / "both.mlpackage", tmp_path / "one.mlpackage"

    def call(*words: object) -> Any:
        return CliRunner().invoke(cli.app, list(map(str, words)))

    made = call("split", package, "--parts", 3, "-o", folder, "--json")
    assert made.exit_code == 0, made.output
    said = json.loads(made.output)
    assert [chunk["weights"] > 2 * LAYER for chunk in said["chunks"]] == [True] * 3
    assert said["borders"][0] == [{"name": "layer_1", "type": "tensor<fp16, [1, 8, 64]>", "bytes": 1024}]
    shown = call("split", package, "--parts", 2, "-o", tmp_path / "two").output
    assert "2 chunks, 1.02 kB between them" in shown
    assert "Chain(" not in shown
    assert call("merge", f"a={package}", f"b={package}", "-o", both).exit_code == 0
    assert call("extract", both, "b", "-o", one).exit_code == 0
    assert one.is_dir()
    with pytest.raises(SurgeryError, match="is not NAME=MODEL"):
        CliRunner().invoke(cli.app, ["merge", str(package), "-o", str(both)], catch_exceptions=False)


def test_the_table_says_what_passes(package: Path) -> None:
    text = str(ane.split(package, 2))
    assert re.search(r"1 +layer_2 +1x8x64xfp16 +1.02 kB", text)
    assert "2 chunks, 1.02 kB between them" in text


def uneven() -> Program:
    """Long rows first, short ones with as many weights later: even bytes are uneven time."""
    weights = [RNG.standard_normal((256, 256, 1, 1)).astype(np.float16) / 16 for _ in range(6)]

    @mb.program(input_specs=[mb.TensorSpec((1, 256, 64, 64), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        for number, weight in enumerate(weights):
            x = mb.conv(x=x, weight=weight, name=f"conv_{number}")
            if number == 1:
                x = mb.max_pool(x=x, kernel_sizes=[4, 4], strides=[4, 4], pad_type="valid")
        return mb.relu(x=x, name="y")

    return program


def test_chunks_of_even_estimate_are_more_even_than_those_of_even_bytes() -> None:
    loaded = ane.load(uneven())
    options: dict[str, Any] = {"target": "M4/macOS 15"}
    chains = [ane.split(loaded, 2, balance=how, **options) for how in ("bytes", "estimate")]
    slowest = [max(placed.estimate or 0.0 for placed in chain.placed) for chain in chains]
    assert slowest[1] < 0.95 * slowest[0]
    assert len(set(chains[0].weights)) == 1
    assert ane.compare(loaded, chains[1], precision="fp16").psnr == np.inf
    first = chains[1].placed[0]
    assert f"{first.ops:.0%} of ops" in str(chains[1])


@pytest.mark.slow
def test_chunks_equal_a_whole_whose_weights_find_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are kept as fp32 and weights that are not are multiplied in one order."""
    wide, narrow = 6400, 1600
    weights = [RNG.standard_normal(shape).astype(np.float16) / 60 for shape in ((wide, narrow), (narrow, wide))]

    @mb.program(input_specs=[mb.TensorSpec((64, narrow), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        return mb.relu(x=mb.linear(x=mb.linear(x=x, weight=weights[0]), weight=weights[1]), name="y")

    loaded = ane.load(program)
    monkeypatch.setattr(constant_memory, "CACHE_LIMIT", 5 * wide * narrow)  # of one, and not of two
    assert ane.compare(loaded, ane.split(loaded, 2), precision="fp16").psnr == np.inf


def masked(build: Callable[[Var], Var]) -> Program:
    """Layers that all read one mask, which is made of an input and a table larger than the mask."""
    layers = [weight[:32, :32] for weight in WEIGHTS]

    @mb.program(
        input_specs=[mb.TensorSpec((4, 32), types.fp16), mb.TensorSpec((1,), types.int32)],
        opset_version=ct.target.iOS18,
    )
    def program(x: Var, place: Var) -> Var:
        keep = build(place)
        for weight in layers:
            x = mb.select(cond=keep, a=mb.linear(x=x, weight=weight), b=np.zeros((4, 32), np.float16))
        return mb.relu(x=x, name="y")

    return program


def test_a_mask_of_booleans_is_made_again_where_it_is_read() -> None:
    """It cannot be passed: the model would be in one piece."""
    whole = ane.load(masked(lambda place: mb.less(x=np.arange(32, dtype=np.int32), y=place)))
    chain = ane.split(whole, 3)
    assert [sum(op.op_type == "less" for op in walk_ops(c.program)) for c in chain.chunks] == [1, 1, 1]
    assert [len(border.names) for border in chain.borders] == [1, 1]
    values: dict[str, Any] = {"x": np.ones((4, 32), np.float16), "place": np.array([20], np.int32)}
    assert ane.compare(whole, chain, values, precision="fp16").psnr == np.inf


def test_random_numbers_are_not_drawn_again() -> None:
    def keep(place: Var) -> Var:
        return mb.greater(x=mb.random_uniform(shape=np.array([4, 32], np.int32), seed=1), y=np.float32(0.5))

    chain = ane.split(ane.load(masked(keep)), 3)
    drawn = [sum(op.op_type == "random_uniform" for op in walk_ops(c.program)) for c in chain.chunks]
    assert sum(drawn) == 1


def test_values_that_are_no_tensors_stay_in_one_chunk() -> None:
    @mb.program(input_specs=[mb.TensorSpec((4, 8))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        rows = mb.make_list(init_length=4, dtype="fp32", elem_shape=(8,))
        rows = mb.list_write(ls=rows, index=0, value=mb.gather(x=mb.relu(x=x), indices=1, axis=0))
        row = mb.list_read(ls=rows, index=0)
        return mb.relu(x=mb.linear(x=mb.relu(x=row), weight=WEIGHTS[0][:8, :8].astype(np.float32)), name="y")

    chain = ane.split(ane.load(program), 2)
    lists = [{op.op_type for op in walk_ops(c.program)} & {"make_list", "list_read"} for c in chain.chunks]
    assert sorted(map(len, lists)) == [0, 2]


PROVED: dict[str, Callable[[], Any]] = {
    "masks made again": stack,
    "halves that pass as floats": lambda: stack(ct.target.iOS15),
    "states": counter,
}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", PROVED)
def test_a_chain_is_proved_against_the_whole(name: str, tmp_path: Path) -> None:
    whole = PROVED[name]()
    chain = ane.split(whole, 3)
    chain.save(tmp_path / "chain")
    found = ane.compare(whole, tmp_path / "chain", prove=True, precision="fp16")
    assert found.proof is not None
    assert found.proof.proved
    assert found.proof.words.startswith("bit for bit")
    if name == "states":
        assert {"state first", "state second"} <= set(found.proof.outputs)


def test_a_chain_with_another_number_is_not_proved() -> None:
    """The wrong version: a weight of the last chunk is off by a bit, where the sampled numbers are small."""
    whole = ane.load(stack())
    chain = ane.split(whole, 2)
    linear = next(op for op in walk_ops(chain.chunks[1].program) if op.op_type == "linear")
    held = np.array(linear.weight.val)
    held.view(np.uint16)[3, 5] ^= 1
    linear.weight._sym_val.val = held
    found = ane.compare(whole, chain, prove=True)
    assert found.proof is not None
    assert not found.proof.proved


def test_a_chain_that_writes_another_number_to_a_state_is_not_proved() -> None:
    """The wrong version: what the second state gets differs where the output may still be the same."""
    whole = counter()
    chain = ane.split(whole, 4)
    linears = [op for chunk in chain.chunks for op in walk_ops(chunk.program) if op.op_type == "linear"]
    held = np.array(linears[-1].weight.val)
    held[0, 1] = 1
    linears[-1].weight._sym_val.val = held
    found = ane.compare(whole, chain, prove=True)
    assert found.proof is not None
    assert not found.proof.proved
    assert found.proof.outputs["state second"] == "not matched"
    assert found.proof.outputs["state first"] == "bit for bit"


SAVE = """
import sys, anesurgery as ane
source, target = sys.argv[1:]
chain = ane.split(source, 3)
print("ready", flush=True)
while True:
    chain.save(target, overwrite=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain", "chain.mlpackage"])
def test_a_kill_while_saving_leaves_the_old_chain_or_the_new_one(
    package: Path, tmp_path: Path, name: str
) -> None:
    target = tmp_path / name
    for wait in (0.0, 0.013, 0.041):
        ane.split(package, 2).save(target, overwrite=True)
        command = [sys.executable, "-c", SAVE, str(package), str(target)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(wait)
        process.kill()
        process.wait()
        process.stdout.close()
        assert ane.compare(package, target, INPUTS, precision="fp16").psnr == np.inf
        ane.split(package, 2).save(target, overwrite=True)
        assert [p.name for p in tmp_path.iterdir()] == [name]  # what the dead one left is gone


def moved_then_summed() -> Program:
    """A transposed picture, convolved and summed, in fp16."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((32, 32, 3, 3)).astype(np.float16)

    @mb.program(input_specs=[mb.TensorSpec((1, 24, 24, 32), dtype=types.fp16)], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        first = mb.relu(x=mb.transpose(x=x, perm=[0, 3, 1, 2]), name="first")
        second = mb.conv(x=first, weight=weight, pad_type="same", name="second")
        third = mb.softmax(x=mb.mul(x=second, y=np.float16(1.1)), axis=1, name="third")
        return mb.reduce_sum(x=third, axes=[2, 3], name="y")

    return program


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_sums_do_not_depend_on_how_a_value_lies_in_memory(precision: str) -> None:
    """The wrong version: a convolution of a transposed value sums in another order than one of its copy."""
    whole = moved_then_summed()
    chain = ane.split(whole, 2)
    assert ane.compare(whole, chain, precision=precision, gate=np.inf).ok
    found = ane.run(whole, {"x": X}, precision=precision, outputs=["first", "second"])

    @mb.program(input_specs=[mb.TensorSpec((1, 32, 24, 24), dtype=types.fp16)], opset_version=ct.target.iOS16)
    def rest(first: Var) -> Var:
        weight = next(op for op in walk_ops(whole) if op.op_type == "conv").weight.val
        return mb.conv(x=first, weight=weight, pad_type="same", name="second")

    again = ane.run(rest, {"first": np.ascontiguousarray(found["first"])}, precision=precision)
    np.testing.assert_array_equal(again["second"], found["second"])


X = np.random.default_rng(1).standard_normal((1, 24, 24, 32)).astype(np.float16)


def test_nothing_is_rounded_at_a_border_in_fp32() -> None:
    """The wrong version: what passes is rounded to fp16, and 25 of 262,144 labels of a real model differ."""

    @mb.program(input_specs=[mb.TensorSpec((1, 8), dtype=types.fp16)], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        weight = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float16)
        return mb.linear(x=mb.tanh(x=mb.linear(x=x, weight=weight)), weight=weight.T.copy(), name="y")

    assert ane.compare(program, ane.split(program, 2), gate=np.inf).ok


def test_a_cut_says_what_a_run_beside_the_whole_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    program = moved_then_summed()
    said = "bit-identical to the whole model, as stored, on one random input"
    chain = ane.split(program, 2)
    assert chain.compared == said
    assert said in str(chain)
    assert ane.split(program, 2, compare=False).compared == ""
    monkeypatch.setattr(split, "MOST_FLOP", 1000)
    assert re.match(r"not compared with the whole: \d+ billion operations", ane.split(program, 2).compared)
    monkeypatch.setattr(split, "MOST_BYTES", 10)
    assert re.match(r"not compared with the whole: 18.4 kB of weights", ane.split(program, 2).compared)


def test_a_cut_that_differs_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    program = moved_then_summed()
    chain = ane.split(program, 2)
    (conv,) = [op for c in chain.chunks for op in walk_ops(c.program) if op.op_type == "conv"]
    conv.weight.val[0] += 1  # the weights are shared with the whole, which is made anew
    said = split.comparison_words(ane.load(moved_then_summed()), chain, None)
    assert said.startswith("NOT equal to the whole model, as stored, on one random input: worst PSNR")


@pytest.mark.slow
def test_a_real_model_with_labels_is_equal_in_chunks(corpus: Path) -> None:
    path = corpus / "mlc_mosaic.mlpackage"
    chain = ane.split(path, 2)
    assert chain.compared == "bit-identical to the whole model, as stored, on one random input"
    assert ane.compare(path, chain, gate=np.inf).ok
