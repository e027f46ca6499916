"""The catalogue of numeric hazards: a graph that goes wrong, inputs that make it, and a twin that cannot.

Each is of fp16, as converters write it. `make hazards` writes docs/hazards.md from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from anesurgery.mil import Array, Program, Var, ct, mb, types

Build = Callable[[Var], Any]
HALF = np.float16
NONE = HALF(0)


@dataclass(frozen=True)
class Hazard:
    """One way in which fp16, or the engine, gives other numbers than the model means.

    Attributes:
        name: a few words.
        build: makes the graph of its input.
        inputs: what makes it fail.
        harmless: the same where it cannot fail: no rule of numbers may speak of it.
        rule: which names it.
        repair: the pass that repairs it; "" where none does.
        arithmetic: under which the interpreter shows it: "fp16", "ane", "ane:M1", "flushed", in which
            subnormal numbers are 0, or "one by one", in which a running sum is rounded at each step; "" where
            none does.
        because: what goes wrong, and, without a repair, what to do.
        measured: what was seen on a device, with chip, system and source; "" where nothing was published.
        twin_shape: of the input of the twin; that of the inputs by default.
        target: for which `inspect` is asked.
    """

    name: str
    build: Build
    inputs: Array
    harmless: Build
    rule: str
    repair: str
    arithmetic: str
    because: str
    measured: str = ""
    twin_shape: tuple[int, ...] | None = None
    target: str = "M1/macOS 14"

    @cached_property
    def graph(self) -> Program:
        """The model that goes wrong."""
        return model(self.inputs.shape, self.build)

    @cached_property
    def twin(self) -> Program:
        """The model that cannot."""
        return model(self.twin_shape or self.inputs.shape, self.harmless)


def model(shape: tuple[int, ...], build: Build) -> Program:
    """A program of one input."""
    spec = mb.TensorSpec(shape, dtype=types.fp16)
    return mb.program(input_specs=[spec], opset_version=ct.target.iOS18)(lambda x: build(x))


REPAIRS = {
    "num-exp": "fuse_exponential",
    "num-softmax": "fuse_exponential",
    "num-log-softmax": "fuse_exponential",
    "num-exp-range": "halve_exponent",
    "num-root": "scale_roots",
    "num-square": "scale_powers",
    "num-quotient": "mean_quotient",
    "num-scale-after": "scale_scores",
    "num-between": "widen_to_fp32",
    "num-cancel": "widen_to_fp32",
    "num-angle": "widen_to_fp32",
}
"""Rule -> the pass that repairs it, where rows say nothing else."""


def row(
    name: str,
    build: Build,
    inputs: Array,
    rule: str,
    *,
    twin: Build | None = None,
    because: str = "",
    **more: Any,
) -> Hazard:
    """A hazard of fp16, with a twin of bounded numbers; what goes wrong is the docstring of `build`."""
    doc = (build.__doc__ or "").rstrip(".")
    given = {"repair": REPAIRS.get(rule, ""), "arithmetic": "fp16"} | more
    reason = because or doc[0].lower() + doc[1:]
    return Hazard(name, build, inputs, twin or of_bounded(build), rule, because=reason, **given)


def random(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Array:
    """Normal numbers of fp16."""
    return (np.random.default_rng(0).standard_normal(shape) * scale + shift).astype(HALF)


def bounded(x: Var) -> Var:
    """Between -1 and 1."""
    return mb.tanh(x=x)


def of_bounded(build: Build) -> Build:
    """The same of numbers between -1 and 1."""
    return lambda x: build(bounded(x))


def more(x: Var) -> Var:
    """1 + exp(x)."""
    return mb.add(x=mb.exp(x=x), y=HALF(1))


def negative(x: Var) -> Var:
    """The negation, as converters write it."""
    return mb.mul(x=x, y=HALF(-1))


def rows(reduce: Callable[..., Var], x: Var) -> Var:
    """A reduction of the last axis, which stays."""
    return reduce(x=x, axes=[-1], keep_dims=True)


def softmax_written(x: Var) -> Var:
    """The exponential overflows above 11.09."""
    e = mb.exp(x=x)
    return mb.real_div(x=e, y=rows(mb.reduce_sum, e), name="y")


def logsumexp_written(x: Var) -> Var:
    """The exponential overflows above 11.09."""
    return mb.log(x=rows(mb.reduce_sum, mb.exp(x=x)), epsilon=NONE, name="y")


def log_add_exp(x: Var) -> Var:
    """An exponential overflows above 11.09."""
    a, b = (mb.exp(x=v) for v in mb.split(x=x, num_splits=2, axis=1))
    return mb.log(x=mb.add(x=a, y=b), epsilon=NONE, name="y")


def tanh_written(x: Var) -> Var:
    """An infinity is divided by an infinity."""
    e = mb.exp(x=mb.mul(x=x, y=HALF(2)))
    return mb.real_div(x=mb.sub(x=e, y=HALF(1)), y=mb.add(x=e, y=HALF(1)), name="y")


def log_sigmoid(x: Var) -> Var:
    """A probability below 6e-8 becomes 0, and its logarithm -inf."""
    return mb.log(x=mb.sigmoid(x=x), epsilon=NONE, name="y")


def log_softmax(x: Var) -> Var:
    """A probability below 6e-8 becomes 0, and its logarithm -inf."""
    return mb.log(x=mb.softmax(x=x, axis=-1), epsilon=NONE, name="y")


def root_norm(x: Var) -> Var:
    """Values of 256 or more overflow when squared; the compiler may remove casts to fp32 around the norm."""
    mean = rows(mb.reduce_mean, mb.square(x=x))
    return mb.mul(x=x, y=mb.rsqrt(x=mb.add(x=mean, y=HALF(1e-4)), epsilon=NONE), name="y")


def l2_norm(x: Var) -> Var:
    """Values of 256 or more overflow when squared."""
    total = rows(mb.reduce_sum, mb.mul(x=x, y=x))
    return mb.real_div(x=x, y=mb.sqrt(x=mb.add(x=total, y=HALF(1e-4))), name="y")


def layer_norm(x: Var) -> Var:
    """Values of 256 or more overflow when squared."""
    apart = mb.sub(x=x, y=rows(mb.reduce_mean, x))
    spread = mb.add(x=rows(mb.reduce_mean, mb.square(x=apart)), y=HALF(1e-4))
    return mb.mul(x=apart, y=mb.rsqrt(x=spread, epsilon=NONE), name="y")


def variance(x: Var) -> Var:
    """Two large numbers cancel."""
    squares = rows(mb.reduce_mean, mb.square(x=x))
    return mb.sub(x=squares, y=mb.square(x=rows(mb.reduce_mean, x)), name="y")


def magnitude(x: Var) -> Var:
    """Values of 256 or more overflow when squared."""
    a, b = mb.split(x=x, num_splits=2, axis=1)
    return mb.sqrt(x=mb.add(x=mb.square(x=a), y=mb.square(x=b)), name="y")


def power_in_decibels(x: Var) -> Var:
    """Values of 256 or more overflow when squared, although the logarithm is small."""
    real, imaginary = (mb.square(x=v) for v in mb.split(x=x, num_splits=2, axis=1))
    power = mb.maximum(x=mb.add(x=real, y=imaginary), y=HALF(1e-4))
    return mb.mul(x=mb.log(x=power, epsilon=NONE), y=HALF(4.34), name="y")


def log_mel(x: Var) -> Var:
    """Values of 256 or more overflow when squared, although the logarithm is small."""
    weights = np.abs(random(1, 20, 64, scale=0.02))[0]
    real, imaginary = (mb.square(x=mb.squeeze(x=v, axes=[1])) for v in mb.split(x=x, num_splits=2, axis=1))
    bands = mb.matmul(x=weights, y=mb.add(x=real, y=imaginary))
    return mb.log(x=mb.clip(x=bands, alpha=HALF(1e-4), beta=HALF(np.inf)), epsilon=NONE, name="y")


def deviation(x: Var) -> Var:
    """Values of 256 or more overflow when squared."""
    apart = mb.sub(x=x, y=rows(mb.reduce_mean, x))
    return mb.sqrt(x=mb.mul(x=rows(mb.reduce_mean, mb.square(x=apart)), y=HALF(64 / 63)), name="y")


def cosine_written(x: Var) -> Var:
    """Products above 65504 are divided by products above 65504."""
    a, b = mb.split(x=x, num_splits=2, axis=1)
    product, first, second = (rows(mb.reduce_sum, mb.mul(x=v, y=w)) for v, w in ((a, b), (a, a), (b, b)))
    lengths = mb.sqrt(x=mb.maximum(x=mb.mul(x=first, y=second), y=HALF(6e-8)))
    return mb.real_div(x=product, y=lengths, name="y")


def length(x: Var) -> Var:
    """Values of 256 or more overflow when squared."""
    return mb.sqrt(x=rows(mb.reduce_sum, mb.square(x=x)), name="y")


def mean_by_sum(x: Var) -> Var:
    """The sum overflows before it is scaled down."""
    return mb.mul(x=mb.reduce_sum(x=x, axes=[-2, -1], keep_dims=True), y=HALF(1 / 16384), name="y")


def masked_mean(x: Var) -> Var:
    """The sum overflows before it is divided by the count."""
    mask = mb.cast(
        x=mb.greater(x=mb.slice_by_size(x=x, begin=[0, 0, 0], size=[-1, -1, 1]), y=HALF(0)), dtype="fp16"
    )
    total = mb.reduce_sum(x=mb.mul(x=x, y=mask), axes=[1], keep_dims=False)
    return mb.real_div(x=total, y=mb.reduce_sum(x=mask, axes=[1], keep_dims=False), name="y")


def shares_of_magnitudes(x: Var) -> Var:
    """The divisor overflows, so every result is 0."""
    total = mb.reduce_sum(x=mb.abs(x=x), axes=[-1], keep_dims=True)
    return mb.real_div(x=x, y=mb.maximum(x=total, y=HALF(2**-24)), name="y")


def log_cosh(x: Var) -> Var:
    """The hyperbolic cosine overflows above 11.78."""
    return mb.log(x=mb.cosh(x=x), epsilon=NONE, name="y")


def late_scale(x: Var) -> Var:
    """The product overflows before it is scaled down."""
    scores = mb.mul(x=mb.matmul(x=x, y=x, transpose_y=True), y=HALF(1 / 64))
    return mb.matmul(x=mb.softmax(x=scores, axis=-1), y=x, name="y")


def covariance(x: Var) -> Var:
    """The product overflows before it is divided by the number of values."""
    apart = mb.sub(x=x, y=rows(mb.reduce_mean, x))
    return mb.mul(x=mb.matmul(x=apart, y=apart, transpose_y=True), y=HALF(1 / 511), name="y")


def large_product(weight: float) -> Build:
    """A sum of 512 products, of numbers up to 1 with a weight."""
    return lambda x: mb.linear(x=bounded(x), weight=np.full((4, 512), weight, HALF), name="y")


def log_guard(epsilon: float) -> Build:
    """A logarithm that is guarded, as a log-mel front end's is."""
    return lambda x: mb.log(x=mb.add(x=mb.square(x=bounded(x)), y=HALF(epsilon)), epsilon=NONE, name="y")


