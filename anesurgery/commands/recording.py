"""The commands `measure`, `learn` and `calibrate`: measure on a Mac, and learn from such files."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table

from anesurgery.commands.next_steps import command
from anesurgery.commands.options import Function, Json, Model, Quiet, show
from anesurgery.commands.waiting import load_engine, waiting

Overwrite = Annotated[bool, typer.Option(help="Replace the --out file if it exists.")]


def measure(
    model: Model,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The JSON file to write. Default: MODEL_measured.json.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Chip and OS of this Mac.")] = None,
    compute_units: Annotated[
        list[str] | None, typer.Option(help="CPU_AND_NE, ALL, ...; repeat. All four by default.")
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Number of timed predictions for each setting.")] = 50,
    function: Function = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Measure loads, predictions and Core ML's plan on this Mac (macOS 14.4 or later)."""
    load_engine(quiet)
    from anesurgery.placement.core_ml_runs import SETTINGS
    from anesurgery.placement.core_ml_runs import measure as record
    from anesurgery.placement.target import Target

    out = out or Path(f"{Path(model).stem}_measured.json")
    place = _place(out, overwrite, model)
    settings = [Target.parse(target, units).compute_units for units in compute_units or SETTINGS]
    with waiting("measuring with Core ML", quiet):
        plain = record(model, Target.parse(target), function, settings=settings, runs=runs)
    _write(place, plain)
    failures = (f"not measured: {row['error']}" for row in plain["settings"] if row["error"])
    shown = Group(measured_table(plain), *failures, plain["host"])
    show(plain, shown, False, quiet, [place], then=command("learn", place))


def measured_table(plain: dict[str, Any]) -> Table:
    """What `measure` found, a row for each setting of compute units."""
    table = Table(
        "units", "first load", "later load", "prediction", "eight of ten lie in", "ops on ANE", box=None
    )
    for row in plain["settings"]:
        on = [op["unit"] == "ane" for op in row["ops"] or []]
        share = f"{sum(on)} of {len(on)}" if on else "not said"
        if (timing := row["timing"]) is None:
            table.add_row(row["compute_units"], "-", "-", "-", "-", share)
            continue
        ms = timing["predictions"]
        loads = (f"{timing[name]:.3g} s" for name in ("first_load", "later_load"))
        spread = f"{ms['low']:.3g} to {ms['high']:.3g} ms"
        table.add_row(row["compute_units"], *loads, f"{ms['median']:.3g} ms", spread, share)
    return table


def learn(
    plans: Annotated[list[Path], typer.Argument(help="Files that `measure` wrote.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="The table of rates to write, for inspect --rates.")] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare recorded plans with what was expected, and learn rates from them."""
    load_engine(quiet)
    from anesurgery.placement.rates_from_plans import learn as fit
    from anesurgery.placement.rates_from_plans import read_plan

    place = None if out is None else _place(out, overwrite, plans[0])
    measured = {str(path): read_plan(path) for path in plans}
    learned = fit(measured)
    if place is not None:
        _write(place, learned.corrections.to_json())
    if place is None:
        then = command("learn", *plans, "--out", "rates.json")
    else:
        then = command("see", measured[str(plans[0])].get("model", "MODEL"), "--rates", place)
    show(learned.to_json(), _report(learned), as_json, quiet, [out] if out else [], then=then)


def _place(out: Path, overwrite: bool, source: Any) -> Path:
    from anesurgery.files.writing import check_place

    place = out.expanduser().absolute()
    check_place(place, overwrite, Path(source).expanduser())
    return place


def _write(place: Path, plain: Any) -> None:
    from anesurgery.files import arrays

    arrays.write_text(place, json.dumps(plain, indent=1) + "\n")


def _report(learned: Any) -> Group:
    plans = Table("plan", "expected unit", "expected legality", box=None)
    for name, asked in learned.asked.items():
        legal, of = learned.legal[name]
        plans.add_row(name, f"{learned.agree[name]} of {asked}", f"{legal} of {of}")
    rates = Table("op", "unit", "factor", "off, each left out", "cases", box=None)
    for op, units in learned.corrections.rates.items():
        for unit, c in units.items():
            rates.add_row(op, unit.upper(), f"{c.factor:.3g}", f"{c.off:.3g} times", str(c.cases))
    return Group(plans, rates, *(f"not learned: {why}" for why in learned.skipped))


def calibrate(
    folder: Annotated[Path, typer.Argument(help="Files that `measure` wrote.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The table of times to write.")],
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fit the table of times to your measurements, and show what changed."""
    load_engine(quiet)
    from anesurgery.placement.calibration import calibrate as fit
    from anesurgery.placement.calibration import write_table
    from anesurgery.placement.timing import VARIABLE

    place = _place(out, overwrite, folder)
    calibrated = fit(folder)
    write_table(calibrated.table, place)
    then = f"export {VARIABLE}={shlex.quote(str(place))}"
    show(calibrated.to_json(), Group(*calibrated_tables(calibrated)), as_json, quiet, [out], then=then)


def calibrated_tables(calibrated: Any) -> list[Any]:
    """What `calibrate` added, and how factors and errors changed."""
    rows = Table("added", "chip", "measured", "estimated before", "after", box=None)
    for one in calibrated.added:
        told = ("none" if ms is None else f"{ms:.3g} ms" for ms in (one.before, one.after))
        rows.add_row(one.model, one.chip, f"{one.ms:.3g} ms", *told)
    numbers = Table("", "before", "after", box=None)
    for name, (before, after) in calibrated.numbers.items():
        numbers.add_row(name, "-" if before is None else f"{before:.3g}", f"{after:.3g}")
    return [rows, numbers, *(f"not added: {why}" for why in calibrated.skipped)]
