"""Compress one weight with coremltools, in a mode that a name describes, such as "palettize-4".

``palettize-4``, ``palettize-4-uniform``, ``palettize-4-group-16``, ``linear-8``, ``linear-4-block-32``,
``prune-50``: the bits or the per cent of zeros, and how the table is found or how far a scale reaches.
`sensitivity` measures each weight so, and `compression` whole models.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from anesurgery.compressing.weight_forms import IOS18
from anesurgery.errors import SurgeryError
from anesurgery.files.mil_types import ELEMENTS, sizes_of_type
from anesurgery.files.progress import advance, work
from anesurgery.mil import Array, Var, exclusive, is_compressed, operands, patched, quiet_host, silent_host
from anesurgery.regions.compressed_weights import decoded
from anesurgery.regions.reencoding import stored_bytes
from anesurgery.splitting.graph import Graph, Stretch, carve

KINDS = {
    "palettize": ("OpPalettizerConfig", "palettize_weights"),
    "linear": ("OpLinearQuantizerConfig", "linear_quantize_weights"),
    "prune": ("OpMagnitudePrunerConfig", "prune_weights"),
}
"""Kind of compression -> coremltools' class of options, and its function and pass of the same name."""

NAME = re.compile(r"(palettize|linear|prune)-(\d+)(?:-(uniform|group|block)(?:-(\d+))?)?")
BARS = "tqdm"
"""The module with coremltools' progress bars, which is replaced."""
SMALLEST = 2048
"""Weights with more elements are compressed: coremltools' own default."""


@dataclass(frozen=True)
class Mode:
    """One way of coremltools to compress a weight."""

    name: str
    kind: str
    settings: Mapping[str, Any] = field(hash=False)
    """The arguments of coremltools' class of options."""

    def config(self, weights: Iterable[str], smallest: int | None = None) -> Any:
        """Return coremltools' `OptimizationConfig` that compresses these weights so, and no others."""
        return config_of(self.kind, dict.fromkeys(weights, self), smallest)


def config_of(kind: str, chosen: Mapping[str, Mode], smallest: int | None = None) -> Any:
    """Return coremltools' `OptimizationConfig` for weights with modes of one kind."""
    with quiet_host():
        from coremltools.optimize.coreml import OptimizationConfig
    return OptimizationConfig.from_dict(config_data(kind, chosen, smallest))


def config_data(kind: str, chosen: Mapping[str, Mode], smallest: int | None = None) -> dict[str, Any]:
    """Return the config as plain data, for `OptimizationConfig.from_dict` or `from_yaml`."""
    threshold = {} if smallest is None else {"weight_threshold": smallest}
    options = {name: {**mode.settings, **threshold} for name, mode in chosen.items()}
    return {"config_type": KINDS[kind][0], "op_name_configs": options}


def read_mode(name: str) -> Mode:
    """Return the mode of a name.

    Raises:
        SurgeryError: there is no such mode.
    """
    parts, settings = NAME.fullmatch(name), None
    if parts:
        settings = _settings(parts[1], int(parts[2]), parts[3], int(parts[4]) if parts[4] else None)
    if not parts or not settings:
        raise SurgeryError(
            f"there is no mode {name!r}; modes are palettize-1 to -8 (with -uniform, or -group-16), "
            "linear-4 and linear-8 (with -block-32), and prune-1 to -99"
        )
    return Mode(name, parts[1], settings)


def _settings(kind: str, number: int, how: str | None, size: int | None) -> dict[str, Any] | None:
    """Return the arguments of coremltools' options; None for a mode that it does not have."""
    if (how in ("group", "block")) != (size is not None) or size == 0:
        return None
    if kind == "palettize" and number in (1, 2, 3, 4, 6, 8) and how != "block":
        grouped = {"granularity": "per_grouped_channel", "group_size": size} if size else {}
        return {"mode": "uniform" if how == "uniform" else "kmeans", "nbits": number, **grouped}
    if kind == "linear" and number in (4, 8) and how in (None, "block"):
        blocks = {"granularity": "per_block", "block_size": size} if size else {}
        return {"mode": "linear_symmetric", "dtype": f"int{number}", **blocks}
    if kind == "prune" and 0 < number < 100 and how is None:
        return {"target_sparsity": number / 100}
    return None


