"""Find where to cut a graph: into the fewest chunks within a limit, or into N even ones.

`split` and the pass `add_cache` use it. Among such cuts, the one with the fewest bytes between chunks is taken.
A cut lies at a place p, before node p. `Cuts.places` are the places worth considering; a search over pairs of
them (dynamic programming) finds the best chunks.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from anesurgery.display import byte_words, read_size
from anesurgery.errors import SurgeryError
from anesurgery.files.mil_types import type_text
from anesurgery.files.protobuf import version_of
from anesurgery.mil import Program
from anesurgery.splitting.graph import Graph, read_graphs

MOST_PLACES = 400
"""The most places that are considered: the search looks at pairs of them, up to 80,000."""
SLACK = 1.03
"""How much heavier the heaviest of N even chunks may become for fewer bytes at the borders. A choice: 3 % is
not felt."""


@dataclass(frozen=True)
class Cuts:
    """The places of a function's graph at which it may be cut; place p lies before node p."""

    graph: Graph
    costs: tuple[int, ...] | None = None
    """The cost of each node, for even chunks; by default its weights, counted once for each chunk."""
    others: tuple[Cuts, ...] = ()
    """The cuts of other functions of the model, at the same places."""

    @cached_property
    def _loads(self) -> Sequence[Mapping[int, int]]:
        """For each node, what it adds to a chunk that does not have it yet: key -> cost."""
        return self.graph.weights if self.costs is None else [{i: cost} for i, cost in enumerate(self.costs)]

    @cached_property
    def crossing(self) -> tuple[tuple[str, ...], ...]:
        """For each place from 0 to n, the values that are computed before it and read after it."""
        graph = self.graph
        last: dict[str, int] = {}
        for number, node in enumerate(graph.nodes):
            last |= dict.fromkeys((name for name in node.reads if name in graph.maker), number)
        across: list[list[str]] = [[] for _ in range(len(graph.nodes) + 1)]
        for name, end in last.items():
            if name not in graph.repeated:
                for place in range(graph.maker[name] + 1, end + 1):
                    across[place].append(name)
        return tuple(map(tuple, across))

    @cached_property
    def allowed(self) -> tuple[bool, ...]:
        """For each place, whether it may be cut: not amid users of a state, nor where values cannot pass."""
        graph = self.graph
        inside = {p for users in graph.state_users.values() for p in range(users[0] + 1, users[-1] + 1)}
        can_pass = {name: graph.can_pass(name) for names in self.crossing for name in names}
        return tuple(
            0 < place < len(graph.nodes)
            and place not in inside
            and all(can_pass[n] for n in names)
            and all(places[place] is not None for places in self.matches)
            for place, names in enumerate(self.crossing)
        )

    @cached_property
    def matches(self) -> tuple[tuple[int | None, ...], ...]:
        """For each other function, the places that match those of this one; None where there is none."""
        return tuple(self._matching_places(other) for other in self.others)

    def _matching_places(self, other: Cuts) -> tuple[int | None, ...]:
        """Return the places of another function that lie between ops with the same results.

        Of several, the place that the fewest bytes cross; ops that only one function has may lie on either
        side.
        """
        makers = {node.makes[0]: i for i, node in enumerate(other.graph.nodes) if node.makes}
        partners = [makers.get(node.makes[0]) if node.makes else None for node in self.graph.nodes]
        last, count = len(partners), len(other.graph.nodes)
        # of each place p here: the last partner of a node before p, and the first one of a node from p on
        low = list(accumulate((-1 if i is None else i for i in partners), max, initial=-1))
        high = list(accumulate((count if i is None else i for i in partners[::-1]), min, initial=count))[::-1]
        spans = (range(low[p] + 1, high[p] + 1) for p in range(1, last))
        inner = [min((q for q in span if other.allowed[q]), key=other.bytes_at, default=None) for span in spans]
        return (0, *inner, count)

    def bytes_at(self, place: int) -> int:
        """Return the bytes that cross a place, in all functions."""
        own = sum(map(self.graph.size, self.crossing[place]))
        return own + sum(o.bytes_at(q) for o, p in self._other_cuts if (q := p[place]) is not None)

    @property
    def _other_cuts(self) -> Iterator[tuple[Cuts, tuple[int | None, ...]]]:
        return zip(self.others, self.matches, strict=True)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Both ends, and between them the places worth a cut.

        The weights, in the order in which they are first read, are divided into `MOST_PLACES` equal parts. Of
        the places in one part, the one that the fewest bytes cross is kept. If there is room, so are local
        minima of these bytes.
        """
        count, before = len(self.graph.nodes), self._weights_before
        scale = MOST_PLACES / max(1, before[-1])
        sizes = {p: self.bytes_at(p) for p in range(1, count) if self.allowed[p]}
        best: dict[int, int] = {}  # part of the weights -> its lightest place
        for place, size in sizes.items():
            part = int(before[place] * scale)
            if size < sizes[best.setdefault(part, place)]:
                best[part] = place
        dips = [
            p
            for p, size in sizes.items()
            if size <= sizes.get(p + 1, size) and size < sizes.get(p - 1, size + 1)
        ]
        room = MOST_PLACES - len(best)
        kept = {*best.values(), *sorted(dips, key=sizes.__getitem__)[: max(0, room)]}
        return (0, *sorted(kept), count)

    @cached_property
    def _weights_before(self) -> list[int]:
        """For each place, the bytes of weights read before it; the number of ops in a model without weights."""
        seen: dict[int, int] = {}
        totals = [0]
        for weights in self._loads:
            totals.append(totals[-1] + sum(size for at, size in weights.items() if at not in seen))
            seen |= weights
        return totals if totals[-1] else list(range(len(totals)))

    @cached_property
    def chunk_weights(self) -> dict[tuple[int, int], int]:
        """(start, end) -> the weight of the chunk between two places."""
        places, weights = self.places, {}
        for at, start in enumerate(places[:-1]):
            needed: dict[int, int] = {}
            for begin, end in zip(places[at:], places[at + 1 :], strict=False):
                needed |= self._needed_weights(start, begin, end)
                weights[start, end] = sum(needed.values())
        return weights

    def _needed_weights(self, start: int, begin: int, end: int) -> dict[int, int]:
        """Return key -> cost of what nodes from `begin` to `end` need, in a chunk that begins at `start`."""
        graph, needed = self.graph, dict[int, int]()
        for cuts, places in self._other_cuts:
            first, low, high = (places[p] for p in (start, begin, end))
            if first is not None and low is not None and high is not None:
                needed |= cuts._needed_weights(first, low, high)
        for number in range(begin, end):
            needed |= self._loads[number]
            for name in graph.nodes[number].reads:
                if graph.maker.get(name, start) < start:
                    for other in graph.repeated.get(name, ()):
                        needed |= self._loads[other]
        return needed

    def within(self, limit: int) -> tuple[int, ...]:
        """Return the fewest chunks of at most `limit` bytes of weights, with the fewest bytes between.

        Raises:
            SurgeryError: a part that cannot be cut is heavier.
        """
        best = self._cheapest_chunks(limit, None)
        if best is None:
            raise SurgeryError(self._too_heavy_words(limit))
        return best

    def into(self, parts: int) -> tuple[int, ...]:
        """Return a number of chunks whose heaviest is about as light as possible.

        Raises:
            SurgeryError: there are too few places to cut.
        """
        most = len(self.places) - 1
        if parts > most:
            elsewhere = f"at any other place, more data passes between the parts{self._uncuttable_words()}"
            why = "it has no more ops" if most == len(self.graph.nodes) else elsewhere
            raise SurgeryError(f"it can be cut into {most} parts at most, and not into {parts}: {why}")
        limits = sorted(set(self.chunk_weights.values()))
        least = bisect.bisect_left(limits, True, key=lambda n: self._cheapest_chunks(n, parts) is not None)
        best = self._cheapest_chunks(int(limits[least] * SLACK), parts)
        assert best is not None
        return best

    def _cheapest_chunks(self, limit: int, parts: int | None) -> tuple[int, ...] | None:
        """Return the cheapest chunks within a limit, as places; None where there are none.

        The cost is the number of chunks, then the bytes at their borders; with `parts`, only those bytes.
        """
        places = self.places
        best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}  # last place -> (bytes, all places)
        for count in range(1, (parts or len(places)) + 1):
            longer: dict[int, tuple[int, tuple[int, ...]]] = {}
            for start, (cost, chosen) in best.items():
                for end in places[bisect.bisect_right(places, start) :]:
                    if self.chunk_weights[start, end] > limit:
                        break
                    price = cost + (self.bytes_at(end) if end != places[-1] else 0)
                    if end not in longer or price < longer[end][0]:
                        longer[end] = (price, (*chosen, end))
            best = longer
            if places[-1] in best and parts in (None, count):
                return best[places[-1]][1]
        return None

    def _uncuttable_words(self) -> str:
        """Return in words which values that cross cannot be inputs, and which states keep ops together."""
        words = self._state_words(0, len(self.graph.nodes))
        unfit = {name for names in self.crossing for name in names if not self.graph.can_pass(name)}
        first = min(unfit, key=self.graph.maker.__getitem__, default=None)
        if first is None:
            return words
        kind = type_text(self.graph.types[first], False)
        return f", or ones that cannot be inputs ({len(unfit)}, the first is %{first}: {kind}){words}"

    def _state_words(self, start: int, end: int) -> str:
        """Return in words the states that keep ops between two nodes in one chunk."""
        users = self.graph.state_users.items()
        states = [name for name, by in users if max(by[0], start) < min(by[-1], end - 1)]
        return f"; the state {', '.join(states)} stays in one chunk, with all ops that use it" if states else ""

    def _too_heavy_words(self, limit: int) -> str:
        """Return in words which ops cannot be cut between and weigh more than a limit."""
        start, end = max(itertools.pairwise(self.places), key=self.chunk_weights.__getitem__)
        made = [node.makes[0] for node in self.graph.nodes[start:end] if node.makes]
        needed, words = byte_words(self.chunk_weights[start, end]), self._state_words(start, end)
        return (
            f"the ops from %{made[0]} to %{made[-1]} need {needed} of weights, and cannot be cut between; the "
            f"limit is {byte_words(limit)}{words}"
        )


PLANNED_SHARE = 0.95
"""Share of a size limit that is planned for, as passes add masks and tables later. A choice."""


def chunk_numbers(program: Program, chunks: int | str) -> dict[str, int]:
    """Return value -> the number of the chunk that computes it, from 0.

    Args:
        program: a program with one function.
        chunks: how many, of even weight; or the most bytes of weights in each, as "950 MB".

    Raises:
        SurgeryError: the program cannot be cut in this way.
    """
    if chunks == 1:
        return {}
    (graph,) = read_graphs(program, version_of(program), list(program.functions)).values()
    cuts = Cuts(graph)
    if isinstance(chunks, int) and chunks < 1:
        raise SurgeryError(f"chunks={chunks}; a model has 1 or more")
    places = (
        cuts.into(chunks) if isinstance(chunks, int) else cuts.within(int(PLANNED_SHARE * read_size(chunks)))
    )
    inner = places[1:-1]
    return {name: sum(p <= i for p in inner) for i, node in enumerate(graph.nodes) for name in node.makes}
