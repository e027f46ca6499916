"""Compressed weights that a pass computes with: kept, decoded, or encoded again with the error stated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.checking.output_comparison import psnr
from anesurgery.commands import app as cli
from anesurgery.errors import SurgeryError
from anesurgery.files import sub_byte
from anesurgery.mil import Array, Program, Var, ct, is_compressed, mb, walk_ops

RNG = np.random.default_rng(3)
SHAPE = (16, 3, 3, 3)
SHAPES = np.array(SHAPE, np.uint32)


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def int8(channels: bool) -> Any:
    scale = np.abs(floats(16)) / 100 if channels else np.float32(0.01)
    zero = np.zeros_like(scale, np.int8)
    data = RNG.integers(-127, 128, SHAPE).astype(np.int8)
    return lambda: mb.constexpr_affine_dequantize(
        quantized_data=data, zero_point=zero, scale=scale, axis=np.int32(0)
    )


def palette() -> Var:
    indices = sub_byte.pack(RNG.integers(0, 16, SHAPE).astype(np.uint8), 4)
    return mb.constexpr_lut_to_dense(indices=indices, lut=np.sort(floats(16)), shape=SHAPES)


def sparse() -> Var:
    mask = RNG.integers(0, 2, SHAPE).astype(np.uint8)
    return mb.constexpr_sparse_to_dense(
        nonzero_data=floats(int(mask.sum())), mask=sub_byte.pack(mask, 1), shape=SHAPES
    )


FORMS = {"int8 of channels": int8(True), "int8": int8(False), "palette": palette, "sparse": sparse}
LEAST = {"int8 of channels": 100.0, "int8": 30.0, "palette": 25.0, "sparse": 140.0}
"""dB of the weights that each form reaches at least, after a scale for each channel."""


def net(form: str) -> Program:
    """A convolution and its batch norm."""
    mean, variance, gamma = (np.linspace(0.5, 1.5, 16, dtype=np.float32) * n for n in (1, 2, 3))

    @mb.program(input_specs=[mb.TensorSpec((1, 3, 8, 8))], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        c = mb.conv(x=x, weight=FORMS[form]())
        return mb.batch_norm(x=c, mean=mean, variance=variance, gamma=gamma, name="y")

    return program


def conv_weight(program: Program) -> Var:
    (conv,) = [op for op in walk_ops(program) if op.op_type == "conv"]
    weight: Var = conv.weight
    return weight


@pytest.mark.parametrize("form", FORMS)
def test_a_folded_scale_is_encoded_again_and_the_error_stated(form: str) -> None:
    before = net(form)
    found = ane.apply(before, "fold_batch_norm", compressed="reencode", quiet=True)
    assert [c.pass_name for c in found.changes] == ["fold_batch_norm"]
    weight = conv_weight(found.program)
    assert weight.op is not None
    assert weight.op.op_type == conv_weight(before).op.op_type  # type: ignore[union-attr]
    (note,) = [n for n in found.notes if "encoded again in the form each had" in n]
    assert float(note.split("at worst ")[1].split(" dB")[0]) >= LEAST[form]
    (outputs,) = [n for n in found.notes if n.startswith("outputs with")]
    x = {"x": floats(1, 3, 8, 8)}
    old, new = (ane.run(p, x, precision="fp32")["y"] for p in (before, found.program))
    measured = psnr(float(np.abs(old).max()), float(np.sqrt(np.mean((old - new) ** 2))))
    assert abs(measured - float(outputs.split(": ")[1].split(" dB")[0])) < 12  # on other inputs


@pytest.mark.parametrize("form", FORMS)
def test_decoded_weights_are_plain_and_the_growth_is_stated(form: str) -> None:
    found = ane.apply(net(form), "fold_batch_norm", compressed="decode", quiet=True)
    assert not is_compressed(conv_weight(found.program))
    (note,) = [n for n in found.notes if "plain numbers" in n]
    assert "become 1.73 kB" in note
    assert found.changes[0].proof is not None or found.proof is not None


def test_compressed_weights_stay_by_default() -> None:
    found = ane.apply(net("palette"), "fold_batch_norm", quiet=True)
    assert not found.changes
    ((_, refusal),) = found.refusals
    assert 'compressed="reencode", or "decode", allows it' in refusal.reason
    assert is_compressed(conv_weight(found.program))
    with pytest.raises(SurgeryError, match="'keep', 'decode', 'reencode'"):
        ane.apply(net("palette"), "fold_batch_norm", compressed="again")


def test_a_wrong_encoding_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: the old numbers are stored, as if nothing had been folded."""
    from anesurgery.regions.compressed_weights import edited
    from anesurgery.regions.weight_edits import Edit
    from anesurgery.rewriting import builder

    monkeypatch.setattr(builder, "encoded", lambda var, numbers, edit: edited(var, Edit.of(SHAPE)))
    found = ane.apply(net("int8 of channels"), "fold_batch_norm", compressed="reencode", quiet=True)
    (note,) = [n for n in found.notes if "encoded again" in n]
    assert float(note.split("at worst ")[1].split(" dB")[0]) < 20
    assert found.proof is not None
    assert found.proof.psnr < 30


def test_the_command(tmp_path: Path) -> None:
    source = ane.save(ane.load(net("palette")), tmp_path / "before.mlpackage")
    words = [
        "apply",
        str(source),
        "fold_batch_norm",
        str(tmp_path / "after.mlpackage"),
        "--compressed",
        "reencode",
        "--full",
    ]
    shown = CliRunner().invoke(cli.app, words)
    assert shown.exit_code == 0, shown.output
    assert "encoded again in the form each had" in " ".join(shown.output.split())
    assert is_compressed(conv_weight(ane.load(tmp_path / "after.mlpackage").program))