def least_of_log(least: float) -> Build:
    """A logarithm of what is clipped from below, as log-mel front ends are written."""
    clip = partial(mb.clip, alpha=HALF(least), beta=HALF(np.inf))
    return lambda x: mb.log(x=clip(x=mb.relu(x=bounded(x))), epsilon=NONE, name="y")


def unit_rows(least: float) -> Build:
    """Rows divided by their largest magnitude, or by no less than a number."""

    def build(x: Var) -> Var:
        x = bounded(x)
        length = mb.maximum(x=rows(mb.reduce_max, mb.abs(x=x)), y=HALF(least))
        return mb.real_div(x=x, y=mb.tile(x=length, reps=[1, 64]), name="y")

    return build


def root_guard(epsilon: float) -> Build:
    """A norm whose guard is the epsilon of an op."""

    def build(x: Var) -> Var:
        total = rows(mb.reduce_sum, mb.square(x=bounded(x)))
        return mb.mul(x=x, y=mb.rsqrt(x=total, epsilon=HALF(epsilon)), name="y")

    return build


def gelu_written(x: Var) -> Var:
    """A gelu by tanh, whose cube overflows, which the tanh does not mind."""
    cube = mb.mul(x=mb.mul(x=x, y=x), y=x)
    inner = mb.mul(x=mb.add(x=x, y=mb.mul(x=cube, y=HALF(0.044715))), y=HALF(0.7978846))
    return mb.mul(x=mb.mul(x=x, y=HALF(0.5)), y=mb.add(x=mb.tanh(x=inner), y=HALF(1)), name="y")


def cube(x: Var) -> Var:
    """A number above 40.3 overflows when cubed, although it is scaled down later."""
    return mb.mul(x=mb.pow(x=x, y=HALF(3)), y=HALF(1e-4), name="y")


def counter(x: Var) -> Var:
    """Fp16 skips integers above 2048, and 2048 + 1 is 2048."""
    return mb.cumsum(x=mb.cast(x=mb.greater(x=x, y=HALF(0)), dtype="fp16"), axis=1, name="y")


