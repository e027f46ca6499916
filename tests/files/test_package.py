"""Loading, copying and saving: nothing is lost, nothing is half-written, bad input is explained."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anesurgery.errors import LoadError
from anesurgery.files import protobuf
from anesurgery.files.package import save, to_mlmodel
from anesurgery.files.weights import WeightWriter
from anesurgery.interpret import run
from anesurgery.interpret.sampling import sample_inputs
from anesurgery.loading import clone, interface, load
from anesurgery.mil import Array, Function, Program, Var, constant, ct, mb, quiet_host, types, walk_ops
from anesurgery.text import to_text

PACKAGES = [
    "anemll_multifunction",
    "basic_pitch_nmp",
    "dtln_aec_128_part1_fp16",
    "silero_unified",
    "silero_unified_palette_4bit",
]
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"


def network(rows: int = 64) -> Program:
    rng = np.random.default_rng(0)
    table = rng.standard_normal((rows, 8)).astype(np.float16)

    return mb.program(input_specs=[mb.TensorSpec((2, 8), dtype=types.fp16)], opset_version=ct.target.iOS16)(
        lambda x: mb.linear(x=mb.relu(x=x, name="hidden"), weight=table, name="y")
    )


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return save(load(network()), tmp_path / "network.mlpackage")


def weights(program: Program) -> list[Array]:
    return [np.array(op.outputs[0].val) for op in walk_ops(program) if _is_weight(op.outputs[0])]


def _is_weight(var: Var) -> bool:
    value = constant(var)
    return isinstance(value, np.ndarray) and value.size >= 10


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", PACKAGES)
def test_real_packages_survive(corpus: Path, tmp_path: Path, name: str) -> None:
    before = load(corpus / f"{name}.mlpackage")
    after = load(save(before, tmp_path / "again.mlpackage"))
    assert interface(before).difference(interface(after)) == ""
    assert interface(before) == interface(after)
    assert to_text(after.program) == to_text(before.program)
    for function in before.program.functions:
        inputs = sample_inputs(before.program, function=function)
        old = run(before.program, inputs, function=function)
        new = run(after.program, inputs, function=function)
        assert old.keys() == new.keys()
        for output, value in old.items():
            np.testing.assert_array_equal(new[output], value)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", [n for n in PACKAGES if n != "anemll_multifunction"])
def test_coremltools_reads_what_was_written(corpus: Path, tmp_path: Path, name: str) -> None:
    path = save(load(corpus / f"{name}.mlpackage"), tmp_path / "again.mlpackage")
    from coremltools.converters.mil.frontend.milproto.load import load as host_load

    with quiet_host():
        model = ct.models.MLModel(str(path), skip_model_load=True)
        spec = model.get_spec()
        theirs = host_load(spec, spec.specificationVersion, model.weights_dir)
    ours = weights(load(corpus / f"{name}.mlpackage").program)
    for mine, other in zip(ours, weights(theirs), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_nothing_is_read_before_it_is_needed(package: Path) -> None:
    loaded = load(package)
    found = [v for op in walk_ops(loaded.program) for v in op.outputs if _is_weight(v)]
    (var,) = [v for v in found if v.shape == (64, 8)]
    assert loaded.weights is not None
    assert loaded.weights.blob_of(var.val) is not None, "the constant is a view of the mapped file"


def test_equal_new_constants_are_stored_once(tmp_path: Path) -> None:
    content = np.arange(4000, dtype=np.float32).reshape(40, 100)

    program = mb.program(input_specs=[mb.TensorSpec((40, 100))], opset_version=ct.target.iOS16)(
        lambda x: mb.add(x=mb.mul(x=x, y=content.copy()), y=content.copy())
    )

    path = save(load(program), tmp_path / "twice.mlpackage")
    assert content.nbytes < (path / WEIGHTS).stat().st_size < 1.1 * content.nbytes


def test_a_clone_shares_weights_and_nothing_else() -> None:
    original = network()
    before = to_text(original)
    copy = clone(original)
    (old, new) = (
        next(v for op in walk_ops(p) for v in op.outputs if _is_weight(v)) for p in (original, copy.program)
    )
    assert np.shares_memory(old.val, new.val)
    copy.program.functions["main"].outputs[0].name = "renamed"
    assert to_text(original) == before


def states_and_functions() -> Program:
    @mb.program(
        input_specs=[mb.TensorSpec((2,), dtype=types.fp16), mb.StateTensorSpec((2,), dtype=types.fp16)],
        opset_version=ct.target.iOS18,
    )
    def program(x: Var, total: Var) -> Var:
        grown = mb.add(x=mb.read_state(input=total), y=x)
        return mb.mul(x=mb.coreml_update_state(state=total, value=grown), y=np.float16(2), name="y")

    return program


def test_states_survive(tmp_path: Path) -> None:
    before = load(states_and_functions())
    after = load(save(before, tmp_path / "state.mlpackage"))
    assert to_text(after.program) == to_text(before.program)
    assert interface(after).functions == interface(before).functions
    assert interface(after).functions["main"].inputs[1].kind == "state fp16"


def test_several_functions_survive(tmp_path: Path) -> None:
    parts = [save(load(network(n)), tmp_path / f"part{n}.mlpackage") for n in (16, 32)]
    described = ct.utils.MultiFunctionDescriptor()
    for n, part in zip((16, 32), parts, strict=True):
        described.add_function(str(part), "main", f"wide_{n}")
    described.default_function_name = "wide_16"
    with quiet_host():
        ct.utils.save_multifunction(described, str(tmp_path / "both.mlpackage"))
    before = load(tmp_path / "both.mlpackage")
    after = load(save(before, tmp_path / "again.mlpackage"))
    assert set(after.program.functions) == {"wide_16", "wide_32"}
    assert interface(after) == interface(before)
    assert after.spec.description.defaultFunctionName == "wide_16"


def convert(program: Program, **options: Any) -> Any:
    with quiet_host():
        return ct.convert(program, minimum_deployment_target=ct.target.iOS16, skip_model_load=True, **options)


def test_metadata_and_description_survive(tmp_path: Path) -> None:
    model = convert(network())
    model.author, model.license, model.short_description = "me", "BSD", "a test"
    model.user_defined_metadata["key"] = "value"
    model.input_description["x"] = "an input"
    after = load(save(load(model_on_disk(model, tmp_path)), tmp_path / "again.mlpackage"))
    metadata = after.spec.description.metadata
    assert (metadata.author, metadata.license, metadata.shortDescription) == ("me", "BSD", "a test")
    assert metadata.userDefined["key"] == "value"
    assert after.spec.description.input[0].shortDescription == "an input"


def model_on_disk(model: Any, folder: Path) -> Path:
    model.save(str(folder / "model.mlpackage"))
    return folder / "model.mlpackage"


def test_flexible_shapes_and_images_survive(tmp_path: Path) -> None:
    import torch

    class Double(torch.nn.Module):
        def forward(self, image: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return image * 2, rows * 2

    traced: Any = torch.jit.trace(Double(), (torch.zeros(1, 3, 8, 8), torch.zeros(4, 3)))  # type: ignore[no-untyped-call]
    inputs = [
        ct.ImageType("image", shape=(1, 3, 8, 8), scale=1 / 255),
        ct.TensorType("rows", shape=(ct.RangeDim(1, 9, default=4), 3)),
    ]
    with quiet_host():
        model = ct.convert(
            traced, inputs=inputs, minimum_deployment_target=ct.target.iOS16, skip_model_load=True
        )
    before = load(model_on_disk(model, tmp_path))
    after = load(save(before, tmp_path / "again.mlpackage"))
    assert interface(before) == interface(after)
    assert after.spec.description.input[0].type.WhichOneof("Type") == "imageType"
    for n in (2, 9):
        values = {"image": np.ones((1, 3, 8, 8), np.float32), "rows": np.ones((n, 3), np.float32)}
        for name, value in run(after, values).items():
            np.testing.assert_array_equal(value, run(before, values)[name])


def test_an_mlmodel_comes_out(package: Path) -> None:
    model = to_mlmodel(load(package, compute_units=ct.ComputeUnit.CPU_AND_NE))
    assert isinstance(model, ct.models.MLModel)
    assert model.compute_unit == ct.ComputeUnit.CPU_AND_NE
    assert to_text(load(model).program) == to_text(load(package).program)
    assert load(model).compute_units == ct.ComputeUnit.CPU_AND_NE


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere.mlpackage", "does not exist"),
        ("nnv2_simple_layer.mlmodel", "is not a Core ML model, or is damaged"),
        ("README.md", "is not a Core ML model"),
        (".", "is a folder of models; give one of them: "),
    ],
)
def test_bad_files_are_explained(corpus: Path, name: str, words: str) -> None:
    with pytest.raises(LoadError) as raised:
        load(corpus / name)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("pipeline", "is a pipeline of"), ("treeEnsembleRegressor", "is of type treeEnsembleRegressor")],
)
def test_other_kinds_of_model_are_named(tmp_path: Path, kind: str, words: str) -> None:
    spec = protobuf.proto.Model_pb2.Model(specificationVersion=5)
    getattr(spec, kind).SetInParent()
    (tmp_path / "other.mlmodel").write_bytes(spec.SerializeToString())
    with pytest.raises(LoadError, match=words):
        load(tmp_path / "other.mlmodel")


def test_a_missing_or_short_weight_file_is_explained(package: Path) -> None:
    content = (package / WEIGHTS).read_bytes()
    (package / WEIGHTS).write_bytes(content[:-40])
    with pytest.raises(LoadError, match="the file is cut short; copy the package again"):
        load(package)
    (package / WEIGHTS).unlink()
    with pytest.raises(LoadError, match="has no weights/weight"):
        load(package)


def test_a_truncated_specification_is_explained(package: Path) -> None:
    file = package / "Data/com.apple.CoreML/model.mlmodel"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(LoadError):
        load(package)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("network.mlpackage", "is the input, which is never changed"),
        ("other.mlpackage", "exists; choose another name"),
        ("other.mlmodel", "let it end in .mlpackage"),
        ("no/other.mlpackage", "does not exist; make it first"),
    ],
)
def test_bad_places_are_refused_before_any_work(package: Path, name: str, words: str) -> None:
    shutil.copytree(package, package.with_name("other.mlpackage"))
    with pytest.raises(LoadError) as raised:
        save(load(package), package.parent / name)
    assert words in str(raised.value)
    with pytest.raises(LoadError):
        save(load(package), package, overwrite=True)


def test_overwriting_on_request(package: Path, tmp_path: Path) -> None:
    other = save(load(network(16)), tmp_path / "other.mlpackage")
    save(load(package), other, overwrite=True)
    assert to_text(load(other).program) == to_text(load(package).program)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["network.mlpackage", "other.mlpackage"]


def test_a_full_disk_leaves_what_was_there(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = save(load(network(16)), tmp_path / "other.mlpackage")
    before = to_text(load(other).program)

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(WeightWriter, "finish", full)
    with pytest.raises(LoadError, match="No space left on device; nothing was changed"):
        save(load(package), other, overwrite=True)
    monkeypatch.undo()
    assert to_text(load(other).program) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["network.mlpackage", "other.mlpackage"]


KILLED = """
import sys, time
import anesurgery.files.package as p
from anesurgery.loading import load
writing = p.WeightWriter.finish
def slow(self):
    print("writing", flush=True)
    time.sleep(60)
