"""Quantize the inputs of linear and conv to 8 bits, with scales from a run of the plain model.

Before::

    y = linear(x=x, weight=w)

After::

    y = linear(x=dequantize(quantize(x, scale), scale), weight=w)

coremltools writes the same form: symmetric int8, one scale for the tensor. `compress(activations=...)` calls
`measure_scales`, and then `insert_pairs` and `clip_products`. Where a few large inputs leave too few levels for
the others, as in language models, the inputs of that op stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from anesurgery.compressing.correcting import Candidate
from anesurgery.compressing.running_samples import run_op_by_op
from anesurgery.compressing.weight_rows import WeightRows
from anesurgery.errors import SurgeryError
from anesurgery.files.package import Loaded
from anesurgery.interpret.core import Executable
from anesurgery.interpret.ops.constexpr import RANGE, dequantize, quantize
from anesurgery.interpret.steps import Step
from anesurgery.mil import Array, Function, Operation, Program, Var, dtype_name, mb, stamp, types

IOS17 = 8
"""The specification version in which quantize and dequantize begin."""
READERS = ("linear", "conv")
"""The ops whose inputs are quantized: those that the engine runs in 8 bits."""
LEVELS = 127
"""The largest code. -128 is not used, as in coremltools' symmetric form."""
PERCENTILE = 99.99
"""The per cent of magnitudes that the range of "percentile" covers: it clips one number in 10,000. A choice,
the usual one of tools for quantization."""
LEAST_COSINE = 0.995
"""The least cosine between products with and without quantized inputs: below it a tenth of a product is
noise."""


METHODS: dict[str, Callable[[Array], float]] = {
    "percentile": lambda magnitudes: float(np.percentile(magnitudes, PERCENTILE)),
    "max": lambda magnitudes: float(magnitudes.max(initial=0.0)),
}
"""Name of a method -> computes the largest magnitude that a code represents from those of the inputs."""


@dataclass(frozen=True)
class Quantized:
    """The scale for the inputs of one op, or why they stay as they are."""

    scale: float
    """The step between two levels; 0 where the inputs stay."""
    cosine: float
    """The cosine between the op's products with quantized inputs and without, averaged over positions."""
    why: str = ""
    """The reason why the inputs stay; else empty."""


def check_method(method: str | None) -> None:
    """Check that a method exists.

    Raises:
        SurgeryError: it does not.
    """
    if method is not None and method not in METHODS:
        raise SurgeryError(f"activations={method!r}; it may be {', '.join(map(repr, METHODS))}, or None")


def measure_scales(
    loaded: Loaded, name: str, samples: Sequence[Mapping[str, Any]], chosen: Sequence[Candidate], method: str
) -> dict[Operation, Quantized]:
    """Measure the scale for the inputs of each linear and conv, and how much it changes the products.

    Args:
        loaded: the plain model.
        name: of the function.
        samples: inputs of the function.
        chosen: the weights whose ops are measured.
        method: one of `METHODS`.
    """
    rows = {r.op: r for candidate in chosen for r in candidate.readers if r.op.op_type in READERS}
    results: dict[Operation, Quantized] = {}

    def measure(step: Step, arguments: Sequence[Mapping[str, Any]]) -> Step:
        results[step.op] = _measure_scale(rows[step.op], arguments, METHODS[method])
        return step

    run_op_by_op(Executable(loaded.program, function=name, fuse=False), samples, measure, set(rows))
    return results


def _measure_scale(
    rows: WeightRows, arguments: Sequence[Mapping[str, Any]], range_of: Callable[[Array], float]
) -> Quantized:
    """Measure the scale for one op, given its arguments in each sample."""
    kind = dtype_name(rows.op.x)
    if kind not in ("fp16", "fp32"):
        return Quantized(0.0, 1.0, f"its inputs are {kind}")
    magnitudes = np.concatenate([np.abs(values["x"].float().numpy()).ravel() for values in arguments])
    if not np.isfinite(magnitudes).all() or not magnitudes.any():
        return Quantized(0.0, 1.0, "its inputs are not finite" if magnitudes.any() else "its inputs are all 0")
    scale = float(_typed_scale(range_of(magnitudes) / LEVELS, rows.op.x))
    cosine = _mean_cosine(rows, arguments, scale)
    if cosine >= LEAST_COSINE:
        return Quantized(scale, cosine)
    ratio = magnitudes.max() / magnitudes.mean()
    why = f"its products with inputs of 8 bits have a cosine of {cosine:.4f}, below {LEAST_COSINE:g}"
    return Quantized(0.0, cosine, f"{why}: the largest input is {ratio:.0f} times the mean")


