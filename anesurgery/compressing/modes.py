"""The ways in which coremltools compresses a weight, by name, and one weight compressed so.

``palettize-4``, ``palettize-4-uniform``, ``palettize-4-group-16``, ``linear-8``, ``linear-4-block-32``,
``prune-50``: the bits or the per cent of zeros, and how the table is found or how far a scale reaches.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from anesurgery.errors import SurgeryError
from anesurgery.files.mil_types import ELEMENTS, sizes_of_type
from anesurgery.files.progress import advance, work
from anesurgery.mil import Array, Var, exclusive, is_compressed, operands, patched, quiet_host
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
"""What draws coremltools' own progress bars."""
SMALLEST = 2048
"""Elements above which coremltools compresses a weight: its own default."""
IOS18 = 9
"""The specification version that tables of groups, scales of blocks and 4-bit numbers need."""


@dataclass(frozen=True)
class Mode:
    """One way to compress a weight."""

    name: str
    kind: str
    settings: Mapping[str, Any] = field(hash=False)
    """As coremltools' class of options takes them."""

    def config(self, weights: Iterable[str], smallest: int | None = None) -> Any:
        """Coremltools' `OptimizationConfig` that compresses these weights so, and no others."""
        return config_of(self.kind, dict.fromkeys(weights, self), smallest)


def config_of(kind: str, chosen: Mapping[str, Mode], smallest: int | None = None) -> Any:
    """Coremltools' `OptimizationConfig` for weights with modes of one kind."""
    with quiet_host():
        from coremltools.optimize.coreml import OptimizationConfig
    return OptimizationConfig.from_dict(written(kind, chosen, smallest))


def written(kind: str, chosen: Mapping[str, Mode], smallest: int | None = None) -> dict[str, Any]:
    """The same as plain data, for `OptimizationConfig.from_dict` or `from_yaml`."""
    more = {} if smallest is None else {"weight_threshold": smallest}
    options = {name: {**mode.settings, **more} for name, mode in chosen.items()}
    return {"config_type": KINDS[kind][0], "op_name_configs": options}


def read_mode(name: str) -> Mode:
    """The mode of a name.

    Raises:
        SurgeryError: there is none.
    """
    found = NAME.fullmatch(name)
    known = found and _settings(found[1], int(found[2]), found[3], int(found[4]) if found[4] else None)
    if not found or not known:
        raise SurgeryError(
            f"there is no mode {name!r}; modes are palettize-1 to -8 (with -uniform, or -group-16), "
            "linear-4 and linear-8 (with -block-32), and prune-1 to -99"
        )
    return Mode(name, found[1], known)


def _settings(kind: str, number: int, how: str | None, size: int | None) -> dict[str, Any] | None:
    """The options of coremltools; None for what it has not."""
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
    """Of all that it is decoded from."""


def candidates(graph: Graph, smallest: int = SMALLEST) -> dict[str, list[int]]:
    """The weights of a function that may be compressed, each with the nodes that read it."""
    found: dict[str, list[int]] = {}
    for number, node in enumerate(graph.nodes):
        for name in dict.fromkeys(node.reads):
            op = graph.constants.get(name)
            if op is not None and op.type == "const" and _is_weight(op, smallest):
                found.setdefault(name, []).append(number)
    nested = {number for number, node in enumerate(graph.nodes) if node.op.blocks}
    return {name: nodes for name, nodes in found.items() if not nested.intersection(nodes)}


def _is_weight(op: Any, smallest: int) -> bool:
    kind = op.outputs[0].type
    shape = sizes_of_type(kind)
    floats = kind.tensorType.dataType in (ELEMENTS["fp16"], ELEMENTS["fp32"])
    return floats and shape is not None and len(shape) > 1 and int(np.prod(shape)) > smallest


@exclusive()
def compress(
    graph: Graph, weight: str, readers: list[int], mode: Mode, version: int, smallest: int = SMALLEST
) -> Compressed | str:
    """A weight as coremltools compresses it, in a program of the ops that read it; or why it does not."""
    reads = [n for i in readers for n in graph.nodes[i].reads if n not in graph.constants]
    makes = tuple(n for i in readers for n in graph.nodes[i].makes)
    program = carve(graph, Stretch(tuple(readers), tuple(dict.fromkeys(reads)), makes), version, weight)
    function = program.functions["main"]
    places = [(op, k) for op in function.operations for k, v in operands(op) if v.name == weight]
    named = op_name(places[0][0].inputs[places[0][1]])
    with quiet_host():
        from coremltools.optimize.coreml import _quantization_passes as host
    with quiet_host(), patched(host, BARS, lambda ops, **_: ops):
        try:
            getattr(host, KINDS[mode.kind][1])(mode.config([named], smallest)).apply(program)
        except (ValueError, ModuleNotFoundError) as error:
            return str(error).splitlines()[0]
    op, name = places[0]
    made = op.inputs[name]
    if not isinstance(made, Var) or not is_compressed(made):
        return "coremltools does not compress it so"
    return Compressed(decoded(made), stored_bytes(made))


def op_name(weight: Var) -> str:
    """The name by which coremltools is told of a weight: of its op, which may not be that of its value."""
    assert weight.op is not None
    return weight.op.name


def fits(mode: Mode, version: int) -> bool:
    """May a model of a specification version hold weights in this mode?"""
    settings = mode.settings
    return version >= IOS18 or ("granularity" not in settings and settings.get("dtype") != "int4")


def apply_configs(model: Any, chosen: Mapping[str, Mode], smallest: int = SMALLEST) -> Any:
    """An MLModel whose weights coremltools has compressed, those of each kind in one call."""
    kinds = {kind: {n: mode for n, mode in chosen.items() if mode.kind == kind} for kind in KINDS}
    with quiet_host(), redirect_stderr(io.StringIO()):  # its progress bars
        from coremltools.optimize import coreml as host
        from coremltools.optimize.coreml import _quantization_passes as bars

        for kind, of_kind in kinds.items():
            if of_kind:
                with work(len(of_kind), "weights"), patched(bars, BARS, partial(_counted, of_kind)):
                    model = getattr(host, KINDS[kind][1])(model, config_of(kind, of_kind, smallest))
    return model


def _counted(chosen: Mapping[str, Mode], ops: Iterable[Any], **_: Any) -> Iterator[Any]:
    """The ops that coremltools looks at, while those that it compresses are counted."""
    for op in ops:
        yield op
        advance(op.name in chosen)


__all__ = ["Compressed", "Mode", "apply_configs", "candidates", "compress", "read_mode", "stored_bytes"]
