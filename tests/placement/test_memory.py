"""Memory by liveness, findings about a function as a whole, what saving changes, and hazards from samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoders import cached

import anesurgery as ane
from anesurgery.display import byte_words
from anesurgery.loading import load
from anesurgery.mil import Program, Var, ct, mb, quiet_host, types
from anesurgery.placement import memory
from anesurgery.placement.evidence import Finding, Rule
from anesurgery.placement.flexible import flexible_shapes
from anesurgery.placement.inspection import Memory
from anesurgery.placement.rules import lost_in_conversion, sampled, shapes
from anesurgery.placement.target import CHIPS, Target

ANY = Target.parse("any")
RNG = np.random.default_rng(0)


def half(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float16)


def main(program: Program) -> Any:
    return program.functions["main"]


def built(body: Callable[..., Any], *specs: Any, opset: Any = ct.target.iOS18) -> Program:
    made: Program = mb.program(input_specs=list(specs), opset_version=opset)(body)
    return made


def fp16(*shape: Any) -> Any:
    return mb.TensorSpec(shape, dtype=types.fp16)


def state(*shape: int) -> Any:
    return mb.StateTensorSpec(shape, dtype=types.fp16)


def words(findings: tuple[Finding, ...]) -> dict[str, str]:
    return {f.rule: f.message for f in findings}


def small_limits(monkeypatch: pytest.MonkeyPatch, **limits: Any) -> None:
    """Let the chips hold little, so that tests need no large weights."""
    for name, chip in CHIPS.items():
        monkeypatch.setitem(CHIPS, name, replace(chip, **limits))


def test_values_live_until_they_are_read_last() -> None:
    def body(x: Var) -> Any:
        a = mb.relu(x=x)  # 200 bytes
        b = mb.tanh(x=a)  # x is gone, a is not
        c = mb.concat(values=[b, b, b], axis=1)  # 600 bytes, with a and b
        return mb.reduce_sum(x=mb.mul(x=mb.reduce_max(x=c, axes=[1], keep_dims=True), y=a), axes=[1])

    found, _ = memory.measure(main(built(body, fp16(1, 100))), ANY)
    assert found == Memory(weights=found.weights, activations=1000, largest=600, limit=10**9, chunks=1)
    assert found.weights < 20


def test_states_count_by_what_a_call_moves_of_them() -> None:
    program = cached(layers=1)  # keys and values of 2 heads, 24 tokens, 4 numbers of 2 bytes
    for name, tokens in (("prefill", 4), ("decode", 1)):
        found, _ = memory.measure(program.functions[name], ANY)
        assert found.states == 2 * 2 * 24 * 4 * 2
        assert found.state_traffic == found.states + 2 * 2 * tokens * 4 * 2  # all is read, some is written
    shown = " ".join(ane.inspect(program, function="decode").details.split())
    assert f"states {byte_words(found.states)}, {byte_words(found.state_traffic)} a call" in shown


def test_a_loop_holds_what_it_reads() -> None:
    def body(x: Var) -> Any:
        kept = mb.relu(x=x)

        def go(i: Var) -> Any:
            return mb.less(x=i, y=np.float16(3))

        def step(i: Var) -> Any:
            total = mb.reduce_sum(x=kept, axes=[0, 1], keep_dims=False)
            wide = mb.concat(values=[kept, kept], axis=1)  # behind the last op that reads `kept`
            wider = mb.concat(values=[wide, wide], axis=1)
            return mb.add(x=i, y=mb.add(x=total, y=mb.reduce_max(x=wider, axes=[0, 1], keep_dims=False)))

        return mb.while_loop(
            _cond=go, _body=step, loop_vars=(mb.reduce_max(x=x, axes=[0, 1], keep_dims=False),)
        )

    found, _ = memory.measure(main(built(body, fp16(1, 100))), ANY)
    assert found.activations >= 200 + 400 + 800
    assert found.largest == 800


def test_weights_count_as_stored_and_once(corpus: Path) -> None:
    """Both packages hold the same network; each count must be that of its weight file, but for its paddings."""
    for name in ("silero_unified", "silero_unified_palette_4bit", "dtln_aec_128_part1_fp16"):
        package = corpus / f"{name}.mlpackage"
        stored = next(package.rglob("weight.bin")).stat().st_size
        found, _ = memory.measure(main(load(package).program), ANY)
        assert found.weights == pytest.approx(stored, rel=0.02)


def test_a_shared_constant_counts_once() -> None:
    weight = mb.const

    def body(x: Var) -> Any:
        shared = weight(val=half(64, 64))
        return mb.linear(x=mb.linear(x=x, weight=shared), weight=shared)

    found, _ = memory.measure(main(built(body, fp16(1, 64))), ANY)
    assert 64 * 64 * 2 <= found.weights <= 64 * 64 * 2 + 2 * 64 * 4 + 64


def test_too_many_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    program = built(lambda x: mb.linear(x=x, weight=half(256, 64)), fp16(1, 64))
    small_limits(monkeypatch, program=10_000, address_space=30_000)
    found, findings = memory.measure(main(program), Target.parse("M1"))
    assert found.chunks == 4
    said = words(findings)
    assert said["size-program"] == "33.3 kB of weights; M1 runs programs of 10 kB: 4 chunks"
    assert "M1 has 30 kB for all programs" in said["size-address-space"]
    assert memory.measure(main(program), Target.parse("M1", "CPU_ONLY"))[1] == ()


def test_compressed_weights_may_be_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    indices = np.zeros((256, 64), types.np_uint4_dtype)
    program = built(
        lambda x: mb.linear(x=x, weight=mb.constexpr_lut_to_dense(indices=indices, lut=half(1, 1, 16, 1))),
        fp16(1, 64),
    )
    assert memory.measure(main(program), ANY)[1] == ()
    small_limits(monkeypatch, program=20_000)
    found, findings = memory.measure(main(program), Target.parse("M4"))
    assert found.weights < 10_000
    assert "are 33.3 kB decompressed" in words(findings)["size-dense"]


def test_large_values() -> None:
    program = built(lambda x: mb.relu(x=x), fp16(1, 3, 5568, 5568))
    said = words(memory.measure(main(program), Target.parse("M5"))[1])
    assert "larger than 4.95 MB (M5): 2 of 2 values" in said["working-set"]
    assert "%x is 1x3x5568x5568" in said["size-big-image"] or "1x3x5568x5568" in said["size-big-image"]
    assert memory.measure(main(built(lambda x: mb.relu(x=x), fp16(1, 3, 224, 224))), ANY)[1] == ()


def test_every_finding_about_the_model_is_whole() -> None:
    whole = [rule for rule in vars(shapes).values() if isinstance(rule, Rule)]
    for rule in (*memory.RULES, *whole, *shapes.LAYOUT_RULES):
        assert rule.legal is None
        assert rule.because
        assert rule.source
        assert rule.advice


def test_ranges_and_lists_of_shapes() -> None:
    program = built(lambda x: mb.layer_norm(x=x, axes=[-1], epsilon=np.float16(1e-5)), fp16(1, 8, 64))
    assert "dyn-range" not in words(shapes.of_model(main(program), ANY))

    import torch

    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(64)

        def forward(self, x: torch.Tensor) -> Any:
            return self.norm(x)

    traced: Any = torch.jit.trace(Norm().eval(), torch.zeros(1, 8, 64))  # type: ignore[no-untyped-call]
    kinds = {
        "dyn-enumerated": ct.EnumeratedShapes([(1, 8, 64), (1, 16, 64)]),
        "dyn-range": (1, ct.RangeDim(1, 64), 64),
    }
    for rule, shape in kinds.items():
        model = ct.convert(
            traced,
            inputs=[ct.TensorType("x", shape=shape)],
            skip_model_load=True,
            minimum_deployment_target=ct.target.iOS16,
        )
        converted = main(model._mil_program)
        said = words(shapes.of_model(converted, Target.parse("macOS 13"), flexible_shapes(converted)))
        assert "%x has the shape 1x" in said[rule]
        assert ("dyn-enum-ln" in said) == (rule == "dyn-enumerated")
        loaded = load(model)
        named = flexible_shapes(main(loaded.program), loaded.spec.description)
        told = words(shapes.of_model(main(loaded.program), Target.parse("macOS 14"), named))
        assert rule in told
        assert "dyn-enum-ln" not in told


def test_inputs_outputs_and_states() -> None:
    def body(ids: Var, x: Var, a: Var, b: Var, c: Var) -> Any:
        kept = [mb.read_state(input=s) for s in (a, b, c)]
        return mb.add(x=mb.relu(x=x), y=1.0), mb.add(x=ids, y=1), *[mb.relu(x=k) for k in kept]

    program = built(
        body,
        mb.TensorSpec((1, 32), dtype=types.int32),
        mb.TensorSpec((1, 40)),
        state(1, 1, 2, 8, 64),
        state(1, 270),
        state(1, 64),
    )
    said = words(shapes.of_model(main(program), ANY))
    assert said["dtype-int-input"] == "input %ids holds integers"
    assert said["dtype-fp32-io"].startswith("input %x, output %")
    assert "input %x 1x40" in said["io-width"]
    assert said["io-width"].startswith("no multiple of 32 on the last axis: output"), "an app reads outputs"
    assert said["state-max-types"] == "3 states: %a, %b, %c"
    assert said["state-width-32"] == "state %b is 1x270: the width is not a multiple of 32"
    assert said["rank5-kv"] == "state %a is 1x1x2x8x64, of rank 5"


@pytest.mark.parametrize(
    ("states", "target", "rule"),
    [
        (1, "M4/macOS 26", None),
        (2, "M4/macOS 26", "state-two"),
        (2, "M1", "state-two"),
        (2, "M4/macOS 15", None),
        (2, "A19/iOS 26", None),
        (2, "M4/iOS 26", None),
        (3, "A19/iOS 26", "state-max-types"),
        (3, "M4/macOS 26", "state-max-types"),
    ],
)
def test_a_mac_runs_one_state_and_an_iphone_two(states: int, target: str, rule: str | None) -> None:
    def body(x: Var, *caches: Var) -> Any:
        return tuple(mb.add(x=x, y=mb.read_state(input=cache)) for cache in caches)

    bodies: dict[int, Callable[..., Any]] = {
        1: lambda x, a: body(x, a),
        2: lambda x, a, b: body(x, a, b),
        3: lambda x, a, b, c: body(x, a, b, c),
    }
    program = built(bodies[states], fp16(1, 64), *[state(1, 64)] * states)
    said = words(shapes.of_model(main(program), Target.parse(target)))
    assert {r for r in said if r.startswith("state-")} == ({rule} if rule else set())


def test_a_model_without_products() -> None:
    said = words(shapes.of_model(main(built(lambda x: mb.relu(x=x), fp16(1, 64))), ANY))
    assert said == {"perf-elementwise": "none of the 1 ops is a convolution or matrix product"}
    product = built(lambda x: mb.linear(x=x, weight=half(64, 64)), fp16(1, 64))
    assert shapes.of_model(main(product), ANY) == ()


def test_layout_and_heads(converted: Callable[..., Any]) -> None:
    said = words(shapes.of_model(main(converted("bert").model._mil_program), ANY))
    assert said["linear-vs-conv"].startswith("12 of 12 products with weights have channels last")
    assert said["attn-split-heads"].startswith("2 attentions take all heads at once")


def test_small_maps_and_long_chains() -> None:
    def body(x: Var) -> Any:
        y: Any = x
        for _ in range(2):
            y = mb.conv(x=y, weight=half(8, 8, 1, 1))
        for _ in range(385):
            y = mb.relu(x=y)
        return y

    program = built(body, fp16(1, 8, 1, 64))
    said = words(shapes.of_model(main(program), ANY))
    assert said["mlp-spatial-8x8"] == "2 1x1 convolutions work on 1x64"
    assert said["compile-chain"] == "the longest chain has 387 ops"
    assert shapes.of_model(main(program), Target.parse("M4")) == ()


def one_hot_lookup(ids: Var) -> Any:
    rows = mb.cast(x=mb.one_hot(indices=ids, one_hot_vector_size=32), dtype="fp32")
    return mb.matmul(
        x=mb.one_hot(indices=ids, one_hot_vector_size=32, on_value=1.0, off_value=0.0),
        y=RNG.standard_normal((32, 8)).astype(np.float32),
    ), rows


def dilated(x: Var) -> Any:
    blocks = mb.space_to_batch(x=x, block_shape=[2, 2], paddings=np.array([[2, 2], [2, 2]]))
    made = mb.conv(x=blocks, weight=half(4, 4, 3, 3))
    return mb.batch_to_space(x=made, block_shape=[2, 2], crops=np.zeros((2, 2), np.int32))


def round_trip(x: Var) -> Any:
    there = mb.transpose(x=x, perm=[0, 2, 1])
    return mb.transpose(x=mb.relu(x=there), perm=[0, 2, 1])


IDS = mb.TensorSpec((1, 4), dtype=types.int32)
CHANGED: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "save-fuse-onehot-matmul-to-gather": (one_hot_lookup, IDS, "gather"),
    "save-fuse-dilated-conv": (dilated, fp16(1, 4, 16, 16), "-space_to_batch"),
    "save-guard-negative-gather-indices": (lambda i: mb.gather(x=half(32, 8), indices=i), IDS, "greater_equal"),
    "save-const-elimination": (
        lambda x: mb.add(x=x, y=mb.cast(x=half(1, 64), dtype="fp32")),
        mb.TensorSpec((1, 64)),
        "-cast",
    ),
    "save-reduce-transposes": (round_trip, fp16(1, 8, 16), "-transpose"),
}


@pytest.mark.parametrize("rule", CHANGED)
def test_saving_through_the_host_changes_it(rule: str, settled: Callable[[Program], Program]) -> None:
    """What is told without running its passes must be what they do."""
    body, spec, change = CHANGED[rule]
    program = built(body, spec, opset=ct.target.iOS17)
    said = words(tuple(lost_in_conversion.save_changes(program)))
    assert rule in said
    assert said.keys() <= {rule, "save-guard-negative-gather-indices"}
    kinds = [op.op_type for op in main(settled(program)).operations]
    assert (change[1:] not in kinds) if change[0] == "-" else (change in kinds)


@pytest.mark.parametrize(
    ("first", "second", "cancel"),
    [
        ([0, 2, 3, 1], [0, 2, 3, 1], False),
        ([0, 2, 3, 1], [0, 3, 1, 2], True),
        ([0, -1, 1, 2], [0, 2, 3, 1], True),
    ],
)
def test_only_a_transposition_that_undoes_another_cancels(
    first: list[int], second: list[int], cancel: bool, settled: Callable[[Program], Program]
) -> None:
    """The wrong version takes any two transpositions for such ones."""

    def body(x: Var) -> Any:
        return mb.transpose(x=mb.relu(x=mb.transpose(x=x, perm=first)), perm=second)

    program = built(body, fp16(1, 4, 6, 8), opset=ct.target.iOS17)
    said = words(tuple(lost_in_conversion.save_changes(program)))
    assert ("save-reduce-transposes" in said) == cancel
    assert ("transpose" not in [op.op_type for op in main(settled(program)).operations]) == cancel


@pytest.mark.slow
def test_saving_a_converted_model_guards_it_twice(
    converted: Callable[..., Any], settled: Callable[[Program], Program]
) -> None:
    for name in ("gpt2", "bert", "vit"):
        program = converted(name).model._mil_program
        said = words(tuple(lost_in_conversion.save_changes(program)))
        assert set(said) == ({"save-guard-negative-gather-indices"} if name != "vit" else set())
        before, after = (
            [op.op_type for op in main(p).operations].count("greater_equal")
            for p in (program, settled(program))
        )
        assert after == before + len(said)


def test_samples_show_the_values() -> None:
    weight = np.full((8, 64), 30, np.float16)

    def body(x: Var) -> Any:
        return mb.square(x=x, name="squared"), mb.linear(x=x, weight=weight, name="summed")

    program = built(body, fp16(1, 64))
    sample = {"x": np.full((1, 64), 300, np.float16)}
    found = sampled.ranges_on_samples(program, [sample, sample], Target.parse("M4")).findings
    assert set(found) == {"squared", "summed"}
    messages = {f.rule: f.message for f in found["squared"]}
    assert messages["sampled-overflow"].endswith("a magnitude of 9e+04, values from 9e+04 to 9e+04")
    assert any("5.76e+05" in f.message for f in found["summed"])
    assert any("2 samples, the engine of M4" in f.scope for f in found["squared"])
    quiet = sampled.ranges_on_samples(program, {"x": np.ones((1, 64), np.float16)}, ANY).findings
    assert quiet == {}


def test_the_chip_of_a_target() -> None:
    assert sampled.measured_chip(Target.parse("M1/macOS 14")) == "M1"
    assert sampled.measured_chip(Target.parse("M1-M3")) is None
    assert sampled.measured_chip(Target.parse("A17")) is None


class Times(torch.nn.Module):
    """A product with a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Scaled(torch.nn.Module):
    """Three channels of an image, with arithmetic of the module before the first product."""

    def __init__(self, first: torch.nn.Module, scale: float = 1, mean: float = 0) -> None:
        super().__init__()
        self.first, self.scale, self.mean = first, scale, mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.first(
            x if self.scale == 1 and not self.mean else (x - self.mean) * self.scale
        )
        return made