p.WeightWriter.finish = slow
p.save(load(sys.argv[1]), sys.argv[2], overwrite=True)
"""


@pytest.mark.slow
def test_a_kill_in_mid_save_leaves_what_was_there(package: Path, tmp_path: Path) -> None:
    other = save(load(network(16)), tmp_path / "other.mlpackage")
    before = to_text(load(other).program)
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(package), str(other)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert to_text(load(other).program) == before


def peak(work: Callable[[], object]) -> int:
    """Bytes that Python and numpy hold at most during a call, beyond what they held before."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_stays_far_below_the_weights(tmp_path: Path) -> None:
    big = np.random.default_rng(0).integers(0, 255, (12_000, 4_000), np.uint8).view(np.float16)

    program = mb.program(
        input_specs=[mb.TensorSpec((1, 2000), dtype=types.fp16)], opset_version=ct.target.iOS16
    )(lambda x: mb.linear(x=x, weight=big))

    path = save(load(program), tmp_path / "big.mlpackage")
    weights = next(path.rglob("weight.bin"))
    assert peak(lambda: save(load(path), tmp_path / "again.mlpackage")) < 0.25 * big.nbytes
    assert peak(lambda: weights.read_bytes()) > 0.9 * big.nbytes


def test_loading_and_saving_touch_no_other_file(package: Path, tmp_path: Path) -> None:
    for path in package.rglob("*"):
        os.utime(path, (10**9, 10**9))
    stamps = {p: p.stat().st_mtime_ns for p in package.rglob("*")}
    save(load(package), tmp_path / "again.mlpackage")
    assert {p: p.stat().st_mtime_ns for p in package.rglob("*")} == stamps


def test_opsets_of_functions_are_kept(package: Path) -> None:
    functions: dict[str, Function] = load(package).program.functions
    assert {protobuf.opset_version(f) for f in functions.values()} == {int(ct.target.iOS16.value)}
