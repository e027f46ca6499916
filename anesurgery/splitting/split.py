"""Split a model into chunks that run one after the other (`anesurgery.split`).

An ML Program is cut where the fewest bytes cross (`cuts`, `graph`), or at the ops that the Neural Engine cannot
run (`phases`). A neural network is cut at its layers (`network_cut`). The result is a `Chain`, compared with
the whole model where that is cheap.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from anesurgery.checking.comparison import compare
from anesurgery.display import byte_words, read_size
from anesurgery.doors import door
from anesurgery.errors import SurgeryError, UnknownName
from anesurgery.files.interface import describe, new_spec, warn_of_names
from anesurgery.files.joining import default_function
from anesurgery.files.mil_types import type_text
from anesurgery.files.package import Loaded
from anesurgery.files.sequence import Border, Chain, ChunkPlacement, Ends, is_network
from anesurgery.interpret.decoder_calls import INPUTS
from anesurgery.loading import load, load_as_is
from anesurgery.mil import exclusive, function_of, types, walk_ops
from anesurgery.neuralnetwork.importing import LoadedNetwork
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.inspector import inspect_program
from anesurgery.placement.models import inspect_other
from anesurgery.placement.target import Target
from anesurgery.semantics.rows import work_of
from anesurgery.splitting.cuts import Cuts
from anesurgery.splitting.graph import Graph, Stretch, carve_functions, read_graphs, stretches
from anesurgery.splitting.network_cut import cut_network
from anesurgery.splitting.phases import engine_phases

BALANCES = ("bytes", "estimate")
"""What chunks may have in equal parts."""
UNSUPPORTED = "unsupported"
Pieces = Mapping[str, list[Stretch]]
"""Function -> its stretch in each chunk; chunks after its last stretch have none."""
EMPTY = Stretch((), (), ())
"""The stretch of a function in chunks before the one that has it."""
NANOSECONDS = 1000
"""Nanoseconds in a microsecond: estimates become integers, which are exact enough in nanoseconds."""


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
        parts: how many chunks, of similar size. Or:
        max_bytes: the most bytes of weights in a chunk, such as "950 MB"; makes as few chunks as possible. Or:
        at: "unsupported" cuts before and after ops that the ANE cannot run. A neural network is cut into
            networks.
        balance: make `parts` even by "bytes", or by "estimate" (Core ML's own, for the target).
        target: chips and OS, as "M1/macOS 14"; the report then shows the share of each chunk on the ANE and
            its estimate. For `at` and "estimate", every chip when absent.
        function: the one function to cut. Default: all. `at` and "estimate" need one.
        shapes: with `at`: the shapes of blobs that custom layers of a neural network make.
        compare: run the model and the chain once on random inputs, if that is quick. The chain's `compared` has
            the result.

    Returns:
        The chain: its chunks, and what passes between them. Its `save` writes a folder or one package.

    Raises:
        LoadError: the model cannot be read.
        SurgeryError: none or several of `parts`, `max_bytes` and `at`; or the model cannot be cut so.
        UnknownName: no such function, target or balance.
    """
    options = _Options(parts, max_bytes, at, balance, function, shapes)
    options.check()
    whole = load(model) if at is None else load_as_is(model)
    needs_device = target is not None or at is not None or balance != "bytes"
    device = Target.parse(target) if needs_device else None
    chain = _cut_model(whole, options, device)
    return replace(chain, compared=comparison_words(whole, chain, function)) if compare else chain