def _typed_scale(scale: float, x: Var) -> np.floating[Any]:
    """Return a scale in the type of the value that it scales; never 0 or subnormal."""
    dtype = types.nptype_from_builtin(x.dtype)
    typed: np.floating[Any] = dtype(max(scale, float(np.finfo(dtype).tiny)))
    return typed


def _mean_cosine(rows: WeightRows, arguments: Sequence[Mapping[str, Any]], scale: float) -> float:
    """Return the cosine between products with quantized inputs and without, the mean over positions.

    A position counts if its product is not 0: one that is has no direction.
    """
    weight = torch.from_numpy(rows.to_rows(np.asarray(rows.op.weight.val, np.float32)).copy())
    total, count = 0.0, 0
    for values in arguments:
        inputs = rows.inputs(values)
        x = dequantize(quantize(values["x"].float(), scale, "int8"), scale)
        quantized_inputs = rows.inputs({**values, "x": x})
        assert inputs is not None
        assert quantized_inputs is not None
        a, b = (each.float() @ weight.transpose(1, 2) for each in (inputs, quantized_inputs))
        dot, aa, bb = ((p * q).sum((0, 2)) for p, q in ((a, b), (a, a), (b, b)))
        nonzero = aa > 0
        lengths = (aa[nonzero] * bb[nonzero]).sqrt().clamp_min(torch.finfo(dot.dtype).tiny)
        total += float((dot[nonzero] / lengths).sum())
        count += int(nonzero.sum())
    return total / count if count else 1.0


def insert_pairs(program: Program, scales: Mapping[Operation, float]) -> None:
    """Quantize and dequantize the inputs of ops; those with the same input and scale share a pair."""
    for function in program.functions.values():
        pairs: dict[tuple[Var, float], Var] = {}
        for op in list(function.operations):
            if op not in scales:
                continue
            key = op.x, scales[op]
            if key not in pairs:
                pairs[key] = _build_pair(function, op, scales[op])
            op.set_inputs(x=pairs[key], no_check_var_types=True)


def pair_names(op: str) -> tuple[str, str]:
    """Return the names of the quantize and the dequantize before the op of a name."""
    return f"{op}_x_quantized", f"{op}_x_dequantized"


def _build_pair(function: Function, op: Operation, scale: float) -> Var:
    """Build quantize and dequantize before an op, and return the dequantized value."""
    typed, names = _typed_scale(scale, op.x), pair_names(op.name)
    with function:
        # without names of ours, those of coremltools would depend on the ops built before
        size = mb.const(val=typed, name=f"{names[0]}_scale", before_op=op)
        kind = mb.const(val="int8", name=f"{names[0]}_dtype", before_op=op)
        codes = mb.quantize(input=op.x, scale=size, output_dtype=kind, name=names[0], before_op=op)
        read: Var = mb.dequantize(input=codes, scale=size, name=names[1], before_op=op)
    for new_op in (size.op, kind.op, codes.op, read.op):
        assert new_op is not None
        stamp(new_op, op)
    return read


def clip_products(program: Program) -> int:
    """Clip products with a dequantized value that are quantized right after, to the range of their codes.

    The engine was seen to multiply such a value by the scale of the result instead of its own (M5 Pro, macOS
    27.0); a clip between the two avoids that. No code changes, since quantize clips to the same range.

    Returns:
        The number of products that were clipped.
    """
    count = 0
    for function in program.functions.values():
        for op in list(function.operations):
            if op.op_type == "quantize" and _is_dequantized_product(op.input) and op.scale.rank == 0:
                _insert_clip(function, op)
                count += 1
    return count


def _is_dequantized_product(var: Var) -> bool:
    """Is a value a product of which a factor is dequantized?"""
    mul = var.op
    if mul is None or mul.op_type != "mul":
        return False
    return any(v.op is not None and v.op.op_type == "dequantize" for v in (mul.x, mul.y))


def _insert_clip(function: Function, op: Operation) -> None:
    """Clip the input of a quantize to the numbers that its codes represent."""
    dtype, scale = types.nptype_from_builtin(op.input.dtype), float(op.scale.val)
    zero_point = 0 if op.inputs.get("zero_point") is None else int(op.zero_point.val)
    largest = float(np.finfo(dtype).max)
    ends = [max(-largest, min(largest, (code - zero_point) * scale)) for code in RANGE[op.output_dtype.val]]
    with function:
        low = mb.const(val=dtype(ends[0]), name=f"{op.name}_least", before_op=op)
        high = mb.const(val=dtype(ends[1]), name=f"{op.name}_most", before_op=op)
        clipped = mb.clip(x=op.input, alpha=low, beta=high, name=f"{op.name}_clipped", before_op=op)
    for var in (low, high, clipped):
        stamp(var.op, op)
    op.set_inputs(input=clipped, no_check_var_types=True)
