"""The conditions of the rows of `legality.py`: does an op have the form that keeps it off the Neural Engine?

A row calls its condition with (op, target). The condition returns what it found in words, such as "%x has rank
6 (1x2x3x4x5x6)", which becomes the message of the finding; "" means that the row does not apply. Sections:
dtypes, gathers and masks; ranks and lengths; windows and slices; palettes; state updates and long heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from anesurgery import fp16
from anesurgery.facts.moves import moves_in_a_row
from anesurgery.mil import (
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
    producer,
)
from anesurgery.ops import BY_ROWS, CARRIERS, COMPARISONS, LOGICAL, MOVES, WEIGHTED, names
from anesurgery.placement.rules.masks import causal_mask
from anesurgery.placement.rules.slow import lookup_table, palette_scale
from anesurgery.placement.target import Target
from anesurgery.semantics.analysis_cache import cached
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

Condition = Callable[[Operation, Target], str]

CHANNELS = 65536
"""The longest axis that is neither width nor height. Measured on M4; compiler tables say so of other chips."""

INDEX = frozenset({"int16", "uint16"})
WIDE = frozenset({"int32", "int64", "uint32", "uint64"})
DOUBLE = frozenset({"fp32", "fp64", "double"})
BYTES = frozenset({"int8", "uint8"})


@cached
def runtime_values(op: Operation) -> list[Var]:
    """Return the dynamic operands and the results of an op; results without a consumer are left out."""
    return [*runtime(op), *read_results(op)]


def values_of_dtypes(variables: Iterable[Var], dtypes: frozenset[str]) -> str:
    """Name the first two values of these dtypes, as "%x is int32, %y is int32"; "" where there is none."""
    matching = [f"%{v.name} is {k.dtype}" for v in variables if (k := kind_of(v)).dtype in dtypes]
    return ", ".join(matching[:2])


def int32(op: Operation, target: Target) -> str:
    """Report 32-bit integers, except of products, and as begin and end of a slice_update, which ran.

    The latter was seen on A19 and M4 (CoreML-LLM).
    """
    if integer_product(op, target):
        return ""
    allowed = [op.begin, op.end] if op.op_type == "slice_update" else []
    return values_of_dtypes([v for v in runtime_values(op) if v not in allowed], WIDE)


def integer_product(op: Operation, target: Target) -> str:
    """Report a product of 32-bit integers, which no pass writes as floats."""
    words = values_of_dtypes(runtime_values(op), WIDE) if op.op_type in WEIGHTED else ""
    constant_weights = bool(words) and is_stored(weight(op))
    return f"{words}; such a product was reported not to load (error -14)" if constant_weights else words


def fp32(op: Operation, target: Target) -> str:
    """Report an op that computes in fp32; casts have a row of their own."""
    return "" if op.op_type == "cast" else values_of_dtypes(runtime_values(op), DOUBLE)


def fp32_cast(op: Operation, target: Target) -> str:
    """Report a cast from or to fp32."""
    return values_of_dtypes(runtime_values(op), DOUBLE)


def index_guard(op: Operation, target: Target) -> str:
    """Report integer arithmetic whose results all become the indices of an embedding."""
    return values_of_dtypes(runtime_values(op), WIDE | INDEX) if _leads_to_lookup(op, 8) else ""


GUARD = frozenset({"cast", "greater_equal", "add", "select", "less"})
"""The ops that coremltools inserts before a gather so that negative indices count from the end."""


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
"""Ops that occur between token positions and the scores that a mask made of them is added to."""


def mask_positions(op: Operation, target: Target) -> str:
    """Report integer arithmetic that ends in a causal mask."""
    integers = values_of_dtypes(runtime_values(op), WIDE)
    return integers if integers and _leads_to_mask(op, target) else ""


def _leads_to_mask(op: Operation, target: Target, steps: int = 32) -> bool:
    pending, seen = [op], {op}
    while pending and len(seen) < steps:
        current = pending.pop()
        if current.op_type in ("select", "add", "sub", "mul") and causal_mask(current, target):
            return True
        if current is op or current.op_type in MAKES_MASKS:
            readers = [r for v in current.outputs for r in v.child_ops if r not in seen]
            seen.update(readers)
            pending += readers
    return False


def is_lookup(op: Operation) -> bool:
    """Does an op gather rows of a constant table at dynamic indices (an embedding)?"""
    if op.op_type != "gather" or is_stored(op.indices) or not is_stored(op.x):
        return False
    return len(shape_of(op.x)) == 2 and number(op.inputs.get("axis")) in (0, -2)


def lookup(op: Operation, target: Target) -> str:
    """Report an embedding: rows of a constant table at dynamic indices."""
    table = shape_in_words(shape_of(op.x))
    return f"a lookup in a table of {table}, of %{op.indices.name}" if is_lookup(op) else ""


EVEN_ROWS = 512
"""By the estimates of A15, A17, M1 and M4, a product with a table of so many rows costs what the lookup does;
with one of 2048 rows, small models take 2 to 5 % longer."""


def remedy_for_lookup(op: Operation, target: Target) -> str | None:
    """Return the pass that writes a lookup as a product, for a small table.

    The product reads the whole table and multiplies by every row. A lookup of ids that the engine computed is
    between two switches, which pay for more rows; one of the ids that are given is at the front anyway.
    """
    most = fp16.LAST_INTEGER if _comes_from_floats(op.indices) else EVEN_ROWS
    return "embedding_matmul" if shape_of(op.x)[0] <= most else None


def _comes_from_floats(integers: Var) -> bool:
    """Are integers computed from floats of an op, rather than from integers that are given?"""
    pending, seen = [integers], {integers}
    for var in pending:
        maker = producer(var)
        if maker is None or is_stored(var):
            continue
        if np_dtype(var).kind == "f":
            return True
        upstream = [v for _, v in operands(maker) if v not in seen]
        seen.update(upstream)
        pending += upstream
    return False


def remedy_for_scatter(op: Operation, target: Target) -> str:
    """Return the pass for a scatter_nd: at places that a mask lists, whose number varies, it is a selection."""
    return "mask_to_select" if _lists_places([op.indices]) else "replace_scatter"


def remedy_for_integers(op: Operation, target: Target) -> str:
    """Return the pass for an op on integers: a mask, its places and their number become a selection."""
    is_listed = any(reader.op_type == "non_zero" for out in op.outputs for reader in consumers(out))
    return "mask_to_select" if is_listed or _lists_places(runtime_values(op)) else "integers_as_floats"


def _lists_places(values: Iterable[Var]) -> bool:
    """Does an integer or a truth value come from the list of the places of a mask, or from its length?"""
    others = _values_without_places()
    pending = [v for v in values if v not in others]
    seen = {*pending}
    for var in pending:
        maker = producer(var)
        if maker is not None and maker.op_type == "non_zero":
            return True
        if maker is not None and np_dtype(var).kind in "iub":
            upstream = [v for _, v in operands(maker) if v not in seen and v not in others]
            seen.update(upstream)
            pending += upstream
    others |= seen
    return False


@cached
def _values_without_places() -> set[Var]:
    """Return the values that come from no list of places, to which `_lists_places` adds what it finds."""
    return set()


def runtime_indices(op: Operation, target: Target) -> str:
    """Report a gather at dynamic indices."""
    if is_stored(op.indices):
        return ""
    return f"indices %{op.indices.name} ({dtype_name(op.indices)}) are dynamic"


def rank_over(most: int) -> Condition:
    """Return the condition that an op reads or makes a tensor with more than `most` axes."""

    def test(op: Operation, target: Target) -> str:
        over = [v for v in runtime_values(op) if is_tensor(v) and len(shape_of(v)) > most]
        if not over:
            return ""
        return f"%{over[0].name} has rank {over[0].rank} ({shape_in_words(shape_of(over[0]))})"

    return test


def product_of_rank(least: int) -> Condition:
    """Return the condition that both operands are dynamic, and one has at least `least` axes."""

    def test(op: Operation, target: Target) -> str:
        operands = runtime(op)
        if len(operands) < 2 or (most := max(len(shape_of(v)) for v in operands)) < least:
            return ""
        return f"%{operands[0].name} and %{operands[1].name} are dynamic, of rank {most}"

    return test


def rank_under(least: int) -> Condition:
    """Return the condition that the operand x has fewer axes than `least`."""

    def test(op: Operation, target: Target) -> str:
        return f"rank {op.x.rank}" if op.x.rank < least else ""

    return test


def long_axis(op: Operation, target: Target) -> str:
    """Report one of the last two axes longer than the target takes, or another axis longer than `CHANNELS`."""
    limit, chip = target.least("axis")
    head = op.outputs[0] if long_head(op, target) else None
    for var in runtime_values(op):
        if var is head:
            continue
        shape = shape_of(var) if is_tensor(var) else ()
        wide = max(shape[-2:], default=0)
        if wide > limit:
            return f"%{var.name} is {shape_in_words(shape)}: an axis above {limit} ({chip})"
        deep = max(_other_axes(op, var, shape, target), default=0)
        if deep > CHANNELS:
            return f"%{var.name} is {shape_in_words(shape)}: an axis above {CHANNELS}"
    return ""


def remedy_for_long_axis(op: Operation, target: Target) -> str | None:
    """Return the pass that repairs a long axis; for products, only where the result alone is long."""
    if op.op_type in BY_ROWS:
        return "fold_long_axis"
    if op.op_type in MOVES:
        return "merge_moves" if can_merge_moves(op) else None
    limit, _ = target.least("axis")
    long = [var for var in runtime_values(op) if is_tensor(var) and max(shape_of(var)[-2:], default=0) > limit]
    stored = weight(op) if long == [op.outputs[0]] else None
    if stored is None:
        return None
    if op.op_type == "conv_transpose":
        return "subpixel_convolution"
    return "split_head" if stored.rank == 2 else None


def can_merge_moves(op: Operation) -> bool:
    """Do fewer transposes do what the reshapes and transposes do that an op is one of?"""
    while (readers := consumers(op.outputs[0])) and len(readers) == 1 and readers[0].op_type in MOVES:
        op = readers[0]
    found = moves_in_a_row(op)
    return found is not None and len(found.turns) < found.transposes


def _other_axes(op: Operation, var: Var, shape: tuple[int, ...], target: Target) -> tuple[int, ...]:
    """Return the axes before the last two, without the channels that a conv makes: H16 on allows more (A19)."""
    takes_any_channels = op.op_type == "conv" and var is op.outputs[0] and min(target.families) >= 16
    return shape[:1] + shape[2:-2] if takes_any_channels else shape[:-2]


def large_kernel(op: Operation, target: Target) -> str:
    """Report a kernel larger than the target takes; a 1-D kernel is a width. H14 to H17 also take 16x16."""
    kernel = shape_of(op.weight)[2:]
    height, width = (1, *kernel)[-2:]
    (most_w, chip), (most_h, _) = target.least("kernel_w"), target.least("kernel_h")
    square = width == height == 16 and min(target.families) >= 14 and max(target.families) < 18
    if (width <= most_w and height <= most_h) or square:
        return ""
    return f"kernel {shape_in_words((height, width))}; {chip} takes {most_h}x{most_w} (height x width)"


def wide_window(op: Operation, target: Target) -> str:
    """Report a max_pool window that is wider than 8, and not 32."""
    width = int(op.kernel_sizes.val[-1])
    supported = width <= 8 or width == 32
    return "" if supported else f"the pooling window is {width} wide; the engine supports 1 to 8, and 32"


def long_inner(most: int) -> Condition:
    """Return the condition that the summed axis of a matmul or linear is longer than `most`."""

    def test(op: Operation, target: Target) -> str:
        shape, turned = shape_of(op.x), op.inputs.get("transpose_x")
        inner = shape[-2 if turned is not None and bool(turned.val) and len(shape) > 1 else -1]
        return f"inner length {inner}; {most} is taken" if inner > most else ""

    return test


def dynamic_slice(op: Operation, target: Target) -> str:
    """Report a slice whose begin, end or size is dynamic."""
    ends = {n: op.inputs.get(n) for n in ("begin", "end", "size")}
    dynamic = [n for n, v in ends.items() if v is not None and not is_stored(v)]
    return f"{' and '.join(dynamic)} dynamic" if dynamic else ""


def large_window(op: Operation, target: Target) -> str:
    """Report a pooling window longer than 29 (up to H13) or 31."""
    most = 29 if min(target.families) <= 13 else 31
    window = ints(op, "kernel_sizes")
    return f"window {shape_in_words(window)}; {most} is taken" if max(window) > most else ""


def mirrored_padding(op: Operation, target: Target) -> str:
    """Report edges that are padded with their mirror image."""
    mode = constant(op.inputs.get("mode"))
    return f"mode {mode}" if mode in ("reflect", "symmetric") else ""


def scaled_palette(op: Operation, target: Target) -> str:
    """Report a palette that is scaled, for each channel, before the product that reads it."""
    scale = palette_scale(op)
    if scale is None:
        return ""
    return f"the palette is scaled before the {op.op_type} ({shape_in_words(scale.shape)} scales)"


def palettized_stride(op: Operation, target: Target) -> str:
    """Report a palettized convolution with a stride above 2."""
    strides = ints(op, "strides")
    if lookup_table(op) is None or max(strides, default=1) <= 2:
        return ""
    return f"palettized weights and a stride of {shape_in_words(strides)}"


def dynamic_window(op: Operation, target: Target) -> str:
    """Report a window over dynamic lengths with a stride above 2, of 2 with padded edges, or with ceil_mode."""
    if not any_symbolic(op.x.shape or ()):
        return ""
    step, padded = max(ints(op, "strides"), default=1), constant(op.inputs.get("pad_type"))
    if op.op_type == "conv" and step > 1 and (step > 2 or str(padded).startswith("same")):
        return f"dynamic lengths and a stride of {step}"
    return "dynamic lengths and ceil_mode" if flag(op, "ceil_mode") else ""


def strided_update(op: Operation, target: Target) -> str:
    """Report an update that writes only every second position, or fewer."""
    return f"stride {steps}" if max(steps := ints(op, "stride"), default=1) > 1 else ""


STATES = names("read_state coreml_update_state")
"""Ops whose result is the value of a state."""


def update_outside_state(op: Operation, target: Target) -> str:
    """Report a slice_update of a value that is not a state, or whose result is not written to a state only."""
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


LONGEST_HEADS = {"M1": (49152, False), "M4": (151936, True)}
"""Chip -> (the longest output of a linear that was reported on its ANE, whether its weight was palettized)."""


def long_head(op: Operation, target: Target) -> str:
    """Report a linear with more outputs than an axis may hold, but no more than were seen on each chip."""
    limit, outputs = target.least("axis")[0], shape_of(op.outputs[0])[-1:]
    if op.op_type != "linear" or not outputs or outputs[0] <= limit:
        return ""
    if not set(target.chips) <= LONGEST_HEADS.keys():
        return ""
    seen = [LONGEST_HEADS[chip] for chip in target.chips]
    most = min(outputs_seen for outputs_seen, _ in seen)
    if outputs[0] > most or (lookup_table(op) is None and any(palettized for _, palettized in seen)):
        return ""
    return f"{outputs[0]} outputs; the limit is {limit} by some reports, and others saw up to {most}"
