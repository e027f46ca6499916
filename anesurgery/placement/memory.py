"""Compute the memory that a function needs, and find what is too large for a target.

`inspect` calls `measure`, which uses dtypes and shapes only and reads no weights. Weights count as stored,
each once. An activation lives from the op that returns it to the last op that reads it; views count too,
since the engine copies them. Symbolic axes count as one element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate

import numpy as np

from anesurgery.display import byte_words
from anesurgery.mil import (
    Block,
    Function,
    Operation,
    Var,
    consumers,
    is_constexpr,
    is_weight,
    producer,
    static_shape,
    types,
    walk_ops,
)
from anesurgery.placement.evidence import Finding, Grade, Scope, general
from anesurgery.placement.inspection import Memory
from anesurgery.placement.target import CHIPS, SOURCES, Target
from anesurgery.semantics.reading import elements, is_tensor, shape_in_words, size_of

FAILED_IMAGE = 3 * 5568 * 5568 * 2
"""Bytes of an fp16 image of 1x3x5568x5568, which did not compile for the engine."""
NEAR = 0.8
"""A program that takes this share of the address space is reported: failures began there (3 to 3.75 GB on
M1)."""
APP_LIMITS = {"A19": 5_000_000_000}
"""Chip -> about how many bytes an app took when iOS ended it: an iPhone 17 Pro (john-rocky/CoreML-LLM). No
other phone has a published number."""


def measure(function: Function, target: Target) -> tuple[Memory, tuple[Finding, ...]]:
    """Return the memory that a function needs, and findings about what is too large for a target.

    Args:
        function: a MIL function.
        target: chips and OS; the smallest limit of its chips counts.

    Returns:
        Sizes in bytes, and findings about the function as a whole.
    """
    ops = list(walk_ops(function))
    stored, values = _weight_bytes(ops), {v: size_of(v) for v in _run_time_values(function, ops)}
    largest = max(values, key=lambda v: values[v], default=None)
    limit, chip = target.least("program")
    memory = Memory(
        weights=stored,
        activations=_peak_bytes(ops, values),
        largest=0 if largest is None else values[largest],
        limit=limit,
        chunks=max(1, math.ceil(stored / limit)),
        states=sum(map(_state_bytes, function.inputs.values())),
        state_traffic=sum(map(_state_traffic, ops)),
        expanded=decompressed_bytes(function) if any(map(is_constexpr, ops)) else 0,
        app=_app_limit(target),
    )
    if not target.uses_ane:
        return memory, ()
    findings = [*_weight_findings(memory, target, chip), *_value_findings(values, largest, target)]
    return memory, tuple(findings)


def _app_limit(target: Target) -> int | None:
    """Return the bytes that an app may take on all chips of a target; None if unknown, or if one is a Mac's."""
    if any(CHIPS[name].platform != "iOS" for name in target.chips):
        return None
    return min((APP_LIMITS[name] for name in target.chips if name in APP_LIMITS), default=None)


def _weight_bytes(ops: Sequence[Operation]) -> int:
    """Return the bytes of the constants; two that share their memory count once."""
    sizes: dict[object, int] = {}
    for op in ops:
        if op.op_type == "const" and is_tensor(out := op.outputs[0]):
            value, size = out.val, size_of(out)
            is_array = isinstance(value, np.ndarray)
            address = value.__array_interface__["data"][0] if is_array else op  # a scalar has no address
            sizes[address, size] = size
    return sum(sizes.values())


def _state_bytes(state: Var) -> int:
    """Return the bytes that a state holds; 0 for other inputs."""
    if not types.is_state(state.sym_type):
        return 0
    tensor = state.sym_type.wrapped_type()
    return int(math.prod(tensor.get_shape()) * types.nptype_from_builtin(tensor.get_primitive())().itemsize)


def _state_traffic(op: Operation) -> int:
    """Return the bytes that an op writes to a state, and that other ops read of its value.

    Of a slice only its own size counts, read or written.
    """
    if op.op_type not in ("read_state", "coreml_update_state"):
        return 0
    out, moved = op.outputs[0], 0
    if op.op_type == "coreml_update_state":
        update = producer(op.value, "slice_update")
        moved = size_of(op.value if update is None else update.update)
    for reader in consumers(out):
        if reader.op_type in ("slice_by_index", "slice_by_size"):
            moved += size_of(reader.outputs[0])
        elif reader.op_type not in ("slice_update", "coreml_update_state"):
            moved += size_of(out)
    return moved


def decompressed_bytes(function: Function) -> int:
    """Return the bytes of all weights when the compressed ones are decompressed."""
    packed = [op for op in walk_ops(function) if is_constexpr(op)]
    inner = {v for op in packed for v in op.inputs.values() if isinstance(v, Var)}
    plain = [op.outputs[0] for op in walk_ops(function) if op.op_type == "const" and is_tensor(op.outputs[0])]
    ends = [op.outputs[0] for op in packed if op.outputs[0] not in inner]
    return sum(map(size_of, ends)) + sum(size_of(v) for v in plain if v not in inner)


def _run_time_values(function: Function, ops: Iterable[Operation]) -> Iterator[Var]:
    """Yield the values of run time: the inputs, and the outputs of ops that are not weights."""
    yield from function.inputs.values()
    for op in ops:
        if not is_weight(op):
            yield from op.outputs


