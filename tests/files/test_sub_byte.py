"""Elements of less than a byte: packed as coremltools packs them, and copied file to file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anesurgery.files import sub_byte, weights
from anesurgery.files.package import Loaded, save
from anesurgery.files.weights import PACKED_TYPE_CODES, WeightFile
from anesurgery.loading import load
from anesurgery.mil import Array, Var, constant, ct, mb, types, walk_ops

TYPES = sorted(PACKED_TYPE_CODES)
FILE = Path("Data/com.apple.CoreML/weights/weight.bin")


def values(name: str, count: int) -> Array:
    element = types.string_to_builtin(name)
    low = 0 if element.is_unsigned() else -(1 << (element.get_bitwidth() - 1))
    spread = np.random.default_rng(0).integers(low, low + (1 << element.get_bitwidth()), count)
    return spread.astype(np.uint8 if element.is_unsigned() else np.int8)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("count", [1, 7, 8, 11, 1000])
def test_as_coremltools_packs_them(tmp_path: Path, name: str, count: int) -> None:
    from coremltools.libmilstoragepython import _BlobStorageWriter

    given, element = values(name, count), types.string_to_builtin(name)
    writer = _BlobStorageWriter(str(tmp_path / "weight.bin"))
    offset = getattr(writer, f"write_{name}_data")(given)
    del writer  # it writes when it goes
    file = WeightFile(tmp_path / "weight.bin")
    np.testing.assert_array_equal(file.unpacked(offset, element, (count,)), given)
    blob, packed = file.blob(offset), sub_byte.pack(given, element.get_bitwidth())
    assert (blob.code, blob.padding) == (
        PACKED_TYPE_CODES[name],
        8 * packed.size - count * element.get_bitwidth(),
    )
    stored = (tmp_path / "weight.bin").read_bytes()[blob.data : blob.data + blob.size]
    assert stored == packed.tobytes()


@pytest.mark.parametrize("name", ["uint3", "uint6", "int4"])
def test_pieces(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What is packed in pieces is what is packed at once."""
    element, given = types.string_to_builtin(name), values(name, 100)
    whole = sub_byte.pack(given, element.get_bitwidth())
    monkeypatch.setattr(sub_byte, "PIECE", 16)
    np.testing.assert_array_equal(sub_byte.pack(given, element.get_bitwidth()), whole)
    again = sub_byte.unpack(whole, element.get_bitwidth(), not element.is_unsigned(), (100,))
    np.testing.assert_array_equal(again, given)


def palettized(name: str = "uint4") -> Loaded:
    table = values(name, 64).reshape(16, 4).astype(types.nptype_from_builtin(types.string_to_builtin(name)))
    lut = np.arange(1 << types.string_to_builtin(name).get_bitwidth(), dtype=np.float16).reshape(1, 1, -1, 1)

    @mb.program(input_specs=[mb.TensorSpec((2, 16), types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Var) -> Any:
        return mb.matmul(x=x, y=mb.constexpr_lut_to_dense(indices=table, lut=lut), name="y")

    return load(program)


def indices(loaded: Loaded) -> Any:
    (op,) = [o for o in walk_ops(loaded.program) if o.op_type == "constexpr_lut_to_dense"]
    return constant(op.indices)


def test_unchanged_ones_are_copied_file_to_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = save(palettized(), tmp_path / "first.mlpackage")
    loaded = load(first)
    monkeypatch.setattr(weights, "_encoded", lambda var, array: pytest.fail(f"{var.name} is packed again"))
    again = save(loaded, tmp_path / "again.mlpackage")
    monkeypatch.undo()
    assert (again / FILE).read_bytes() == (first / FILE).read_bytes()
    np.testing.assert_array_equal(indices(load(again)), indices(loaded))


def test_changed_ones_are_packed(tmp_path: Path) -> None:
    loaded = load(save(palettized(), tmp_path / "first.mlpackage"))
    (op,) = [o for o in walk_ops(loaded.program) if o.op_type == "constexpr_lut_to_dense"]
    changed = np.array(indices(loaded))
    changed[0] = 3
    assert op.indices.op is not None
    op.indices.op.outputs[0]._sym_val.val = changed
    again = load(save(loaded, tmp_path / "again.mlpackage"))
    np.testing.assert_array_equal(indices(again), changed)
