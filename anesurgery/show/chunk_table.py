"""Show a chain of chunks: what each holds, and what passes between them."""

from __future__ import annotations

import re
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table

from anesurgery.byte_counts import byte_words
from anesurgery.display import draws, short_name
from anesurgery.files.sequence import Chain, Placed, is_network
from anesurgery.mil import Program, walk_ops
from anesurgery.neuralnetwork.spec import network_of, walk_layers
from anesurgery.placement.networks import CONSTANTS
from anesurgery.show.console import plain, shows

MOST_SHOWN = 4
"""Values of a border, and types of ops off the ANE, that are shown in the text; JSON has all."""


def _ops(chain: Chain) -> list[int]:
    """Ops of each chunk."""
    return [_layers(c.spec) if is_network(c) else _program_ops(c.program) for c in chain.chunks]


def _layers(spec: Any) -> int:
    """Layers of a network, without those that hold constants."""
    return sum(x.WhichOneof("layer") not in CONSTANTS for x, _ in walk_layers(network_of(spec)))


def _program_ops(program: Program) -> int:
    return sum(not op.op_type.startswith("const") for op in walk_ops(program))


@shows("Chain")
def chain_group(chain: Chain) -> Group:
    """A row for each chunk; then a row for each value that passes from one to a later one."""
    seen = ["on the ANE", "estimate", "elsewhere"] if chain.placed else []
    table = Table("chunk", "ops", "weights", *seen, box=box.SIMPLE_HEAD)
    for number, count in enumerate(_ops(chain)):
        weights = byte_words(chain.weights[number]) if chain.weights else ""
        where = _where(chain.placed[number]) if chain.placed else []
        table.add_row(str(number + 1), str(count), weights, *where)
    total = sum(border.bytes for border in chain.borders)
    words = f"{len(chain.chunks)} chunks" + (f", {byte_words(total)} between them" if chain.borders else "")
    line = plain(words + (f"; for {chain.target}" if chain.target else ""), "bold")
    said = [plain(chain.compared)] if chain.compared else []
    return Group(line, table, *([_borders(chain)] if chain.borders else []), *said)


def _borders(chain: Chain) -> Table:
    """What passes, the largest values of each border."""
    table = Table("after chunk", "passes", "shape", "size", box=box.SIMPLE_HEAD)
    for number, border in enumerate(chain.borders, 1):
        values = sorted(zip(border.sizes, border.names, border.kinds, strict=True), key=lambda v: -v[0])
        for place, (size, name, kind) in enumerate(values[:MOST_SHOWN]):
            table.add_row(
                "" if place else str(number), plain(short_name(name)), plain(_short(kind)), byte_words(size)
            )
        if rest := values[MOST_SHOWN:]:
            table.add_row("", f"{len(rest)} more", "", byte_words(sum(size for size, *_ in rest)))
    return table


def _short(kind: str) -> str:
    """A type as a shape and a word: "1x8x64xfp16" for "tensor<fp16, [1, 8, 64]>"."""
    tensor = re.fullmatch(r"tensor<(\w+), \[([\d, ]+)\]>", kind)
    return kind if tensor is None else "x".join([*tensor[2].split(", "), tensor[1]])


def _where(placed: Placed) -> list[str]:
    """Share on the ANE, estimate, and what is elsewhere."""
    shares = f"{placed.ops:.0%} of ops" + ("" if placed.flop is None else f", {placed.flop:.0%} of the work")
    estimate = "" if placed.estimate is None else f"{placed.estimate / 1000:.3g} ms"
    more = len(placed.elsewhere) - MOST_SHOWN
    words = [*placed.elsewhere[:MOST_SHOWN], *([f"{more} other types"] if more > 0 else [])]
    return [shares, estimate, ", ".join(words)]


@draws("Chain", "json")
def chain_json(chain: Chain) -> dict[str, Any]:
    """Chunks and borders as plain data; sizes in bytes."""
    keys = ("name", "type", "bytes")
    rows = [zip(b.names, b.kinds, b.sizes, strict=True) for b in chain.borders]
    borders = [[dict(zip(keys, value, strict=True)) for value in row] for row in rows]
    sizes = chain.weights or (None,) * len(chain.chunks)
    chunks: list[dict[str, Any]] = [
        {"ops": n, "weights": size} for n, size in zip(_ops(chain), sizes, strict=True)
    ]
    if chain.placed:
        chunks = [{**chunk, "ane": vars(placed)} for chunk, placed in zip(chunks, chain.placed, strict=True)]
    ends = {"inputs": list(chain.inputs), "outputs": list(chain.outputs)}
    return {"chunks": chunks, "borders": borders, **ends, "compared": chain.compared}
