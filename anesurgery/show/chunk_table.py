"""Show a chain of chunks: what each holds, and what passes between them."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from anesurgery.display import draws
from anesurgery.files.chain import Chain
from anesurgery.mil import walk_ops
from anesurgery.show.console import as_html, as_text, plain


def _ops(chain: Chain) -> list[int]:
    """Ops of each chunk."""
    return [sum(op.op_type != "const" for op in walk_ops(chunk.program)) for chunk in chain.chunks]


def chain_group(chain: Chain) -> Group:
    """A row for each chunk, with what it gives to those after it."""
    table = Table("chunk", "ops", "weights", "passes on", box=box.SIMPLE_HEAD)
    for number, count in enumerate(_ops(chain)):
        border = chain.borders[number] if number < len(chain.borders) else None
        values = [] if border is None else list(zip(border.names, border.kinds, border.sizes, strict=True))
        words = "\n".join(f"{name} {kind} ({decimal(size)})" for name, kind, size in values)
        weights = decimal(chain.weights[number]) if chain.weights else ""
        table.add_row(str(number + 1), str(count), weights, plain(words))
    total = sum(border.bytes for border in chain.borders)
    line = Text(f"{len(chain.chunks)} chunks" + (f", {decimal(total)} between them" if chain.borders else ""))
    return Group(table, line)


@draws("Chain", "text")
def chain_text(chain: Chain) -> str:
    """The table as text."""
    return as_text(chain_group(chain))


@draws("Chain", "html")
def chain_html(chain: Chain) -> str:
    """The table as HTML."""
    return as_html(chain_group(chain))


@draws("Chain", "json")
def chain_json(chain: Chain) -> dict[str, Any]:
    """Chunks and borders as plain data; sizes in bytes."""
    keys = ("name", "type", "bytes")
    rows = [zip(b.names, b.kinds, b.sizes, strict=True) for b in chain.borders]
    borders = [[dict(zip(keys, value, strict=True)) for value in row] for row in rows]
    sizes = chain.weights or (None,) * len(chain.chunks)
    chunks = [{"ops": n, "weights": size} for n, size in zip(_ops(chain), sizes, strict=True)]
    return {"chunks": chunks, "borders": borders, "inputs": list(chain.inputs), "outputs": list(chain.outputs)}
