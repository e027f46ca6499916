"""Static shapes: which sizes inputs get, what follows from them, and what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close

import anesurgery as ane
from anesurgery.errors import InterfaceError, PassError, UnknownName
from anesurgery.loading import load
from anesurgery.mil import Program, Var, ct, mb, quiet_host, types, walk_ops
from anesurgery.passes.fix_shapes import FixShapes
from anesurgery.rewriting.session import Session
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers


def dynamic(build: Any, shape: tuple[Any, ...] = (None, None, 4), dtype: Any = types.fp16) -> Program:
    from coremltools.converters.mil.mil import get_new_symbol

    sizes = [get_new_symbol() if d is None else d for d in shape]

    return mb.program(input_specs=[mb.TensorSpec(sizes, dtype=dtype)], opset_version=ct.target.iOS17)(
        lambda x: build(x)
    )


def rolled(x: Var) -> Any:
    """Positions of the length at hand, added."""
    length = mb.gather(x=mb.shape(x=x), indices=np.int32(1), axis=0)
    places = mb.range_1d(start=np.int32(0), end=length, step=np.int32(1))
    return mb.add(x=x, y=mb.expand_dims(x=mb.cast(x=places, dtype="fp16"), axes=[1]), name="y")


def causal(x: Var) -> Any:
    """A mask chosen of two numbers, which coremltools types as one number."""
    length = mb.gather(x=mb.shape(x=x), indices=np.int32(1), axis=0)
    places = mb.range_1d(start=np.int32(0), end=length, step=np.int32(1))
    seen = mb.less_equal(x=mb.expand_dims(x=places, axes=[0]), y=mb.expand_dims(x=places, axes=[1]))
    mask = mb.select(cond=seen, a=np.float16(0), b=np.float16(-1e4), name="mask")
    return mb.add(x=mb.matmul(x=x, y=x, transpose_y=True), y=mask, name="y")


def kinds(program: Program) -> set[str]:
    return {op.op_type for op in walk_ops(program)} - {"const"}


@pytest.mark.parametrize(
    ("step", "shape"),
    [
        (FixShapes(), (1, 128, 4)),
        (FixShapes(length=7), (1, 7, 4)),
        (FixShapes(shapes={"x": (2, 5, 4)}), (2, 5, 4)),
        (FixShapes(shapes={"x": [2, 5, 4]}, length=7), (2, 5, 4)),
    ],
)
def test_the_arithmetic_of_shapes_is_computed(step: FixShapes, shape: tuple[int, ...]) -> None:
    program = dynamic(rolled)
    after, session = apply_pass(step, program)
    assert kinds(after) == {"add"}
    assert tuple(after.functions["main"].inputs["x"].shape) == shape
    assert [change.names for change in session.contract] == [("x",), ("y",)]
    values = {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float16)}
    assert_same_numbers(program, after, values, precision="fp16", rtol=0)


def test_a_choice_of_two_numbers_is_as_wide_as_what_decides() -> None:
    program = dynamic(causal)
    assert next(op for op in walk_ops(program) if op.op_type == "select").outputs[0].rank == 0
    after, _ = apply_pass(FixShapes(length=6), program)
    assert kinds(after) == {"matmul", "add"}
    values = {"x": np.random.default_rng(0).standard_normal((1, 6, 4)).astype(np.float16)}
    assert_same_numbers(program, after, values, precision="fp16", rtol=0)


def test_inputs_of_which_nothing_is_said_follow_the_others() -> None:
    from coremltools.converters.mil.mil import get_new_symbol

    specs = [mb.TensorSpec((1, get_new_symbol()), dtype=types.fp16) for _ in range(2)]

    program = mb.program(input_specs=specs, opset_version=ct.target.iOS17)(
        lambda x, mask: mb.mul(x=x, y=mask, name="y")
    )

    after, _ = apply_pass(FixShapes(shapes={"mask": (1, 9)}), program)
    assert {tuple(v.shape) for v in after.functions["main"].inputs.values()} == {(1, 9)}
    with pytest.raises(PassError, match="the shapes do not fit mul y: Incompatible dim 1"):
        apply_pass(FixShapes(shapes={"x": (1, 9), "mask": (1, 8)}), program)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"x": (1, 5)}, "x has 3 axes, the shape given 2"),
        ({"x": (1, 5, 3)}, "not 1x5x3"),
        ({"x": (1, 0, 4)}, "not 1x0x4"),
    ],
)
def test_shapes_that_do_not_fit(shapes: Any, words: str) -> None:
    with pytest.raises(PassError, match=words):
        apply_pass(FixShapes(shapes=shapes), dynamic(rolled))


def test_an_op_that_the_length_does_not_fit_is_named() -> None:
    program = dynamic(lambda x: mb.matmul(x=x, y=np.ones((1, 6, 6), np.float16), transpose_x=True, name="y"))
    with pytest.raises(PassError, match="the shapes do not fit matmul y"):
        apply_pass(FixShapes(length=5), program)


def test_refusals() -> None:
    static = dynamic(lambda x: mb.relu(x=x), (1, 4))
    assert_refuses(FixShapes(), static, "no input has a dynamic shape")
    with pytest.raises(UnknownName, match="unknown input 'z'"):
        apply_pass(FixShapes(shapes={"z": (1,)}), dynamic(rolled))
    session = Session(images=frozenset({"x"}))
    FixShapes().run(dynamic(rolled), session)
    ((_, refusal),) = session.refusals
    assert "is an image of dynamic size" in refusal.reason


class Net(torch.nn.Module):
    """A length is read, and used in a view."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.softmax(ids.reshape(ids.shape[0], ids.shape[1] // 2, 2).cumsum(1), -1)


