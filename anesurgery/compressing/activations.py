"""Activations in 8 bits: what linear and conv read is quantized, by scales from a run of the plain model.

Before::

    y = linear(x=x, weight=w)

After::

    y = linear(x=dequantize(quantize(x, scale), scale), weight=w)

which is the form that coremltools writes: symmetric int8, one scale for the tensor. Where a few large numbers
leave too few levels for the others, as in language models, the inputs of that op stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from anesurgery.compressing.correcting import Candidate, op_by_op
from anesurgery.compressing.weight_rows import Rows
from anesurgery.errors import SurgeryError
from anesurgery.files.package import Loaded
from anesurgery.interpret.core import Executable, Step
from anesurgery.interpret.ops.constexpr import RANGE, dequantize, quantize
from anesurgery.mil import Array, Function, Operation, Program, Var, dtype_name, mb, stamp, types

IOS17 = 8
"""The specification version in which quantize and dequantize begin."""
READERS = ("linear", "conv")
"""Ops whose inputs are quantized: those that the engine runs in 8 bits."""
LEVELS = 127
"""Of one sign: -128 is not used, as in coremltools' symmetric form."""
SHARE = 99.99
"""Per cent of the sizes that the range of "percentile" holds: one number in 10,000 is clipped. A choice, as
tools for quantization make it."""
LEAST_COSINE = 0.995
"""Between the products with quantized inputs and those without: below, a tenth of a product is noise."""


def _largest(sizes: Array) -> float:
    return float(sizes.max(initial=0.0))


METHODS: dict[str, Callable[[Array], float]] = {
    "percentile": lambda sizes: float(np.percentile(sizes, SHARE)),
    "max": _largest,
}
"""How the range of an input follows from the sizes of its numbers."""


@dataclass(frozen=True)
class Quantized:
    """What the inputs of one op become."""

    scale: float
    """Of a level; 0 where they stay as they are."""
    cosine: float
    """Between its products with quantized inputs and those without, the mean over positions."""
    why: str = ""
    """The reason where they stay."""


def check_method(method: str | None) -> None:
    """See that a method exists.

    Raises:
        SurgeryError: it does not.
    """
    if method is not None and method not in METHODS:
        raise SurgeryError(f"activations={method!r}; it may be {', '.join(map(repr, METHODS))}, or None")


def measured(
    loaded: Loaded, name: str, samples: Sequence[Mapping[str, Any]], chosen: Sequence[Candidate], method: str
) -> dict[Operation, Quantized]:
    """The scale of what each linear and conv reads, and how well its products stand it.

    Args:
        loaded: the plain model.
        name: of the function.
        samples: as it takes them.
        chosen: the weights whose readers are asked.
        method: one of `METHODS`.
    """
    rows = {r.op: r for one in chosen for r in one.readers if r.op.op_type in READERS}
    found: dict[Operation, Quantized] = {}

    def ask(step: Step, given: Sequence[Mapping[str, Any]]) -> Step:
        found[step.op] = _judged(rows[step.op], given, METHODS[method])
        return step

    op_by_op(Executable(loaded.program, function=name, fuse=False), samples, ask, set(rows))
    return found


def _judged(rows: Rows, given: Sequence[Mapping[str, Any]], range_of: Callable[[Array], float]) -> Quantized:
    """The scale of the inputs of one op, and the cosine of its products."""
    kind = dtype_name(rows.op.x)
    if kind not in ("fp16", "fp32"):
        return Quantized(0.0, 1.0, f"its inputs are {kind}")
    magnitudes = np.concatenate([np.abs(values["x"].float().numpy()).ravel() for values in given])
    if not np.isfinite(magnitudes).all() or not magnitudes.any():
        return Quantized(0.0, 1.0, "its inputs are not finite" if magnitudes.any() else "its inputs are all 0")
    scale = _stored(range_of(magnitudes) / LEVELS, rows.op.x)
    cosine = _cosine(rows, given, float(scale))
    if cosine < LEAST_COSINE:
        why = f"its products with inputs of 8 bits have a cosine of {cosine:.4f}, below {LEAST_COSINE:g}"
        return Quantized(
            0.0,
            cosine,
            f"{why}: the largest input is {magnitudes.max() / magnitudes.mean():.0f} times the mean",
        )
    return Quantized(float(scale), cosine)


