"""A model at several sizes computes at each what the model computes, and its weights are stored once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import get_new_symbol
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands.app import app
from anesurgery.files.size_index import read
from anesurgery.loading import load
from anesurgery.mil import Program, Var, ct, mb, types

ANY: Any = ane
LENGTHS = (3, 5, 8, 16, 24, 32)
SHAPES = {"x": [(1, n, 64) for n in LENGTHS]}
WEIGHT = np.random.default_rng(0).standard_normal((256, 64)).astype(np.float16) / 8


def tagger(length: int | None, opset: Any = ct.target.iOS18) -> Program:
    """Two products, positions of the length at hand, a softmax over the positions."""
    size = get_new_symbol() if length is None else length

    @mb.program(input_specs=[mb.TensorSpec((1, size, 64), dtype=types.fp16)], opset_version=opset)
    def program(x: Var) -> Var:
        count = mb.gather(x=mb.shape(x=x), indices=np.int32(1), axis=0)
        places = mb.range_1d(start=np.int32(0), end=count, step=np.int32(1))
        moved = mb.add(x=x, y=mb.expand_dims(x=mb.cast(x=places, dtype="fp16"), axes=[1]))
        wide = mb.relu(x=mb.linear(x=moved, weight=WEIGHT))
        narrow = mb.linear(x=wide, weight=np.ascontiguousarray(WEIGHT.T))
        return mb.softmax(x=narrow, axis=1, name="y")

    return program


def sample(length: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(length).standard_normal((1, length, 64)).astype(np.float16)}


def weight_bytes(package: Path) -> int:
    return next(package.rglob("weight.bin")).stat().st_size


@pytest.mark.one_of(2)
@pytest.mark.parametrize("opset", [ct.target.iOS18, ct.target.iOS17], ids=["iOS18", "iOS17"])
def test_each_size_is_the_model_at_that_size(opset: Any, tmp_path: Path) -> None:
    """Bit for bit in fp16 what the model built at the size gives; 2 % more weights than one size at most."""
    folder = ane.sizes(tagger(None, opset), SHAPES).save(tmp_path / "sized")
    packages = sorted(folder.glob("*.mlpackage"))
    assert len(packages) == (1 if opset == ct.target.iOS18 else 6)
    for length in LENGTHS:
        expected = ane.run(tagger(length, opset), sample(length), precision="fp16")["y"]
        np.testing.assert_array_equal(ane.run(folder, sample(length), precision="fp16")["y"], expected)
    one = ane.save(load(tagger(LENGTHS[-1], opset)), tmp_path / "one.mlpackage")
    assert all(weight_bytes(package) <= 1.02 * weight_bytes(one) for package in packages)
    assert len({next(package.rglob("weight.bin")).stat().st_ino for package in packages}) == 1


def test_without_links_the_weights_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: Any) -> None:
        raise OSError("no links here")

    sized = ane.sizes(tagger(None, ct.target.iOS17), {"x": [(1, 3, 64), (1, 5, 64)]})
    monkeypatch.setattr(os, "link", no_links)
    folder = sized.save(tmp_path / "sized")
    first, second = (path.read_bytes() for path in sorted(folder.rglob("weight.bin")))
    assert first == second
    assert ane.run(folder, sample(5))["y"].shape == (1, 5, 64)


def test_sizes_are_ordered_named_and_listed(tmp_path: Path) -> None:
    sized = ane.sizes(tagger(None), {"x": [(1, 8, 64), (1, 3, 64)]})
    lines = str(sized).splitlines()
    assert lines[:2] == ["size_3: x 1x3x64", "size_8: x 1x8x64"]
    assert lines[2] == f"between sizes: not padded: {sized.padding.why_not}"
    folder = sized.save(tmp_path / "sized")
    whole = json.loads((folder / "sizes.json").read_text())
    assert (whole["format"], whole["version"]) == ("anesurgery sizes", 4)
    row = {"name": "size_3", "function": "size_3", "package": "model.mlpackage", "inputs": {"x": [1, 3, 64]}}
    assert whole["sizes"][0] == row
    assert ane.run(folder, sample(8), function="size_8")["y"].shape == (1, 8, 64)
    found = sized.inspect("M1/macOS 14")
    assert {name: {row.shape for row in one.ops} for name, one in found.items()} == {
        "size_3": {"1x3x64", "1x3x256"},
        "size_8": {"1x8x64", "1x8x256"},
    }


def test_two_inputs_and_two_axes() -> None:
    sides = [get_new_symbol(), get_new_symbol()]
    specs = [mb.TensorSpec((1, 4, *sides), dtype=types.fp16), mb.TensorSpec((1, 1, *sides), dtype=types.fp16)]

    program = mb.program(input_specs=specs, opset_version=ct.target.iOS18)(
        lambda image, mask: mb.mul(x=image, y=mask, name="y")
    )

    shapes = {"image": [(1, 4, 8, 6), (1, 4, 8, 12)], "mask": [(1, 1, 8, 6), (1, 1, 8, 12)]}
    assert list(ane.sizes(program, shapes).models) == ["size_6", "size_12"]
    shapes = {"image": [(1, 4, 8, 6), (1, 4, 16, 12)]}
    assert list(ane.sizes(program, shapes).models) == ["size_8x6", "size_16x12"]


def test_a_function_converts_at_each_size(tmp_path: Path) -> None:
    """What a size needs of its own is in it: here the program is built at the size."""
    folder = ane.sizes(lambda shapes: tagger(shapes["x"][1]), {"x": [(1, 3, 64), (1, 5, 64)]}).save(
        tmp_path / "s"
    )
    expected = ane.run(tagger(5), sample(5))["y"]
    np.testing.assert_array_equal(ane.run(folder, sample(5))["y"], expected)


@pytest.fixture(scope="module")
def ranged() -> Any:
    """A convolution that takes 4 to 32 positions."""
    traced: Any = torch.jit.trace(torch.nn.Conv1d(4, 4, 3).eval(), torch.zeros(1, 4, 8))  # type: ignore[no-untyped-call]
    return ct.convert(
        traced,
        inputs=[ct.TensorType("x", shape=(1, 4, ct.RangeDim(4, 32, default=8)), dtype=np.float16)],
        skip_model_load=True,
        minimum_deployment_target=ct.target.iOS16,
    )


def test_a_ranged_conversion_and_sizes_outside_its_range(ranged: Any, tmp_path: Path) -> None:
    folder = ane.sizes(ranged, {"x": [(1, 4, 8), (1, 4, 32)]}).save(tmp_path / "sized")
    values = {"x": np.ones((1, 4, 32), np.float16)}
    assert next(iter(ane.run(folder, values, precision="fp16").values())).tolist() == (
        next(iter(ane.run(ranged, values, precision="fp16").values())).tolist()
    )
    described = load(folder / "size_32.mlpackage").described_inputs[0].type.multiArrayType
    assert (list(described.shape), described.WhichOneof("ShapeFlexibility")) == ([1, 4, 32], None)
    with pytest.raises(ane.SurgeryError, match="does not take x 1x4x33"):
        ane.sizes(ranged, {"x": [(1, 4, 8), (1, 4, 33)]})


def narrow() -> Program:
    """It has 8 positions whatever the input is said to have."""

    return mb.program(
        input_specs=[mb.TensorSpec((1, get_new_symbol()), dtype=types.fp16)], opset_version=ct.target.iOS18
    )(lambda x: mb.add(x=x, y=np.ones((1, 8), np.float16), name="sum"))


X2 = {"x": [(1, 3, 64), (1, 5, 64)]}
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no sizes": (lambda: ane.sizes(tagger(None), {"x": []}), "there are no sizes"),
    "no inputs": (lambda: ane.sizes(tagger(None), {}), "there are no sizes"),
    "twice": (lambda: ane.sizes(tagger(None), {"x": [(1, 3, 64), (1, 3, 64)]}), "x 1x3x64 is there twice"),
    "unequal": (lambda: ane.sizes(tagger(None), {"x": [(1, 3, 64)], "y": X2["x"]}), "x has 1, y has 2"),
    "no shape": (lambda: ANY.sizes(tagger(None), {"x": [64]}), "64 of x is no shape"),
    "a size of 0": (lambda: ane.sizes(tagger(None), {"x": [(1, 0, 64)]}), r"\(1, 0, 64\) of x is no shape"),
    "no input": (lambda: ane.sizes(tagger(None), {"y": X2["x"]}), "unknown input 'y'"),
    "an axis that is fixed": (lambda: ane.sizes(tagger(None), {"x": [(1, 3, 65)]}), "the shape of x is"),
    "an op": (lambda: ane.sizes(narrow(), {"x": [(1, 8), (1, 9)]}), "do not fit add sum"),
    "other shapes": (lambda: ane.sizes(lambda _: tagger(3), X2), r"x was to be \(1, 5, 64\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(case: str) -> None:
    call, words = WRONG[case]
    with pytest.raises(ane.SurgeryError, match=words):
        call()


class Tagger(torch.nn.Module):
    """Tokens, their places, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(20, 32), torch.nn.Embedding(64, 32)
        self.head = torch.nn.Linear(32, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.head(self.tokens(ids) + self.places(torch.arange(ids.shape[1])))
        return x


def test_a_module_is_converted_at_each_size(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Tagger().train()
    sized = ane.sizes(module, {"ids": [(1, 16), (1, 64)]}, dtypes={"ids": "int32"})
    assert module.training
    folder = sized.save(tmp_path / "sized")
    for length in (16, 64):
        ids = np.arange(length, dtype=np.int32)[None] % 20
        (found,) = ane.run(folder, {"ids": ids}).values()
        expected = module(torch.from_numpy(ids)).detach().numpy()
        np.testing.assert_allclose(found, expected, atol=1e-2)
    one = ane.save(sized.models["size_64"], tmp_path / "one.mlpackage")
    assert weight_bytes(folder) <= 1.02 * weight_bytes(one)


MODULES: dict[str, tuple[Callable[[], Any], str]] = {
    "floats where tokens are": (lambda: ane.sizes(Tagger(), {"ids": [(1, 4)]}), "ids float32 .other types"),
    "no such input": (lambda: ane.sizes(Tagger(), {"x": [(1, 4)]}), "unknown input 'x'"),
    "a type of another input": (
        lambda: ane.sizes(Tagger(), {"ids": [(1, 4)]}, dtypes={"x": "int32"}),
        "unknown input 'x'",
    ),
    "no such type": (lambda: ane.sizes(Tagger(), {"ids": [(1, 4)]}, dtypes={"ids": "int64"}), "give one of"),
    "an input left out": (
        lambda: ane.sizes(torch.nn.Bilinear(4, 4, 4), {"input1": [(1, 4)]}),
        "forward takes input1, input2",
    ),
    "types of a model": (lambda: ane.sizes(tagger(None), X2, dtypes={"x": "int32"}), "is for a PyTorch module"),
}


@pytest.mark.parametrize("case", MODULES)
def test_a_module_that_cannot_be_converted(case: str) -> None:
    call, words = MODULES[case]
    with pytest.raises(ane.SurgeryError, match=words):
        call()


def test_what_is_there_stays(tmp_path: Path) -> None:
    sized = ane.sizes(tagger(None), X2)
    folder = sized.save(tmp_path / "sized")
    with pytest.raises(ane.SurgeryError, match="exists"):
        sized.save(folder)
    sized.save(folder, overwrite=True)
    (tmp_path / "mine").mkdir()
    with pytest.raises(ane.SurgeryError, match="is no folder of sizes"):
        sized.save(tmp_path / "mine", overwrite=True)


def test_running_says_which_sizes_there_are(tmp_path: Path) -> None:
    folder = ane.sizes(tagger(None), X2).save(tmp_path / "sized")
    with pytest.raises(
        ane.SurgeryError, match=r"\(x 1x4x64\): size_3 takes x 1x3x64; size_5 takes x 1x5x64, and it is"
    ):
        ane.run(folder, sample(4))
    with pytest.raises(ane.SurgeryError, match="unknown size 'size_6'"):
        ane.run(folder, sample(3), function="size_6")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is damaged"),
        ("[" * 100_000, "nested too deeply"),
        ('{"format": "anesurgery sizes", "version": 5, "sizes": []}', "sizes 5; this reads"),
        (
            '{"format": "anesurgery sizes", "version": 1, "sizes": [], '
            '"padding": {"inputs": {}, "outputs": {}, "why_not": ""}}',
            "names no sizes",
        ),
        (
            '{"format": "anesurgery sizes", "version": 1, "sizes": '
            '[{"name": "a", "function": null, "package": "../b", "inputs": {}}]}',
            "is not in the folder",
        ),
    ],
)
def test_a_damaged_index_is_said(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "sizes.json").write_text(text)
    with pytest.raises(ane.SurgeryError, match=words):
        read(tmp_path)