def _peak_bytes(ops: Iterable[Operation], values: dict[Var, int]) -> int:
    """Return the largest sum of bytes of values that live at the same time."""
    positions, ends = _places_and_ends(ops)
    change = [0] * (len(positions) + 2)
    for var, count in values.items():
        op = producer(var)
        change[0 if op is None else positions[op]] += count
        change[_last_place(var, positions, ends, len(positions)) + 1] -= count
    return max(accumulate(change), default=0)


def _places_and_ends(ops: Iterable[Operation]) -> tuple[dict[Operation, int], dict[Operation, int]]:
    """Return for each op its place in file order, and the place of the last op in its nested blocks."""
    places = {op: i for i, op in enumerate(ops)}
    ends = dict(places)
    for op in reversed(list(places)):
        outer = op.enclosing_block.outer_op if op.enclosing_block is not None else None
        if outer is not None:
            ends[outer] = max(ends[outer], ends[op])
    return places, ends


def _last_place(var: Var, positions: dict[Operation, int], ends: dict[Operation, int], last: int) -> int:
    """Return the place of the last op that reads a value; a loop that reads it keeps it to the loop's end."""
    home = var.op.enclosing_block if var.op is not None else None
    readers = [ends[_ancestor_in(op, home)] for op in consumers(var) if op in positions]
    for block in var.consuming_blocks:
        readers.append(last if block.outer_op is None else ends[block.outer_op])
    own = 0 if var.op is None else positions[var.op]
    return max([own, *readers])


def _ancestor_in(op: Operation, home: Block | None) -> Operation:
    """Return the op of the block `home` that is or encloses an op; None stands for the function's own block."""
    while op.enclosing_block is not home and op.enclosing_block is not None:
        outer = op.enclosing_block.outer_op
        if outer is None:
            break
        op = outer
    return op


_rule = partial(general, kind="memory")

OVER = _rule(
    "size-program",
    "programs with more weights were seen to leave the engine, without an error: 1 GB on iOS (Apple's "
    "guide; on an A19 "
    "Pro 1.4 GB ran and 1.8 GB failed), on Macs 1.5 GB ran and 3.4 GB failed",
    SOURCES["program"],
    grade=Grade.REPORTED,
    advice="split the model into chunks of at most 950 MB (coremltools: bisect_model), palettize it, or both; "
    "each chunk costs a round trip of its inputs and outputs",
)
ADDRESS = _rule(
    "size-address-space",
    "programs loaded together share an address space: four of 0.8 GB ran, a fifth fell back to the CPU; GPT-2 "
    "XL of 3.1 GB ran only as two",
    SOURCES["address_space"],
    scope=Scope(frozenset({13, 14}), "seen on M1 Max, macOS 13"),
    advice="unload chunks that are not in use, or palettize",
)
DENSE = _rule(
    "size-dense",
    "whether compressed weights stay compressed in the engine's memory is disputed: Apple's Stable Diffusion "
    "runs unsplit from 6 bits down, two tests found no saving",
    "apple/ml-stable-diffusion: README; more-ane-transformers; john-rocky/CoreML-LLM",
    grade=Grade.REPORTED,
    advice="load it on the device with CPU_AND_NE before you rely on it",
)
WORKING = _rule(
    "working-set",
    "an operand beyond the on-chip memory is streamed in tiles; ane-guide measured 2.3 MB (M1) and 4.95 MB "
    "(M5), maderix infers about 32 MB on M4 from its throughput",
    SOURCES["working_set"],
    scope=Scope(os="seen on M1, M5", via="compiler"),
    advice="cut along the sequence, the query or the batch where the time counts",
)
IMAGE = _rule(
    "size-big-image",
    "a model of an image of 1x3x5568x5568 did not compile for the engine",
    "coremltools issue 2247",
    grade=Grade.REPORTED,
    advice="cut the image into tiles",
)


def _weight_findings(memory: Memory, target: Target, chip: str) -> Iterator[Finding]:
    """Yield what is too large about the weights: for one program, all programs, or when decompressed."""
    limit, stored = memory.limit or 0, memory.weights
    if stored > limit:
        yield OVER.finding(
            f"{byte_words(stored)} of weights; {chip} runs programs of {byte_words(limit)}: "
            f"{memory.chunks} chunks"
        )
    spaces = [(space, n) for n in target.chips if (space := CHIPS[n].address_space) is not None]
    for space, name in spaces:
        if stored > NEAR * space:
            yield ADDRESS.finding(
                f"{byte_words(stored)} of weights; {name} has {byte_words(space)} for all programs"
            )
    if stored <= limit < memory.expanded:
        yield DENSE.finding(
            f"{byte_words(stored)} of weights are {byte_words(memory.expanded)} decompressed; "
            f"{chip} runs programs of {byte_words(limit)}"
        )


def _value_findings(values: dict[Var, int], largest: Var | None, target: Target) -> Iterator[Finding]:
    """Yield what is too large about activations: for the on-chip memory, or as an image."""
    if largest is None or static_shape(largest) is None:
        return
    limit, chip = target.least("working_set")
    over = [v for v, count in values.items() if count > limit]
    if over:
        yield WORKING.finding(
            f"larger than {byte_words(limit)} ({chip}): {len(over)} of {len(values)} values; the largest, "
            f"%{largest.name} {shape_in_words(largest.shape)}, takes {byte_words(values[largest])}"
        )
    if 2 * elements(largest) >= FAILED_IMAGE:
        words = f"%{largest.name} is {shape_in_words(largest.shape)}"
        yield IMAGE.finding(f"{words}: an image this large did not compile for the engine")


RULES = (OVER, ADDRESS, DENSE, WORKING, IMAGE)
"""The rules whose findings `measure` returns."""