def _stored(scale: float, x: Var) -> np.floating[Any]:
    """A scale in the type of what it scales; none is 0 or subnormal."""
    dtype = types.nptype_from_builtin(x.dtype)
    held: np.floating[Any] = dtype(max(scale, float(np.finfo(dtype).tiny)))
    return held


def _cosine(rows: Rows, given: Sequence[Mapping[str, Any]], scale: float) -> float:
    """The mean over positions; a position whose product is 0 has no direction."""
    weight = torch.from_numpy(rows.of(np.asarray(rows.op.weight.val, np.float32)).copy())
    total, count = 0.0, 0
    for values in given:
        plain = rows.inputs(values)
        x = dequantize(quantize(values["x"].float(), scale, "int8"), scale)
        coded = rows.inputs({**values, "x": x})
        assert plain is not None
        assert coded is not None
        a, b = (inputs.float() @ weight.transpose(1, 2) for inputs in (plain, coded))
        dot, aa, bb = ((p * q).sum((0, 2)) for p, q in ((a, b), (a, a), (b, b)))
        known = aa > 0
        total += float(
            (dot[known] / (aa[known] * bb[known]).sqrt().clamp_min(torch.finfo(dot.dtype).tiny)).sum()
        )
        count += int(known.sum())
    return total / count if count else 1.0


def insert(program: Program, scales: Mapping[Operation, float]) -> None:
    """Quantize the inputs of ops, and read them back; ops that read the same at one scale share a pair."""
    for function in program.functions.values():
        pairs: dict[tuple[Var, float], Var] = {}
        for op in list(function.operations):
            if op not in scales:
                continue
            key = op.x, scales[op]
            if key not in pairs:
                pairs[key] = _pair(function, op, scales[op])
            op.set_inputs(x=pairs[key], no_check_var_types=True)


def pair_names(op: str) -> tuple[str, str]:
    """The names of what quantizes the inputs of an op of a name, and reads them back."""
    return f"{op}_x_quantized", f"{op}_x_dequantized"


def _pair(function: Function, op: Operation, scale: float) -> Var:
    held, names = _stored(scale, op.x), pair_names(op.name)
    with function:
        size = mb.const(val=held, name=f"{names[0]}_scale", before_op=op)  # names of our own: the host counts
        kind = mb.const(val="int8", name=f"{names[0]}_dtype", before_op=op)
        codes = mb.quantize(input=op.x, scale=size, output_dtype=kind, name=names[0], before_op=op)
        read: Var = mb.dequantize(input=codes, scale=size, name=names[1], before_op=op)
    for made in (size.op, kind.op, codes.op, read.op):
        assert made is not None
        stamp(made, op)
    return read


def clip_products(program: Program) -> int:
    """Clip products with a dequantized value that are quantized right after, to the range of their codes.

    The engine was seen to multiply such a value by the scale of the result instead of its own (M5 Pro, macOS
    27.0); a clip between the two keeps them apart. Not a code changes: quantize clips there too.

    Returns:
        How many were clipped.
    """
    count = 0
    for function in program.functions.values():
        for op in list(function.operations):
            if op.op_type == "quantize" and _is_dequantized_product(op.input) and op.scale.rank == 0:
                _clip(function, op)
                count += 1
    return count


def _is_dequantized_product(var: Var) -> bool:
    maker = var.op
    if maker is None or maker.op_type != "mul":
        return False
    return any(v.op is not None and v.op.op_type == "dequantize" for v in (maker.x, maker.y))


def _clip(function: Function, op: Operation) -> None:
    dtype, scale = types.nptype_from_builtin(op.input.dtype), float(op.scale.val)
    shift = 0 if op.inputs.get("zero_point") is None else int(op.zero_point.val)
    most = float(np.finfo(dtype).max)
    low, high = (max(-most, min(most, (code - shift) * scale)) for code in RANGE[op.output_dtype.val])
    with function:
        ends = [
            mb.const(val=dtype(end), name=f"{op.name}_{side}", before_op=op)
            for end, side in ((low, "least"), (high, "most"))
        ]
        name = f"{op.name}_clipped"
        clipped = mb.clip(x=op.input, alpha=ends[0], beta=ends[1], name=name, before_op=op)
    for made in (*ends, clipped):
        stamp(made.op, op)
    op.set_inputs(input=clipped, no_check_var_types=True)
