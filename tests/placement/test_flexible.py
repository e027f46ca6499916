"""Shapes that may vary: the default shape is judged, each enumerated one is counted, others are unknown."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import get_new_symbol
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands.app import app
from anesurgery.loading import load
from anesurgery.mil import Function, Program, Var, ct, mb, types, walk_ops
from anesurgery.placement import flexible
from anesurgery.placement.flexible import flexible_shapes, function_at
from anesurgery.placement.inspector import inspect_program
from anesurgery.placement.score import placed
from anesurgery.placement.target import Target
from anesurgery.show.costs import costs

SMALL, LARGE = (1, 64, 8, 8), (1, 64, 96, 96)
SIDE = ct.RangeDim(8, 128, default=96)
KINDS: dict[str, Any] = {
    "range": (1, 64, SIDE, SIDE),
    "list": ct.EnumeratedShapes([SMALL, LARGE], default=LARGE),
    "fixed": LARGE,
}


@pytest.fixture(scope="module", params=sorted(KINDS))
def converted(request: pytest.FixtureRequest) -> tuple[str, Any]:
    layers = [torch.nn.Conv2d(64, 64, 3, padding=1) for _ in range(3)]
    traced: Any = torch.jit.trace(torch.nn.Sequential(*layers).eval(), torch.zeros(LARGE))  # type: ignore[no-untyped-call]
    kind = request.param
    made = ct.convert(
        traced,
        inputs=[ct.TensorType("x", shape=KINDS[kind], dtype=np.float16)],
        outputs=[ct.TensorType(dtype=np.float16)],
        skip_model_load=True,
        minimum_deployment_target=ct.target.iOS16,
    )
    return kind, made


@pytest.mark.one_of(4)
def test_the_default_shape_is_judged_in_memory_and_from_a_path(
    converted: tuple[str, Any], tmp_path: Path
) -> None:
    kind, model = converted
    model.save(str(tmp_path / "m.mlpackage"))
    for source in (model, tmp_path / "m.mlpackage", model._mil_program):
        found = ane.inspect(source, "iPhone/iOS 17")
        assert [row.shape for row in found.ops] == ["1x64x96x96"] * 3
        assert found.counts == {"ane": 3}
        later = ane.inspect(source, "iPhone/iOS 26")  # no such iPhone was told of
        assert later.counts == {"unknown" if kind == "range" else "ane": 3}
        assert ("fix them first: anesurgery fix " in found.summary) == (kind == "range")
        on_a_mac = ane.inspect(source, "M4/macOS 27")
        told = [problem.why for problem in costs(on_a_mac) if "sizes of the inputs vary" in problem.why]
        assert [("whole models on the CPU" in why) for why in told] == [True] * (kind == "range")
        assert on_a_mac.counts == {"ane" if kind == "fixed" else "unknown": 3}  # reports of Macs conflict
        assert on_a_mac.residency_at_most["ops"] == 1
        rules = {f.rule for f in found.findings}
        remedies = [f.advice for f in found.findings if f.rule in ("dyn-range", "dyn-enumerated")]
        assert all("`ane.sizes`" in words for words in remedies)
        assert ("dyn-range" in rules, "dyn-enumerated" in rules) == (kind == "range", kind == "list")
        assert any("default shape, x 1x64x96x96" in note for note in found.notes) == (kind != "fixed")
        assert ("other shapes of a range are not known" in found.notes) == (kind == "range")


@pytest.mark.one_of(3)
def test_each_enumerated_shape_is_counted(converted: tuple[str, Any]) -> None:
    kind, model = converted
    found = ane.inspect(model, "A17/iOS 18")
    told = [(one.shape, one.counts) for one in found.at_shapes]
    expected = [("x 1x64x96x96", {"ane": 3}), ("x 1x64x8x8", {"cpu": 3})]
    assert told == (expected if kind == "list" else [])
    assert any("estimated at x 1x64x8x8: 3 cpu" in note for note in found.notes) == (kind == "list")
    assert [one["shape"] for one in found.to_json()["at_shapes"]] == [shape for shape, _ in told]


def test_flexible_shapes_are_doubtful_where_reports_conflict(converted: tuple[str, Any]) -> None:
    kind, model = converted
    found = ane.inspect(model, "M1/macOS 27")
    assert found.counts == ({"ane": 3} if kind == "fixed" else {"unknown": 3})
    rules = {f.rule for f in found.findings}
    assert ("dyn-enumerated-disputed" in rules, "dyn-range-disputed" in rules) == (
        kind == "list",
        kind == "range",
    )
    # What is said of the whole is said at each shape; at the small one the ops are on the CPU in either case.
    assert [one.counts for one in found.at_shapes] == ([{"unknown": 3}, {"cpu": 3}] if kind == "list" else [])


@pytest.mark.parametrize(
    ("target", "said"), [("iPhone/iOS 27", True), ("iPhone/iOS 18", False), ("M1/macOS 27", False)]
)
def test_ranges_that_gave_no_numbers_are_named(converted: tuple[str, Any], target: str, said: bool) -> None:
    kind, model = converted
    rules = {f.rule for f in ane.inspect(model, target).findings}
    assert ("dyn-range-numbers" in rules) == (said and kind == "range")


def test_the_command_that_fixes_the_sizes_does(converted: tuple[str, Any], tmp_path: Path) -> None:
    """The wrong version: a command that the command line does not take, or that leaves the sizes open."""
    kind, model = converted
    if kind != "range":
        return
    model.save(str(path := tmp_path / "a model.mlpackage"))
    command = ane.inspect(path, "iPhone/iOS 26").fixing
    arguments = shlex.split(command)[1:]
    assert arguments[:3] == ["fix", str(path), "fix_shapes"]
    arguments[3] = str(fixed := tmp_path / arguments[3])
    assert CliRunner().invoke(app, [*arguments, "--quiet"]).exit_code == 0
    after = ane.inspect(fixed, "iPhone/iOS 26")
    assert (after.counts, after.fixing) == ({"ane": 3}, "")


def symbolic(*shape: Any) -> Program:
    weight = np.ones((64, 64), np.float16)

    return mb.program(input_specs=[mb.TensorSpec(shape, dtype=types.fp16)], opset_version=ct.target.iOS16)(
        lambda x: mb.linear(x=x, weight=weight)
    )


def test_without_a_default_shape_nothing_is_claimed() -> None:
    found = ane.inspect(symbolic(get_new_symbol(), 64), "M4/macOS 27")
    assert found.counts == {"unknown": 1}
    assert any("default shape of %x is not known" in note for note in found.notes)


def test_a_copy_at_one_shape_leaves_the_program_as_it_was() -> None:
    program = symbolic(get_new_symbol(), 64)
    function = function_at(program, "main", {"x": (5, 64)})
    assert function is not None
    assert tuple(function.outputs[0].shape) == (5, 64)
    assert flexible_shapes(load(program).program.functions["main"]) is not None
    assert function_at(program, "main", {}) is None  # still dynamic


IMAGES: dict[str, Any] = {
    "range": (1, 3, SIDE, SIDE),
    "list": ct.EnumeratedShapes([(1, 3, 8 * n, 8 * n) for n in range(1, 19)], default=(1, 3, 96, 96)),
}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("kind", IMAGES)
def test_images_of_many_sizes_are_judged_alike_however_they_are_given(kind: str, tmp_path: Path) -> None:
    import torch

    traced: Any = torch.jit.trace(torch.nn.Conv2d(3, 64, 3, padding=1).eval(), torch.zeros(1, 3, 96, 96))  # type: ignore[no-untyped-call]
    model = ct.convert(
        traced,
        inputs=[ct.ImageType("x", shape=IMAGES[kind])],
        skip_model_load=True,
        minimum_deployment_target=ct.target.iOS16,
    )
    model.save(str(tmp_path / "m.mlpackage"))
    again = ct.models.MLModel(str(tmp_path / "m.mlpackage"), skip_model_load=True)
    found = [
        ane.inspect(given, "M4/macOS 27")
        for given in (model, again, tmp_path / "m.mlpackage", model._mil_program)
    ]
    assert (
        len({(one.notes, one.at_shapes, tuple(row.shape for row in one.ops)) for one in map(_plain, found)})
        == 1
    )
    assert len(found[0].at_shapes) == (16 if kind == "list" else 0)
    told = "16 of 18 enumerated shapes are estimated, the default first"
    assert (told in found[0].notes) == (kind == "list")


def _plain(found: Any) -> Any:
    """Without dictionaries, so that it can be in a set."""
    return dataclasses.replace(found, at_shapes=tuple(map(str, found.at_shapes)))


class Padded(torch.nn.Module):
    """Frames of a strided convolution, masked past the length, as in the encoders of speech models."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = torch.nn.Conv1d(1, 4, 3, 2, 1)

    def forward(self, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        y = self.frames(x)
        padding = torch.arange(y.shape[-1])[None] >= length[:, None]
        return y.masked_fill(padding[:, None], 0.0)


@pytest.mark.parametrize(
    ("sizes", "default", "lost"),
    [
        (ct.RangeDim(8, 512, default=64), 64, False),
        (None, 64, False),
        (ct.RangeDim(8, 200000, default=160000), 160000, True),
    ],
)
def test_a_length_that_fits_int16_is_not_lost(sizes: Any, default: int, lost: bool) -> None:
    """The wrong version: a dynamic length "may be any int32", in the first line of each such model."""
    example = (torch.zeros(1, 1, default), torch.tensor([9]))
    shape = (1, 1, sizes) if sizes else ct.EnumeratedShapes([(1, 1, 64), (1, 1, 256)], default=(1, 1, 64))
    traced = torch.jit.trace(Padded().eval(), example)  # type: ignore[no-untyped-call]
    model = ct.convert(
        traced,
        inputs=[ct.TensorType("x", shape), ct.TensorType("length", (1,), dtype=np.int32)],
        minimum_deployment_target=ct.target.iOS17,
        skip_model_load=True,
    )
    rules = [f.rule for f in ane.inspect(model, "M4/macOS 26").all_findings]
    assert ("lost-int16" in rules) == lost


@pytest.mark.parametrize(("count", "many"), [(128, False), (129, True)])
def test_more_shapes_than_apple_documents(count: int, many: bool) -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, get_new_symbol(), 8))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        return mb.relu(x=x)

    shapes = ct.EnumeratedShapes([(1, 8 * n, 8) for n in range(1, count + 1)])
    model = ct.convert(program, inputs=[ct.TensorType("x", shape=shapes)], skip_model_load=True)
    found = ane.inspect(model, "M1/macOS 14")
    said = [f.message for f in found.findings if f.rule == "dyn-enum-many"]
    assert said == ([f"{count} enumerated shapes, more than 128"] if many else [])


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (((1, 256), (1, 512)), True),
        (((1, 32), (1, 16)), True),
        (((1, 16), (1, 32)), False),
        (((16, 16), (32, 32)), False),
        (((1, 8),), False),
    ],
    ids=["longer", "turned", "the same", "a square mask", "fixed"],
)
def test_lists_of_two_inputs_go_in_pairs(others: tuple[tuple[int, int], ...], said: bool) -> None:
    listed = {"x": ((1, 16), (1, 32)), "y": others}
    shapes: dict[str, Any] = {n: ct.EnumeratedShapes(own) if own[1:] else own[0] for n, own in listed.items()}
    specs = [mb.TensorSpec((1, get_new_symbol()))]
    specs += [
        mb.TensorSpec(
            [n if len({s[axis] for s in others}) == 1 else get_new_symbol() for axis, n in enumerate(others[0])]
        )
    ]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(x: Var, y: Var) -> tuple[Var, Var]:
        return mb.relu(x=x), mb.relu(x=y)

    model = ct.convert(
        program,
        inputs=[ct.TensorType(*port) for port in shapes.items()],
        skip_model_load=True,
        minimum_deployment_target=ct.target.iOS18,
    )
    words = [f.message for f in ane.inspect(model, "M1/macOS 15").findings if f.rule == "dyn-enum-pairs"]
    assert ["go in pairs: 1x16 only with" in w for w in words] == [True] * said