def angles(length: int) -> Build:
    """Sines of positions times frequencies."""
    positions = np.arange(length, dtype=HALF)[:, None] * np.ones((1, 4), HALF)
    return lambda x: mb.sin(x=mb.mul(x=positions, y=mb.sigmoid(x=x)), name="y")


def counted_angle(x: Var) -> Var:
    """Above 2048, a count in fp16 skips integers, so the angles are those of the wrong positions."""
    ones = mb.fill_like(ref_tensor=x, value=HALF(1))
    return mb.mul(x=x, y=mb.cos(x=mb.mul(x=mb.cumsum(x=ones, axis=1), y=HALF(0.5))), name="y")


def warped(x: Var) -> Var:
    """An image that is sampled next to each of its own pixels, as flow and warps have it."""
    height, width = (int(n) for n in x.shape[-2:])
    across = np.broadcast_to(np.linspace(-1, 1, width, dtype=HALF), (1, height, width))
    down = np.broadcast_to(np.linspace(-1, 1, height, dtype=HALF)[:, None], (1, height, width))
    moved = mb.add(x=mb.mul(x=mb.squeeze(x=x, axes=[1]), y=HALF(0.004)), y=across)
    return mb.resample(
        x=x,
        coordinates=mb.stack(values=[moved, down], axis=-1),
        sampling_mode="bilinear",
        padding_mode="border",
        padding_value=HALF(0),
        coordinates_mode="normalized_minus_one_to_one",
        align_corners=True,
        name="y",
    )


def quotient_angle(x: Var) -> Var:
    """0 / 0 is NaN."""
    a, b = mb.split(x=x, num_splits=2, axis=1)
    return mb.atan(x=mb.real_div(x=a, y=b), name="y")


def guarded_angle(x: Var) -> Var:
    """The same of a divisor that is 1 or more."""
    a, b = mb.split(x=x, num_splits=2, axis=1)
    return mb.atan(x=mb.real_div(x=a, y=more(bounded(b))), name="y")


def in_quadrants(a: Var, b: Var) -> Var:
    """The angle in four quadrants, as it is written with conditions."""
    angle = mb.atan(x=mb.real_div(x=a, y=b))
    sides = mb.sub(x=angle, y=HALF(np.pi)), mb.add(x=angle, y=HALF(np.pi))
    turned = mb.select(cond=mb.less(x=a, y=HALF(0)), a=sides[0], b=sides[1])
    return mb.select(cond=mb.less(x=b, y=HALF(0)), a=turned, b=angle, name="y")


def quadrants(x: Var) -> Var:
    """0 / 0 is NaN; if y is 0 and x is negative, a converted torch.atan2 gives 0 instead of pi."""
    return in_quadrants(*mb.split(x=x, num_splits=2, axis=1))


def right_quadrants(x: Var) -> Var:
    """The same of a divisor that is 1 or more."""
    a, b = mb.split(x=x, num_splits=2, axis=1)
    return in_quadrants(a, more(bounded(b)))


def covariance_of_means(x: Var) -> Var:
    """Two large numbers cancel."""
    a, b = mb.split(x=x, num_splits=2, axis=1)
    return mb.sub(
        x=rows(mb.reduce_mean, mb.mul(x=a, y=b)),
        y=mb.mul(x=rows(mb.reduce_mean, a), y=rows(mb.reduce_mean, b)),
        name="y",
    )


def variance_of_windows(x: Var) -> Var:
    """Two large numbers cancel."""
    pool = partial(mb.avg_pool, kernel_sizes=[4, 4], strides=[4, 4], pad_type="valid")
    return mb.sub(x=pool(x=mb.square(x=x)), y=mb.square(x=pool(x=x)), name="y")


def small_divisor(x: Var) -> Var:
    """A number above 0.65, divided by 1e-5, overflows, although it is scaled down later."""
    a, b = mb.split(x=x, num_splits=2, axis=1)
    return mb.mul(x=mb.real_div(x=a, y=mb.maximum(x=mb.abs(x=b), y=HALF(1e-5))), y=b, name="y")


def divided_by_more(x: Var) -> Var:
    """The same of a divisor of 1e-2 or more, of bounded numbers."""
    a, b = mb.split(x=bounded(x), num_splits=2, axis=1)
    return mb.mul(x=mb.real_div(x=a, y=mb.maximum(x=mb.abs(x=b), y=HALF(1e-2))), y=b, name="y")


def norm_between_casts(x: Var) -> Var:
    """The compiler may remove the casts; run `compute_fp16`, then `safe_numbers`."""
    wide = mb.cast(x=x, dtype="fp32")
    mean = mb.add(x=rows(mb.reduce_mean, mb.square(x=wide)), y=np.float32(1e-4))
    return mb.cast(x=mb.mul(x=wide, y=mb.rsqrt(x=mean, epsilon=np.float32(0))), dtype="fp16", name="y")


def fused_attention(fill: float) -> Build:
    """Fused attention under a mask that is multiplied with a fill; the first row of x says what is kept."""

    def build(x: Var) -> Var:
        first = mb.slice_by_size(x=x, begin=[0, 0, 0, 0], size=[-1, -1, 1, -1])
        shut = mb.cast(x=mb.less(x=first, y=HALF(0)), dtype="fp16")
        mask = mb.mul(x=shut, y=HALF(fill))
        return mb.scaled_dot_product_attention(query=x, key=x, value=x, attn_mask=mask, name="y")

    return build


def fused_under_table(masked: bool) -> Build:
    """Fused attention under a causal mask that is a constant, or under none."""
    table = {"attn_mask": np.where(np.tril(np.ones((8, 8), bool)), 0, -1e4).astype(HALF)} if masked else {}
    return lambda x: mb.scaled_dot_product_attention(query=x, key=x, value=x, **table, name="y")


def exponential(x: Var) -> Var:
    """Above 11.09 it overflows, although it is scaled down later."""
    return mb.mul(x=mb.exp(x=x), y=HALF(1e-3), name="y")


def likelihood(x: Var) -> Var:
    """The exponential overflows above 11.09, although a small square then scales it down."""
    return mb.mul(x=mb.exp(x=mb.mul(x=x, y=HALF(-1))), y=mb.square(x=mb.add(x=x, y=HALF(13))), name="y")


def squared_relu(x: Var) -> Var:
    """Values of 256 or more overflow when squared, although the weights scale them down."""
    weight = (np.random.default_rng(0).uniform(-0.05, 0.05, (8, 64))).astype(HALF)
    return mb.linear(x=mb.square(x=mb.relu(x=x)), weight=weight, name="y")


def width_slice(x: Var) -> Var:
    """Numbers of 4095 or more become infinite."""
    return mb.slice_by_index(x=x, begin=[0, 0, 4], end=[1, 4, 8], name="y")