@dataclass(frozen=True)
class _Options:
    """Options of `split`."""

    parts: int | None
    max_bytes: int | str | None
    at: str | None
    balance: str
    function: str | None
    shapes: Mapping[str, tuple[int, ...]] | None

    def check(self) -> None:
        """Check that the options go together.

        Raises:
            SurgeryError: the options contradict each other.
            UnknownName: an unknown choice.
        """
        if [self.parts, self.max_bytes, self.at].count(None) != 2:
            raise SurgeryError(
                "give either parts=N or max_bytes=... or at='unsupported', as split(model, max_bytes='950 MB')"
            )
        if self.at not in (None, UNSUPPORTED):
            raise UnknownName("place to cut", str(self.at), [UNSUPPORTED])
        if self.balance not in BALANCES:
            raise UnknownName("balance", self.balance, BALANCES)
        if self.parts is not None and self.parts < 2:
            raise SurgeryError(f"parts={self.parts}; a model is cut into 2 or more")
        if self.balance != "bytes" and self.parts is None:
            raise SurgeryError("balance= is for parts=N")
        if self.shapes and self.at is None:
            raise SurgeryError("shapes= is for at='unsupported'")


def _cut_model(loaded: Loaded, options: _Options, device: Target | None) -> Chain:
    """Return the chain of a model; without a device, nothing asks for the placement of its ops."""
    if isinstance(loaded, LoadedNetwork) and device is not None:
        if options.function not in (None, "main"):
            raise UnknownName("function", str(options.function), ["main"])
        return _with_placement(cut_network(loaded.spec, device, options.shapes, loaded.source), device)
    if options.shapes:
        raise SurgeryError("shapes= is for the custom layers of a neural network; an ML Program states them")
    warn_of_names(loaded.notes)
    only_one = options.at is not None or options.balance != "bytes"
    first, *others = _function_names(loaded, options.function, only_one=only_one)
    graphs = read_graphs(loaded.program, loaded.version, [first, *others])
    cuts = Cuts(graphs[first], others=tuple(Cuts(graphs[other]) for other in others))
    if options.at is not None and device is not None:
        rows = inspect_program(loaded, device, function=first, advice=False).ops
        refused = {row.name for row in rows if row.legal is False}
        graphs[first], places = engine_phases(graphs[first], refused, str(device))
    elif options.parts is not None:
        if options.balance != "bytes" and device is not None:
            cuts = replace(cuts, costs=_estimated_costs(loaded, graphs[first], device, first))
        places = cuts.into(options.parts)
    else:
        places = cuts.within(read_size(options.max_bytes))
    pieces = {first: stretches(graphs[first], places)}
    for other, matching in zip(others, cuts.matches, strict=True):  # place in the first -> place in the other
        matched = [matching[place] for place in places]
        pieces[other] = stretches(graphs[other], [place for place in matched if place is not None])
    makers = [maker for name in (first, *others) if (maker := f"{name}{INPUTS}") in loaded.program.functions]
    graphs |= read_graphs(loaded.program, loaded.version, makers)
    pieces |= {name: _whole_in_one_chunk(graphs, pieces, name) for name in makers}
    _check_states(graphs, pieces)
    return _with_placement(_carved_chain(loaded, graphs, pieces), device)


def _estimated_costs(loaded: Loaded, graph: Graph, target: Target, name: str) -> tuple[int, ...]:
    """Return the estimate of each node on its preferred unit, in nanoseconds.

    Raises:
        SurgeryError: there is no estimate for this target.
    """
    costs: dict[str, int] = {}
    for row in inspect_program(loaded, target, function=name, advice=False).ops:
        if row.estimate is not None:
            time = row.estimate.ane if row.preferred == "ane" else row.estimate.cpu
            costs[row.name] = round(NANOSECONDS * (time or 0))
    if not any(costs.values()):
        raise SurgeryError(f"there is no estimate for {target}; balance by bytes")
    return tuple(costs.get(node.makes[0], 0) for node in graph.nodes)


def _with_placement(chain: Chain, target: Target | None) -> Chain:
    """Return the chain with the placement of its chunks, if there is a target."""
    if target is None:
        return chain
    inspection = inspect_other(chain, target, partial(inspect_program, advice=False))
    assert inspection is not None
    return replace(chain, placed=tuple(map(_placement_of, inspection.parts.values())), target=str(target))