@pytest.mark.parametrize("flexible", ["range", "enumerated"])
def test_a_converted_model_is_saved_with_the_new_shape(flexible: str, tmp_path: Path) -> None:
    given = (
        ct.Shape((1, ct.RangeDim(2, 64, default=8)))
        if flexible == "range"
        else ct.EnumeratedShapes([(1, 8), (1, 16)])
    )
    with quiet_host():
        traced: Any = torch.jit.trace(Net().eval(), torch.zeros(1, 8))  # type: ignore[no-untyped-call]
        model = ct.convert(
            traced,
            inputs=[ct.TensorType("ids", shape=given)],
            minimum_deployment_target=ct.target.iOS16,
            skip_model_load=True,
        )
    surgery = ane.apply(model, FixShapes(shapes={"ids": (1, 16)}), prove="both", quiet=True)
    assert surgery.proof is not None
    assert surgery.proof.ok
    assert "give ids as 1x16" in surgery.contract[0].words
    saved = load(surgery.save(tmp_path / "fixed.mlpackage"))
    (feature,) = saved.spec.description.input
    assert list(feature.type.multiArrayType.shape) == [1, 16]
    assert feature.type.multiArrayType.WhichOneof("ShapeFlexibility") is None
    assert "shape" not in kinds(saved.program)
    assert not ane.apply(saved, FixShapes(), quiet=True).changes


@pytest.mark.slow
@pytest.mark.parametrize("two_ways", [False, True])
def test_loops_of_a_recurrent_model_get_the_length_too(two_ways: bool, tmp_path: Path) -> None:
    """coremltools makes a GRU a loop of as many rounds as the input is long."""

    class Tagger(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = torch.nn.GRU(4, 3, batch_first=True, bidirectional=two_ways)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.gru(x)[0])

    torch.manual_seed(0)
    module = Tagger().eval()
    with quiet_host():
        traced: Any = torch.jit.trace(module, torch.zeros(1, 5, 4))  # type: ignore[no-untyped-call]
        shape = ct.Shape((1, ct.RangeDim(2, 16, default=5), 4))
        model = ct.convert(
            traced,
            inputs=[ct.TensorType("x", shape=shape)],
            compute_precision=ct.precision.FLOAT32,
            skip_model_load=True,
        )
    surgery = ane.apply(model, FixShapes(shapes={"x": (1, 7, 4)}), prove="both", quiet=True)
    saved = load(surgery.save(tmp_path / "fixed.mlpackage"))
    values = torch.randn(1, 7, 4)
    (found,) = ane.run(saved, {"x": values.numpy()}).values()
    assert_close(found, module(values).detach().numpy(), 1e-5)
    assert "while_loop" not in kinds(ane.apply(saved, "unroll_loop", quiet=True).program)


