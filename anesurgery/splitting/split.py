"""Cut a model into chunks that run one after the other."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from anesurgery.checking.comparison import compare
from anesurgery.doors import door
from anesurgery.errors import SurgeryError, UnknownName
from anesurgery.files.interface import describe, new_spec, warn_of_names
from anesurgery.files.joining import default_function
from anesurgery.files.mil_types import type_text
from anesurgery.files.package import Loaded
from anesurgery.files.sequence import Border, Chain, Ends, Placed, is_network
from anesurgery.files.sizes import read_size
from anesurgery.interpret.decoder_calls import INPUTS
from anesurgery.loading import load, load_as_is
from anesurgery.mil import exclusive, function_of, types, walk_ops
from anesurgery.neuralnetwork.loaded_network import LoadedNetwork
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.inspector import inspect_program
from anesurgery.placement.models import inspect_other
from anesurgery.placement.target import Target
from anesurgery.semantics.reading import in_words
from anesurgery.semantics.rows import work_of
from anesurgery.splitting.carving import Stretch, carve_functions, stretches
from anesurgery.splitting.cuts import Cuts
from anesurgery.splitting.graph import WRITING, Graph, read_graphs
from anesurgery.splitting.network_chunks import cut_network
from anesurgery.splitting.phases import joined, phases

BALANCES = ("bytes", "estimate")
"""What chunks may be even in."""
UNSUPPORTED = "unsupported"
Pieces = Mapping[str, list[Stretch]]
"""Function -> its part in each chunk."""
NOTHING = Stretch((), (), ())
"""Of a function in chunks before its only one."""
NANOSECONDS = 1000
"""A microsecond of an estimate, so that whole numbers are exact enough."""


@door()
@exclusive()
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
    compare: bool = True,
) -> Chain:
    """Cut a model into chunks that together compute the same, where the fewest bytes cross.

    Masks, positions and tables of cosines are computed again in each chunk; every other op is in one chunk. A
    constant that two chunks read is in both. A state stays in one chunk. Several functions, as `prefill` and
    `decode`, are cut at the same places. A function that makes the inputs of another (`position_function`)
    stays whole, in the chunk that shares most weights with it.

    Args:
        model: path, MLModel or MIL program.
        parts: how many chunks, of even weight. Or:
        max_bytes: the most bytes of weights in a chunk, as a number or as "950 MB"; the fewest chunks. Or:
        at: "unsupported" cuts before and after ops that the ANE cannot run. A neural network is cut into
            networks.
        balance: make `parts` even by "bytes", or by "estimate" (Core ML's own, for the target).
        target: chips and OS, as "M1/macOS 14"; the report then shows the share of each chunk on the ANE and
            its estimate. For `at` and "estimate", every chip when absent.
        function: the one function to cut. Default: all. `at` and "estimate" need one.
        shapes: with `at`: the shapes of blobs that custom layers make.
        compare: run the model and the chain once on random inputs, if that is quick. The chain's `compared` has
            the result.

    Returns:
        The chain: its chunks, and what passes between them. Its `save` writes a folder or one package.

    Raises:
        LoadError: the model cannot be read.
        SurgeryError: none or several of `parts`, `max_bytes` and `at`; or the model cannot be cut so.
        UnknownName: no such function, target or balance.
    """
    _check(parts, max_bytes, at, balance, shapes)
    whole = load(model) if at is None else load_as_is(model)
    chain = _cut(whole, parts, max_bytes, at, balance, target, function, shapes)
    return replace(chain, compared=checked(whole, chain, function)) if compare else chain


def _cut(
    loaded: Loaded,
    parts: int | None,
    max_bytes: int | str | None,
    at: str | None,
    balance: str,
    target: Target | str | None,
    function: str | None,
    shapes: Mapping[str, tuple[int, ...]] | None,
) -> Chain:
    """The chain: see `split`."""
    aim = None if (target, at, balance) == (None, None, "bytes") else Target.parse(target)
    if isinstance(loaded, LoadedNetwork) and aim is not None:
        return _placed(cut_network(loaded.spec, aim, shapes, loaded.source), aim)
    warn_of_names(loaded.notes)
    names = _names(loaded, function, alone=at is not None or balance != "bytes")
    graphs, name = read_graphs(loaded.program, loaded.version, names), names[0]
    graph, others = graphs[name], tuple(Cuts(graphs[other]) for other in names[1:])
    cuts = Cuts(graph, others=others)
    if at is not None and aim is not None:
        rows = inspect_program(loaded, aim, function=name, advice=False).ops
        graphs[name], places = apart(graph, {row.name for row in rows if row.legal is False}, str(aim))
    elif parts is not None:
        costs = None if balance == "bytes" or aim is None else _costs(loaded, graph, aim, name)
        places = replace(cuts, costs=costs).into(parts)
    else:
        places = cuts.within(read_size(max_bytes))
    along = [places, *([p for place in places if (p := match[place]) is not None] for match in cuts.matches)]
    pieces = {name: stretches(graphs[name], where) for name, where in zip(graphs, along, strict=True)}
    makers = [maker for name in names if (maker := f"{name}{INPUTS}") in loaded.program.functions]
    graphs |= read_graphs(loaded.program, loaded.version, makers)
    pieces |= {name: _whole(graphs, pieces, name) for name in makers}
    _check_states(graphs, pieces)
    return _placed(_chain(loaded, graphs, pieces), aim)


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


def _costs(loaded: Loaded, graph: Graph, target: Target, name: str) -> tuple[int, ...]:
    """The estimate of each node on the unit that it prefers, in nanoseconds.

    Raises:
        SurgeryError: there is none for this target.
    """
    costs: dict[str, int] = {}
    for row in inspect_program(loaded, target, function=name, advice=False).ops:
        if row.estimate is not None:
            time = row.estimate.ane if row.preferred == "ane" else row.estimate.cpu
            costs[row.name] = round(NANOSECONDS * (time or 0))
    if not any(costs.values()):
        raise SurgeryError(f"there is no estimate for {target}; balance by bytes")
    return tuple(costs.get(node.makes[0], 0) for node in graph.nodes)


def _placed(chain: Chain, target: Target | None) -> Chain:
    """The chain with where its chunks run, if there is a target."""
    if target is None:
        return chain
    inspection = inspect_other(chain, target, partial(inspect_program, advice=False))
    assert inspection is not None
    return replace(chain, placed=tuple(map(_place, inspection.parts.values())), target=str(target))


def _place(part: Inspection) -> Placed:
    """Where a chunk runs."""
    share = part.residency
    away = Counter(row.op_type for row in part.ops if row.preferred != "ane")
    words = tuple(f"{count} {kind}" for kind, count in away.most_common())
    return Placed(share["ops"], share["flop"] if any(r.flop for r in part.ops) else None, words, part.cost)


def _names(loaded: Loaded, function: str | None, alone: bool) -> list[str]:
    """The functions to cut, the default one first.

    Raises:
        SurgeryError: only one can be, and none is named.
    """
    functions = loaded.program.functions
    if function is None and alone and len(functions) > 1:
        raise SurgeryError(f"the model has the functions {', '.join(functions)}; name one of them (function=)")
    if function is not None:
        chosen = function_of(loaded.program, function)
        return [next(name for name, f in functions.items() if f is chosen)]
    first = default_function(loaded)
    makers = {f"{name}{INPUTS}" for name in functions}
    return [first, *(name for name in functions if name != first and name not in makers)]


def _check_states(graphs: Mapping[str, Graph], cut: Pieces) -> None:
    """See that the functions use each state in the same chunk.

    Raises:
        SurgeryError: they do not.
    """
    places: dict[str, tuple[int, str]] = {}
    for function, stretch in ((f, s) for f, pieces in cut.items() for s in enumerate(pieces, 1)):
        for name in (n for n in stretch[1].inputs if n in graphs[function].state_users):
            number, other = places.setdefault(name, (stretch[0], function))
            if number != stretch[0]:
                raise SurgeryError(
                    f"{other} uses the state {name} in chunk {number}, {function} in chunk {stretch[0]}; "
                    "cut the functions one by one (function=)"
                )


def _chain(loaded: Loaded, graphs: Mapping[str, Graph], cut: Pieces) -> Chain:
    spec = loaded.spec if loaded.spec is not None else new_spec(loaded.program, loaded.version)
    chunks = []
    several = len(graphs) > 1
    for number in range(len(next(iter(cut.values())))):
        pieces = {name: s[number] for name, s in cut.items() if number < len(s) and s[number] is not NOTHING}
        carved = {name if several else "main": (graphs[name], piece) for name, piece in pieces.items()}
        program = carve_functions(carved, loaded.version, f"chunk {number + 1}")
        described = _spec(spec, pieces, loaded.version, several)
        describe(described, program)
        chunks.append(replace(loaded, program=program, spec=described))
    ends = {name: _ends(loaded, name, graph) for name, graph in graphs.items()}
    (name, graph), *_ = graphs.items()
    return Chain.of(
        chunks,
        ends if several else {"": ends[name]},
        borders=tuple(_border(graph, cut[name], at) for at in range(1, len(chunks))),
        weights=tuple(_weights(graphs, cut, number) for number in range(len(chunks))),
        source=loaded.source,
    )


def _ends(loaded: Loaded, name: str, graph: Graph) -> Ends:
    """What the caller gives to a function, states left out, and what it gives."""
    inputs = loaded.program.functions[name].inputs.items()
    return Ends(tuple(n for n, v in inputs if not types.is_state(v.sym_type)), graph.outputs)


def _spec(whole: Any, pieces: Mapping[str, Stretch], version: int, several: bool) -> Any:
    """The specification of a chunk: features of the whole where it has them, metadata of the whole."""
    chunk = type(whole)(specificationVersion=version)
    chunk.description.metadata.CopyFrom(whole.description.metadata)
    for name, stretch in pieces.items():
        described = next((f for f in whole.description.functions if f.name == name), whole.description)
        place = chunk.description.functions.add(name=name) if several else chunk.description
        wanted = {"input": stretch.inputs, "output": stretch.outputs, "state": stretch.inputs}
        for kind, names in wanted.items():
            getattr(place, kind).extend(f for f in getattr(described, kind) if f.name in names)
    if several:
        chunk.description.defaultFunctionName = next(iter(pieces))
    chunk.mlProgram.SetInParent()
    return chunk


def _whole(graphs: Mapping[str, Graph], pieces: Pieces, name: str) -> list[Stretch]:
    """A function as one piece, in the chunk of these pieces that holds most of the weights that it reads."""
    (whole,) = stretches(graphs[name], [0, len(graphs[name].nodes)])
    own = _held(graphs, {name: [whole]}, 0).keys()
    counted = range(max(map(len, pieces.values())))
    shared = [sum(n for w, n in _held(graphs, pieces, at).items() if w in own) for at in counted]
    return [*[NOTHING] * shared.index(max(shared)), whole]


def _weights(graphs: Mapping[str, Graph], pieces: Pieces, number: int) -> int:
    """Bytes of the weights of a chunk, those that its functions share once."""
    return sum(_held(graphs, pieces, number).values())


def _held(graphs: Mapping[str, Graph], pieces: Pieces, number: int) -> dict[int, int]:
    """The weights of a chunk, and the bytes of each."""
    held: dict[int, int] = {}
    for name, piece in pieces.items():
        for node in piece[number].nodes if number < len(piece) else ():
            held |= graphs[name].weights[node]
    return held


def _border(graph: Graph, stretches_of: Sequence[Stretch], at: int) -> Border:
    """What the chunks before a place give to those after it."""
    before = {name: None for s in stretches_of[:at] for name in s.outputs}
    names = tuple(n for n in before if any(n in s.inputs for s in stretches_of[at:]))
    kinds = tuple(type_text(graph.type_of(name), False) for name in names)
    return Border(names, tuple(map(graph.size, names)), kinds)


# Compare a chain with the model that was cut, where that costs little, and say what was found.

MOST_BYTES = 256 << 20
"""Weights up to which the models are run: as fp32 they take twice as much memory, of both in turn."""
MOST_FLOP = 20 * 10**9
"""Floating point operations of one run up to which they are run: seconds on one core."""
PRECISION = "fp16"
"""The arithmetic as stored, in which a cut may change nothing."""


def checked(whole: Loaded, chain: Chain, function: str | None) -> str:
    """What one run of both on sampled inputs shows, in words; why there was none, where it is left out."""
    if dear := _too_dear(chain):
        return f"not compared with the whole: {dear}; anesurgery.compare does it"
    try:
        if chain.functions or function is not None:
            return "not compared with the whole: name the function to anesurgery.compare, or prove=True"
        compared = compare(whole, chain, precision=PRECISION, gate=math.inf)
    except SurgeryError as error:
        return f"not compared with the whole: {error}"
    if compared.ok:
        return "equal to the whole bit for bit, as stored, on one sampled input"
    return f"NOT equal to the whole, as stored, on one sampled input: {compared.verdict}"


def _too_dear(chain: Chain) -> str:
    """What makes a run cost too much; empty where it does not."""
    size = sum(chain.weights)
    if size > MOST_BYTES:
        return f"{in_words(size)} of weights"
    programs = [c.program for c in chain.chunks if not is_network(c)]
    flop = sum(work_of(op).flop for p in programs for op in walk_ops(function_of(p, None)))
    return f"{flop / 1e9:.0f} billion operations" if flop > MOST_FLOP else ""


# Cut a program before and after the ops that the Neural Engine cannot run.
#
# Ops are put in another order, so that there are as few chunks as the order of need allows. What passes from
# one chunk to another is passed; only what no input can be, as a mask of booleans, is computed again or keeps
# its makers and readers in one chunk. So do states.


def apart(graph: Graph, refused: Collection[str], words: str) -> tuple[Graph, tuple[int, ...]]:
    """The ops in phases, and the places between them.

    Args:
        graph: of the whole.
        refused: names of the ops that cannot run on the ANE.
        words: of the target, for errors.

    Returns:
        A graph whose nodes are in the order of the chunks, those that nobody reads left out; and the places.

    Raises:
        SurgeryError: there is no such op or no other, or they cannot be separated.
    """
    graph = replace(graph, nodes=tuple(graph.nodes[i] for i in _read(graph)))
    alone = [node.makes[0] in refused for node in graph.nodes]
    if not any(alone) or all(alone):
        word = "no op" if any(alone) else "every op"
        raise SurgeryError(f"{word} of the model can run on the ANE ({words}), so there is no cut")
    needed = [{graph.maker[name] for name in node.reads if name in graph.maker} for node in graph.nodes]
    together = list(graph.state_users.values())
    for users in together:
        for first, second in itertools.pairwise(users):
            needed[second].add(first)
    readers: dict[str, list[int]] = {}
    for number, node in enumerate(graph.nodes):
        for name in node.reads:
            readers.setdefault(name, []).append(number)
    again = {name: cone for name, cone in graph.again.items() if not graph.passes(name)}
    for name, maker in graph.maker.items():
        if name not in again and name in readers and not graph.passes(name):
            together.append([maker, *readers[name]])
    numbers = joined(phases(needed, alone), together)
    if not any(numbers):
        raise SurgeryError(
            "the ops that cannot run on the ANE share a state with the others, or values that no input can be; "
            "there is no cut"
        )
    order = sorted(range(len(numbers)), key=lambda i: (numbers[i], i))
    place = {old: new for new, old in enumerate(order)}
    ordered = replace(graph, nodes=tuple(graph.nodes[i] for i in order))
    ordered.again = {name: frozenset(place[i] for i in cone) for name, cone in again.items()}
    ends = [new for new in range(1, len(order)) if numbers[order[new]] != numbers[order[new - 1]]]
    return ordered, (0, *ends, len(order))


def _read(graph: Graph) -> list[int]:
    """The nodes that make what leaves the function, or change a state."""
    pending = [graph.maker[name] for name in graph.outputs if name in graph.maker]
    pending += [i for i, node in enumerate(graph.nodes) if node.op.type in WRITING]
    needed: set[int] = set()
    while pending:
        number = pending.pop()
        if number not in needed:
            needed.add(number)
            pending += [graph.maker[name] for name in graph.nodes[number].reads if name in graph.maker]
    return sorted(needed)
