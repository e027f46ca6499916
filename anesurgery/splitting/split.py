"""Cut a model into chunks that run one after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anesurgery.errors import SurgeryError
from anesurgery.files.chain import Border, Chain
from anesurgery.files.description import describe, new_spec
from anesurgery.files.mil_types import type_text
from anesurgery.files.package import Loaded
from anesurgery.files.sizes import read_size
from anesurgery.loading import load
from anesurgery.mil import exclusive, function_of, types
from anesurgery.splitting.carving import Stretch, carve, stretches
from anesurgery.splitting.cuts import Cuts
from anesurgery.splitting.graph import Graph, read_graph


@exclusive
def split(
    model: Any, parts: int | None = None, *, max_bytes: int | str | None = None, function: str | None = None
) -> Chain:
    """Cut a model where the fewest bytes cross, into chunks that compute together what it computes.

    Each op is in one chunk, but for what is cheaper to compute again than to pass on: masks, positions, tables
    of cosines. A constant that two chunks read is in both. A state stays in one chunk.

    Args:
        model: path, MLModel or MIL program; with one function, or see `function`.
        parts: how many chunks, of even weight. Or:
        max_bytes: the most bytes of weights in a chunk, as a number or as "950 MB"; the fewest chunks.
        function: which function to cut; others are left out.

    Returns:
        The chain: its chunks, and what passes between them. Its `save` writes a folder or one package.

    Raises:
        LoadError: the model cannot be read.
        SurgeryError: neither or both of `parts` and `max_bytes`; or it cannot be cut so.
    """
    if (parts is None) == (max_bytes is None):
        raise SurgeryError("give either parts=N or max_bytes=..., as split(model, max_bytes='950 MB')")
    loaded = load(model)
    name = _name(loaded, function)
    graph = read_graph(loaded.program, loaded.version, name)
    cuts = Cuts(graph)
    if parts is not None:
        if parts < 2:
            raise SurgeryError(f"parts={parts}; a model is cut into 2 or more")
        places = cuts.into(parts)
    else:
        places = cuts.within(read_size(max_bytes))
    return _chain(loaded, graph, places, name)


def _name(loaded: Loaded, function: str | None) -> str:
    """The function to cut."""
    functions = loaded.program.functions
    chosen = function_of(loaded.program, function)
    if function is None and len(functions) > 1:
        raise SurgeryError(f"the model has the functions {', '.join(functions)}; name one of them (function=)")
    return next(name for name, f in functions.items() if f is chosen)


def _chain(loaded: Loaded, graph: Graph, places: tuple[int, ...], name: str) -> Chain:
    spec = loaded.spec if loaded.spec is not None else new_spec(loaded.program, loaded.version)
    described = next((f for f in spec.description.functions if f.name == name), spec.description)
    chunks, found = [], stretches(graph, places)
    for number, stretch in enumerate(found, 1):
        program = carve(graph, stretch, loaded.version, f"chunk {number}")
        made = _spec(spec, described, stretch, loaded.version)
        describe(made, program)
        chunks.append(replace(loaded, program=program, spec=made))
    function = loaded.program.functions[name]
    inputs = tuple(n for n, v in function.inputs.items() if not types.is_state(v.sym_type))
    weights = tuple(sum(_weights(graph, stretch).values()) for stretch in found)
    borders = tuple(_border(graph, found, at) for at in range(1, len(found)))
    return Chain(tuple(chunks), inputs, graph.outputs, borders, weights, loaded.source)


def _spec(whole: Any, described: Any, stretch: Stretch, version: int) -> Any:
    """The specification of a chunk: features of the whole where it has them, metadata of the whole."""
    made = type(whole)(specificationVersion=version)
    made.description.metadata.CopyFrom(whole.description.metadata)
    for kind, names in (("input", stretch.inputs), ("output", stretch.outputs), ("state", stretch.inputs)):
        for feature in getattr(described, kind):
            if feature.name in names:
                getattr(made.description, kind).add().CopyFrom(feature)
    made.mlProgram.SetInParent()
    return made


def _weights(graph: Graph, stretch: Stretch) -> dict[int, int]:
    return {place: size for number in stretch.nodes for place, size in graph.weights[number].items()}


def _border(graph: Graph, found: list[Stretch], at: int) -> Border:
    """What the chunks before a place give to those after it."""
    made = {name: None for s in found[:at] for name in s.outputs}
    names = tuple(n for n in made if any(n in s.inputs for s in found[at:]))
    kinds = tuple(type_text(graph.type_of(name), False) for name in names)
    return Border(names, tuple(map(graph.size, names)), kinds)