@pytest.mark.parametrize(
    ("window", "step", "said"), [(48, 48, True), (14, 14, True), (2, 2, False), (48, 1, False)]
)
def test_a_window_that_fits_one_size_alone(window: int, step: int, said: bool) -> None:
    sizes = [get_new_symbol(), get_new_symbol()]

    @mb.program(input_specs=[mb.TensorSpec((1, 3, *sizes))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        return mb.avg_pool(x=x, kernel_sizes=[window] * 2, strides=[step] * 2, pad_type="valid")

    shapes = ct.EnumeratedShapes([(1, 3, 96, 96), (1, 3, 144, 144)])
    model = ct.convert(program, inputs=[ct.TensorType("x", shape=shapes)], skip_model_load=True)
    found = ane.inspect(model, "M1/macOS 14")
    words = [f.message for f in found.findings if f.rule == "dyn-fixed-window"]
    assert (costs(found)[0].rule == "dyn-fixed-window") == said
    assert [f"keeps a window of {window}x{window} at every size" in w for w in words] == [True] * said


@pytest.mark.parametrize(
    ("others", "state", "said"),
    [((5,), True, True), ((5,), False, False), ((), True, False)],
    ids=["a fixed input", "no state", "no fixed input"],
)
def test_a_range_beside_a_state(others: tuple[int, ...], state: bool, said: bool) -> None:
    ports = {"x": mb.placeholder((get_new_symbol(), 32))}
    ports |= {f"fixed{n}": mb.placeholder((n, 32)) for n in others}
    ports |= {"st": mb.state_tensor_placeholder((1, 32), dtype=types.fp16)} if state else {}

    def body(**values: Var) -> Var:
        total = values.pop("x")
        if "st" in values:
            kept = values.pop("st")
            total = mb.add(x=total, y=mb.cast(x=mb.read_state(input=kept), dtype="fp32"))
        for value in values.values():
            total = mb.add(x=total, y=mb.reduce_sum(x=value, axes=[0], keep_dims=True))
        return total

    program = Program()
    with Function(ports, opset_version=ct.target.iOS18) as function:
        function.set_outputs([body(**function.inputs)])
        program.add_function("main", function)
    rules = [f.rule for f in ane.inspect(program, "M4/macOS 15").findings]
    assert ("state-range" in rules) == said


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize(("low", "dynamic", "said"), [(0, True, True), (1, True, False), (0, False, False)])
def test_a_slice_where_a_range_starts_at_nothing(
    saved: bool, low: int, dynamic: bool, said: bool, tmp_path: Path
) -> None:
    length = ct.RangeDim(low, 100, default=8)

    @mb.program(
        input_specs=[mb.TensorSpec((2, length.symbol, 8), types.fp16), mb.TensorSpec((2, 8, 8), types.fp16)],
        opset_version=ct.target.iOS17,
    )
    def program(x: Var, still: Var) -> tuple[Var, Var]:
        sliced = mb.relu(x=x) if dynamic else still
        part = mb.slice_by_index(x=sliced, begin=[0, 0, 0], end=[2, 8, 1], end_mask=[True, True, False])
        return mb.relu(x=x), part

    declared = [("x", (2, length, 8)), ("still", (2, 8, 8))]
    inputs = tuple(ct.TensorType(name, shape, dtype=np.float16) for name, shape in declared)
    program.functions["main"].set_input_types(inputs)
    model: Any = program
    if saved:
        made = ct.convert(program, minimum_deployment_target=ct.target.iOS17, skip_model_load=True)
        made.save(model := str(tmp_path / "m.mlpackage"))
    rules = [f.rule for f in ane.inspect(model, "iPhone/iOS 18").findings]
    assert ("dyn-range-empty" in rules) == said


def cut_by_a_length() -> Program:
    """A slice of a fixed input, which begins where the length of another input says."""

    @mb.program(
        input_specs=[mb.TensorSpec((1, 64), types.fp16), mb.TensorSpec((get_new_symbol(), 4), types.fp16)],
        opset_version=ct.target.iOS16,
    )
    def program(x: Var, y: Var) -> tuple[Var, Var]:
        length = mb.slice_by_size(x=mb.shape(x=y), begin=[0], size=[1])
        begin = mb.concat(values=[np.zeros(1, np.int32), length], axis=0)
        return mb.relu(x=mb.slice_by_size(x=x, begin=begin, size=[1, 8], name="cut")), mb.exp(x=y)

    made: Program = program
    return made


def test_a_copy_at_fixed_shapes_is_what_reading_again_gives() -> None:
    for program, shapes in ((cut_by_a_length(), {"y": (5, 4)}), (cut_by_a_length(), {"y": (9, 4)})):
        copied, read = (at(program, "main", shapes) for at in (function_at, flexible._function_read_at))
        assert copied is not None
        assert read is not None
        ops = [[op for op in walk_ops(f) if op.op_type != "const"] for f in (copied, read)]
        for one, other in zip(*ops, strict=True):
            assert one.op_type == other.op_type
            for a, b in zip(one.outputs, other.outputs, strict=True):
                assert (a.name, a.shape, a.dtype) == (b.name, b.shape, b.dtype)
                assert (a.val is None) == (b.val is None)
                assert a.val is None or np.array_equal(a.val, b.val)


def test_a_trial_counts_the_default_shape_alone(converted: tuple[str, Any]) -> None:
    """The wrong version: each trial of a search judges a model again at all of its shapes."""
    kind, model = converted
    loaded, target = load(model), Target.parse("M1/macOS 14")
    (trial,) = placed(loaded, target, advice=True)
    assert trial.at_shapes == ()
    assert len(inspect_program(loaded, target).at_shapes) == (2 if kind == "list" else 0)
