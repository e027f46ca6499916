"""What conversions lose: each lint, what is restored, and what must not be touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, quiet_host, types
from anesurgery.passes.restore_meaning import RestoreMeaning
from anesurgery.show.costs import costs
from anesurgery.testing import apply_pass, assert_refuses

HALF = np.float16


def converted(
    function: Callable[..., torch.Tensor], *arrays: Any, half: bool = False, any_length: bool = False
) -> Program:
    """What coremltools makes of a function by itself."""

    class Module(torch.nn.Module):
        def forward(self, *values: torch.Tensor) -> torch.Tensor:
            return function(*values)

    tensors = tuple(map(torch.from_numpy, arrays))
    kinds = {"i": np.int32, "f": np.float32}
    shapes = [
        (*a.shape[:-1], ct.RangeDim(1, 9, default=a.shape[-1])) if any_length else a.shape for a in arrays
    ]
    inputs = [
        ct.TensorType(f"x{k}", shape, dtype=kinds[a.dtype.kind])
        for k, (a, shape) in enumerate(zip(arrays, shapes, strict=True))
    ]
    program: Program = ct.convert(
        torch.jit.trace(Module().eval(), tensors),  # type: ignore[no-untyped-call]
        inputs=inputs,
        convert_to="milinternal",
        compute_precision=ct.precision.FLOAT16 if half else ct.precision.FLOAT32,
        minimum_deployment_target=ct.target.iOS17,
    )
    return program


pytestmark = pytest.mark.usefixtures("hosts_own_converters")


def floats(*shape: int, scale: float = 3.0) -> Any:
    return (np.random.default_rng(0).standard_normal(shape) * scale).astype(np.float32)


SPIKE = floats(4, 32) * np.where(np.arange(32) == 7, 200, 0.02).astype(np.float32)
AXIS = np.array([[0, 0, 1, -1, 0]], np.float32)
OTHER = np.array([[-1, 1, -1, -1, -5]], np.float32)
TABLE = (np.arange(10) * 10000).astype(np.int32)
ROWS = np.array([7, 1, 9], np.int32)

WIDE = np.array([[70001, 4099, -65537, 5], [2049, -4097, 30001, 8]], np.int32)
RISING = np.arange(70001, dtype=np.float32)[None] / 70001

LOST: dict[str, tuple[str, Callable[..., torch.Tensor], tuple[Any, ...], bool]] = {
    "x % 1": ("lost-remainder", lambda x: x % 1, (floats(2, 3),), False),
    "a phase": ("lost-remainder", lambda x: torch.sin(6.28 * (x % 1)), (floats(2, 3),), False),
    "x % 1 in fp16": ("lost-remainder", lambda x: torch.remainder(x, 1.0) + 1, (floats(2, 3),), True),
    "rms_norm": ("lost-epsilon", lambda x: F.rms_norm(x, (32,), eps=1e-3), (SPIKE,), False),
    "rms_norm, scaled": (
        "lost-epsilon",
        lambda x: F.rms_norm(x, (32,), torch.arange(32.0), eps=1e-2 / 2),
        (SPIKE,),
        False,
    ),
    "rms_norm twice": (
        "lost-epsilon",
        lambda x: F.rms_norm(F.rms_norm(x, (32,), eps=1e-3) * 5, (32,), eps=1e-3),
        (SPIKE,),
        False,
    ),
    "a reciprocal": ("lost-reciprocal", lambda x: 1 / x, (floats(2, 3, scale=1e-3),), False),
    "a reciprocal in fp16": (
        "lost-reciprocal",
        lambda x: 3 / (x * x),
        (np.array([[0.01, 0.25]], np.float32),),
        True,
    ),
    "atan2": ("lost-branch", torch.atan2, (AXIS, OTHER), False),
    "a phase of a spectrum": ("lost-branch", lambda y, x: torch.atan2(y, x) * 2, (AXIS, OTHER), False),
    "a lookup": ("lost-int16", lambda table, at: table[at], (TABLE, ROWS), True),
    "a row": ("lost-int16", lambda table, at: table.reshape(5, 2)[at % 5], (TABLE, ROWS), True),
    "a column": ("lost-int16", lambda x: x.unbind(1)[0] * 1, (WIDE,), True),
    "the largest": ("lost-int16", lambda x: x.topk(2, 1)[0], (WIDE,), True),
    "places on a long axis": ("lost-int16", lambda x: x.topk(3, 1)[1], (RISING,), True),
    "places on a long axis, as floats": ("lost-int16", lambda x: x.topk(3, 1)[1] / 4.0, (RISING,), True),
    "a lower limit": ("lost-integers", lambda x: x.clamp(min=3).int(), (WIDE,), True),
    "an upper limit": ("lost-integers", lambda x: x.clamp(max=30001).int() + 1, (WIDE,), True),
    "a limit for each": (
        "lost-integers",
        lambda x, y: torch.clamp(x, min=y).int(),
        (WIDE, WIDE[::-1].copy()),
        True,
    ),
    "ids without padding": (
        "lost-integers",
        lambda table, at: table[at.clamp(min=0)],
        (floats(70001, 1), np.array([-1, 4099, 69999], np.int32)),
        True,
    ),
    "a row of a map": (
        "lost-integers",
        lambda x: torch.div(x, 7, rounding_mode="floor").int(),
        (np.array([[2057, 30001, 4095]], np.int32),),
        True,
    ),
    "a mean": ("lost-average", lambda x: F.avg_pool2d(x, 2, 2, ceil_mode=True), (floats(1, 2, 5, 5),), False),
    "a mean of rows": (
        "lost-average",
        lambda x: F.avg_pool1d(x, 3, 2, ceil_mode=True),
        (floats(1, 2, 8),),
        False,
    ),
}


@pytest.mark.parametrize("case", LOST)
def test_what_was_meant_is_restored(case: str) -> None:
    rule, function, arrays, half = LOST[case]
    program = converted(function, *arrays, half=half)
    found = [f for f in ane.inspect(program).all_findings if f.rule == rule]
    assert found
    assert {f.remedy for f in found} == {"restore_meaning"}
    wanted = function(*map(torch.from_numpy, arrays)).numpy()
    inputs = {f"x{k}": a for k, a in enumerate(arrays)}
    precision = "fp16" if rule == "lost-integers" else "fp32"
    (before,) = ane.run(program, inputs, precision=precision).values()
    done = ane.apply(program, RestoreMeaning(only=(rule,)), quiet=True)
    (after,) = ane.run(done.program, inputs, precision=precision).values()
    near = 2e-2 if half else 1e-5
    assert np.abs(before - wanted).max() > 10 * near
    np.testing.assert_allclose(after, wanted, rtol=near, atol=near)
    assert all(change.unchecked.startswith("the numbers change on purpose") for change in done.changes)
    assert not [f for f in ane.inspect(done.program).all_findings if f.rule == rule]


KEPT: dict[str, tuple[Callable[..., torch.Tensor], tuple[Any, ...]]] = {
    "a difference of two": (lambda x, y: x - y, (floats(2, 3), floats(2, 3) + 1)),
    "x % 2": (lambda x: x % 2, (floats(2, 3),)),
    "a layer norm": (lambda x: F.layer_norm(x, (32,)), (SPIKE,)),
    "a norm by hand": (lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3), (SPIKE,)),
    "a mean that fits": (lambda x: F.avg_pool2d(x, 2, 2, ceil_mode=True), (floats(1, 2, 4, 4),)),
    "limits of floats": (lambda x: x.clamp(min=0), (floats(2, 3),)),
    "places": (lambda x: x.topk(2, 1)[1].clamp(min=1), (floats(2, 300),)),
    "a maximum": (lambda x: F.max_pool2d(x, 2, 2, ceil_mode=True), (floats(1, 2, 5, 5),)),
    "an arc tangent": (torch.atan, (floats(2, 3),)),
    "a reciprocal of 1 or more": (lambda x: 1 / (1 + x.exp()), (floats(2, 3),)),
    "a quotient": (lambda x, y: x / y, (floats(2, 3), floats(2, 3, scale=1e-3))),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_is_meant_is_left(case: str) -> None:
    function, arrays = KEPT[case]
    program = converted(function, *arrays)
    assert not [f for f in ane.inspect(program).all_findings if f.kind == "conversion"]
    _, session = apply_pass(RestoreMeaning(), program)
    assert not session.changes


def test_a_roll_to_the_left_of_any_length_is_restored() -> None:
    """coremltools takes the remainder of a negative shift where the length is known on the device only."""
    program = converted(lambda x: torch.roll(x, -2, 1), floats(2, 5), any_length=True)
    (found,) = (f for f in ane.inspect(program).all_findings if f.kind == "conversion")
    assert (found.rule, found.remedy) == ("lost-sign", "restore_meaning")
    after, _ = apply_pass(RestoreMeaning(), program)
    assert not [f for f in ane.inspect(after).all_findings if f.kind == "conversion"]
    for length in (5, 3, 1):
        x = floats(2, length)
        (before,), (rolled,) = (ane.run(p, {"x0": x}).values() for p in (program, after))
        np.testing.assert_array_equal(rolled, np.roll(x, -2, 1))
        assert length == 1 or not np.array_equal(before, rolled)


def test_a_padded_mean_is_named_and_refused() -> None:
    program = converted(lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), floats(1, 2, 6, 6))
    assert [f.rule for f in ane.inspect(program).all_findings if f.kind == "conversion"] == ["lost-average"]
    assert_refuses(RestoreMeaning(), program, "the mean counts padding")


def exported(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Program:
    """What coremltools makes of an exported function by itself, as ExecuTorch does."""

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    graph = torch.export.export(Module().eval(), (x,)).run_decompositions({})
    program: Program = ct.convert(graph, convert_to="milinternal", compute_precision=ct.precision.FLOAT32)
    return program


MATRIX = torch.arange(25.0).reshape(5, 5)
DIAGONALS: dict[str, tuple[Callable[..., torch.Tensor], bool]] = {
    "a diagonal": (torch.diagonal, True),
    "a diagonal, scaled": (lambda x: 2 * torch.diagonal(x) + 1, True),
    "a trace": (lambda x: torch.diagonal(x).sum(), False),
    "a triangle": (torch.tril, False),
}


@pytest.mark.parametrize("case", DIAGONALS)
def test_a_diagonal_that_is_still_a_matrix_is_named(case: str) -> None:
    """A sum of the rows of that matrix is the sum that was meant."""
    function, is_lost = DIAGONALS[case]
    program = exported(function, MATRIX)
    found = [f.rule for f in ane.inspect(program).all_findings if f.kind == "conversion"]
    assert found == (["lost-diagonal"] if is_lost else [])
    (result,) = ane.run(program, {"x": MATRIX.numpy()}, precision="fp32").values()
    assert (result.size != function(MATRIX).numel()) == is_lost


@pytest.mark.parametrize(("factor", "rules"), [(-np.inf, ["lost-infinity"]), (-1e4, [])])
def test_a_product_with_an_infinity_is_named_first(factor: float, rules: list[str]) -> None:
    """Tokens are hidden from a maximum by (1 - mask) times the lowest number of fp32."""
    program = still(lambda x: mb.reduce_max(x=mb.mul(x=mb.sub(x=np.float16(1), y=x), y=np.float16(factor))))
    found = ane.inspect(program)
    assert [f.rule for f in found.all_findings if f.kind == "conversion"] == rules
    first = costs(found)[0].rule
    assert (first == "lost-infinity") == bool(rules)


@pytest.mark.parametrize("filled", [-np.inf, -1e4])
def test_a_constant_of_nan_is_named_first(filled: float) -> None:
    """A uniform palette of a mask with -inf has no finite step, so all of its numbers are NaN."""
    mask = np.triu(np.full((64, 64), filled, np.float16), 1)
    with quiet_host():
        model = ct.convert(
            still(lambda x: mb.add(x=mb.relu(x=x), y=mask), (64, 64)),
            minimum_deployment_target=ct.target.iOS17,
            skip_model_load=True,
        )
        options = ct.optimize.coreml.OpPalettizerConfig(mode="uniform", nbits=6, weight_threshold=512)
        model = ct.optimize.coreml.palettize_weights(
            model, ct.optimize.coreml.OptimizationConfig(global_config=options)
        )
    assert (costs(ane.inspect(model))[0].rule == "lost-number") == (filled == -np.inf)


@pytest.mark.parametrize(
    "build",
    [
        lambda x: mb.select(cond=mb.less(x=x, y=np.float16(0)), a=np.float16(np.nan), b=x),
        lambda x: mb.inverse(x=mb.relu(x=x), epsilon=np.float16(1e-6)),
    ],
)
def test_what_may_be_meant_is_no_loss(build: Callable[[Var], Var]) -> None:
    """NaN that is chosen, and an epsilon that is not the converter's."""
    assert not [f for f in ane.inspect(still(build, (4, 4))).all_findings if f.kind == "conversion"]