def test_what_grows_in_a_loop_has_no_one_length() -> None:
    def grows(x: Var) -> Var:
        less = lambda i, h: mb.less(x=i, y=np.int32(3))  # noqa: E731
        body = lambda i, h: (mb.add(x=i, y=np.int32(1)), mb.concat(values=(h, h), axis=1))  # noqa: E731
        return mb.while_loop(_cond=less, _body=body, loop_vars=(np.int32(0), x))[1]

    program = dynamic(grows)
    before = str(program)
    with pytest.raises(PassError, match="1x5x4 before a round of while_loop_0 and 1x10x4"):
        apply_pass(FixShapes(length=5), program)
    assert str(program) == before


def test_likely_shapes_that_do_not_fit_leave_the_model_as_it_was() -> None:
    program = dynamic(lambda x: mb.add(x=x, y=np.ones((1, 3, 4), np.float16), name="y"))
    before = ane.to_text(program)
    session = Session()
    FixShapes().run(program, session)
    assert ane.to_text(program) == before
    assert "do not fit add y" in session.refusals[0][1].reason
    assert session.changes == []
    assert session.contract == []
    with pytest.raises(PassError, match="do not fit add y"):
        FixShapes(shapes={"x": (1, 7, 4)}).run(program, Session())


def several(build: Any = rolled, opset: Any = ct.target.iOS18) -> Program:
    from coremltools.converters.mil.mil import get_new_symbol

    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float16)
    length = get_new_symbol()
    specs = [mb.TensorSpec((1, length, 64), dtype=types.fp16), mb.TensorSpec((1, length, 1), dtype=types.fp16)]

    return mb.program(input_specs=specs, opset_version=opset)(
        lambda x, mask: mb.mul(x=mb.linear(x=build(x), weight=weight), y=mask, name="out")
    )


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ([4, 9], {"length_4": 4, "length_9": 9}),
        ({"short": {"x": [1, 4, 64]}, "long": {"x": [1, 9, 64]}}, {"short": 4, "long": 9}),
    ],
)
def test_several_sizes_are_functions_that_share_weights(sizes: Any, names: Any, tmp_path: Path) -> None:
    surgery = ane.apply(several(), FixShapes(sizes=sizes), prove="both", quiet=True)
    assert surgery.proof is not None
    assert surgery.proof.ok
    path = surgery.save(tmp_path / "several.mlpackage")
    loaded = load(path)
    assert {n: f.inputs["mask"].shape[1] for n, f in loaded.program.functions.items()} == names
    described = {f.name: list(f.input[0].type.multiArrayType.shape) for f in loaded.spec.description.functions}
    assert described == {name: [1, n, 64] for name, n in names.items()}
    assert loaded.spec.description.defaultFunctionName == next(iter(names))
    assert (path / "Data" / "com.apple.CoreML" / "weights" / "weight.bin").stat().st_size < 1.5 * 2 * 64 * 64
    assert "shape" not in kinds(loaded.program)
    for n in names.values():
        values = {"x": np.ones((1, n, 64), np.float16), "mask": np.ones((1, n, 1), np.float16)}
        assert ane.compare(several(), loaded, values, contract=surgery.contract).ok
    with pytest.raises(
        InterfaceError, match="no function takes inputs of these shapes; give one of: .*x 1x4x64"
    ):
        ane.compare(several(), loaded, {k: v[:, :3] for k, v in values.items()}, contract=surgery.contract)


def test_several_sizes_refuse_with_words() -> None:
    assert_refuses(FixShapes(sizes=[4]), several(opset=ct.target.iOS17), "several functions came with iOS 18")
    two, _ = apply_pass(FixShapes(sizes=[4, 9]), several())
    assert_refuses(FixShapes(sizes=[4]), two, "no input has a dynamic shape")
    with pytest.raises(PassError, match="give shapes .one function. or sizes .several."):
        FixShapes(sizes=[4], shapes={"x": (1, 4, 64)})
    for wrong in (4, [0], [2.5]):
        with pytest.raises(PassError, match=r"give lengths, as \[64, 128\], or the shapes"):
            FixShapes(sizes=wrong)  # type: ignore[arg-type]
    program = several(lambda x: mb.add(x=x, y=np.ones((1, 4, 64), np.float16)))
    before = ane.to_text(program)
    with pytest.raises(PassError, match="do not fit add"):
        FixShapes(sizes=[4, 9]).run(program, Session())
    assert ane.to_text(program) == before
