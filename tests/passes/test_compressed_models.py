"""Packages that coremltools compressed, in each of its modes: passes leave weights compressed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from closeness import assert_close

import anesurgery as ane
from anesurgery.mil import Array, Program, Var, ct, is_compressed, mb, operands, quiet_host, types, walk_ops
from anesurgery.passes.channels_first import ChannelsFirst
from anesurgery.passes.embedding_matmul import EmbeddingMatmul
from anesurgery.passes.pad_last_axis import PadLastAxis
from anesurgery.passes.patch_convolution import PatchConvolution
from anesurgery.passes.split_conv3d import SplitConv3d
from anesurgery.passes.split_head import SplitHead
from anesurgery.passes.split_inner_axis import SplitInnerAxis
from anesurgery.passes.unroll_recurrent import UnrollRecurrent
from anesurgery.regions.compressed_weights import decoded
from anesurgery.semantics.reading import elements
from anesurgery.testing import apply_pass, assert_same_numbers, random_inputs

with quiet_host():
    from coremltools.optimize import coreml as host

RNG = np.random.default_rng(11)
LARGE = 256
"""Elements above which weights are compressed here."""


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def text(opset: Any) -> Program:
    """A table, a hidden layer of odd width, a head; each with the shape that a pass looks for."""

    @mb.program(input_specs=[mb.TensorSpec((1, 6), dtype=types.int32)], opset_version=opset)
    def program(ids: Var) -> Var:
        x = mb.gather(x=floats(67, 24), indices=ids, axis=0)
        h = mb.linear(x=x, weight=floats(40, 24), bias=floats(40))
        y = mb.linear(x=mb.relu(x=h), weight=floats(24, 40))
        return mb.linear(x=mb.add(x=x, y=y), weight=floats(300, 24), name="logits")

    return program


def vision(opset: Any) -> Program:
    """Patches, voxels, and a recurrent op."""

    @mb.program(
        input_specs=[mb.TensorSpec((1, 3, 32, 32)), mb.TensorSpec((1, 2, 4, 6, 6)), mb.TensorSpec((3, 1, 8))],
        opset_version=opset,
    )
    def program(image: Var, voxels: Var, row: Var) -> tuple[Var, ...]:
        patches = mb.conv(x=image, weight=floats(8, 3, 16, 16), strides=[16, 16], pad_type="valid", name="p")
        depth = mb.conv(x=voxels, weight=floats(16, 2, 2, 3, 3), name="d")
        last = mb.gru(x=row, initial_h=floats(1, 16), weight_ih=floats(48, 8), weight_hh=floats(48, 16))[1]
        return patches, depth, mb.identity(x=last, name="h")

    return program


Compress = Callable[[Any], Any]


def config(make: Any, **options: Any) -> Any:
    return host.OptimizationConfig(global_config=make(weight_threshold=LARGE, **options))


def linear(**options: Any) -> Compress:
    return lambda m: host.linear_quantize_weights(m, config(host.OpLinearQuantizerConfig, **options))


def palettes(joint: bool = False, **options: Any) -> Compress:
    return lambda m: host.palettize_weights(m, config(host.OpPalettizerConfig, **options), joint)


def prune(**options: Any) -> Compress:
    return lambda m: host.prune_weights(m, config(host.OpMagnitudePrunerConfig, **options))


def few(weight: Array) -> tuple[Array, Array]:
    """A table of 16 entries, and the nearest of them for each number."""
    table = np.quantile(weight, np.linspace(0, 1, 16)).astype(weight.dtype)
    return table, np.abs(weight[..., None] - table).argmin(-1).astype(np.uint8)


QUANTIZED_TABLE = host.OpLinearQuantizerConfig(weight_threshold=0, granularity="per_tensor")


def both(first: Compress, second: Callable[[Any], Any]) -> Compress:
    return lambda m: second(first(m))


OLD: dict[str, Compress] = {
    "int8": linear(mode="linear_symmetric"),
    "uint8 with zero points": linear(mode="linear", dtype="uint8"),
    "int8 of tensors": linear(mode="linear", granularity="per_tensor"),
    "palette of 4 bits": palettes(mode="uniform", nbits=4),
    "palette of a function": palettes(mode="custom", lut_function=few),
    "palette of 8 bits": palettes(mode="uniform", nbits=8),
    "pruned": prune(target_sparsity=0.6),
    "pruned n:m": prune(n_m_ratio=(2, 4)),
    "thresholds": lambda m: host.prune_weights(m, config(host.OpThresholdPrunerConfig, threshold=1.0)),
}
NEW: dict[str, Compress] = {
    "int4 of blocks": linear(mode="linear_symmetric", dtype="int4", granularity="per_block", block_size=8),
    "uint4 of blocks": linear(mode="linear", dtype="uint4", granularity="per_block", block_size=8),
    "int8 with zero points": linear(mode="linear"),
    "palette of 3 bits": palettes(mode="uniform", nbits=3),
    "palettes of groups": palettes(mode="uniform", nbits=4, granularity="per_grouped_channel", group_size=4),
    "palette with scales": palettes(mode="uniform", nbits=6, enable_per_channel_scale=True),
    "pruned": prune(target_sparsity=0.6),
    "pruned blocks": prune(target_sparsity=0.5, block_size=4),
    "pruned, palettes": both(prune(target_sparsity=0.6), palettes(True, mode="uniform", nbits=4)),
    "pruned, int8": both(
        prune(target_sparsity=0.6),
        lambda m: host.linear_quantize_weights(m, config(host.OpLinearQuantizerConfig), True),
    ),
    "palettes, int8": both(
        palettes(mode="uniform", nbits=4),
        lambda m: host.linear_quantize_weights(m, host.OptimizationConfig(global_config=QUANTIZED_TABLE), True),
    ),
}
MODES = {**{("iOS 16", k): v for k, v in OLD.items()}, **{("iOS 18", k): v for k, v in NEW.items()}}
OPSETS = {"iOS 16": ct.target.iOS16, "iOS 18": ct.target.iOS18}

STEPS = {
    text: (EmbeddingMatmul(), PadLastAxis(), SplitHead(most=128), ChannelsFirst(), SplitInnerAxis(most=16)),
    vision: (PatchConvolution(), SplitConv3d(), UnrollRecurrent()),
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    folder = tmp_path_factory.mktemp("plain")
    made = {}
    for name, opset in OPSETS.items():
        for build in STEPS:
            path = folder / f"{build.__name__}_{name.replace(' ', '')}.mlpackage"
            made[name, build] = ane.save(ane.load(build(opset)), path)
    return made


def weights(program: Program) -> list[Var]:
    """What ops other than those that decode read of large constants, compressed or not."""
    found: dict[Var, None] = {}
    for op in walk_ops(program):
        if not op.op_type.startswith("constexpr_"):
            stored = [v for _, v in operands(op) if v.op is not None and v.op.op_type.startswith("const")]
            found |= dict.fromkeys(v for v in stored if v.rank > 1 and elements(v) > LARGE)
    return list(found)


CASES = [(mode, build) for mode in MODES for build in STEPS if (mode[1], build) != ("pruned n:m", vision)]
"""coremltools prunes n of m along an axis that none of these kernels has."""


@pytest.mark.quick_cases(
    "iOS 16: int8, vision",
    "iOS 16: uint8 with zero points, vision",
    "iOS 16: int8 of tensors, text",
    "iOS 16: palette of 4 bits, vision",
    "iOS 16: palette of a function, vision",
    "iOS 16: palette of 8 bits, vision",
    "iOS 16: pruned, vision",
    "iOS 16: pruned n:m, text",
    "iOS 16: thresholds, vision",
    "iOS 18: int4 of blocks, vision",
    "iOS 18: uint4 of blocks, text",
    "iOS 18: int8 with zero points, vision",
    "iOS 18: palette of 3 bits, vision",
    "iOS 18: palettes of groups, vision",
    "iOS 18: palette with scales, vision",
    "iOS 18: pruned, vision",
    "iOS 18: pruned blocks, vision",
    "iOS 18: pruned, palettes, vision",
    "iOS 18: pruned, int8, vision",
    "iOS 18: palettes, int8, vision",
)
@pytest.mark.one_of(18)
@pytest.mark.parametrize(("mode", "build"), CASES, ids=[f"{': '.join(m)}, {b.__name__}" for m, b in CASES])
def test_weights_stay_compressed(
    mode: tuple[str, str], build: Any, packages: dict[Any, Path], tmp_path: Path
) -> None:
    plain = ct.models.MLModel(str(packages[mode[0], build]), skip_model_load=True)
    with quiet_host():
        MODES[mode](plain).save(str(tmp_path / "compressed.mlpackage"))
    program = ane.load(tmp_path / "compressed.mlpackage").program
    before = list(map(is_compressed, weights(program)))  # a few modes leave a weight whose shape does not fit
    assert sum(before) >= 1
    for step in STEPS[build]:
        after, session = apply_pass(step, program)
        assert session.changes, session.refusals
        assert all(change.proof for change in session.changes)
        now = list(map(is_compressed, weights(after)))
        assert sum(now) >= sum(before), step.name
        assert all(now) or not all(before), step.name
        assert_same_numbers(program, after, rtol=1e-4)


def test_a_compressed_model_is_saved_compressed(packages: dict[Any, Path], tmp_path: Path) -> None:
    """Through `apply`, a package and coremltools: about as small as before, the same numbers."""
    plain = ct.models.MLModel(str(packages["iOS 18", text]), skip_model_load=True)
    with quiet_host():
        NEW["palettes of groups"](plain).save(str(tmp_path / "before.mlpackage"))
    surgery = ane.apply(tmp_path / "before.mlpackage", ["split_head"], quiet=True)
    assert not surgery.changes
    surgery = ane.apply(tmp_path / "before.mlpackage", [SplitHead(most=128)], quiet=True)
    path = surgery.save(tmp_path / "after.mlpackage")
    sizes = [sum(f.stat().st_size for f in p.rglob("*.bin")) for p in (tmp_path / "before.mlpackage", path)]
    assert sizes[1] < 1.3 * sizes[0]
    values = random_inputs(ane.load(path).program)
    old, new = (ane.run(p, values) for p in (tmp_path / "before.mlpackage", path))
    assert_close(new["logits"], old["logits"], rtol=1e-6)
    with quiet_host():
        again = host.decompress_weights(ct.models.MLModel(str(path), skip_model_load=True))
    assert not [op for op in walk_ops(ane.load(again).program) if op.op_type.startswith("constexpr_")]


def test_splitting_and_merging_leave_weights_compressed(packages: dict[Any, Path], tmp_path: Path) -> None:
    plain = ct.models.MLModel(str(packages["iOS 18", text]), skip_model_load=True)
    with quiet_host():
        NEW["pruned, palettes"](plain).save(str(tmp_path / "before.mlpackage"))
    chain = ane.split(tmp_path / "before.mlpackage", 2)
    assert all(is_compressed(w) for chunk in chain.chunks for w in weights(chunk.program))
    chain.save(tmp_path / "chain")
    assert ane.compare(tmp_path / "before.mlpackage", tmp_path / "chain").psnr == np.inf
    merged = ane.merge(dict.fromkeys("ab", tmp_path / "before.mlpackage"), tmp_path / "both.mlpackage")
    assert all(map(is_compressed, weights(ane.load(merged).program)))


@pytest.mark.quick_cases("int8", "pruned")
@pytest.mark.parametrize("mode", OLD)
def test_forms_of_an_old_opset_are_merged_taken_out_and_cut(
    mode: str, packages: dict[Any, Path], tmp_path: Path
) -> None:
    """From iOS 18 on the ops that decode have other inputs: a function that has old ones keeps its opset."""
    plain = ct.models.MLModel(str(packages["iOS 16", text]), skip_model_load=True)
    with quiet_host():
        OLD[mode](plain).save(str(tmp_path / "before.mlpackage"))
    merged = ane.merge(dict.fromkeys("ab", tmp_path / "before.mlpackage"), tmp_path / "both.mlpackage")
    taken = ane.extract(merged, "b", tmp_path / "b.mlpackage")
    chain = ane.split(merged, 2, function="a").save(tmp_path / "chain")
    values = random_inputs(ane.load(tmp_path / "before.mlpackage").program)
    expected = ane.run(tmp_path / "before.mlpackage", values)["logits"]
    for model in (merged, taken, chain):
        np.testing.assert_array_equal(ane.run(model, values)["logits"], expected)
    kept, found = (weights(ane.load(p).program) for p in (tmp_path / "before.mlpackage", taken))
    assert any(map(is_compressed, kept))
    assert [is_compressed(w) for w in found] == [is_compressed(w) for w in kept]


def test_a_table_as_an_input_is_written_decoded(packages: dict[Any, Path], tmp_path: Path) -> None:
    plain = ct.models.MLModel(str(packages["iOS 16", text]), skip_model_load=True)
    with quiet_host():
        OLD["int8"](plain).save(str(tmp_path / "before.mlpackage"))
    surgery = ane.apply(tmp_path / "before.mlpackage", [EmbeddingMatmul(mode="input")], quiet=True)
    assert any("not compressed" in note for note in surgery.notes)
    before = ane.load(tmp_path / "before.mlpackage").program
    table = next(op for op in walk_ops(before) if op.op_type == "gather").x
    (left,) = surgery.artifacts.values()
    np.testing.assert_array_equal(left, decoded(table))