def test_the_command(ranged: Any, tmp_path: Path) -> None:
    ranged.save(str(tmp_path / "model.mlpackage"))
    words = ["sizes", str(tmp_path / "model.mlpackage"), "--out", str(tmp_path / "sized")]
    out = CliRunner().invoke(app, [*words, "--size", "x=1x4x8", "--size", "x=1x4x16", "--json"])
    assert [row["name"] for row in json.loads(out.stdout)["sizes"]] == ["size_8", "size_16"]
    assert (tmp_path / "sized" / "sizes.json").is_file()
    out = CliRunner().invoke(app, [*words, "--size", "x=1x4x8", "--size", "y=1x4x16"])
    assert "the same inputs" in str(out.exception)


@pytest.mark.slow
@pytest.mark.parametrize("part", [1, 2])
def test_loops_of_real_models_are_unrolled(part: int, corpus: Path) -> None:
    """Bit for bit what the model with its loop gives, at either size of its batch."""
    source = corpus / f"dtln_aec_128_part{part}_fp16.mlpackage"
    inputs = ane.load(source).described_inputs
    shapes = {f.name: tuple(f.type.multiArrayType.shape) for f in inputs}
    sized = ane.sizes(source, {name: [shape, (2, *shape[1:])] for name, shape in shapes.items()})
    for count, model in enumerate(sized.models.values(), 1):
        rng = np.random.default_rng(count)
        values = {n: rng.uniform(0.1, 1, (count, *s[1:])).astype(np.float16) for n, s in shapes.items()}
        expected, got = (ane.run(m, values, precision="fp16") for m in (source, model))
        for name, value in expected.items():
            np.testing.assert_array_equal(got[name], value)


class Gated(torch.nn.Module):
    """A layer that coremltools converts as a loop over its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.GRU(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps: torch.Tensor = self.layer(x)[0]
        return steps


def test_a_loop_of_one_size_is_refused_with_its_reason() -> None:
    trace: Any = torch.jit.trace
    example = torch.zeros(4, 1, 4)
    model = ct.convert(
        trace(Gated().eval(), example),
        inputs=[ct.TensorType("x", example.shape)],
        minimum_deployment_target=ct.target.iOS18,
        skip_model_load=True,
    )
    with pytest.raises(ane.SurgeryError, match=r"give the PyTorch module.*its loops were unrolled"):
        ane.sizes(model, {"x": [(8, 1, 4)]})