def phase(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(torch.cumsum(x, -1) * (2 * torch.pi))


@pytest.mark.parametrize(
    ("function", "shape", "is_long"),
    [
        (phase, (1, 2, 5000), True),
        (lambda x: torch.cos(torch.cumsum(x, 1) + 0.5), (1, 6000, 3), True),
        (lambda x: torch.cumsum(x / 24000, 0)[100:].sin(), (4096,), True),
        (phase, (1, 2, 400), False),
        (lambda x: torch.cumsum(x, -1), (1, 5000), False),
        (lambda x: torch.sin(torch.cumsum((x > 0.007).float(), -1)), (1, 5000), False),  # whole, so exact
    ],
)
def test_a_long_phase_is_summed_in_blocks(function: Any, shape: tuple[int, ...], is_long: bool) -> None:
    x = np.random.default_rng(0).uniform(0.005, 0.01, shape).astype(np.float32)
    program = converted(function, x)
    found = [f.rule for f in ane.inspect(program).all_findings if f.kind == "conversion"]
    assert found == (["lost-phase"] if is_long else [])
    changed, _ = apply_pass(RestoreMeaning(), program)
    sums = [op for op in changed.functions["main"].operations if op.op_type == "cumsum"]
    assert [op.x.shape[op.axis.val] < 80 for op in sums] == ([True, True] if is_long else [shape[-1] < 80])
    (restored,) = ane.run(changed, {"x0": x}, precision="fp32").values()
    meant = function(torch.from_numpy(x.astype(np.float64))).numpy()
    assert np.allclose(restored, meant, rtol=0, atol=2e-4)


def test_a_phase_that_runs_backwards_stays() -> None:
    program = mb.program(input_specs=[mb.TensorSpec((1, 5000))], opset_version=ct.target.iOS17)(
        lambda x: mb.sin(x=mb.cumsum(x=x, axis=1, exclusive=False, reverse=True))
    )
    assert_refuses(RestoreMeaning(), program, "backwards")


def still(body: Callable[[Var], Any], shape: tuple[int, ...] = (2, 4)) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape, dtype=types.fp16)], opset_version=ct.target.iOS17)(
        lambda x: body(x)
    )