def attention(fill: float, first: int = 0) -> Build:
    """Attention under a causal mask with a fill; `first=-1` leaves the first row without a key."""

    def build(x: Var) -> Var:
        keep = np.tril(np.ones((1, 8, 8), bool), first)
        scores = mb.select(cond=keep, a=mb.matmul(x=x, y=x, transpose_y=True), b=HALF(fill))
        return mb.matmul(x=mb.softmax(x=scores, axis=-1), y=x, name="y")

    return build


def wide_mask(kept: int) -> Build:
    """Shares under a mask of fp32, as graph attention writes it; the first row keeps so many scores."""

    def build(x: Var) -> Var:
        keep = np.arange(8)[:, None] >= np.where(np.arange(8) < kept, 0, 1)
        wide = mb.select(cond=keep, a=mb.cast(x=x, dtype="fp32"), b=np.float32(-9e15))
        return mb.softmax(x=mb.cast(x=wide, dtype="fp16"), axis=-1, name="y")

    return build


def many_keys(x: Var) -> Var:
    """The product of weights and values is wrong; we do not know why."""
    return mb.matmul(x=mb.softmax(x=mb.matmul(x=x, y=x, transpose_y=True), axis=-1), y=x, name="y")


def large_mean(x: Var) -> Var:
    """A running sum with few bits loses numbers that are small compared with the sum."""
    return mb.reduce_mean(x=x, axes=[-2, -1], keep_dims=True, name="y")


def quantized_product(clipped: bool, scale: float = 0.5) -> Build:
    """A product with a quantized factor, quantized again."""

    def build(x: Var) -> Var:
        code = mb.quantize(input=x, scale=HALF(1 / 16), output_dtype="int8")
        product = mb.mul(x=x, y=mb.dequantize(input=code, scale=HALF(1 / 16)))
        ends = HALF(-128 * scale), HALF(127 * scale)
        product = mb.clip(x=product, alpha=ends[0], beta=ends[1]) if clipped else product
        again = mb.quantize(input=product, scale=HALF(scale), output_dtype="int8")
        return mb.dequantize(input=again, scale=HALF(scale), name="y")

    return build


def rows_at_places(constant: bool) -> Build:
    """A gather of several axes."""

    def build(x: Var) -> Var:
        places = np.array([[0, 1], [1, 2]], np.int32)
        chosen = mb.cast(x=mb.slice_by_index(x=x, begin=[0, 0], end=[2, 2]), dtype="int32")
        return mb.gather_nd(x=x, indices=places if constant else chosen, name="y")

    return build


def product_of_three(x: Var) -> Var:
    """The product of two factors overflows before the third scales it down."""
    a, b, c = mb.split(x=x, num_splits=3, axis=1)
    return mb.mul(x=mb.mul(x=a, y=b), y=c, name="y")


def linear_attention(x: Var) -> Var:
    """Two sums over all keys overflow before one is divided by the other."""
    a, b, v = mb.split(x=x, num_splits=3, axis=0)
    q, k = (mb.add(x=mb.elu(x=w, alpha=HALF(1)), y=HALF(1)) for w in (a, b))
    total = mb.reduce_sum(x=k, axes=[-2], keep_dims=True)
    share = mb.inverse(x=mb.matmul(x=q, y=total, transpose_y=True), epsilon=HALF(1e-4))
    return mb.mul(x=mb.matmul(x=q, y=mb.matmul(x=k, y=v, transpose_x=True)), y=share, name="y")


def square_over_more(x: Var) -> Var:
    """Two powers overflow before one is divided by the other."""
    power = mb.mul(x=mb.square(x=x), y=x)
    return mb.real_div(x=power, y=mb.add(x=mb.abs(x=power), y=HALF(1e4)), name="y")


def generalized_mean(x: Var) -> Var:
    """Cubes exceed 65504, although their root is small."""
    cubes = mb.pow(x=mb.clip(x=x, alpha=HALF(1e-6), beta=HALF(np.inf)), y=HALF(3))
    return mb.pow(x=mb.reduce_mean(x=cubes, axes=[-1], keep_dims=True), y=HALF(1 / 3), name="y")


def distances(x: Var) -> Var:
    """Large squares and products nearly cancel."""
    total = rows(mb.reduce_sum, mb.square(x=x))
    product = mb.matmul(x=mb.mul(x=x, y=HALF(2)), y=x, transpose_y=True)
    return mb.sub(x=mb.add(x=total, y=mb.transpose(x=total, perm=[1, 0])), y=product, name="y")


def shares_by_hand(x: Var) -> Var:
    """The product overflows before it is divided by the sum of the weights."""
    weights = mb.sigmoid(x=mb.matmul(x=bounded(x), y=bounded(x), transpose_y=True))
    return mb.real_div(x=mb.matmul(x=weights, y=x), y=rows(mb.reduce_sum, weights), name="y")


def difference_of_roots(x: Var) -> Var:
    """The roots of two large numbers agree in most digits."""
    size = mb.abs(x=x)
    return mb.sub(x=mb.sqrt(x=mb.add(x=size, y=HALF(1))), y=mb.sqrt(x=size), name="y")


def log_of_more(x: Var) -> Var:
    """Near 1, a sum is rounded to steps of 0.001."""
    return mb.log(x=mb.add(x=x, y=HALF(1)), epsilon=HALF(0), name="y")


def log_of_many_times(x: Var) -> Var:
    """10,000 times a number above 6.5 overflows, although its logarithm is small."""
    return mb.log(x=mb.mul(x=mb.abs(x=x), y=HALF(1e4)), epsilon=HALF(1), name="y")


def log_of_narrowed(x: Var) -> Var:
    """log(1 + |x| / 1e-6): coremltools leaves a product with a number beyond fp16 in fp32, and casts it."""
    wide = mb.mul(x=mb.cast(x=mb.abs(x=x), dtype="fp32"), y=np.float32(1e6))
    return mb.log(x=mb.cast(x=wide, dtype="fp16"), epsilon=HALF(1), name="y")


def of_little(build: Build) -> Build:
    """The same of numbers up to 0.05."""
    return lambda x: build(mb.mul(x=bounded(x), y=HALF(0.05)))


def log_of_rest(x: Var) -> Var:
    """A probability near 1 is rounded to 1, and the logarithm of 0 is -inf."""
    share = mb.exp(x=mb.mul(x=mb.abs(x=x), y=HALF(-1)))
    return mb.log(x=mb.sub(x=HALF(1), y=share), epsilon=NONE, name="y")


def log_of_product(x: Var) -> Var:
    """A product of probabilities below 6e-8 becomes 0, and its logarithm -inf."""
    return mb.log(x=rows(mb.reduce_prod, mb.sigmoid(x=x)), epsilon=NONE, name="y")