def _placement_of(part: Inspection) -> ChunkPlacement:
    """Return where a chunk runs."""
    share = part.residency
    counts = Counter(row.op_type for row in part.ops if row.preferred != "ane")
    return ChunkPlacement(
        ops=share["ops"],
        flop=share["flop"] if any(row.flop for row in part.ops) else None,
        elsewhere=tuple(f"{count} {op_type}" for op_type, count in counts.most_common()),
        estimate=part.cost,
    )


def _function_names(loaded: Loaded, function: str | None, only_one: bool) -> list[str]:
    """Return the functions to cut, the default one first.

    Raises:
        SurgeryError: only one function can be cut, and none is named.
    """
    functions = loaded.program.functions
    if function is None and only_one and len(functions) > 1:
        raise SurgeryError(f"the model has the functions {', '.join(functions)}; name one of them (function=)")
    if function is not None:
        chosen = function_of(loaded.program, function)
        return [next(name for name, f in functions.items() if f is chosen)]
    first = default_function(loaded)
    makers = {f"{name}{INPUTS}" for name in functions}
    return [first, *(name for name in functions if name != first and name not in makers)]


def _check_states(graphs: Mapping[str, Graph], cut: Pieces) -> None:
    """Check that the functions use each state in the same chunk.

    Raises:
        SurgeryError: two functions use a state in different chunks.
    """
    uses = [
        (name, number, function)
        for function, pieces in cut.items()
        for number, stretch in enumerate(pieces, 1)
        for name in stretch.inputs
        if name in graphs[function].state_users
    ]
    first_uses: dict[str, tuple[int, str]] = {}  # state -> (chunk, function)
    for name, number, function in uses:
        first_number, other = first_uses.setdefault(name, (number, function))
        if first_number != number:
            raise SurgeryError(
                f"{other} uses the state {name} in chunk {first_number}, {function} in chunk {number}; "
                "cut the functions one by one (function=)"
            )


def _carved_chain(loaded: Loaded, graphs: Mapping[str, Graph], cut: Pieces) -> Chain:
    """Return the chain of the chunks, each with the stretches of all functions in it."""
    spec = loaded.spec if loaded.spec is not None else new_spec(loaded.program, loaded.version)
    chunks = []
    several = len(graphs) > 1
    for number in range(len(next(iter(cut.values())))):
        pieces = {name: s[number] for name, s in cut.items() if number < len(s) and s[number] is not EMPTY}
        carved = {name if several else "main": (graphs[name], piece) for name, piece in pieces.items()}
        program = carve_functions(carved, loaded.version, f"chunk {number + 1}")
        chunk_spec = _chunk_spec(spec, pieces, loaded.version, several)
        describe(chunk_spec, program)
        chunks.append(replace(loaded, program=program, spec=chunk_spec))
    ends = {name: _function_ends(loaded, name, graph) for name, graph in graphs.items()}
    first = next(iter(graphs))
    return Chain.of(
        chunks,
        ends if several else {"": ends[first]},
        borders=tuple(_border(graphs[first], cut[first], number) for number in range(1, len(chunks))),
        weights=tuple(_chunk_bytes(graphs, cut, number) for number in range(len(chunks))),
        source=loaded.source,
    )


def _function_ends(loaded: Loaded, name: str, graph: Graph) -> Ends:
    """Return what a caller gives to a function, without states, and what it returns."""
    inputs = loaded.program.functions[name].inputs.items()
    return Ends(tuple(n for n, v in inputs if not types.is_state(v.sym_type)), graph.outputs)


