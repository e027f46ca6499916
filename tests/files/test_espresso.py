"""Compiled neural networks: each layer computes what torch does, and what is not known is refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close
from torch.nn import functional

import anesurgery as ane
from anesurgery.errors import LoadError
from anesurgery.files.package import read_spec
from anesurgery.mil import Array, ct

F32 = ct.proto.FeatureTypes_pb2.ArrayFeatureType.FLOAT32
SIZES = ("n", "k", "h", "w")


def entry(kind: str, bottom: str = "x", top: str = "y", /, **fields: Any) -> dict[str, Any]:
    """A layer of `model.espresso.net`."""
    return {"type": kind, "name": top, "bottom": bottom, "top": top, "weights": {}, "debug_info": "", **fields}


def write(
    folder: Path,
    layers: Sequence[dict[str, Any]],
    shapes: dict[str, tuple[int, ...]],
    blobs: dict[int, Array] | None = None,
    image: bool = False,
) -> Path:
    """A compiled network with the input `x` and the output `y`."""
    folder.mkdir(exist_ok=True)
    net = {"storage": "model.espresso.weights", "format_version": 200, "layers": list(layers)}
    (folder / "model.espresso.net").write_text(json.dumps(net))
    filled = {name: (1,) * (4 - len(shape)) + shape for name, shape in shapes.items()}
    sizes = {n: {**dict(zip(SIZES, s, strict=True)), "_rank": len(shapes[n])} for n, s in filled.items()}
    (folder / "model.espresso.shape").write_text(json.dumps({"layer_shapes": sizes}))
    content = {number: values.tobytes() for number, values in (blobs or {}).items()}
    table = b"".join(struct.pack("<QQ", number, len(data)) for number, data in content.items())
    weights = struct.pack("<Q", len(content)) + table + b"".join(content.values())
    (folder / "model.espresso.weights").write_bytes(weights)
    description = ct.proto.Model_pb2.ModelDescription()
    feature = description.input.add(name="x").type
    if image:
        feature.imageType.width, feature.imageType.height = shapes["x"][-1], shapes["x"][-2]
    else:
        feature.multiArrayType.dataType = F32
        feature.multiArrayType.shape.extend(shapes["x"])
    description.output.add(name="y").type.multiArrayType.dataType = F32
    code = ct.proto.Model_pb2.Model.DESCRIPTOR.fields_by_name["neuralNetwork"].number
    data = description.SerializeToString()
    head = struct.pack("<I", code) + bytes(24) + struct.pack("<Q", 0) + struct.pack("<I", 4) + bytes(28)
    (folder / "coremldata.bin").write_bytes(head + struct.pack("<Q", len(data)) + data)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "made.mlmodelc"


RNG = np.random.default_rng(7)
X = RNG.standard_normal((1, 4, 9, 7)).astype(np.float32)
KERNEL = RNG.standard_normal((6, 2, 3, 2)).astype(np.float32)
WIDE = RNG.standard_normal((5, 7)).astype(np.float32)
BIAS = RNG.standard_normal(24).astype(np.float32)  # more than the layers need: the end is padding
PARAMS = RNG.standard_normal((4, 4)).astype(np.float32)
CONV: dict[str, Any] = {
    "C": 6,
    "K": 4,
    "n_groups": 2,
    "Nx": 2,
    "Ny": 3,
    "n_parallel": 1,
    "fused_tanh": 0,
    "has_batch_norm": 0,
}
POOL: dict[str, Any] = {"size_x": 2, "size_y": 3, "stride_x": 2, "stride_y": 3, "top_shape_style": 0}

Given = tuple[dict[str, Any], dict[int, Array], Callable[[torch.Tensor], torch.Tensor]]


def _tensor(values: Array) -> torch.Tensor:
    return torch.from_numpy(values)


CASES: dict[str, Given] = {
    "convolution": (
        entry(
            "convolution",
            **CONV,
            has_biases=1,
            blob_biases=1,
            blob_weights=3,
            pad_t=1,
            pad_b=0,
            pad_l=2,
            pad_r=1,
            stride_x=2,
            stride_y=1,
            fused_relu=1,
        ),
        {1: BIAS, 3: KERNEL},
        lambda x: functional.conv2d(
            functional.pad(x, (2, 1, 1, 0)), _tensor(KERNEL), _tensor(BIAS[:6]), stride=(1, 2), groups=2
        ).relu(),
    ),
    "convolution, same": (
        entry("convolution", **CONV, has_biases=0, blob_weights=3, pad_mode=1),
        {3: KERNEL},
        lambda x: functional.conv2d(functional.pad(x, (0, 1, 1, 1)), _tensor(KERNEL), groups=2),
    ),
    "convolution of half floats": (
        entry("convolution", **CONV, has_biases=0, blob_weights_f16=3, pad_mode=2),
        {3: KERNEL.astype(np.float16)},
        lambda x: functional.conv2d(x, _tensor(KERNEL.astype(np.float16).astype(np.float32)), groups=2),
    ),
    "maximum pooling": (
        entry("pool", **POOL, avg_or_max=1, pad_mode=2),
        {},
        lambda x: functional.max_pool2d(x, (3, 2)),
    ),
    "pooling to the last pixel": (
        entry("pool", **POOL, avg_or_max=1, pad_mode=0),
        {},
        lambda x: functional.max_pool2d(x, (3, 2), ceil_mode=True),
    ),
    "pooling to the last pixel, without the padding that is given": (
        entry("pool", **POOL, avg_or_max=1, pad_mode=2, pad_t=1, pad_b=1, pad_l=1, pad_r=1),
        {},
        lambda x: functional.max_pool2d(x, (3, 2), ceil_mode=True),
    ),
    "global average": (
        entry("pool", avg_or_max=0, is_global=1, size_x=7, size_y=9, stride_x=1, stride_y=1, pad_mode=0),
        {},
        lambda x: x.mean((2, 3), keepdim=True),
    ),
    "relu": (entry("activation", mode=0, beta=0), {}, torch.relu),
    "sigmoid": (entry("activation", mode=3), {}, torch.sigmoid),
    "linear": (entry("activation", mode=6, alpha=-2, beta=0.5), {}, lambda x: -2 * x + 0.5),
    "plus a number": (entry("elementwise", operation=2, alpha=3, fused_relu=1), {}, lambda x: (x + 3).relu()),
    "times a number": (entry("elementwise", operation=3, alpha=0.25, beta=0), {}, lambda x: 0.25 * x),
    "clip": (entry("elementwise", operation=119, alpha=0, beta=1), {}, lambda x: x.clamp(0, 1)),
    "sum": (entry("elementwise", "x,x", operation=0, alpha=1, beta=0), {}, lambda x: x + x),
    "product": (entry("elementwise", "x,x", operation=1, alpha=1, beta=0), {}, lambda x: x * x),
    "instance norm": (
        entry(
            "batchnorm",
            C=4,
            training=1,
            training_instancenorm=1,
            training_eps=1e-6,
            training_momentum=0.9,
            blob_batchnorm_params=3,
        ),
        {3: PARAMS},
        lambda x: functional.instance_norm(
            x, weight=_tensor(PARAMS[:, 0].copy()), bias=_tensor(PARAMS[:, 1].copy()), eps=1e-6
        ),
    ),
    "transpose": (
        entry("transpose", axis_w=2, axis_h=0, axis_k=1, axis_n=3, axis_seq=4),
        {},
        lambda x: x.permute(0, 2, 3, 1),
    ),
    "reshape": (
        entry(
            "reshape",
            mode=0,
            version=1,
            dst_w=63,
            dst_h=4,
            dst_k=1,
            dst_n=1,
            dst_seq=1,
            dst_nd_rank=2,
            dynamic_shape=False,
        ),
        {},
        lambda x: x.reshape(4, 63),
    ),
    "softmax": (entry("softmax_nd", nd_axis=-1), {}, lambda x: x.softmax(-1)),
    "softmax of channels": (entry("softmax"), {}, lambda x: x.softmax(1)),
    "concat": (entry("concat", "x,x"), {}, lambda x: torch.cat([x, x], 1)),
    "upsample": (
        entry("upsample", mode=0, scaling_factor_x=2, scaling_factor_y=3),
        {},
        lambda x: x.repeat_interleave(3, 2).repeat_interleave(2, 3),
    ),
    "copy": (entry("copy"), {}, lambda x: x),
}


@pytest.mark.parametrize("name", CASES)
def test_a_layer_computes_what_torch_does(folder: Path, name: str) -> None:
    layer, blobs, function = CASES[name]
    expected = function(_tensor(X)).numpy()
    write(folder, [layer], {"x": X.shape, "y": expected.shape}, blobs)
    found = ane.run(folder, {"x": X})["y"]
    assert_close(found, expected, rtol=1e-5)


def test_an_inner_product_reads_the_last_axis(folder: Path) -> None:
    rows = X.reshape(36, 7)
    stored = {"has_biases": 1, "blob_biases": 1, "blob_weights": 3}
    layer = entry("inner_product", nB=7, nC=5, has_relu=1, has_tanh=0, **stored)
    write(folder, [layer], {"x": rows.shape, "y": (36, 5)}, {1: BIAS, 3: WIDE})
    expected = functional.linear(_tensor(rows), _tensor(WIDE), _tensor(BIAS[:5])).relu()
    assert_close(ane.run(folder, {"x": rows})["y"], expected.numpy(), rtol=1e-5)


def test_parts_and_constants(folder: Path) -> None:
    layers = [
        entry("split_nd", "x", "a,b", nd_axis=1, begin_0=0, begin_1=0),
        entry("load_constant", "", "c", n=1, k=1, h=1, w=7, nd_rank=4, constant_blob=5),
        entry("elementwise", "b,c", "y", operation=0, alpha=1, beta=0),
    ]
    shapes = {"x": X.shape, "a": (1, 3, 9, 7), "b": (1, 1, 9, 7), "c": (1, 1, 1, 7), "y": (1, 1, 9, 7)}
    write(folder, layers, shapes, {5: WIDE[0]})
    np.testing.assert_allclose(ane.run(folder, {"x": X})["y"], X[:, 3:] + WIDE[0], rtol=1e-6)


def test_the_same_verbs_as_for_a_network(folder: Path) -> None:
    write(folder, [entry("activation", mode=0)], {"x": X.shape, "y": X.shape})
    assert [row.op_type for row in ane.inspect(folder, target="M1/macOS 14").ops] == ["activation"]
    assert ane.compare(folder, ane.upgrade(folder, precision="fp32"), inputs={"x": X}).ok
    with pytest.raises(LoadError, match="a compiled neural network; `upgrade` turns it into an ML Program"):
        ane.decompile(folder, folder.with_name("made.mlpackage"))


def test_an_image_input_becomes_an_array_and_a_note_says_so(folder: Path) -> None:
    write(folder, [entry("activation", mode=0)], {"x": X.shape, "y": X.shape}, image=True)
    spec = read_spec(folder / "model.espresso.net")
    assert list(spec.description.input[0].type.multiArrayType.shape) == list(X.shape)
    assert "image inputs are arrays" in spec.description.metadata.userDefined["anesurgery.notes"]
    np.testing.assert_array_equal(ane.run(folder, {"x": X})["y"], X.clip(0))


UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "a type": (entry("mystery"), r"layer 0 \(mystery 'y'\): no public file shows"),
    "a mode": (entry("activation", mode=12), "it has mode 12"),
    "an operation": (entry("elementwise", operation=105, alpha=1, beta=0), "it has operation 105 of 1 blobs"),
    "a scaled sum": (entry("elementwise", "x,x", operation=0, alpha=2, beta=0), "with alpha 2 and beta 0"),
    "a key": (entry("activation", mode=0, fused_magic=1), "it has fused_magic = 1"),
    "an option that is on": (entry("copy", has_tanh=1), "it has has_tanh = 1"),
    "a fixed batch norm": (entry("batchnorm", C=4, blob_batchnorm_params=3), "how the parameters of a fixed"),
    "compressed weights": (
        entry("inner_product", nB=7, nC=5, quantization_lut_weights_blob=3),
        "that no public file explains",
    ),
    "a short blob": (entry("inner_product", nB=70, nC=5, blob_weights=3), "140 bytes, and 1400 are needed"),
    "another size": (entry("pool", **POOL, avg_or_max=1, pad_t=1, pad_b=2), "another size than its"),
    "a pad mode": (entry("pool", **POOL, avg_or_max=1, pad_mode=3), "pad_mode 3"),
    "a kind of pooling": (entry("pool", **POOL, avg_or_max=2), "avg_or_max 2, which no public file"),
    "a stride of 0": (entry("pool", **{**POOL, "stride_x": 0}, avg_or_max=1), "is damaged: ZeroDivisionError"),
    "no groups": (
        entry("convolution", **{**CONV, "n_groups": 0}, blob_weights=3),
        "is damaged: ZeroDivisionError",
    ),
    "an axis beyond the rank": (entry("split_nd", nd_axis=7), "is damaged: IndexError"),
    "parts that begin somewhere": (entry("split_nd", "x", "y,z", nd_axis=1, begin_0=2), "its parts begin"),
    "axes": (entry("transpose", axis_w=1, axis_h=1, axis_k=0, axis_n=3), "not those of a blob of rank 4"),
    "a blob without a shape": (entry("reshape", "x", "z"), "the blob 'z' has no shape"),
    "another number of elements": (entry("reshape", mode=0, dst_w=1), "it makes"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_refused(folder: Path, name: str) -> None:
    layer, reason = UNKNOWN[name]
    write(folder, [layer], {"x": X.shape, "y": (1, 4, 3, 3)}, {3: WIDE})
    with pytest.raises(LoadError, match=reason):
        ane.load(folder)


DAMAGE: dict[str, tuple[str, bytes, str]] = {
    "net cut": ("model.espresso.net", b'{"layers": [', "is not JSON"),
    "net a list": ("model.espresso.net", b"[]", "holds a list"),
    "net compressed": ("model.espresso.net", b"pbze0000", "is compressed"),
    "net of another version": ("model.espresso.net", b'{"format_version": 7}', "format_version 7"),
    "weights elsewhere": (
        "model.espresso.net",
        b'{"format_version": 200, "layers": [], "storage": "../w"}',
        "not a file beside it",
    ),
    "a layer that is none": (
        "model.espresso.net",
        b'{"format_version": 200, "layers": [3], "storage": "model.espresso.weights"}',
        "is damaged",
    ),
    "shapes without sizes": ("model.espresso.shape", b'{"layer_shapes": {"x": 3}}', "is damaged"),
    "a negative size": ("model.espresso.shape", b'{"layer_shapes": {"x": {"w": -1, "_rank": 1}}}', "the shape"),
    "weights empty": ("model.espresso.weights", b"", "has 0 bytes"),
    "a long table": ("model.espresso.weights", struct.pack("<Q", 1 << 40), "announces"),
    "a blob beyond the end": ("model.espresso.weights", struct.pack("<QQQ", 1, 5, 99), "ends beyond the file"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_errors_in_words(folder: Path, name: str) -> None:
    file, content, reason = DAMAGE[name]
    write(folder, [entry("activation", mode=0)], {"x": X.shape, "y": X.shape})
    (folder / file).write_bytes(content)
    with pytest.raises(LoadError, match=reason) as caught:
        ane.load(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("file", ["model.espresso.shape", "model.espresso.weights"])
def test_a_file_that_is_missing_is_named(folder: Path, file: str) -> None:
    write(folder, [entry("activation", mode=0)], {"x": X.shape, "y": X.shape})
    (folder / file).unlink()
    with pytest.raises(LoadError, match=file):
        ane.load(folder)


def test_without_a_description_the_layers_say_what_enters_and_leaves(folder: Path) -> None:
    layers = [entry("activation", "x", "y", mode=0), entry("elementwise", "x,y", "z", operation=0, alpha=1)]
    write(folder, layers, dict.fromkeys("xyz", X.shape))
    (folder / "coremldata.bin").write_bytes(b"")
    spec = read_spec(folder / "model.espresso.net")
    assert "it is cut short" in spec.description.metadata.userDefined["anesurgery.notes"]
    np.testing.assert_allclose(ane.run(folder, {"x": X})["z"], X + X.clip(0), rtol=1e-6)
