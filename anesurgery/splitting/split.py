"""Cut a model into chunks that run one after the other."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from anesurgery.errors import SurgeryError, UnknownName
from anesurgery.files.chain import Border, Chain, Placed
from anesurgery.files.description import describe, new_spec
from anesurgery.files.mil_types import type_text
from anesurgery.files.package import Loaded
from anesurgery.files.sizes import read_size
from anesurgery.loading import load
from anesurgery.mil import ct, exclusive, function_of, types
from anesurgery.neuralnetwork.spec import NETWORKS
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.inspector import inspect_program
from anesurgery.placement.models import inspect_other, spec_of
from anesurgery.placement.target import Target
from anesurgery.splitting.carving import Stretch, carve, stretches
from anesurgery.splitting.cuts import Cuts
from anesurgery.splitting.graph import Graph, read_graph
from anesurgery.splitting.network_chunks import cut_network
from anesurgery.splitting.unsupported import apart

BALANCES = ("bytes", "estimate")
"""What chunks may be even in."""
UNSUPPORTED = "unsupported"
NANOSECONDS = 1000
"""A microsecond of an estimate, so that whole numbers are exact enough."""


@exclusive
def split(
    model: Any,
    parts: int | None = None,
    *,
    max_bytes: int | str | None = None,
    at: str | None = None,
    balance: str = "bytes",
    target: Target | str | None = None,
    function: str | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Chain:
    """Cut a model where the fewest bytes cross, into chunks that compute together what it computes.

    Each op is in one chunk, but for what is cheaper to compute again than to pass on: masks, positions, tables
    of cosines. A constant that two chunks read is in both. A state stays in one chunk.

    Args:
        model: path, MLModel or MIL program; with one function, or see `function`.
        parts: how many chunks, of even weight. Or:
        max_bytes: the most bytes of weights in a chunk, as a number or as "950 MB"; the fewest chunks. Or:
        at: "unsupported": before and after what the ANE cannot run, so that the rest runs on it. A neural
            network is cut into networks.
        balance: what `parts` are even in: "bytes", or "estimate": Core ML's own, for the target.
        target: chips and OS, as "M1/macOS 14"; the report then shows the share of each chunk on the ANE and
            its estimate. For `at` and "estimate", every chip when absent.
        function: which function to cut; others are left out.
        shapes: with `at`: of what a custom layer makes, by name of the blob, where the file does not say it.

    Returns:
        The chain: its chunks, and what passes between them. Its `save` writes a folder or one package.

    Raises:
        LoadError: the model cannot be read.
        SurgeryError: not one of `parts`, `max_bytes` and `at`; or it cannot be cut so.
        UnknownName: no such function, target or balance.
    """
    _check(parts, max_bytes, at, balance, shapes)
    aim = None if (target, at, balance) == (None, None, "bytes") else Target.parse(target)
    network = None if at is None or aim is None else _network(model)
    if network is not None and aim is not None:
        return _placed(cut_network(network, aim, shapes, _path(model)), aim)
    loaded = load(model)
    name = _name(loaded, function)
    graph = read_graph(loaded.program, loaded.version, name)
    if at is not None and aim is not None:
        rows = inspect_program(loaded, aim, function=name, advice=False).ops
        graph, places = apart(graph, {row.name for row in rows if row.legal is False}, str(aim))
    elif parts is not None:
        costs = None if balance == "bytes" or aim is None else _costs(loaded, graph, aim, name)
        places = Cuts(graph, costs).into(parts)
    else:
        places = Cuts(graph).within(read_size(max_bytes))
    return _placed(_chain(loaded, graph, places, name), aim)


def _check(parts: int | None, max_bytes: int | str | None, at: str | None, balance: str, shapes: Any) -> None:
    """See that the options go together.

    Raises:
        SurgeryError: they do not.
        UnknownName: an unknown choice.
    """
    if [parts, max_bytes, at].count(None) != 2:
        raise SurgeryError(
            "give either parts=N or max_bytes=... or at='unsupported', as split(model, max_bytes='950 MB')"
        )
    if at not in (None, UNSUPPORTED):
        raise UnknownName("place to cut", str(at), [UNSUPPORTED])
    if balance not in BALANCES:
        raise UnknownName("balance", balance, BALANCES)
    if parts is not None and parts < 2:
        raise SurgeryError(f"parts={parts}; a model is cut into 2 or more")
    if balance != "bytes" and parts is None:
        raise SurgeryError("balance= is for parts=N")
    if shapes and at is None:
        raise SurgeryError("shapes= is for at='unsupported'")


def _network(model: Any) -> Any:
    """The specification of a neural network; None of another model."""
    if not isinstance(model, (str, os.PathLike, ct.models.MLModel)):
        return None
    spec = spec_of(model)
    return spec if spec.WhichOneof("Type") in NETWORKS else None


def _path(model: Any) -> Path | None:
    return Path(model).expanduser().resolve() if isinstance(model, (str, os.PathLike)) else None


def _costs(loaded: Loaded, graph: Graph, target: Target, name: str) -> tuple[int, ...]:
    """The estimate of each node on the unit that it prefers, in nanoseconds.

    Raises:
        SurgeryError: there is none for this target.
    """
    found: dict[str, int] = {}
    for row in inspect_program(loaded, target, function=name, advice=False).ops:
        if row.estimate is not None:
            time = row.estimate.ane if row.preferred == "ane" else row.estimate.cpu
            found[row.name] = round(NANOSECONDS * (time or 0))
    if not any(found.values()):
        raise SurgeryError(f"there is no estimate for {target}; balance by bytes")
    return tuple(found.get(node.makes[0], 0) for node in graph.nodes)


def _placed(chain: Chain, target: Target | None) -> Chain:
    """The chain with where its chunks run, if there is a target."""
    if target is None:
        return chain
    found = inspect_other(chain, target, partial(inspect_program, advice=False))
    assert found is not None
    return replace(chain, placed=tuple(map(_place, found.parts.values())), target=str(target))


def _place(part: Inspection) -> Placed:
    """Where a chunk runs."""
    share = part.residency
    away = Counter(row.op_type for row in part.ops if row.preferred != "ane")
    words = tuple(f"{count} {kind}" for kind, count in away.most_common())
    return Placed(share["ops"], share["flop"] if any(r.flop for r in part.ops) else None, words, part.cost)


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
