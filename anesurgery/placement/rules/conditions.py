"""The conditions of the legality rows: the value that was found, in words, or "" where one does not hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from anesurgery import fp16
from anesurgery.facts.attention import MASKED, softmaxes_after
from anesurgery.facts.masks import against_causal_attention
from anesurgery.mil import (
    Array,
    Operation,
    Var,
    any_symbolic,
    constant,
    consumers,
    dtype_name,
    is_output,
    is_stored,
    np_dtype,
    operands,
)
from anesurgery.ops import BY_ROWS, CARRIERS, COMPARISONS, LOGICAL, names
from anesurgery.placement.rules.slow import lut, palette_scale
from anesurgery.placement.target import Target
from anesurgery.semantics import intervals as bounds
from anesurgery.semantics.analysis_cache import cached
from anesurgery.semantics.bounds import constant_range
from anesurgery.semantics.reading import (
    flag,
    ints,
    is_tensor,
    kind_of,
    number,
    shape_in_words,
    shape_of,
    weight,
)
from anesurgery.semantics.rows import read_results, runtime

DEEPEST = -3.2e4
"""A mask below this is beyond what a sum of products can hold."""

FILLING = frozenset({"add", "sub", "select", "mul", "minimum"})
"""Ops that bring a fill into a mask, or into the scores."""


def fill(op: Operation) -> tuple[float, Var] | None:
    """The lowest number that a mask op of fp16 puts into scores, with the operand that holds it."""
    return _fill(op) if bounds.is_half(op.outputs[0]) else None


def _fill(op: Operation) -> tuple[float, Var] | None:
    if op.op_type not in FILLING:
        return None
    lowest: tuple[float, Var] | None = None
    for name, var in operands(op):
        if name == "cond" or not is_stored(var) or np_dtype(var).kind != "f":
            continue
        low, high = constant_range(var)
        low = -high if op.op_type == "sub" and name == "y" else low
        if high < math.inf and low < DEEPEST and (lowest is None or low < lowest[0]):
            lowest = (low, var)
    if lowest is None or (op.op_type == "mul" and not math.isfinite(bounds.magnitude(_other(op)))):
        return None
    return lowest if any(softmaxes_after(op.outputs[0])) else None


def _other(op: Operation) -> Var:
    return op.x if is_stored(op.y) else op.y


def causal_mask(op: Operation, target: Target) -> str:
    """A fill that is too deep, in a mask that is causal or made from positions."""
    filled = fill(op)
    return "" if filled is None or not _is_causal(op) else _deep(filled)


def other_mask(op: Operation, target: Target) -> str:
    """A fill that is too deep, in any other mask."""
    filled = fill(op)
    return "" if filled is None or _is_causal(op) else _deep(filled)


def infinite_product(op: Operation, target: Target) -> str:
    """A dynamic mask that is multiplied with an infinity before it is added to scores."""
    if not bounds.is_half(op.outputs[0]):
        return ""
    for var, other in ((op.x, op.y), (op.y, op.x)):
        least = constant(var) if var.rank == 0 and not is_stored(other) else None
        if least is not None and math.isinf(least):
            return f"%{var.name} is {least:g}" if any(softmaxes_after(op.outputs[0])) else ""
    return ""


def _deep(filled: tuple[float, Var]) -> str:
    return f"%{filled[1].name} masks scores with {filled[0]:.4g}"


def _is_causal(op: Operation) -> bool:
    """Are the attentions that a mask op serves causal, as the pass asks?"""
    served = list(softmaxes_after(op.outputs[0]))
    return bool(served) and all(against_causal_attention(softmax) is None for softmax in served)


def _kept(op: Operation, value: Var) -> Array | None:
    """Which scores a mask keeps, where that is a constant."""
    if op.op_type == "select":
        cond = constant(op.cond)
        return None if cond is None else np.asarray(cond == (value is op.b))
    numbers = constant(value)
    if np.size(numbers) < 2:
        return None
    return np.asarray((-numbers if op.op_type == "sub" else numbers) > MASKED)


def _unmoved(var: Var, steps: int = 24) -> bool:
    """Does a value depend on no input?"""
    stack = [var]
    for _ in range(steps):
        if not stack:
            return True
        op = stack.pop().op
        if op is None:
            return False
        stack += [] if op.op_type == "const" else [v for _, v in operands(op)]
    return False


def _narrows(op: Operation) -> bool:
    """Is it a cast to fp16?"""
    return op.op_type == "cast" and bounds.is_half(op.outputs[0])


def empty_rows(op: Operation, target: Target) -> str:
    """A softmax whose whole row may be masked with minus infinity, or what a cast to fp16 makes one."""
    half = bounds.is_half(op.outputs[0])
    filled = _fill(op) if half or any(map(_narrows, consumers(op.outputs[0]))) else None
    if filled is None or filled[0] >= -fp16.LARGEST:
        return ""
    keep = _kept(op, filled[1])
    if keep is not None:
        rows = keep.reshape(-1, keep.shape[-1]) if keep.ndim else keep.reshape(1, 1)
        lost = int((~rows.any(-1)).sum())
        return f"{lost} rows of %{filled[1].name} keep nothing" if lost else ""
    cond = op.inputs.get("cond")
    if not isinstance(cond, Var) or _is_causal(op) or _unmoved(cond):
        return ""
    return f"%{cond.name} is dynamic, and a row without a score to keep is all -inf"


Test = Callable[[Operation, Target], str]

CHANNELS = 65536
"""The longest axis that is neither width nor height; measured on M4, compiler tables for the others."""

INDEX = frozenset({"int16", "uint16"})
WIDE = frozenset({"int32", "int64", "uint32", "uint64"})
DOUBLE = frozenset({"fp32", "fp64", "double"})
BYTES = frozenset({"int8", "uint8"})


@cached
def values(op: Operation) -> list[Var]:
    """What an op reads and makes while the model runs; results that nobody reads do not count."""
    return [*runtime(op), *read_results(op)]


def typed(variables: Iterable[Var], kinds: frozenset[str]) -> str:
    """The first values of these types."""
    named = [f"%{v.name} is {k.dtype}" for v in variables if (k := kind_of(v)).dtype in kinds]
    return ", ".join(named[:2])


def words(var: Var) -> str:
    """A shape."""
    return shape_in_words(shape_of(var)) or "scalar"


def int32(op: Operation, target: Target) -> str:
    """Computes with 32-bit integers; where a state is updated may be one (A19, M4: CoreML-LLM)."""
    places = [op.begin, op.end] if op.op_type == "slice_update" else []
    return typed([v for v in values(op) if v not in places], WIDE)


def fp32(op: Operation, target: Target) -> str:
    """Computes in fp32; casts have a row of their own."""
    return "" if op.op_type == "cast" else typed(values(op), DOUBLE)


def fp32_cast(op: Operation, target: Target) -> str:
    """Casts from or to fp32."""
    return typed(values(op), DOUBLE)


def index_guard(op: Operation, target: Target) -> str:
    """Integer arithmetic that ends in the indices of an embedding."""
    return typed(values(op), WIDE | INDEX) if _leads_to_lookup(op, 8) else ""


GUARD = frozenset({"cast", "greater_equal", "add", "select", "less"})
"""What coremltools puts before a gather, so that negative indices count from the end."""


def _leads_to_lookup(op: Operation, steps: int) -> bool:
    readers = [r for v in op.outputs for r in v.child_ops]
    if not readers or steps == 0 or any(v.consuming_blocks for v in op.outputs):
        return False
    return all(is_lookup(r) or (r.op_type in GUARD and _leads_to_lookup(r, steps - 1)) for r in readers)


MAKES_MASKS = (
    GUARD
    | CARRIERS
    | COMPARISONS
    | LOGICAL
    | {"fill", "fill_like", "gather_nd", "logical_not", "mul", "slice_by_index", "sub", "tile"}
)
"""What stands between positions and the scores that they mask."""


def mask_positions(op: Operation, target: Target) -> str:
    """Integer arithmetic that ends in a causal mask."""
    return typed(values(op), WIDE) if typed(values(op), WIDE) and _leads_to_mask(op, target) else ""


def _leads_to_mask(op: Operation, target: Target, steps: int = 32) -> bool:
    waiting, seen = [op], {op}
    while waiting and len(seen) < steps:
        now = waiting.pop()
        if now.op_type in ("select", "add", "sub", "mul") and causal_mask(now, target):
            return True
        if now is op or now.op_type in MAKES_MASKS:
            new = [r for v in now.outputs for r in v.child_ops if r not in seen]
            seen.update(new)
            waiting += new
    return False


def is_lookup(op: Operation) -> bool:
    """Is it a gather of rows of a constant table at dynamic indices?"""
    if op.op_type != "gather" or is_stored(op.indices) or not is_stored(op.x):
        return False
    return len(shape_of(op.x)) == 2 and number(op.inputs.get("axis")) in (0, -2)


def lookup(op: Operation, target: Target) -> str:
    """Looks up rows of a constant table."""
    return f"a table of {words(op.x)} read at %{op.indices.name}" if is_lookup(op) else ""


def runtime_indices(op: Operation, target: Target) -> str:
    """Gathers at indices of the run."""
    if is_stored(op.indices):
        return ""
    return f"indices %{op.indices.name} ({dtype_name(op.indices)}) are dynamic"


def rank_over(most: int) -> Test:
    """A value has more axes than `most`."""

    def test(op: Operation, target: Target) -> str:
        over = [v for v in values(op) if is_tensor(v) and len(shape_of(v)) > most]
        return f"%{over[0].name} has rank {over[0].rank} ({words(over[0])})" if over else ""

    return test


def product_of_rank(least: int) -> Test:
    """Both operands are dynamic, and one has at least so many axes."""

    def test(op: Operation, target: Target) -> str:
        operands = runtime(op)
        if len(operands) < 2 or (most := max(len(shape_of(v)) for v in operands)) < least:
            return ""
        return f"%{operands[0].name} and %{operands[1].name} are dynamic, of rank {most}"

    return test


def rank_under(least: int) -> Test:
    """`x` has fewer axes than `least`."""

    def test(op: Operation, target: Target) -> str:
        return f"rank {op.x.rank}" if op.x.rank < least else ""

    return test


def long_axis(op: Operation, target: Target) -> str:
    """The last two axes are longer than the target takes, or another one longer than `CHANNELS`."""
    limit, chip = target.least("axis")
    head = op.outputs[0] if long_head(op, target) else None
    for var in values(op):
        if var is head:
            continue
        shape = shape_of(var) if is_tensor(var) else ()
        wide = max(shape[-2:], default=0)
        if wide > limit:
            return f"%{var.name} is {words(var)}: {wide} is more than {limit} ({chip})"
        deep = max(_other_axes(op, var, shape, target), default=0)
        if deep > CHANNELS:
            return f"%{var.name} is {words(var)}: {deep} is more than {CHANNELS}"
    return ""


def of_long_axis(op: Operation, target: Target) -> str | None:
    """The pass for an op with a long axis: of a product with stored weights for its outputs alone."""
    if op.op_type in BY_ROWS:
        return "fold_long_axis"
    limit, _ = target.least("axis")
    long = [var for var in values(op) if is_tensor(var) and max(shape_of(var)[-2:], default=0) > limit]
    return "split_head" if long == [op.outputs[0]] and weight(op) is not None else None


def _other_axes(op: Operation, var: Var, shape: tuple[int, ...], target: Target) -> tuple[int, ...]:
    """Without the channels that a convolution makes: from H16 on it may have more (A19, CoreML-LLM)."""
    if op.op_type == "conv" and var is op.outputs[0] and min(target.families) >= 16:
        return shape[:1]
    return shape[:-2]


def large_kernel(op: Operation, target: Target) -> str:
    """The kernel is larger than the target takes, that of one axis in width; 16x16 passes from H14 to H17."""
    kernel = shape_of(op.weight)[2:]
    height, width = (1, *kernel)[-2:]
    (most_w, chip), (most_h, _) = target.least("kernel_w"), target.least("kernel_h")
    square = width == height == 16 and min(target.families) >= 14 and max(target.families) < 18
    if (width <= most_w and height <= most_h) or square:
        return ""
    return f"kernel {shape_in_words((height, width))}; {chip} takes {most_h}x{most_w} (height x width)"


def wide_window(op: Operation, target: Target) -> str:
    """The window of a max_pool is wider than 8, and not 32."""
    width = int(op.kernel_sizes.val[-1])
    return (
        ""
        if width <= 8 or width == 32
        else f"the pooling window is {width} wide; the engine supports 1 to 8, and 32"
    )


def long_inner(most: int) -> Test:
    """The summed axis of a matmul or linear is longer than `most`."""

    def test(op: Operation, target: Target) -> str:
        shape, turned = shape_of(op.x), op.inputs.get("transpose_x")
        inner = shape[-2 if turned is not None and bool(turned.val) and len(shape) > 1 else -1]
        return f"inner length {inner}; {most} is taken" if inner > most else ""

    return test


def late_slice(op: Operation, target: Target) -> str:
    """Where a slice begins or ends is dynamic."""
    ends = {n: op.inputs.get(n) for n in ("begin", "end", "size")}
    late = [n for n, v in ends.items() if v is not None and not is_stored(v)]
    return f"{' and '.join(late)} dynamic" if late else ""


def large_window(op: Operation, target: Target) -> str:
    """The window of a pool is longer than 29 (up to H13) or 31."""
    most = 29 if min(target.families) <= 13 else 31
    window = ints(op, "kernel_sizes")
    return f"window {shape_in_words(window)}; {most} is taken" if max(window) > most else ""


def mirrored(op: Operation, target: Target) -> str:
    """Edges are padded by their mirror image."""
    mode = constant(op.inputs.get("mode"))
    return f"mode {mode}" if mode in ("reflect", "symmetric") else ""


def scaled_palette(op: Operation, target: Target) -> str:
    """A palette that is scaled for each channel before it is multiplied."""
    scale = palette_scale(op)
    if scale is None:
        return ""
    return f"the palette is scaled before the {op.op_type} ({shape_in_words(scale.shape)} scales)"


def palettized_stride(op: Operation, target: Target) -> str:
    """A palettized convolution that steps by more than two."""
    strides = ints(op, "strides")
    if lut(op) is None or max(strides, default=1) <= 2:
        return ""
    return f"palettized weights and a stride of {shape_in_words(strides)}"


def dynamic_window(op: Operation, target: Target) -> str:
    """A window over unknown lengths that steps by more than 2, or by 2 over padded edges, or rounds up."""
    if not any_symbolic(op.x.shape or ()):
        return ""
    step, padded = max(ints(op, "strides"), default=1), constant(op.inputs.get("pad_type"))
    if op.op_type == "conv" and step > 1 and (step > 2 or str(padded).startswith("same")):
        return f"dynamic lengths and a stride of {step}"
    return "dynamic lengths and ceil_mode" if flag(op, "ceil_mode") else ""


def stepped(op: Operation, target: Target) -> str:
    """Every second position, or fewer, is written."""
    return f"stride {steps}" if max(steps := ints(op, "stride"), default=1) > 1 else ""


STATES = names("read_state coreml_update_state")
"""Ops that give the value of a state."""


def standalone(op: Operation, target: Target) -> str:
    """What is updated is not a state, or the result goes elsewhere than into a state."""
    maker = op.x.op
    if maker is None or maker.op_type not in STATES:
        return f"it updates %{op.x.name}, which is not read from a state"
    result = op.outputs[0]
    others = [r for r in consumers(result) if r.op_type != "coreml_update_state"]
    if others:
        return f"%{result.name} is also read by %{others[0].outputs[0].name} ({others[0].op_type})"
    if is_output(result):
        return f"%{result.name} is an output as well"
    return "" if consumers(result) else f"%{result.name} is not written to a state"


HEADS = {"M1": (49152, False), "M4": (151936, True)}
"""Chip -> the longest output of a linear that was reported on its ANE, and was its weight palettized?"""


def long_head(op: Operation, target: Target) -> str:
    """A linear makes more than an axis may hold, and no more than was reported on every chip of the target."""
    limit, outputs = target.least("axis")[0], shape_of(op.outputs[0])[-1:]
    if op.op_type != "linear" or not outputs or outputs[0] <= limit or not set(target.chips) <= HEADS.keys():
        return ""
    seen = [HEADS[chip] for chip in target.chips]
    if any(outputs[0] > most or (palettized and lut(op) is None) for most, palettized in seen):
        return ""
    return f"{outputs[0]} outputs; the limit is {limit} by some reports, and others saw up to {seen[0][0]}"
