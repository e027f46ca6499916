"""The command `chips`: what is known of each chip's Neural Engine, in one table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from anesurgery.byte_counts import byte_words
from anesurgery.commands.next_steps import command
from anesurgery.commands.options import Full
from anesurgery.commands.subcommand import Outcome, subcommand
from anesurgery.show.report import Table

LEGEND = """axis: the longest last axis. kernel: the largest convolution.
weights: of one program. loaded: of all programs. on chip: room for one value.
"""


@subcommand()
def chips(
    target: Annotated[str | None, typer.Option(help='Only these, as in inspect: "M1-M3".')] = None,
    full: Full = False,
) -> Outcome:
    """List the chips, the devices that have them, and the known limits and faults of each."""
    from anesurgery.placement.rules.faulty_ops import faults_on
    from anesurgery.placement.target import CHIPS, SOURCES, Target, products_of

    named = Target.parse(target)
    chosen = [CHIPS[name] for name in named.chips]
    faults = [_fault(fault) for fault in faults_on(named)]
    plain = {
        "chips": [asdict(chip) | {"devices": products_of(chip.name)} for chip in chosen],
        "sources": SOURCES,
        "faults": faults,
    }
    sources = [f"{name}: {source}" for name, source in SOURCES.items()]
    wrong = [f"{f['name']}: {f['what']} ({f['seen']}; {f['source']})" for f in faults]
    ends = [f"\n{LEGEND}\n--full adds the sources, and the ops that were reported wrong."]
    more = ["", *sources, "\nOps that were reported wrong:", *wrong] if full else ends
    shown = [_devices(chosen), "", _limits(chosen), *more]
    return Outcome(plain, shown, then=command("example", "gpt2"))


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
    head = ("chip", "engine", "cores", "GB/s", "axis", "kernel", "weights", "loaded", "on chip")
    rows = [
        (
            chip.name,
            f"H{chip.family}",
            chip.cores,
            chip.bandwidth,
            chip.axis,
            f"{chip.kernel_h}x{chip.kernel_w}",
            byte_words(chip.program),
            None if chip.address_space is None else byte_words(chip.address_space),
            byte_words(chip.working_set),
        )
        for chip in chosen
    ]
    known = [["?" if cell is None else cell for cell in row] for row in rows]
    return Table(head, known, ruled=False, edge=False)


def _devices(chosen: list[Any]) -> Table:
    """The devices of each chip, and the oldest OS that runs on it."""
    from anesurgery.placement.target import products_of

    macs = {"macOS": ["Macs and iPads that name it"]}
    rows = [
        (c.name, f"{c.platform} {c.first_os}", ", ".join([*products_of(c.name), *macs.get(c.platform, [])]))
        for c in chosen
    ]
    return Table(("chip", "from", "devices"), rows, ruled=False, edge=False)
