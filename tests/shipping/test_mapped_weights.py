"""What is converted lies in files, and is the same."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint
from safetensors.torch import load_file, save_file

from anesurgery.files.package import save
from anesurgery.loading import load
from anesurgery.mil import mb, types
from anesurgery.shipping import checkpoint as checkpoints_module
from anesurgery.shipping.checkpoint import Checkpoint, fp32_checkpoint, mapped_constants
from anesurgery.shipping.converting import convert


def held(program: Any) -> list[str]:
    """The constants in memory of their own."""
    ops = program.functions["main"].operations
    return [
        op.name
        for op in ops
        if op.op_type == "const" and checkpoints_module._should_be_mapped(op.outputs[0].val)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("narrow", [False, True])
def test_a_conversion_holds_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, narrow: bool) -> None:
    monkeypatch.setattr(checkpoints_module, "LEAST", 1024)
    monkeypatch.setattr(checkpoints_module, "PIECE", 100)
    source = save_checkpoint(tmp_path / "checkpoint", layers=1)
    if narrow:
        file = source / "model.safetensors"
        save_file({n: t.bfloat16() for n, t in load_file(file).items()}, file, {"format": "pt"})
    checkpoint = Checkpoint.read(source)
    files, counts = [], []
    for mapped in (True, False):
        work = tmp_path / f"work{mapped}"
        work.mkdir()
        module = checkpoint.module(work)
        if mapped:
            with mapped_constants(work):
                model = convert(module, 16)
        else:
            model = convert(module, 16)
        counts.append(len(held(model._mil_program)))
        left = [f for f in work.iterdir() if f.is_file()]
        assert not left
        save(load(model), tmp_path / f"{mapped}.mlpackage")
        files.append((tmp_path / f"{mapped}.mlpackage/Data/com.apple.CoreML/weights/weight.bin").read_bytes())
    assert files[0] == files[1]
    assert counts[0] == 0 < counts[1]


def test_a_checkpoint_of_16_bits_is_widened_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints_module, "SHARD", 100)
    folder = tmp_path / "given"
    folder.mkdir()
    tensors = {"a": torch.randn(5, 5).bfloat16(), "b": torch.randn(9).half(), "c": torch.arange(4)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    to = fp32_checkpoint(folder, tmp_path / "fp32")
    stored = {n: t for f in to.glob("*.safetensors") for n, t in load_file(f).items()}
    assert len(list(to.glob("*.safetensors"))) > 1
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(stored[name], tensor.float() if tensor.is_floating_point() else tensor)
    assert fp32_checkpoint(to, tmp_path / "again") == to
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "model-1-of-1.safetensors"])
def test_files_beside_the_weights_are_not_read(name: str, tmp_path: Path) -> None:
    """As averages of a training, which have the same names."""
    folder = tmp_path / "half"
    folder.mkdir()
    save_file({"w": torch.ones(3).half()}, folder / name)
    save_file({"w": torch.zeros(3).half()}, folder / "model_ema.safetensors")
    if name != "model.safetensors":
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    to = fp32_checkpoint(folder, tmp_path / "fp32")
    stored = {n: t for f in to.glob("*.safetensors") for n, t in load_file(f).items()}
    assert stored["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("largest", [65504.0, 65505.0, 1e37, 1e38, np.inf, np.nan, -70000.0, -np.inf])
@pytest.mark.parametrize("at", [0, 199])
def test_what_leaves_fp16_is_what_the_host_says(
    monkeypatch: pytest.MonkeyPatch, largest: float, at: int
) -> None:
    from coremltools.converters.mil.mil.passes.defs.quantization import FP16ComputePrecision

    monkeypatch.setattr(checkpoints_module, "PIECE", 64)
    values = np.ones((2, 100), np.float32)
    values.reshape(-1)[at] = largest
    host = FP16ComputePrecision.fp16_overflow

    @mb.program(input_specs=[mb.TensorSpec((2, 100), types.fp32)])
    def program(x: Any) -> Any:
        return mb.add(x=x, y=mb.const(val=values))

    (op,) = program.functions["main"].find_ops(op_type="add")
    asked: list[Any] = []

    def ask(given: Any) -> bool:
        asked.append(given)
        return False

    ours = checkpoints_module._overflow_check(ask)
    assert ours(op) == host(op)
    assert not asked  # of large constants the host would make copies
    assert not ours(SimpleNamespace(inputs={}))
    assert asked