@dataclass(frozen=True)
class Compressed:
    """A weight in a mode."""

    array: Array
    """The numbers that it decodes to."""
    bytes: int
    """The bytes of all that it is decoded from."""


def weight_readers(graph: Graph, smallest: int = SMALLEST) -> dict[str, list[int]]:
    """Return the weights of a function that may be compressed, each with the nodes that read it."""
    readers: dict[str, list[int]] = {}
    for number, node in enumerate(graph.nodes):
        for name in dict.fromkeys(node.reads):
            op = graph.constants.get(name)
            if op is not None and op.type == "const" and _is_weight(op, smallest):
                readers.setdefault(name, []).append(number)
    nested = {number for number, node in enumerate(graph.nodes) if node.op.blocks}
    return {name: nodes for name, nodes in readers.items() if not nested.intersection(nodes)}


def _is_weight(op: Any, smallest: int) -> bool:
    """Is a const of floats, with at least 2 axes and more elements than that?"""
    kind = op.outputs[0].type
    shape = sizes_of_type(kind)
    is_float = kind.tensorType.dataType in (ELEMENTS["fp16"], ELEMENTS["fp32"])
    return is_float and shape is not None and len(shape) > 1 and int(np.prod(shape)) > smallest


@exclusive()
def compress(
    graph: Graph, weight: str, readers: list[int], mode: Mode, version: int, smallest: int = SMALLEST
) -> Compressed | str:
    """Compress a weight with coremltools, in a small program of only the ops that read it.

    Args:
        graph: of the function.
        weight: name of the weight.
        readers: numbers of the nodes that read it.
        mode: how to compress it.
        version: the specification version.
        smallest: coremltools compresses weights with more elements.

    Returns:
        The compressed weight, or why coremltools does not compress it.
    """
    reads = [n for i in readers for n in graph.nodes[i].reads if n not in graph.constants]
    results = tuple(n for i in readers for n in graph.nodes[i].makes)
    program = carve(graph, Stretch(tuple(readers), tuple(dict.fromkeys(reads)), results), version, weight)
    operations = program.functions["main"].operations
    op, number, var = next(
        (op, i, v) for op in operations for i, (_, v) in enumerate(operands(op)) if v.name == weight
    )
    config = mode.config([op_name(var)], smallest)
    with quiet_host():
        from coremltools.optimize.coreml import _quantization_passes as host
    with quiet_host(), patched(host, BARS, lambda ops, **_: ops):
        try:
            getattr(host, KINDS[mode.kind][1])(config).apply(program)
        except (ValueError, ModuleNotFoundError) as error:
            return str(error).splitlines()[0]
    compressed = [v for _, v in operands(op)][number]
    if not is_compressed(compressed):
        return "coremltools does not compress it so"
    return Compressed(decoded(compressed), stored_bytes(compressed))


def op_name(weight: Var) -> str:
    """Return the name of a weight in coremltools' configs: that of its op, not that of its value."""
    assert weight.op is not None
    return weight.op.name


def fits(mode: Mode, version: int) -> bool:
    """Can a model of this specification version hold weights in a mode?"""
    settings = mode.settings
    return version >= IOS18 or ("granularity" not in settings and settings.get("dtype") != "int4")


def apply_configs(model: Any, chosen: Mapping[str, Mode], smallest: int = SMALLEST) -> Any:
    """Return an MLModel whose weights coremltools compressed, those of each kind in one call.

    Args:
        model: an MLModel.
        chosen: name of a weight -> its mode.
        smallest: weights with more elements are compressed.
    """
    with silent_host():
        from coremltools.optimize import coreml as host
        from coremltools.optimize.coreml import _quantization_passes as passes

        for kind, (_, function) in KINDS.items():
            weights = {name: mode for name, mode in chosen.items() if mode.kind == kind}
            if weights:
                with work(len(weights), "weights"), patched(passes, BARS, partial(_count_ops, weights)):
                    model = getattr(host, function)(model, config_of(kind, weights, smallest))
    return model


def _count_ops(weights: Mapping[str, Mode], ops: Iterable[Any], **_: Any) -> Iterator[Any]:
    """Yield the ops that coremltools visits, and advance our progress at each weight to compress."""
    for op in ops:
        yield op
        advance(op.name in weights)