CONVOLUTION, PATCHES = torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(3, 8, 4, stride=4)
ROWS = torch.nn.Sequential(torch.nn.Flatten(2), torch.nn.Linear(64, 4))
UNSCALED = ct.ImageType("x", (1, 3, 8, 8))


@pytest.mark.parametrize(
    ("module", "given", "reader"),
    [
        (Scaled(CONVOLUTION), UNSCALED, "conv"),
        (Scaled(PATCHES), ct.ImageType("x", (1, 3, 8, 8), color_layout=ct.colorlayout.BGR), "conv"),
        (Scaled(ROWS), UNSCALED, "linear"),
        (Scaled(CONVOLUTION), ct.ImageType("x", (1, 3, 8, 8), scale=1 / 255), ""),
        (Scaled(CONVOLUTION), ct.ImageType("x", (1, 3, 8, 8), bias=[-104.0, -117.0, -123.0]), ""),
        (Scaled(CONVOLUTION, 1 / 127.5, 127.5), UNSCALED, ""),
        (Scaled(torch.nn.ReLU()), UNSCALED, ""),
        (Scaled(CONVOLUTION), ct.TensorType("x", (1, 3, 8, 8)), ""),
    ],
)
def test_pixels_that_a_product_reads_as_they_are(module: Scaled, given: Any, reader: str) -> None:
    traced = torch.jit.trace(module.eval(), torch.rand(1, 3, 8, 8))  # type: ignore[no-untyped-call]
    with quiet_host():
        model = ct.convert(
            traced, inputs=[given], minimum_deployment_target=ct.target.iOS16, skip_model_load=True
        )
    found = ane.inspect(model).all_findings
    said = [f.message for f in found if f.rule == "image-unscaled"]
    arrays = [f.message for f in found if f.rule in ("dtype-fp32-io", "io-width") and "input %x" in f.message]
    assert bool(arrays) is isinstance(given, ct.TensorType), "images come in buffers of pixels"
    assert said == ([f"image %x: {reader} reads pixels from 0 to 255, without scale or bias"] if reader else [])


