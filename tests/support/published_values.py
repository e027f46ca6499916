"""Values that were measured on chips and published, and what our model of the arithmetic gives for each.

The sources are public; what they measured is typed here, and ours is computed. A row that is not reproduced
says what is not known, and by how much ours differs; where the model that was measured is not public, there is
nothing of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from hazard_graphs import HALF, Build, log_mel, many_keys, model, quantized_product, random, rows_at_places

from anesurgery.interpret import run
from anesurgery.mil import Array, Var, ct, mb, types

GUIDE, STUDY, KAS = "sbryngelson/ane-guide", "751K", "cadamcat/llms-on-apple-neural-engine"
OMARCHY, COREMLIT = "joshuaswarren", "findit-studio/coremlit"
KOKORO, LLM, SIDEKICK = "mattmireles/kokoro-coreml", "john-rocky/CoreML-LLM", "ironblock/sidekick"
M5 = f"M5 Pro, macOS 27.0: {KAS}"
CORE_AI = f"M5 Pro, Core AI: {KAS}"


@dataclass(frozen=True)
class Published:
    """A value that somebody measured, and what ours is."""

    what: str
    measured: str
    ours: Callable[[], str]
    source: str
    unknown: str = ""
    """Why ours differs: what is not known, or not modelled; "" where it is reproduced."""

    @property
    def reproduced(self) -> bool:
        """Is it?"""
        return not self.unknown


def _value(build: Build, x: Array, arithmetic: str) -> Array:
    (value,) = run(model(x.shape, build), {"x": x}, precision=arithmetic).values()
    return np.asarray(value, np.float64)


def _number(build: Build, x: float, arithmetic: str, width: int = 1) -> str:
    return f"{_value(build, np.full((1, width), x, HALF), arithmetic).flat[0]:g}"


def _sum(x: float, arithmetic: str = "ane") -> str:
    ones = np.ones((1, 2), HALF)
    return _number(lambda v: mb.linear(x=v, weight=ones, name="y"), x / 2, arithmetic, 2)


def _tie(chip: str) -> str:
    return _number(lambda v: mb.add(x=v, y=HALF(1), name="y"), 2048, chip)


def _cut(x: float) -> str:
    return _number(lambda v: mb.slice_by_index(x=v, begin=[0, 1], end=[1, 2], name="y"), x, "ane:M1", 2)


def _finite() -> Array:
    bits = np.arange(1 << 16, dtype=np.uint16).view(HALF)
    return bits[np.isfinite(bits)].reshape(1, -1)


def _ties_of_codes() -> str:
    x = _finite()
    value = _value(
        lambda v: mb.dequantize(
            input=mb.quantize(input=v, scale=HALF(1), output_dtype="int8"), scale=HALF(1), name="y"
        ),
        x,
        "ane:M5",
    )
    wide = x.astype(np.float64)
    away = np.clip(np.sign(wide) * np.floor(np.abs(wide) + 0.5), -128, 127)
    return "ties away from zero" if np.array_equal(value, away) else "ties to even"


def _ties_of_casts() -> str:
    @mb.program(input_specs=[mb.TensorSpec((1, 4))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        return mb.cast(x=mb.cast(x=x, dtype="fp16"), dtype="fp32", name="y")

    x = np.array([[2049, 2051, -2049, 4098]], np.float32)
    (value,) = run(program, {"x": x}, precision="ane:M5").values()
    return "ties to even" if np.array_equal(value, x.astype(HALF).astype(np.float32)) else "ties away from zero"


def _product_of_codes(scale: float, clipped: bool = False) -> str:
    x = np.ones((1, 4), HALF)
    return f"{_value(quantized_product(clipped, scale), x, 'ane:M5').flat[0]:g}"


def _written_product() -> str:
    """Quantized by a division, a rounding and a clip, in place of the ops."""

    def build(x: Var) -> Var:
        code = mb.clip(x=mb.round(x=mb.real_div(x=x, y=HALF(1 / 16))), alpha=HALF(-128), beta=HALF(127))
        product = mb.mul(x=x, y=mb.mul(x=code, y=HALF(1 / 16)))
        again = mb.clip(x=mb.round(x=mb.real_div(x=product, y=HALF(0.5))), alpha=HALF(-128), beta=HALF(127))
        return mb.mul(x=again, y=HALF(0.5), name="y")

    return f"{_value(build, np.ones((1, 4), HALF), 'ane:M5').flat[0]:g}"


def _two_codes() -> str:
    """Both factors quantized, by 1/16 and 1/8."""

    def build(x: Var) -> Var:
        factors = [
            mb.dequantize(input=mb.quantize(input=x, scale=HALF(s), output_dtype="int8"), scale=HALF(s))
            for s in (1 / 16, 1 / 8)
        ]
        product = mb.quantize(input=mb.mul(x=factors[0], y=factors[1]), scale=HALF(0.5), output_dtype="int8")
        return mb.dequantize(input=product, scale=HALF(0.5), name="y")

    return f"{_value(build, np.ones((1, 4), HALF), 'ane:M5').flat[0]:g}"


KEYS = 4096


def _off(value: Array, wanted: Array) -> str:
    return f"{100 * np.linalg.norm(wanted - value) / np.linalg.norm(wanted):.2g} % off"


def _attention_off(arithmetic: str) -> str:
    x = random(1, KEYS, 16, scale=0.1)
    program = model(x.shape, many_keys)
    wanted, value = (
        np.asarray(next(iter(run(program, {"x": x}, precision=p).values())), np.float64)
        for p in ("fp32", arithmetic)
    )
    return _off(value, wanted)


def _of_uniform(times: float, v: Array, arithmetic: str) -> Array:
    shares = np.full((1, 1, KEYS), times / KEYS, HALF)
    return _value(lambda x: mb.matmul(x=shares, y=mb.mul(x=x, y=HALF(1)), name="y"), v, arithmetic) / times


def _uniform(times: float) -> str:
    v = random(1, KEYS, 16)
    return _off(_of_uniform(times, v, "ane:M5"), v.astype(np.float64).mean(1, keepdims=True))


def _on_a_grid(times: float) -> str:
    """What a product that is cut to a multiple of 2^-16, toward 0, would give of normal values."""
    v = random(1, KEYS, 16).astype(np.float64)
    products = np.trunc(v * (times / KEYS) * 2**16) / 2**16
    return _off(products.sum(1) / times, v.mean(1))


def _tiny_values() -> str:
    v = np.full((1, KEYS, 16), 0.0005, HALF)
    return f"{_of_uniform(1, v, 'ane:M5').flat[0]:.2g}"


def _product(x: float, chip: str) -> str:
    """Of two activations."""
    return _number(lambda v: mb.matmul(x=v, y=mb.add(x=v, y=HALF(0)), transpose_y=True, name="y"), x, chip)


def _activation(op_type: str, x: float) -> str:
    return _number(lambda v: getattr(mb, op_type)(x=v, name="y"), x, "ane:M1")


def _places(op_type: str, chip: str) -> float:
    """The largest distance from the correctly rounded value, in units of its last place."""
    x = _finite()
    x = x[(np.abs(x) <= 8) & (np.abs(x) >= 2.0**-10)].reshape(1, -1)
    if op_type in ("log", "sqrt", "rsqrt"):
        x = np.abs(x)
    build: Build = lambda v: getattr(mb, op_type)(x=v, name="y")  # noqa: E731
    exact, value = _value(build, x, "fp32"), _value(build, x, chip)
    right = exact.astype(HALF)
    return float(
        (np.abs(value - right.astype(np.float64)) / np.spacing(np.abs(right)).astype(np.float64)).max()
    )


def _in_places(op_type: str, chip: str) -> str:
    return f"{_places(op_type, chip):.2g}"


def _largest_error(op_type: str, chip: str = "ane:M4") -> str:
    x = _finite()
    x = x[np.abs(x) <= 16].reshape(1, -1)
    build: Build = lambda v: getattr(mb, op_type)(x=v, name="y")  # noqa: E731
    return f"{np.abs(_value(build, x, chip) - _value(build, x, 'fp32')).max():.2g}"


def _cosine(a: Array, b: Array) -> str:
    a, b = a.ravel(), np.nan_to_num(b.ravel(), posinf=65504, neginf=-65504)
    return f"cosine {a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-30):.2g}"


def _front_end() -> str:
    x = random(1, 128, 16, scale=500)
    return _cosine(_value(log_mel, x, "fp32"), _value(log_mel, x, "ane:M1"))


def _norm_of_small() -> str:
    def build(x: Var) -> Var:
        return mb.rsqrt(
            x=mb.reduce_mean(x=mb.square(x=x), axes=[-1], keep_dims=True), epsilon=HALF(0), name="y"
        )

    return f"{_value(build, np.full((1, 16), 1e-4, HALF), 'fp16').flat[0]:g}"


def _fill() -> str:
    """A constant of fp32 that is cast to fp16, as a conversion does."""

    @mb.program(input_specs=[mb.TensorSpec((1, 1), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        lowest = mb.mul(x=mb.cast(x=x, dtype="fp32"), y=np.finfo(np.float32).min)
        return mb.cast(x=lowest, dtype="fp16", name="y")

    (value,) = run(program, {"x": np.ones((1, 1), HALF)}, precision="fp16").values()
    return f"{value.flat[0]:g}"


def _run_time_rows() -> str:
    x = np.ones((4, 4), HALF)
    return f"{_value(rows_at_places(constant=False), x, 'ane').flat[0]:g}"


def _attention_with_mask() -> Array:
    """Of a mask that is an input, which fused attention of that Mac ignored."""
    x = random(1, 1, 8, 16)

    @mb.program(input_specs=[mb.TensorSpec(x.shape, dtype=types.fp16)] * 3, opset_version=ct.target.iOS18)
    def program(q: Var, k: Var, v: Var) -> Var:
        keep = np.tril(np.ones((8, 8), bool))
        return mb.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=keep, name="y")

    (value,) = run(program, {"q": x, "k": x, "v": x}, precision="ane:M1").values()
    return np.asarray(value, np.float64)[..., 0, :] - x[..., 0, :]


def _mask_counts() -> str:
    return "mask applied" if np.abs(_attention_with_mask()).max() < 1e-2 else "mask ignored"


def _nothing() -> str:
    return "the model is not public"


WHOLE = "which op causes it"
PRODUCTS = "how the engine adds products of activations; truncating each to a multiple of 2^-16 would give {}"
PUBLISHED: tuple[Published, ...] = (
    Published(
        "256 * 256",
        "infinity",
        lambda: _number(lambda x: mb.mul(x=x, y=x, name="y"), 256, "ane"),
        f"M1 to M6: {STUDY}",
    ),
    Published("a sum of products that is 32752", "32752", lambda: _sum(32752), f"M1 to M6: {GUIDE}; {STUDY}"),
    Published(
        "a sum of products that is 32768", "infinity", lambda: _sum(32768), f"M1 to M6: {GUIDE}; {STUDY}"
    ),
    Published("a linear layer that gives 32000", "32000", lambda: _sum(32000, "ane:M1"), f"M1 Max: {SIDEKICK}"),
    Published(
        "a linear layer that gives 33000", "infinity", lambda: _sum(33000, "ane:M1"), f"M1 Max: {SIDEKICK}"
    ),
    Published(
        "the logarithm of 0",
        "-45440",
        lambda: _number(lambda x: mb.log(x=x, epsilon=HALF(0), name="y"), 0, "ane:M1"),
        f"M1: {GUIDE}",
    ),
    Published("2048 + 1", "2048", lambda: _tie("ane:M1"), f"M1: {GUIDE}"),
    Published("2048 + 1", "2050", lambda: _tie("ane:M5"), f"M5: {GUIDE}"),
    Published("2048 + 1", "2050", lambda: _tie("ane:M2"), f"M2, Linux driver: {OMARCHY}/omarchy-ane"),
    Published("the value 4094, sliced from the end of a row", "4094", lambda: _cut(4094), f"M1: {GUIDE}"),
    Published("the value 4096, sliced from the end of a row", "infinity", lambda: _cut(4096), f"M1: {GUIDE}"),
    Published(
        "0.0026 * 0.0026 (6.8e-06), both activations",
        "0",
        lambda: _product(0.0026, "ane:M2"),
        f"M2, Linux driver: {OMARCHY}/omarchy-ane",
    ),
    Published(
        "0.0045 * 0.0045 (2e-05), both activations; results are multiples of 2^-16",
        "1.52588e-05",
        lambda: _product(0.0045, "ane:M2"),
        f"M2, Linux driver: {OMARCHY}/omarchy-ane",
    ),
    *(
        Published(f"{op_type} of {x:g}", measured, partial(_activation, op_type, x), source)
        for source in (f"M1, Linux driver: {OMARCHY}/mlx-omarchy",)
        for op_type, x, measured in (
            ("sigmoid", 8.3203125, "1"),
            ("sigmoid", -9.9453125, "0"),
            ("tanh", 4.00390625, "1"),
            ("tanh", -4.00390625, "-1"),
        )
    ),
    Published(
        "the largest error of tanh, in ulp",
        "up to 11",
        lambda: f"up to {_places('tanh', 'ane:M1'):.0f}",
        f"M1, Linux driver: {OMARCHY}/mlx-omarchy",
    ),
    *(
        Published(
            f"the largest error of {op_type}", measured, partial(_largest_error, op_type), f"M4, M6: {STUDY}"
        )
        for op_type, measured in (
            ("sigmoid", "0.0034"),
            ("tanh", "0.0017"),
            ("gelu", "0.0062"),
            ("silu", "0.015"),
        )
    ),
    Published("quantization at scale 1, of all fp16 values", "ties away from zero", _ties_of_codes, M5),
    Published("fp32 to fp16", "ties to even", _ties_of_casts, M5),
    *(
        Published(
            f"a product quantized at scale 1/{16 // wrong}, one factor at scale 1/16 (correct result: 1)",
            str(wrong),
            partial(_product_of_codes, wrong / 16),
            M5,
        )
        for wrong in (1, 2, 4, 8)
    ),
    Published("the same at 1/2, with the product clipped", "1", lambda: _product_of_codes(1 / 2, True), M5),
    Published(
        "the same at 1/2, with quantization written as division, rounding and clip", "1", _written_product, M5
    ),
    Published(
        "rsqrt of the mean square of values of 0.0001, its fp32 cast removed",
        "infinity",
        _norm_of_small,
        f"iPhone 17 Pro: {LLM}",
    ),
    Published("the lowest fp32 number as a fill value", "-infinity", _fill, f"M1 Max, CPU: {COREMLIT}"),
    Published(
        "a log-mel front end whose powers are above 65504",
        "cosine 0.046",
        _front_end,
        f"M1 Max: {COREMLIT}",
        "the input, and the number that the engine puts in place of infinity: we use 65536",
    ),
    Published(
        "a product of two factors, at scales 1/16 and 1/8",
        "both factors get the scale of the branch that is built first",
        _two_codes,
        M5,
        "which branch the compiler builds first; our value is the correct one",
    ),
    Published(
        "attention over 4,096 keys",
        "5.2 to 5.4 % off",
        lambda: _attention_off("ane:M5"),
        CORE_AI,
        PRODUCTS.format("an error of this size, and a smaller one with larger weights"),
    ),
    Published(
        "attention over 4,096 keys, in fp16 on the CPU",
        "0.03 % off",
        lambda: _attention_off("fp16"),
        CORE_AI,
        "the order of its additions, and its input; we add in fp32",
    ),
    *(
        Published(
            f"{'' if times == 1 else f'{times} times '}uniform attention weights over 4,096 keys, times values",
            measured,
            partial(_uniform, times),
            CORE_AI,
            PRODUCTS.format(f"{_on_a_grid(times)} for standard normal values"),
        )
        for times, measured in ((1, "3.95 % off"), (16, "0.22 % off"), (64, "0.060 % off"))
    ),
    Published(
        "values of 0.0005 under uniform attention weights over 4,096 keys",
        "0",
        _tiny_values,
        CORE_AI,
        PRODUCTS.format("0"),
    ),
    Published(
        "exp(s - max) @ V before the division",
        "0.11 % off",
        _nothing,
        CORE_AI,
        PRODUCTS.format("such an error"),
    ),
    Published(
        "attention of 1 and of 2 queries",
        "fails; 4 and 8 run",
        lambda: "runs",
        CORE_AI,
        "why 1 and 2 fail; our interpreter runs them",
    ),
    *(
        Published(
            f"the largest error of {op_type}, in ulp",
            measured,
            partial(_in_places, op_type, "ane:M4"),
            f"M4, M6: {STUDY}",
            "which inputs give these errors; ours is correctly rounded",
        )
        for op_type, measured in (("exp", "9"), ("log", "91"), ("sqrt", "1.2"), ("rsqrt", "2.1"))
    ),
    Published(
        "the largest error of sigmoid, in ulp",
        "up to 25",
        lambda: f"up to {_places('sigmoid', 'ane:M1'):.0f}",
        f"M1, Linux driver: {OMARCHY}/mlx-omarchy",
        "which 1,536 values the source tried; we try all magnitudes from 2^-10 to 8, with the published table",
    ),
    Published(
        "the largest error of erf",
        "0.00086",
        lambda: _largest_error("erf"),
        f"M4, M6: {STUDY}",
        "which 33 points the source tried",
    ),
    Published(
        "the largest error of sin",
        "0.00063",
        lambda: _largest_error("sin"),
        f"M4, M6: {STUDY}",
        "which inputs give these errors; ours is correctly rounded",
    ),
    Published(
        "fused attention under a mask that no op of the same engine program computes",
        "mask ignored",
        _mask_counts,
        f"M1 Max, macOS 27.0: {SIDEKICK}",
        "when the engine uses the fused op; `inspect` reports such masks",
    ),
    Published(
        "gather_nd of ones with computed indices",
        "0",
        _run_time_rows,
        f"iPhone 17 Pro: {LLM}",
        "why; `inspect` reports such ops",
    ),
    Published("an angle by atan2", "correlation 0.82", _nothing, f"M1, M2, M2 Ultra, CPU: {KOKORO}", WHOLE),
    Published(
        "two stages of a vocoder", "correlations 0.40 and 0.12", _nothing, f"M1, M2, M2 Ultra: {KOKORO}", WHOLE
    ),
    Published("SigLIP2's vision tower", "cosine 0.31", _nothing, f"M1 Max: {COREMLIT}", WHOLE),
    Published(
        "a model with all 58 ops on the engine",
        "predicts token 509 instead of 941",
        _nothing,
        f"M1 Max, or M2 Ultra and A17 Pro (our notes do not say which): {COREMLIT}; {KOKORO}",
        WHOLE,
    ),
    Published("a language model in W8A8", "cosine 0.108", _nothing, f"M-series: {LLM}", WHOLE),
    Published(
        "outputs with the lowest fp32 number as a fill value",
        "15 of 16 not finite",
        _nothing,
        f"M1 Max, CPU: {COREMLIT}",
        WHOLE,
    ),
    Published(
        "a classifier (MiniLM) whose attention exceeds the range of fp16",
        "right on the engine, NaN with CPU_ONLY, one constant with CPU_AND_GPU",
        _nothing,
        "M4: saurabhav88/EnviousWispr pull request 1830",
        WHOLE,
    ),
    Published(
        "the encoder of SenseVoice",
        "right with CPU_AND_NE, NaN on the CPU and the GPU",
        _nothing,
        "not given: FluidInference/FluidAudio pull request 648",
        WHOLE,
    ),
    Published(
        "25 clips through Whisper large-v3 turbo",
        "5 transcripts differ from those of the GPU, which were correct",
        _nothing,
        "M5 Max, macOS 26.4: saurabhav88/EnviousWispr pull request 2182",
        WHOLE,
    ),
    Published(
        "native SiLU in an embedding model",
        "lost more accuracy than any other op",
        _nothing,
        f"M1 Max, macOS 27.0: {SIDEKICK}",
        WHOLE,
    ),
)


@cache
def ours(value: Published) -> str:
    """What ours gives, in the words of the page."""
    return value.ours().replace("inf", "infinity")


HEAD = """
## Published values

Each row compares a value that was measured on a chip with the value that our model of its arithmetic computes.
[Latency](latency.md) has the published times.

| what | measured | ours | chip, source |
|---|---|---|---|
"""
DIFFERS = """
## Published values that we cannot reproduce

Here our value differs, because we lack a detail, or because the measured model is not public.

| what | measured | ours | not known | chip, source |
|---|---|---|---|---|
"""


def tables() -> str:
    """Both tables: what is reproduced, and what is not."""
    same = (f"| {v.what} | {v.measured} | {ours(v)} | {v.source} |\n" for v in PUBLISHED if v.reproduced)
    other = (
        f"| {v.what} | {v.measured} | {ours(v)} | {v.unknown} | {v.source} |\n"
        for v in PUBLISHED
        if not v.reproduced
    )
    return HEAD + "".join(same) + DIFFERS + "".join(other)