UNMOVED: dict[str, tuple[Callable[[Var], Any], str]] = {
    "itself": (lambda x: mb.sub(x=x, y=x, name="y"), "takes a value from itself"),
    "a sine of it": (lambda x: mb.sin(x=mb.sub(x=x, y=x), name="y"), "takes a value from itself"),
    "times nothing": (lambda x: mb.add(x=mb.mul(x=x, y=HALF(0)), y=HALF(1), name="y"), "multiplies by 0"),
    "a constant": (lambda x: (mb.relu(x=x), mb.exp(x=np.ones(2, HALF), name="y")), "it is a constant"),
}


@pytest.mark.parametrize("case", UNMOVED)
def test_an_output_that_nothing_moves_is_in_the_first_line(case: str) -> None:
    body, why = UNMOVED[case]
    found = ane.inspect(still(body))
    messages = [f.message for f in found.all_findings if f.rule == "lost-output"]
    assert len(messages) == 1
    assert messages[0].startswith("y is the same")
    first = str(found).splitlines()[0]
    assert "y is the same whatever the inputs are" in first
    assert why in " ".join(str(found).split())


def test_outputs_that_move_are_not_named() -> None:
    moving = still(lambda x: (mb.sub(x=x, y=mb.exp(x=x)), mb.mul(x=x, y=HALF(2)), mb.shape(x=x)))
    assert not [f for f in ane.inspect(moving).all_findings if f.rule == "lost-output"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda x: mb.mul(x=x, y=HALF(1 / 24000), name="y"), "fp16 keeps 10 of its 11 binary digits"),
        (lambda x: mb.mul(x=x, y=HALF(1e-7), name="y"), "keeps 2 of"),
        (lambda x: mb.real_div(x=x, y=HALF(3e-5), name="y"), "keeps 9 of"),
        (lambda x: mb.mul(x=x, y=HALF(0), name="y"), "multiplied by 0"),
        (lambda x: mb.real_div(x=x, y=HALF(0), name="y"), "divided by 0"),
        (lambda x: mb.real_div(x=HALF(0), y=x, name="y"), ""),
        (lambda x: mb.mul(x=x, y=HALF(0.001), name="y"), ""),
        (lambda x: mb.add(x=x, y=HALF(1e-7), name="y"), ""),
    ],
)
def test_a_factor_that_fp16_does_not_hold_is_named(body: Callable[[Var], Var], words: str) -> None:
    found = [f.message for f in ane.inspect(still(body)).all_findings if f.rule == "lost-digits"]
    assert (words in found[0]) if words else not found


