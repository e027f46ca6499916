"""Which op will be in which chunk, for passes that run before a model is cut."""

from __future__ import annotations

from anesurgery.byte_counts import read_size
from anesurgery.errors import SurgeryError
from anesurgery.files.protobuf import version_of
from anesurgery.mil import Program
from anesurgery.splitting.cuts import Cuts
from anesurgery.splitting.graph import read_graphs

ROOM = 0.95
"""Share of a limit that is planned for: passes add masks and tables. A choice."""


def chunk_numbers(program: Program, chunks: int | str) -> dict[str, int]:
    """Value -> the chunk that makes it, from 0 on.

    Args:
        program: with one function.
        chunks: how many, of even weight; or the most bytes of weights in each, as "950 MB".

    Raises:
        SurgeryError: it cannot be cut so.
    """
    if chunks == 1:
        return {}
    (graph,) = read_graphs(program, version_of(program), list(program.functions)).values()
    cuts = Cuts(graph)
    if isinstance(chunks, int) and chunks < 1:
        raise SurgeryError(f"chunks={chunks}; a model has 1 or more")
    places = cuts.into(chunks) if isinstance(chunks, int) else cuts.within(int(ROOM * read_size(chunks)))
    inner = places[1:-1]
    return {name: sum(p <= i for p in inner) for i, node in enumerate(graph.nodes) for name in node.makes}
