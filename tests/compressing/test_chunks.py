"""Chunks, caches and several functions compressed: the whole runs, and its loss is stated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from closeness import assert_close
from decoders import cached
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands import app as cli
from anesurgery.errors import LoadError, SurgeryError, UnknownName
from anesurgery.interpret.predictor import Predictor
from anesurgery.loading import load_chain
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement.target import Target
from anesurgery.rewriting.ml_program import MLProgram, read_chunks

RNG = np.random.default_rng(11)
WIDTH = 32
FIRST, SECOND = ((RNG.standard_normal((WIDTH, WIDTH)) / 6).astype(np.float16) for _ in range(2))


def network(rows: int = 4) -> Program:
    """Two layers, and a state between them."""

    @mb.program(
        input_specs=[
            mb.TensorSpec((rows, WIDTH), dtype=types.fp16),
            mb.StateTensorSpec((1, WIDTH), dtype=types.fp16),
        ],
        opset_version=ct.target.iOS18,
    )
    def program(x: Var, memory: Var) -> Var:
        h = mb.relu(x=mb.linear(x=x, weight=FIRST, name="first"))
        last = mb.slice_by_size(x=h, begin=[0, 0], size=[1, WIDTH])
        kept = mb.coreml_update_state(state=memory, value=mb.add(x=mb.read_state(input=memory), y=last))
        return mb.linear(x=mb.add(x=h, y=kept), weight=SECOND, name="logits")

    return program


def samples(rows: int = 4) -> list[dict[str, Any]]:
    return [{"x": RNG.standard_normal((rows, WIDTH)).astype(np.float16)} for _ in range(12)]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ane.save(ane.load(network()), tmp_path_factory.mktemp("chunks") / "whole.mlpackage")


@pytest.fixture(scope="module")
def folder(package: Path) -> Path:
    ane.split(package, parts=2).save(package.parent / "cut")
    return package.parent / "cut"


def unrounded(path: Path, rows: int = 4) -> Path:
    """Two layers whose numbers are fp32, so that no border between chunks rounds any."""

    @mb.program(input_specs=[mb.TensorSpec((rows, WIDTH))], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        h = mb.relu(x=mb.linear(x=x, weight=FIRST.astype(np.float32)))
        return mb.linear(x=h, weight=SECOND.astype(np.float32), name="logits")

    return ane.save(ane.load(program), path)


def wide_samples() -> list[dict[str, Any]]:
    return [{"x": values["x"].astype(np.float32)} for values in samples()]


def test_what_chunks_hand_on_changes_no_weight(tmp_path: Path) -> None:
    """The wrong version hands on what the plain chunk makes."""
    whole, given = unrounded(tmp_path / "two.mlpackage"), wide_samples()
    found = [
        ane.compress(model, 4, inputs=given, target="M5", smallest=1000)
        for model in (whole, ane.split(whole, parts=2))
    ]
    errors = [[(row.error, row.rounded) for row in one.weights] for one in found]
    np.testing.assert_allclose(errors[1], errors[0], rtol=1e-6)
    assert found[0].loss is not None
    assert found[1].loss is not None
    assert found[1].loss.kl == pytest.approx(found[0].loss.kl, rel=1e-6)


def test_chunks_become_what_the_whole_becomes(package: Path, folder: Path, tmp_path: Path) -> None:
    """The wrong version corrects the second chunk for what the first made before it was compressed."""
    given = samples()
    whole = ane.compress(package, 4, inputs=given, target="M5", smallest=1000)
    found = ane.compress(folder, 4, inputs=given, target="M5", smallest=1000)
    assert [row.form for row in found.weights] == ["int4", "int4"]
    assert found.bytes[1] == whole.bytes[1]
    assert found.loss is not None
    assert 0 < found.loss.kl < 0.1
    saved = load_chain(found.save(tmp_path / "small"))
    assert len(saved.chunks) == 2
    small = whole.save(tmp_path / "small.mlpackage")
    for values in given[:3]:
        see_near(ane.run(saved, values)["logits"], ane.run(small, values)["logits"])
    np.testing.assert_array_equal(
        ane.run(found.save(tmp_path / "pipeline.mlpackage"), given[0])["logits"],
        ane.run(saved, given[0])["logits"],
    )


def see_near(outputs: Any, expected: Any) -> None:
    """Values between chunks are rounded to fp16, which may change a row; wrong versions change all."""
    apart = np.abs(outputs.astype(np.float64) - expected)
    assert np.mean(~(apart <= 0.01)) < 0.1
    assert apart.max() < 0.1 * np.abs(expected).max()


def test_a_chain_that_was_not_saved_and_is_not_changed(package: Path) -> None:
    chain = ane.split(package, parts=2)
    before = [ane.to_text(chunk.program) for chunk in chain.chunks]
    found = ane.compress(chain, 8, inputs=samples(), smallest=1000)
    assert [ane.to_text(chunk.program) for chunk in chain.chunks] == before
    assert found.bytes[1] < 0.7 * found.bytes[0]


def test_chunks_of_two_functions(tmp_path: Path) -> None:
    parts = {
        name: unrounded(tmp_path / f"{name}.mlpackage", rows) for name, rows in (("long", 4), ("short", 1))
    }
    both = ane.merge(parts, tmp_path / "both.mlpackage")
    chain = ane.split(both, parts=2)
    how: dict[str, Any] = {"inputs": wide_samples(), "function": "long", "target": "M5", "smallest": 1000}
    found, whole = (ane.compress(model, 4, **how) for model in (chain, both))
    assert found.loss is not None
    assert 0 < found.loss.kl < 0.1
    saved = load_chain(found.save(tmp_path / "small"))
    assert [sorted(chunk.program.functions) for chunk in saved.chunks] == [["long", "short"]] * 2
    values = {"x": wide_samples()[0]["x"][:1]}
    outputs, expected = (ane.run(model, values, function="short")["logits"] for model in (saved, whole.model))
    assert_close(outputs, expected, rtol=1e-5)
    for model in (chain, both):
        with pytest.raises(SurgeryError, match="the samples fit 2 of the functions long, short; say function="):
            ane.compress(model, 4, inputs=wide_samples(), smallest=1000)
        with pytest.raises(UnknownName, match="long2"):
            ane.compress(model, 4, inputs=wide_samples(), function="long2", smallest=1000)


@pytest.mark.slow
def test_a_decoder_with_a_cache_and_two_functions(tmp_path: Path) -> None:
    path = ane.save(ane.load(cached()), tmp_path / "cached.mlpackage")
    functions = ane.load(path).program.functions
    assert len(functions) == 2
    name = "prefill"
    given = [Predictor(path, function=name).sample(seed) for seed in range(12)]
    for number, values in enumerate(given):
        values["position"] = np.array([number % 4], values["position"].dtype).reshape(values["position"].shape)
    found = ane.compress(path, 8, inputs=given, function=name, smallest=100)
    assert found.compressed
    assert found.loss is not None
    assert 0 < found.loss.kl < 0.01
    small = found.save(tmp_path / "small.mlpackage")
    after = ane.load(small).program.functions
    assert {n: list(f.inputs) for n, f in after.items()} == {n: list(f.inputs) for n, f in functions.items()}
    decoded = {n: sum("constexpr" in op.op_type for op in f.operations) for n, f in after.items()}
    assert len(set(decoded.values())) == 1
    assert 0 not in decoded.values()


def test_a_chain_answers_what_one_program_does(package: Path, folder: Path) -> None:
    """Programs that run one after the other are one model: only reading and saving differ."""
    chain, whole = read_chunks(folder), MLProgram.read(package)
    assert list(chain.graphs) == [part.program for part in chain.parts]
    assert chain.op_counts["linear"] == whole.op_counts["linear"] == 2
    assert chain.spec_of(chain.graphs[1]) is chain.parts[1].spec
    aim = Target.parse("M4/macOS 15")
    assert chain.score(aim).share == whole.score(aim).share
    assert ({*chain.takes}, {*whole.takes}) == ({""}, {"main"})
    chain.check_source()


def test_what_chunks_cannot_be(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="unknown input 'y'"):
        ane.compress(folder, 4, inputs=[{"y": samples()[0]["x"]}] * 9, smallest=1000)
    found = ane.compress(folder, 8, inputs=samples(), smallest=1000)
    with pytest.raises(LoadError):
        found.save(folder, overwrite=True)
    assert len(load_chain(folder).chunks) == 2


def test_the_command_takes_chunks(folder: Path, tmp_path: Path) -> None:
    options = []
    for number, values in enumerate(samples()[:8]):
        np.savez(tmp_path / f"{number}.npz", **values)
        options += ["--inputs", str(tmp_path / f"{number}.npz")]
    call = ["compress", str(folder), str(tmp_path / "small"), *options, "--smallest", "1000"]
    done = CliRunner().invoke(cli.app, call)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "held-out samples: KL" in done.stdout
    assert len(load_chain(tmp_path / "small").chunks) == 2
    assert "exists" in str(CliRunner().invoke(cli.app, call).exception)


def test_the_recipe_takes_chunks(package: Path, folder: Path, tmp_path: Path) -> None:
    """The wrong version compresses each chunk by itself, for inputs that nobody gives it."""
    given = samples()
    options: dict[str, Any] = {"inputs": given, "target": "M5", "quiet": True}
    found = ane.compress(folder, 4, inputs=given, target="M5", smallest=1000)
    how: dict[str, Any] = {"bits": 4, "more": {"smallest": 1000}}
    surgery = ane.apply(folder, ane.passes.CompressWeights(**how), **options)
    assert [change.pass_name for change in surgery.changes] == ["compress_weights"] * 2
    saved = load_chain(surgery.save(tmp_path / "small"))
    expected = load_chain(found.save(tmp_path / "expected"))
    for values in given[:2]:
        np.testing.assert_array_equal(*(ane.run(one, values)["logits"] for one in (saved, expected)))
    pipeline = ane.recipes.compressed(folder, **how, **options)
    np.testing.assert_array_equal(*(ane.run(one, given[0])["logits"] for one in (saved, pipeline)))
    chain = ane.split(package, parts=2)
    before = [ane.to_text(chunk.program) for chunk in chain.chunks]
    steps = [ane.passes.CompressWeights(bits=8, more={"smallest": 1000}), "remove_identity"]
    both = ane.apply(chain, steps, **options)
    assert [ane.to_text(chunk.program) for chunk in chain.chunks] == before
    assert both.save(tmp_path / "both.mlpackage").suffix == ".mlpackage"
    with pytest.raises(LoadError):
        surgery.save(folder)


def test_passes_edit_chunks(tmp_path: Path) -> None:
    @mb.program(input_specs=[mb.TensorSpec((4, WIDTH), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        h = mb.relu(x=mb.identity(x=mb.linear(x=x, weight=FIRST)))
        return mb.linear(x=mb.sigmoid(x=mb.identity(x=h)), weight=SECOND, name="logits")

    package = ane.save(ane.load(program), tmp_path / "whole.mlpackage")
    folder = ane.split(package, parts=2).save(tmp_path / "cut")
    surgery = ane.apply(folder, "remove_identity", prove="both", quiet=True)
    assert [change.pass_name for change in surgery.changes] == ["remove_identity"] * 2
    saved, values = load_chain(surgery.save(tmp_path / "edited")), samples()[0]
    np.testing.assert_array_equal(*(ane.run(one, values)["logits"] for one in (saved, folder)))
    first, second = (ane.apply(folder, "remove_identity", member=n, quiet=True) for n in ("chunk_1", "chunk_2"))
    assert len(first.changes) + len(second.changes) == 2
    with pytest.raises(UnknownName, match="chunk_3"):
        ane.apply(folder, "remove_identity", member="chunk_3", quiet=True)


def test_chunks_share_the_bytes_that_are_asked_for(folder: Path) -> None:
    """The wrong version gives each chunk all of them."""
    options: dict[str, Any] = {"inputs": samples(), "for_": "size", "smallest": 1000}
    found = ane.compress(folder, 4, max_bytes="1900 B", **options)
    assert 1200 < found.bytes[1] <= 1900
    assert all(row.bytes[1] < 950 for row in found.compressed)