GREY_HALF = ct.ImageType("y", color_layout=ct.colorlayout.GRAYSCALE_FLOAT16)


@pytest.mark.parametrize(
    ("last", "channels", "given", "numbers"),
    [
        (torch.sigmoid, 3, ct.ImageType("y"), "0 to 1"),
        (torch.tanh, 3, ct.ImageType("y", color_layout=ct.colorlayout.BGR), "-1 to 1"),
        (lambda x: x.clamp(0, 1), 3, ct.ImageType("y"), "0 to 1"),
        (lambda x: x.softmax(1)[:, :1], 4, ct.ImageType("y", color_layout=ct.colorlayout.GRAYSCALE), "0 to 1"),
        (lambda x: 255 * torch.sigmoid(x), 3, ct.ImageType("y"), ""),
        (lambda x: x, 3, ct.ImageType("y"), ""),
        (torch.sigmoid, 1, GREY_HALF, ""),
        (torch.sigmoid, 3, ct.TensorType("y"), ""),
    ],
)
def test_image_outputs_that_are_black(last: Any, channels: int, given: Any, numbers: str) -> None:
    class Ending(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Conv2d(3, channels, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return last(self.first(x))

    traced = torch.jit.trace(Ending().eval(), torch.rand(1, 3, 8, 8))  # type: ignore[no-untyped-call]
    target = ct.target.iOS16
    with quiet_host():
        model = ct.convert(
            traced,
            inputs=[ct.TensorType("x", (1, 3, 8, 8))],
            outputs=[given],
            minimum_deployment_target=target,
            skip_model_load=True,
        )
    found = ane.inspect(model).all_findings
    said = [f.message for f in found if f.rule == "image-dark"]
    arrays = [f for f in found if f.rule in ("dtype-fp32-io", "io-width") and "output %y" in f.message]
    assert bool(arrays) is (given is GREY_HALF or isinstance(given, ct.TensorType))
    assert said == ([f"image output %y: numbers from {numbers}, as pixels from 0 to 255"] if numbers else [])


class Lifted(torch.nn.Conv2d):
    """Writes pixels around 127."""

    def __init__(self) -> None:
        super().__init__(3, 3, 1)
        self.bias = torch.nn.Parameter(torch.full((3,), 127.5))


class Flat(torch.nn.Linear):
    """Writes all pixels as one row."""

    def __init__(self) -> None:
        super().__init__(192, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(192)).reshape(1, 3, 8, 8)


DOUBLED = torch.nn.Upsample(scale_factor=2)
HALVES = torch.nn.PixelUnshuffle(2)


@pytest.mark.parametrize(
    ("first", "scale", "last", "said"),
    [
        (DOUBLED, 1.0, torch.nn.Identity(), "image-unscaled"),
        (HALVES, 1.0, torch.nn.Identity(), "image-unscaled"),
        (torch.nn.Identity(), 1 / 255, torch.nn.Identity(), "image-dark-if-scaled"),
        (DOUBLED, 1 / 127.5, torch.nn.ReLU(), "image-dark-if-scaled"),
        (HALVES, 1 / 255, torch.nn.PixelShuffle(2), "image-dark-if-scaled"),
        (DOUBLED, 1 / 255, torch.nn.Hardtanh(0.0, 1.0), "image-dark"),
        (DOUBLED, 1 / 255, Times(255.0), ""),
        (DOUBLED, 1 / 255, Lifted(), ""),
        (torch.nn.Identity(), 1 / 255, Flat(), "image-dark-if-scaled"),
        (DOUBLED, 1 / 255, torch.nn.Hardtanh(0.0, 255.0), ""),
    ],
)
def test_images_of_a_super_resolution(
    first: torch.nn.Module, scale: float, last: torch.nn.Module, said: str
) -> None:
    channels = 12 if isinstance(first, torch.nn.PixelUnshuffle) else 3
    ends = 4 if isinstance(last, torch.nn.PixelShuffle) else 1
    module = torch.nn.Sequential(first, torch.nn.Conv2d(channels, 3 * ends, 3, padding=1), last)
    traced = torch.jit.trace(module.eval(), torch.rand(1, 3, 8, 8))  # type: ignore[no-untyped-call]
    with quiet_host():
        model = ct.convert(
            traced,
            inputs=[ct.ImageType("x", (1, 3, 8, 8), scale=scale)],
            outputs=[ct.ImageType("y")],
            minimum_deployment_target=ct.target.iOS16,
            skip_model_load=True,
        )
    found = [f.rule for f in ane.inspect(model).all_findings if f.rule.startswith("image")]
    assert found == ([said] if said else [])


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("looked_up", [False, True])
def test_only_rows_of_a_table_can_be_looked_up_outside(looked_up: bool, guarded: bool) -> None:
    """The wrong version gives the advice for a length too."""
    table = np.zeros((50, 8), np.float16)

    @mb.program(
        input_specs=[mb.TensorSpec((1, 4), dtype=types.int32), mb.TensorSpec((1, 4, 8), dtype=types.fp16)],
        opset_version=ct.target.iOS17,
    )
    def program(ids: Any, x: Any) -> Any:
        if guarded:
            ids = mb.select(cond=mb.greater_equal(x=ids, y=0), a=ids, b=mb.add(x=ids, y=50))
        if looked_up:
            return mb.add(x=x, y=mb.gather(x=table, indices=ids, axis=0, batch_dims=0))
        return mb.add(x=x, y=mb.expand_dims(x=mb.cast(x=ids, dtype="fp16"), axes=[-1]))

    advice = {f.rule: f.advice for f in shapes.of_model(main(program), ANY)}["dtype-int-input"]
    assert ("embedding_matmul" in advice) is looked_up