@pytest.mark.parametrize(("queries", "keys", "named"), [(3, 7, True), (7, 7, False), (1, 7, False)])
def test_a_causal_mask_of_the_wrong_length_is_named(queries: int, keys: int, named: bool) -> None:
    arrays = floats(1, 2, queries, 8), floats(1, 2, keys, 8), floats(1, 2, keys, 8)
    program = converted(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *arrays, half=True
    )
    found = [f.message for f in ane.inspect(program).all_findings if f.rule == "lost-mask"]
    assert found == ([f"the last of {queries} queries sees {queries} of {keys} keys"] if named else [])


def skipped(rows: int) -> Program:
    """What coremltools makes of a layer, if its rows are palettized with scales in groups of 16."""
    weight = floats(rows, 64, scale=0.03)
    program = still(lambda x: mb.linear(x=mb.relu(x=x), weight=weight.astype(HALF)), (1, 64))
    config = ct.optimize.coreml.OpPalettizerConfig(
        mode="uniform", nbits=4, granularity="per_grouped_channel", group_size=16, enable_per_channel_scale=True
    )
    model = ct.convert(program, minimum_deployment_target=ct.target.iOS18, skip_model_load=True)
    chosen = ct.optimize.coreml.OptimizationConfig(global_config=config)
    palettized: Program = ct.optimize.coreml.palettize_weights(model, chosen)._mil_program
    return palettized