def hot_softmax(x: Var) -> Var:
    """1000 times a score above 65 is infinite, and inf - inf is NaN."""
    return mb.softmax(x=mb.mul(x=x, y=HALF(1000)), axis=-1, name="y")


def fraction(x: Var) -> Var:
    """From 64 on, fp16 has steps of 1/16; from 1024 on, it has no fractions."""
    turns = mb.real_div(x=x, y=HALF(7))
    return mb.sub(x=turns, y=mb.floor(x=turns), name="y")


def angle_between(x: Var) -> Var:
    """Near 1, one fp16 step (0.0005) changes the arc cosine by 0.03."""
    a, b = mb.split(x=x, num_splits=2, axis=1)
    a, b = (mb.real_div(x=v, y=mb.sqrt(x=rows(mb.reduce_sum, mb.square(x=v)))) for v in (a, b))
    cosine = rows(mb.reduce_sum, mb.mul(x=a, y=b))
    return mb.acos(x=mb.clip(x=cosine, alpha=HALF(-1), beta=HALF(1)), name="y")


def angle_of_half(x: Var) -> Var:
    """An angle of what is no cosine of more than a half."""
    return mb.acos(x=mb.mul(x=bounded(x), y=HALF(0.5)), name="y")


def sum_of_levels(x: Var) -> Var:
    """10^x overflows from x = 4.82 on, although the logarithm is small."""
    power = mb.pow(x=HALF(10), y=mb.mul(x=x, y=HALF(0.1)))
    return mb.log(x=rows(mb.reduce_sum, power), epsilon=NONE, name="y")


def companded(x: Var) -> Var:
    """Near 1, the power is rounded to steps of 0.001."""
    return mb.mul(x=mb.sub(x=mb.pow(x=HALF(256), y=x), y=HALF(1)), y=HALF(1 / 255), name="y")


def away_from_zero(build: Build) -> Build:
    """The same of numbers from 1 to 3."""
    return lambda x: build(mb.add(x=bounded(x), y=HALF(2)))


def from_a_half(build: Build) -> Build:
    """The same of numbers from 0.5 to 1."""
    return lambda x: build(mb.add(x=mb.mul(x=mb.sigmoid(x=x), y=HALF(0.5)), y=HALF(0.5)))


def harmonic_mean(x: Var) -> Var:
    """1/x overflows for x below 1.5e-5, although the mean is small."""
    total = rows(mb.reduce_sum, mb.inverse(x=x, epsilon=NONE))
    return mb.real_div(x=HALF(64000), y=total, name="y")


def gap(start: int) -> Build:
    """How far places are from the first: of integers that are cast before they are subtracted."""

    def build(x: Var) -> Var:
        bits = mb.cast(x=mb.clip(x=x, alpha=HALF(0), beta=HALF(1)), dtype="int32")
        steps = mb.cumsum(x=bits, axis=1)
        places = mb.cast(x=mb.add(x=steps, y=start), dtype="fp16")
        first = mb.cast(x=mb.add(x=bits, y=start), dtype="fp16")
        return mb.sub(x=places, y=first, name="y")

    return build


