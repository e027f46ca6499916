"""Show a chain of chunks, with what passes between them; and a choice of sizes."""

from __future__ import annotations

import re
from typing import Any

from anesurgery.display import byte_words, counted, draws
from anesurgery.files.plot_files import picture
from anesurgery.files.sequence import Border, Chain, ChunkPlacement, is_network
from anesurgery.mil import walk_ops
from anesurgery.neuralnetwork.spec import network_of, walk_layers
from anesurgery.placement.networks import CONSTANTS
from anesurgery.show.console import shows
from anesurgery.show.report import Report, Table, first_rows
from anesurgery.splitting.size_choice import SizeChoice

MOST_SHOWN = 4
"""The most values of a border, and op types off the Neural Engine, in the text; JSON has all."""
BAR = 24
"""Length of the longest bar, in characters."""


def _op_count(chunk: Any) -> int:
    """Return the number of ops of a chunk, or layers of a network, without constants."""
    if is_network(chunk):
        return sum(x.WhichOneof("layer") not in CONSTANTS for x, _ in walk_layers(network_of(chunk.spec)))
    return sum(not op.op_type.startswith("const") for op in walk_ops(chunk.program))


@shows("Chain")
def chain_report(chain: Chain) -> Report:
    """Report a row for each chunk, then a row for each value that passes to a later one."""
    rows = [
        (str(number + 1), str(_op_count(chunk)), byte_words(chain.weights[number]) if chain.weights else "")
        + (_placement_cells(chain.placed[number]) if chain.placed else ())
        for number, chunk in enumerate(chain.chunks)
    ]
    passing = [row for number, border in enumerate(chain.borders, 1) for row in _passing(number, border)]
    total = sum(border.bytes for border in chain.borders)
    between = f", {byte_words(total)} between them" if chain.borders else ""
    words = counted(len(chain.chunks), "chunk") + between
    seen = ("on the Neural Engine", "estimate", "elsewhere") if chain.placed else ()
    return Report(
        words + (f"; for {chain.target}" if chain.target else ""),
        [
            Table(("chunk", "ops", "weights", *seen), rows),
            Table(("after chunk", "passes", "shape", "size"), passing),
            *filter(None, [chain.compared]),
        ],
    )


def _passing(number: int, border: Border) -> list[tuple[str, ...]]:
    """Return rows for what passes behind a chunk, the largest values first."""
    values = sorted(zip(border.sizes, border.names, border.kinds, strict=True), key=lambda v: -v[0])
    rows = [("", name, _short_type(kind), byte_words(size)) for size, name, kind in values[:MOST_SHOWN]]
    if rest := values[MOST_SHOWN:]:
        rows.append(("", f"{len(rest)} more", "", byte_words(sum(size for size, *_ in rest))))
    return [(str(number), *row[1:]) if not place else row for place, row in enumerate(rows)]


def _short_type(kind: str) -> str:
    """Return a type as a shape and a word: "1x8x64xfp16" for "tensor<fp16, [1, 8, 64]>"."""
    tensor = re.fullmatch(r"tensor<(\w+), \[([\d, ]+)\]>", kind)
    return kind if tensor is None else "x".join([*tensor[2].split(", "), tensor[1]])


def _placement_cells(placed: ChunkPlacement) -> tuple[str, str, str]:
    """Return the share on the Neural Engine, the estimate, and what runs elsewhere."""
    shares = f"{placed.ops:.0%} of ops" + ("" if placed.flop is None else f", {placed.flop:.0%} of the work")
    estimate = "" if placed.estimate is None else f"{placed.estimate / 1000:.3g} ms"
    words, more = first_rows(placed.elsewhere, MOST_SHOWN, "{} other types")
    return shares, estimate, ", ".join([*words, *more])


@draws("Chain", "json")
def chain_json(chain: Chain) -> dict[str, Any]:
    """Return chunks and borders as plain data; sizes in bytes."""
    keys = ("name", "type", "bytes")
    rows = [zip(b.names, b.kinds, b.sizes, strict=True) for b in chain.borders]
    borders = [[dict(zip(keys, value, strict=True)) for value in row] for row in rows]
    sizes = chain.weights or (None,) * len(chain.chunks)
    chunks: list[dict[str, Any]] = [
        {"ops": _op_count(chunk), "weights": size} for chunk, size in zip(chain.chunks, sizes, strict=True)
    ]
    if chain.placed:
        chunks = [{**chunk, "ane": vars(placed)} for chunk, placed in zip(chunks, chain.placed, strict=True)]
    ends = {"inputs": list(chain.inputs), "outputs": list(chain.outputs)}
    return {"chunks": chunks, "borders": borders, **ends, "compared": chain.compared}


@shows("SizeChoice")
def choice_report(sized: SizeChoice) -> Report:
    """Report a row for each number of sizes, with a bar as long as the expected value."""
    known = sized.best.bytes is not None
    largest = max(choice.expected for choice in sized.choices) or 1.0
    rows = [
        (
            str(len(choice.sizes)),
            f"{choice.expected:.4g}",
            "#" * round(BAR * choice.expected / largest),
            f"{choice.padding:.1%}",
            *([] if choice.bytes is None else [byte_words(choice.bytes)]),
            ", ".join(map(str, choice.sizes)),
        )
        for choice in sized.choices
    ]
    table = Table(("sizes", _expected_label(sized), "", "padding", *["package"] * known, "which"), rows)
    words = f"best sizes: {', '.join(map(str, sized.sizes))}"
    return Report(words, [table, "each size is compiled when it is first loaded, which takes time"])


def _expected_label(sized: SizeChoice) -> str:
    return "expected time" if sized.timed else "expected positions"


@draws("SizeChoice", "plot")
def choice_plot(sized: SizeChoice, kind: str = "png") -> bytes:
    """Plot the expected value against the number of sizes, and the size of the package if known.

    Args:
        sized: the choice.
        kind: "png", "svg" or "pdf".

    Raises:
        SurgeryError: matplotlib is not installed.
    """

    def draw(axes: Any) -> None:
        counts = [len(choice.sizes) for choice in sized.choices]
        axes.plot(counts, [choice.expected for choice in sized.choices], marker="o")
        axes.set(xlabel="sizes", ylabel=_expected_label(sized), xticks=counts, ylim=(0, None))
        stored = [choice.bytes for choice in sized.choices if choice.bytes is not None]
        if stored:
            other = axes.twinx()
            other.plot(counts, [size / 1e6 for size in stored], marker="s", linestyle=":", color="grey")
            other.set(ylabel="MB of the package (dotted)", ylim=(0, None))

    return picture(draw, kind)
