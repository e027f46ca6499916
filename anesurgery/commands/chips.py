"""The command `chips`: what is known of each chip's Neural Engine, in one table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table

from anesurgery.byte_counts import byte_words
from anesurgery.commands.next_steps import command
from anesurgery.commands.options import Full, Json, Quiet, show
from anesurgery.commands.waiting import load_engine

LEGEND = """axis: the longest last axis. kernel: the largest convolution.
weights: of one program. loaded: of all programs. on chip: room for one value.
"""


def chips(
    target: Annotated[str | None, typer.Option(help='Only these, as in inspect: "M1-M3".')] = None,
    full: Full = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List the chips, the devices that have them, and the known limits and faults of each."""
    load_engine(quiet)
    from anesurgery.placement.rules.faulty_ops import faults_on
    from anesurgery.placement.target import CHIPS, SOURCES, Target, products_of

    aim = Target.parse(target)
    chosen = [CHIPS[name] for name in aim.chips]
    faults = [_fault(fault) for fault in faults_on(aim)]
    plain = {
        "chips": [asdict(chip) | {"devices": products_of(chip.name)} for chip in chosen],
        "sources": SOURCES,
        "faults": faults,
    }
    sources = [f"{name}: {source}" for name, source in SOURCES.items()]
    wrong = [f"{f['name']}: {f['what']} ({f['seen']}; {f['source']})" for f in faults]
    ends = [f"\n{LEGEND}\n--full adds the sources, and the ops that were reported wrong."]
    more = ["", *sources, "\nOps that were reported wrong:", *wrong] if full else ends
    show(
        plain,
        Group(_devices(chosen), "", _limits(chosen), *more),
        as_json,
        quiet,
        then=command("example", "gpt2"),
    )


def _fault(fault: Any) -> dict[str, Any]:
    """A row of the table of engine faults as plain data."""
    return {
        "name": fault.name,
        "ops": sorted(fault.ops),
        "what": fault.what,
        "seen": fault.seen,
        "chips": list(fault.chips),
        "format": fault.format,
        "repair": fault.remedy,
        "advice": fault.advice,
        "source": fault.source,
    }


def _limits(chosen: list[Any]) -> Table:
    """A row for each chip; "?" where nothing is known."""
    rows = [
        {
            "chip": chip.name,
            "engine": f"H{chip.family}",
            "cores": chip.cores,
            "GB/s": chip.bandwidth,
            "axis": chip.axis,
            "kernel": f"{chip.kernel_h}x{chip.kernel_w}",
            "weights": byte_words(chip.program),
            "loaded": None if chip.address_space is None else byte_words(chip.address_space),
            "on chip": byte_words(chip.working_set),
        }
        for chip in chosen
    ]
    return _table(rows)


def _devices(chosen: list[Any]) -> Table:
    """The devices of each chip, and the oldest OS that runs on it."""
    from anesurgery.placement.target import products_of

    macs = "Macs and iPads that name it"
    rows = [
        {
            "chip": chip.name,
            "from": f"{chip.platform} {chip.first_os}",
            "devices": ", ".join([*products_of(chip.name), *([macs] if chip.platform == "macOS" else [])]),
        }
        for chip in chosen
    ]
    return _table(rows)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(*rows[0], box=None, pad_edge=False)
    for row in rows:
        table.add_row(*("?" if value is None else str(value) for value in row.values()))
    return table