ANGLES = np.arange(64)[:, None] * np.arange(64) * np.pi / 32
FRAMES = np.eye(32, dtype=HALF)[:, None]
WEIGHTS: dict[str, tuple[Callable[[], Program], bool]] = {
    "skipped": (lambda: skipped(120), True),
    "palettized": (lambda: skipped(128), False),
    "a convolution": (lambda: still(lambda x: mb.conv(x=x, weight=peaked(48, 32, 3)), (1, 32, 9)), True),
    "a product": (lambda: still(lambda x: mb.matmul(x=x, y=peaked(48, 32).T.copy()), (2, 32)), True),
    "any": (lambda: still(lambda x: mb.linear(x=x, weight=floats(48, 32).astype(HALF)), (2, 32)), False),
    "rows": (lambda: still(lambda x: mb.linear(x=x, weight=peaked(32, 48).T.copy()), (2, 32)), False),
    "sines": (lambda: still(lambda x: mb.linear(x=x, weight=np.sin(ANGLES).astype(HALF)), (2, 64)), False),
    "cosines": (lambda: still(lambda x: mb.linear(x=x, weight=np.cos(ANGLES).astype(HALF)), (2, 64)), False),
    "places": (lambda: still(lambda x: mb.linear(x=x, weight=np.eye(64, dtype=HALF)), (2, 64)), False),
    "frames": (lambda: still(lambda x: mb.conv_transpose(x=x, weight=FRAMES, strides=[8]), (1, 32, 9)), False),
    "signs": (
        lambda: still(lambda x: mb.linear(x=x, weight=np.sign(floats(1, 32)).astype(HALF)), (2, 32)),
        False,
    ),
}