def _chunk_spec(whole: Any, pieces: Mapping[str, Stretch], version: int, several: bool) -> Any:
    """Return the specification of a chunk: features and metadata of the whole."""
    chunk = type(whole)(specificationVersion=version)
    chunk.description.metadata.CopyFrom(whole.description.metadata)
    for name, stretch in pieces.items():
        source = next((f for f in whole.description.functions if f.name == name), whole.description)
        target = chunk.description.functions.add(name=name) if several else chunk.description
        names_of = {"input": stretch.inputs, "output": stretch.outputs, "state": stretch.inputs}
        for field, names in names_of.items():
            getattr(target, field).extend(f for f in getattr(source, field) if f.name in names)
        for field in ("predictedFeatureName", "predictedProbabilitiesName"):
            if getattr(source, field) in stretch.outputs:
                setattr(target, field, getattr(source, field))
    if several:
        chunk.description.defaultFunctionName = next(iter(pieces))
    chunk.mlProgram.SetInParent()
    return chunk


def _whole_in_one_chunk(graphs: Mapping[str, Graph], pieces: Pieces, name: str) -> list[Stretch]:
    """Return a function as one piece, in the chunk with which it shares most weights."""
    (whole,) = stretches(graphs[name], [0, len(graphs[name].nodes)])
    own = _chunk_weights(graphs, {name: [whole]}, 0).keys()
    weights_of_chunks = [_chunk_weights(graphs, pieces, i) for i in range(max(map(len, pieces.values())))]
    shared = [sum(size for address, size in weights.items() if address in own) for weights in weights_of_chunks]
    return [*[EMPTY] * shared.index(max(shared)), whole]


def _chunk_bytes(graphs: Mapping[str, Graph], pieces: Pieces, number: int) -> int:
    """Return the bytes of a chunk's weights; those that its functions share count once."""
    return sum(_chunk_weights(graphs, pieces, number).values())


def _chunk_weights(graphs: Mapping[str, Graph], pieces: Pieces, number: int) -> dict[int, int]:
    """Return address -> bytes of a chunk's weights."""
    weights: dict[int, int] = {}
    for name, piece in pieces.items():
        for node in piece[number].nodes if number < len(piece) else ():
            weights |= graphs[name].weights[node]
    return weights


def _border(graph: Graph, stretches_of: Sequence[Stretch], number: int) -> Border:
    """Return what the chunks before the one of this number pass to it and those after it."""
    computed = dict.fromkeys(name for stretch in stretches_of[:number] for name in stretch.outputs)
    read = {name for stretch in stretches_of[number:] for name in stretch.inputs}
    names = tuple(name for name in computed if name in read)
    type_words = tuple(type_text(graph.types[name], False) for name in names)
    return Border(names, tuple(map(graph.size, names)), type_words)


# -- the chain compared with the whole model, where that is cheap ------------------------------------------

MOST_BYTES = 256 << 20
"""The most bytes of weights of models that are compared: in fp32 they take twice as much memory."""
MOST_FLOP = 20 * 10**9
"""The most floating point operations of one run for a comparison: seconds on one core."""
PRECISION = "fp16"
"""The arithmetic as stored, in which a cut must change nothing."""


def comparison_words(whole: Loaded, chain: Chain, function: str | None) -> str:
    """Run both on one sampled input, and return in words how they compare, or why they were not run."""
    if cost := _cost_words(chain):
        return f"not compared with the whole: {cost}; anesurgery.compare does it"
    try:
        if chain.functions or function is not None:
            return "not compared with the whole: name the function to anesurgery.compare, or prove=True"
        compared = compare(whole, chain, precision=PRECISION, gate=math.inf)
    except SurgeryError as error:
        return f"not compared with the whole: {error}"
    if compared.ok:
        return "bit-identical to the whole model, as stored, on one random input"
    return f"NOT equal to the whole model, as stored, on one random input: {compared.verdict}"


def _cost_words(chain: Chain) -> str:
    """Return in words what makes a run too expensive; "" where it is not."""
    size = sum(chain.weights)
    if size > MOST_BYTES:
        return f"{byte_words(size)} of weights"
    programs = [c.program for c in chain.chunks if not is_network(c)]
    flop = sum(work_of(op).flop for p in programs for op in walk_ops(function_of(p, None)))
    return f"{flop / 1e9:.0f} billion operations" if flop > MOST_FLOP else ""