def map_row(start: int) -> Build:
    """In which rows of a map, 7 wide, places lie: of integers that are cast before they are divided."""

    def build(x: Var) -> Var:
        steps = mb.cumsum(x=mb.cast(x=mb.clip(x=x, alpha=HALF(0), beta=HALF(1)), dtype="int32"), axis=1)
        places = mb.cast(x=mb.add(x=steps, y=start), dtype="fp16")
        rows = mb.floor_div(x=places, y=HALF(7))
        return mb.sub(x=rows, y=HALF(start // 7), name="y")

    return build


def window_sum(x: Var) -> Var:
    """Two values of a large running sum agree in most digits."""
    total = mb.cumsum(x=x, axis=1)
    size = x.shape[1]
    ahead = mb.slice_by_index(x=total, begin=[0, 16], end=[1, size])
    return mb.sub(x=ahead, y=mb.slice_by_index(x=total, begin=[0, 0], end=[1, size - 16]), name="y")


def camera(focal: float) -> Build:
    """Points on the picture of a camera: a product with its matrix, divided by the depth."""

    def build(x: Var) -> Var:
        matrix = np.array([[focal, 0, focal / 2], [0, focal, focal / 2], [0, 0, 1]], HALF)
        a, b, depth = mb.split(x=mb.linear(x=x, weight=matrix), num_splits=3, axis=1)
        return mb.real_div(x=mb.concat(values=[a, b], axis=1), y=depth, name="y")

    return build


def shared_area(x: Var) -> Var:
    """Areas in pixels overflow, although their ratio is at most 1."""
    one, other = mb.split(x=mb.abs(x=x), num_splits=2, axis=1)
    first, second, both = (mb.reduce_prod(x=v, axes=[-1]) for v in (one, other, mb.minimum(x=one, y=other)))
    return mb.real_div(x=both, y=mb.sub(x=mb.add(x=first, y=second), y=both), name="y")


def power_less_one(exponent: float) -> Build:
    """Box and Cox: (x^p - 1) / p."""
    return lambda x: mb.mul(
        x=mb.sub(x=mb.pow(x=x, y=HALF(exponent)), y=HALF(1)), y=HALF(1 / exponent), name="y"
    )


def rest_of_share(noise: float) -> Build:
    """The uncertainty that is left after a measurement: (1 - p / (p + r)) p."""

    def build(x: Var) -> Var:
        share = mb.real_div(x=x, y=mb.add(x=x, y=HALF(noise)))
        return mb.mul(x=mb.sub(x=HALF(1), y=share), y=x, name="y")

    return build


def bump() -> Array:
    """Scores of places of which few are near the largest."""
    return np.clip(20 - ((np.arange(512) - 300.0) / 3) ** 2, -20, 20).astype(HALF)[None]


def near_rows() -> Array:
    """Two rows in each, of which the second is the first and a hundredth of noise."""
    first, other = np.random.default_rng(0).standard_normal((2, 2, 1, 32))
    return np.concatenate([first, first + 0.01 * other], axis=1).astype(HALF)


def unprojection(x: Var) -> Var:
    """A coordinate times a depth overflows before it is divided by the focal length."""
    a, b = mb.split(x=x, num_splits=2, axis=1)
    return mb.mul(x=mb.mul(x=a, y=b), y=HALF(1e-3), name="y")


def versed_sine(x: Var) -> Var:
    """Near 1, the cosine is rounded to steps of 0.0005."""
    return mb.mul(x=mb.sub(x=HALF(1), y=mb.cos(x=x)), y=HALF(1000), name="y")


def spread(x: Var) -> Var:
    """Weighted squares overflow, and their difference cancels."""
    shares, places = mb.softmax(x=x, axis=-1), np.arange(x.shape[1], dtype=HALF)
    place, square = rows(mb.reduce_sum, mb.mul(x=shares, y=places)), mb.mul(x=shares, y=places)
    return mb.sub(x=rows(mb.reduce_sum, mb.mul(x=square, y=places)), y=mb.mul(x=place, y=place), name="y")


def overlap(x: Var) -> Var:
    """A product of two probabilities below 2.4e-4 is 0, and so is its root."""
    p, q = (mb.softmax(x=v, axis=-1) for v in mb.split(x=x, num_splits=2, axis=1))
    return rows(mb.reduce_sum, mb.sqrt(x=mb.mul(x=p, y=q)))


def log_of_energy(x: Var) -> Var:
    """Squares overflow, although the logarithm is small."""
    return mb.log(x=mb.add(x=rows(mb.reduce_mean, mb.square(x=x)), y=HALF(1)), epsilon=NONE, name="y")


def surely(build: Build) -> Build:
    """The same of numbers from 1 to 2."""
    return lambda x: build(mb.add(x=mb.sigmoid(x=x), y=HALF(1)))


WIDE = random(2, 64, scale=10)
LARGE = random(2, 64, scale=500)
COREMLIT = "cosine 0.046 (M1 Max: findit-studio/coremlit)"
FOLDED_CAST = "a norm whose fp32 cast was removed: infinite (iPhone 17 Pro: john-rocky/CoreML-LLM)"
PHASE = "an atan2 of a phase: correlation 0.82 even on the CPU (M1, M2, M2 Ultra: mattmireles/kokoro-coreml)"
KAS = "cadamcat/llms-on-apple-neural-engine"
HAZARDS: tuple[Hazard, ...] = (
    row(
        "softplus",
        lambda x: mb.log(x=more(x), epsilon=NONE, name="y"),
        WIDE,
        "num-exp",
        because="the exponential overflows above 11.09, although the result is small",
    ),
    row(
        "sigmoid",
        lambda x: mb.real_div(x=mb.exp(x=x), y=more(x), name="y"),
        WIDE,
        "num-exp",
        because="an infinity is divided by an infinity",
    ),
    row(
        "softmax",
        softmax_written,
        WIDE,
        "num-softmax",
        measured="the op subtracts the maximum itself, so an input of 1000 is harmless "
        "(M1: sbryngelson/ane-guide)",
    ),
    row("logsumexp", logsumexp_written, WIDE, "num-softmax"),
    row("logarithm of two exponentials", log_add_exp, random(2, 2, 64, scale=10), "num-exp"),
    row("tanh", tanh_written, WIDE, "num-exp"),
    row("logarithm of a hyperbolic cosine", log_cosh, WIDE, "num-exp"),
    row("logarithm of a sigmoid", log_sigmoid, random(2, 64, scale=20), "num-log-softmax"),
    row(
        "logarithm of a softmax",
        log_softmax,
        random(2, 64, scale=20),
        "num-log-softmax",
        measured="log(0) is -45440 (M1: sbryngelson/ane-guide)",
    ),
    row("root mean square norm", root_norm, LARGE, "num-square", repair="rms_norm", measured=FOLDED_CAST),
    row("L2 normalization of rows", l2_norm, LARGE, "num-root"),
    row("layer norm, written out", layer_norm, LARGE, "num-square", repair="group_norm"),
    row(
        "variance as a difference of means",
        variance,
        random(2, 64, shift=100),
        "num-variance",
        repair="centre_variance",
    ),
    row(
        "covariance as a difference of means",
        covariance_of_means,
        np.repeat(random(2, 1, 64, shift=30), 2, 1),
        "num-cancel",
    ),
    row(
        "variance of windows as a difference of means",
        variance_of_windows,
        random(1, 1, 16, 16, shift=100),
        "num-cancel",
    ),
    row(
        "norm between casts to fp32 and back",
        norm_between_casts,
        LARGE,
        "num-folded-cast",
        arithmetic="",
        measured=FOLDED_CAST,
        target="A19/iOS 26",
    ),
    row(
        "magnitude of complex numbers",
        magnitude,
        random(2, 2, 64, scale=500),
        "num-root",
        measured=f"a log-mel front end: {COREMLIT}",
    ),
    row(
        "logarithm of a power",
        power_in_decibels,
        random(2, 2, 64, scale=500),
        "num-root",
        measured=f"a log-mel front end: {COREMLIT}",
    ),
    row("standard deviation of rows", deviation, LARGE, "num-root"),
    row(
        "log-mel front end",
        log_mel,
        random(1, 2, 64, 8, scale=500),
        "num-spectrum",
        repair="scale_spectra",
        measured=COREMLIT,
    ),
    row(
        "cosine similarity of two rows",
        cosine_written,
        random(2, 2, 64, scale=500),
        "num-cosine",
        repair="scale_cosines",
    ),
    row("L2 norm of rows", length, LARGE, "num-root"),
    row(
        "mean as a sum",
        mean_by_sum,
        random(1, 4, 128, 128, shift=10),
        "num-reduce",
        repair="sum_to_mean",
        measured="reductions overflow above 65504, and their running sum has few bits "
        "(M1, M5: sbryngelson/ane-guide)",
    ),
    row("masked mean", masked_mean, random(1, 512, 8, scale=300, shift=300), "num-quotient"),
    row(
        "L1 normalization",
        shares_of_magnitudes,
        random(2, 1024, scale=200),
        "num-quotient",
        twin=lambda x: shares_of_magnitudes(mb.mul(x=bounded(x), y=HALF(8))),
    ),
    row(
        "scores scaled too late",
        late_scale,
        random(1, 8, 64, scale=30),
        "num-scale-after",
        measured="with one op type at a time in fp16, the query-key product lost the most accuracy (PSNR 35 dB)"
        " (M1 Max: smpanaro/more-ane-transformers)",
    ),
    row("covariance", covariance, random(1, 8, 512, scale=100), "num-scale-after"),
    row(
        "sum of products beyond 32768",
        large_product(100),
        np.abs(random(2, 512, scale=10)),
        "num-mac-32768",
        twin=large_product(10),
        repair="scale_products",
        arithmetic="ane",
        because="a partial sum of 32768 or more becomes infinite",
        measured="M1, M2, M4, M5, M6 (sbryngelson/ane-guide; 751K)",
    ),
    row(
        "slice within the last axis",
        width_slice,
        random(1, 4, 8, scale=9000),
        "num-slice-q4",
        repair="cut_rows",
        arithmetic="ane:M1",
        measured="M1, M2 (sbryngelson/ane-guide, not through Core ML)",
    ),
    row(
        "causal mask of -inf",
        attention(-np.inf),
        random(1, 8, 16),
        "num-mask-causal",
        twin=attention(-1e4),
        repair="causal_mask_tensor",
        arithmetic="",
        because="according to Apple, the engine's softmax does not handle -inf",
    ),
    row(
        "causal mask of finfo.min",
        attention(-65504),
        random(1, 8, 16),
        "num-mask-causal",
        twin=attention(-1e4),
        repair="causal_mask_tensor",
        arithmetic="",
        because="a mask value below -32768 becomes -inf if adding the mask is fused into the matmul",
        measured="finfo.min of fp32: 15 of 16 outputs not finite on the CPU (M1 Max: findit-studio/coremlit)",
    ),
    row(
        "rows in which everything is masked",
        attention(-np.inf, -1),
        random(1, 8, 16),
        "num-mask-rows",
        twin=attention(-1e4, -1),
        repair="padding_mask_tensor",
        arithmetic="",
        because="the softmax of a row that is all -inf is NaN",
        measured="NaN becomes a large number (M5: FluidAudio issue 679)",
    ),
    row(
        "rows in which an fp32 mask masks everything",
        wide_mask(0),
        random(8, 8),
        "num-mask-rows",
        twin=wide_mask(1),
        repair="padding_mask_tensor",
        because="a cast to fp16 turns -9e15 into -inf, and the softmax of such a row is NaN",
    ),
    row(
        "mask of fused attention times -inf",
        fused_attention(-np.inf),
        random(1, 1, 8, 8),
        "num-mask-product",
        twin=fused_attention(-1e4),
        repair="padding_mask_tensor",
        arithmetic="",
        because="0 * -inf is NaN wherever a score is kept",
    ),
    row(
        "fused attention under a constant mask",
        fused_under_table(True),
        random(1, 1, 8, 16),
        "fault-attention-mask",
        twin=fused_under_table(False),
        repair="decompose_attention",
        arithmetic="",
        because="the engine ignores a mask unless an op on the engine computes it",
        measured="a mask ignored, and no error (M1 Max, macOS 27.0: ironblock/sidekick)",
        target="M1/macOS 27",
    ),
    row(
        "small attention weights over many keys",
        many_keys,
        random(1, 4096, 16, scale=0.1),
        "num-shares",
        repair="scale_shares",
        arithmetic="",
        measured="5.2 to 5.4 % off over 4,096 keys; with the weights scaled up 64 times, 0.06 % "
        f"(M5 Pro, Core AI: {KAS})",
        twin_shape=(1, 512, 16),
    ),
    row(
        "product between two quantizations",
        quantized_product(False),
        random(2, 64),
        "num-qdq",
        twin=quantized_product(True),
        repair="clip_product",
        arithmetic="ane:M5",
        because="the engine dequantizes the quantized factor of a product with the scale of the product",
        measured="the result is 1, 2, 4 or 8, depending on the product's scale; 1 is correct "
        f"(M5 Pro, macOS 27.0: {KAS})",
    ),
    row(
        "subnormal epsilon",
        log_guard(1e-6),
        np.zeros((2, 64), HALF),
        "num-eps-subnormal",
        twin=log_guard(1e-4),
        repair="hold_guards",
        arithmetic="flushed",
        because="the multiplier of the A14 and M1 engine (H13) flushes subnormal numbers to 0",
        measured="log-mel with an epsilon of 1e-6: cosine 0.046 (M1 Max: findit-studio/coremlit)",
    ),
    row(
        "logarithm with a subnormal lower bound",
        least_of_log(1e-5),
        np.zeros((2, 64), HALF),
        "num-eps-subnormal",
        twin=least_of_log(1e-4),
        repair="hold_guards",
        arithmetic="flushed",
        because="the multiplier of the A14 and M1 engine (H13) flushes subnormal numbers to 0",
    ),
    row(
        "normalization of rows with a subnormal minimum",
        unit_rows(1e-6),
        np.zeros((2, 64), HALF),
        "num-eps-subnormal",
        twin=unit_rows(1e-4),
        repair="hold_guards",
        arithmetic="flushed",
        because="the multiplier of the A14 and M1 engine (H13) flushes subnormal numbers to 0, and 0 / 0 "
        "is NaN",
    ),
    row(
        "logarithm with a lower bound that a converter rounded",
        least_of_log(2.0**-24),
        np.zeros((2, 64), HALF),
        "num-eps",
        twin=least_of_log(1e-4),
        repair="hold_guards",
        arithmetic="flushed",
        because="the conversion rounded 1e-10 up to 6e-8, so the original value is lost: convert in fp32, "
        "and `compute_fp16` keeps it",
    ),
    row(
        "epsilon that is 0 in fp16",
        root_guard(1e-12),
        np.zeros((2, 64), HALF),
        "num-eps",
        twin=root_guard(1e-4),
        repair="hold_guards",
        arithmetic="",
        because="1e-12 is 0 in fp16, and 0 times infinity is NaN; the repair raises it to 6e-8 and rescales it",
    ),
    row("third power", cube, random(2, 64, scale=60), "num-square", twin=gelu_written),
    row(
        "running count",
        counter,
        np.ones((1, 4096), HALF),
        "num-count",
        twin=counter,
        arithmetic="one by one",
        measured="M1, M5 (sbryngelson/ane-guide)",
        twin_shape=(1, 1024),
        repair="widen_to_fp32",
    ),
    row(
        "sines of large angles",
        angles(4096),
        random(1, 4),
        "num-angle",
        twin=angles(32),
        because="near 2048, neighbouring fp16 numbers are 1 or 2 apart; `rotary_tables` stores the "
        "sines of positions in a table",
    ),
    row(
        "cosines of a running count",
        counted_angle,
        random(1, 5000, 4),
        "num-angle",
        twin=counted_angle,
        twin_shape=(1, 60, 4),
    ),
    row(
        "sampling points in a large image",
        warped,
        random(1, 1, 4, 1024),
        "num-points",
        twin=warped,
        repair="widen_to_fp32",
        because="near 1, fp16 has steps of 1/2048: in an image of 1024 pixels, points are up to 1/8 pixel off",
        measured="grid_sample: 131 times the error of fp32 (an unnamed Mac: coremltools issue 2068)",
        twin_shape=(1, 1, 4, 64),
    ),
    row(
        "angle of a quotient",
        quotient_angle,
        np.zeros((2, 2, 64), HALF),
        "num-atan",
        twin=guarded_angle,
        repair="stable_angle",
        arithmetic="",
        measured=PHASE,
    ),
    row(
        "angle in four quadrants",
        quadrants,
        np.zeros((2, 2, 64), HALF),
        "num-atan",
        twin=right_quadrants,
        repair="stable_angle",
        arithmetic="",
        measured=PHASE,
    ),
    row("exponential without a bound", exponential, random(2, 64, scale=4, shift=6), "num-exp-range"),
    row("exponential times a square", likelihood, random(2, 64, scale=0.05, shift=-13), "num-exp-range"),
    row("square in front of small weights", squared_relu, random(2, 64, scale=150), "num-square"),
    row(
        "product of three",
        product_of_three,
        random(2, 3, 64, scale=40) * np.array([10, 10, 1e-4], HALF).reshape(3, 1),
        "num-between",
    ),
    row(
        "linear attention",
        linear_attention,
        random(3, 512, 16, scale=8, shift=4),
        "num-between",
        twin_shape=(3, 32, 16),
    ),
    row("quotient of powers", square_over_more, random(2, 64, scale=60), "num-between"),
    row(
        "division by small numbers",
        small_divisor,
        np.concatenate([random(2, 1, 64), random(2, 1, 64, scale=1e-5)], 1),
        "num-between",
        twin=divided_by_more,
    ),
    row("logarithm of a scaled-up number", log_of_many_times, np.abs(random(2, 64, scale=20)), "num-between"),
    row(
        "logarithm of a product in fp32",
        log_of_narrowed,
        np.abs(random(2, 64)),
        "num-between",
        twin=of_little(log_of_narrowed),
        because="a product with 1e6 stays in fp32, and its cast to fp16 overflows,"
        " although its logarithm is small",
    ),
    row("generalized mean", generalized_mean, np.abs(random(2, 64, scale=50)), "num-between"),
    row("expanded distances", distances, random(16, 16, shift=30), "num-cancel"),
    row(
        "attention weights computed step by step, times values",
        shares_by_hand,
        random(512, 16, scale=30, shift=200),
        "num-between",
    ),
    row(
        "exp(x) - 1 near 0",
        lambda x: mb.sub(x=mb.exp(x=x), y=HALF(1), name="y"),
        random(2, 64, scale=1e-3),
        "num-cancel",
        twin=surely(lambda x: mb.sub(x=mb.exp(x=x), y=HALF(1), name="y")),
        because="near 1, the exponential is rounded to steps of 0.001",
    ),
    row(
        "sqrt(x + 1) - sqrt(x) for large x",
        difference_of_roots,
        random(2, 64, scale=20, shift=2000),
        "num-cancel",
    ),
    row(
        "logarithm of 1 + x near 0",
        log_of_more,
        np.abs(random(2, 64, scale=1e-3)),
        "num-cancel",
        twin=lambda x: log_of_more(mb.add(x=mb.abs(x=x), y=HALF(1))),
    ),
    row(
        "log(1 - p) for p near 1",
        log_of_rest,
        np.abs(random(2, 64, scale=1e-3)) + HALF(1e-4),
        "num-cancel",
        twin=surely(log_of_rest),
    ),
    row(
        "logarithm of a product of probabilities",
        log_of_product,
        random(2, 32),
        "num-between",
        twin=surely(log_of_product),
    ),
    row(
        "softmax at a low temperature",
        hot_softmax,
        random(2, 64, scale=200),
        "num-scores",
        repair="shift_scores",
    ),
    row(
        "fraction of a large number", fraction, (np.arange(128).reshape(2, 64) * 30).astype(HALF), "num-cancel"
    ),
    row("angle of nearly parallel rows", angle_between, near_rows(), "num-cancel", twin=angle_of_half),
    row("sum of levels", sum_of_levels, random(2, 64, scale=5, shift=60), "num-between"),
    row("256^x - 1 near 0", companded, random(2, 64, scale=0.003), "num-cancel", twin=from_a_half(companded)),
    row(
        "harmonic mean",
        harmonic_mean,
        np.abs(random(2, 64, scale=2e-5)) + HALF(1e-6),
        "num-between",
        twin=away_from_zero(harmonic_mean),
    ),
    row(
        "difference of integers",
        gap(6001),
        np.ones((1, 64), HALF),
        "num-cancel",
        twin=gap(1),
        because="above 2048, integers are rounded before they are subtracted",
    ),
    row(
        "row of a flat index in a large map",
        map_row(6001),
        np.ones((1, 64), HALF),
        "num-cancel",
        twin=map_row(1),
        because="above 2048, integers are rounded before they are divided",
    ),
    row(
        "window sums from a running sum", window_sum, random(1, 4096, shift=2), "num-cancel", twin_shape=(1, 64)
    ),
    row(
        "points of a camera",
        camera(1000),
        random(16, 3, scale=10, shift=100),
        "num-between",
        twin=of_bounded(camera(1)),
        because="a focal length in pixels times a coordinate overflows before it is divided by the depth",
    ),
    row("product of two, scaled down", unprojection, random(2, 64, scale=100, shift=700), "num-between"),
    row(
        "areas of boxes",
        shared_area,
        random(16, 4, 2, scale=100, shift=600),
        "num-between",
        twin=surely(shared_area),
    ),
    row(
        "x^0.01 - 1",
        power_less_one(0.01),
        np.abs(random(2, 64, scale=20)) + HALF(0.5),
        "num-cancel",
        twin=surely(power_less_one(2)),
        because="any fp16 number to the power 0.01 is near 1",
    ),
    row("1 - cos(x) near 0", versed_sine, random(2, 64, scale=0.02), "num-cancel", twin=surely(versed_sine)),
    row(
        "spread of a heat map",
        spread,
        bump(),
        "num-cancel",
        twin=of_bounded(lambda x: rows(mb.reduce_sum, mb.mul(x=x, y=np.full((64,), 0.01, HALF)))),
        twin_shape=(1, 64),
    ),
    row(
        "square root of a product of probabilities",
        overlap,
        random(2, 128, scale=8),
        "num-cancel",
        twin_shape=(2, 8),
    ),
    row("log(1 + energy)", log_of_energy, random(2, 64, scale=6000), "num-cancel", twin=surely(log_of_energy)),
    row(
        "1 - p for p near 1",
        rest_of_share(0.01),
        np.abs(random(2, 64, scale=50, shift=100)),
        "num-cancel",
        twin=surely(rest_of_share(0.5)),
        because="p near 1 is rounded to 1",
    ),
    row(
        "gather_nd with computed indices",
        rows_at_places(False),
        np.abs(random(4, 4)),
        "num-gather-nd",
        twin=rows_at_places(True),
        repair="flat_gather",
        arithmetic="",
        because="the engine returns zeros; the repair is a gather along one axis, which runs on the CPU or GPU",
        measured="iPhone 17 Pro (john-rocky/CoreML-LLM)",
    ),
    row(
        "mean of a million numbers",
        large_mean,
        random(1, 1, 1024, 1024, shift=0.5),
        "num-mean",
        twin=large_mean,
        repair="mean_of_means",
        arithmetic="",
        measured="M1, M5 (sbryngelson/ane-guide)",
        twin_shape=(1, 1, 64, 64),
    ),
)