def peaked(*shape: int) -> Any:
    """Return weights that are divided by the largest magnitude along their first axis."""
    weight = floats(*shape)
    return (weight / np.abs(weight).max(axis=0, keepdims=True)).astype(HALF)


@pytest.mark.parametrize("case", WEIGHTS)
def test_a_weight_that_is_still_divided_by_its_scales_is_named_first(case: str) -> None:
    build, is_divided = WEIGHTS[case]
    found = ane.inspect(build(), target="M2")
    assert ("lost-scale" in [f.rule for f in found.all_findings]) == is_divided
    assert (costs(found)[0].rule == "lost-scale") == is_divided


@pytest.mark.parametrize("is_computed", [True, False])
def test_an_lstm_that_reads_the_padding_of_packed_rows_is_named(*, is_computed: bool) -> None:
    """As coremltools writes it: the first length stands for the number of rows of the first state."""

    @mb.program(
        input_specs=[mb.TensorSpec((3, 2, 4)), mb.TensorSpec((2,), types.int32)], opset_version=ct.target.iOS17
    )
    def program(x: Var, lengths: Var) -> Var:
        rows = mb.slice_by_index(x=lengths, begin=[0], end=[1]) if is_computed else [2]
        zeros = mb.fill(shape=mb.concat(values=[rows, [6]], axis=0), value=0.0)
        weights = {"weight_ih": np.ones((24, 4), np.float32), "weight_hh": np.ones((24, 6), np.float32)}
        return mb.lstm(x=x, initial_h=zeros, initial_c=zeros, **weights)[0]

    assert ("lost-lengths" in {f.rule for f in ane.inspect(program).all_findings}) == is_computed


class Tagger(torch.nn.Module):
    """An LSTM over tokens, of which a mask hides the last."""

    def __init__(self, hide: Callable[..., torch.Tensor], *, both: bool = True) -> None:
        super().__init__()
        self.hide = hide
        self.lstm = torch.nn.LSTM(8, 8, batch_first=True, bidirectional=both)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.lstm(self.hide(x, mask))[0] * mask[..., None]


def product(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x * mask[..., None]


def fill(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).masked_fill(mask[:, None] < 0.5, 0.0).transpose(1, 2)


@pytest.mark.parametrize(
    ("module", "is_named"),
    [
        (Tagger(product), True),
        (Tagger(fill), True),
        (Tagger(product, both=False), False),
        (Tagger(lambda x, mask: x + 1), False),
        (Tagger(lambda x, mask: x * torch.sigmoid(x.sum(-1, keepdim=True))), False),  # a gate
    ],
)
def test_an_lstm_that_starts_in_masked_steps_is_named(*, module: Tagger, is_named: bool) -> None:
    program = converted(module.eval().requires_grad_(False), floats(1, 12, 8), np.ones((1, 12), np.float32))
    assert ("lost-lengths-if-packed" in {f.rule for f in ane.inspect(program).all_findings}) == is_named
