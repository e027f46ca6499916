"""The commands `measure`, `learn` and `calibrate`: measure on a Mac, and learn from such files."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from anesurgery.commands.next_steps import command
from anesurgery.commands.options import Model, Overwrite, ending
from anesurgery.commands.subcommand import Call, Outcome, subcommand
from anesurgery.commands.waiting import waiting
from anesurgery.show.report import Table

Record = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", help="The JSON file to write. Default: MODEL_measured.json.", callback=ending(".json")
    ),
]
Mac = Annotated[str | None, typer.Option(help="Chip and OS of this Mac.")]
Units = Annotated[list[str] | None, typer.Option(help="CPU_AND_NE, ALL, ...; repeat. All four by default.")]
Plans = Annotated[list[Path], typer.Argument(help="Files that `measure` wrote.")]
Folder = Annotated[Path, typer.Argument(help="Files that `measure` wrote.")]
Rates = Annotated[
    Path | None,
    typer.Option(help="The table of rates to write (JSON), for inspect --rates.", callback=ending(".json")),
]
Times = Annotated[
    Path, typer.Option("--out", "-o", help="The table of times to write (JSON).", callback=ending(".json"))
]


@subcommand("placement.core_ml_runs:measure", without=("settings",))
def measure(
    call: Call,
    model: Model,
    out: Record = None,
    target: Mac = None,
    compute_units: Units = None,
    overwrite: Overwrite = False,
) -> Outcome:
    """Measure loads, predictions and Core ML's plan on this Mac (macOS 14.4 or later)."""
    from anesurgery.placement.core_ml_runs import SETTINGS
    from anesurgery.placement.target import Target

    place = _place(out or Path(f"{Path(model).stem}_measured.json"), overwrite, model)
    settings = [Target.parse(target, units).compute_units for units in compute_units or SETTINGS]
    with waiting("measuring with Core ML", call.silent):
        plain = call(model, Target.parse(target), settings=settings, progress=lambda words: None)
    _write(place, plain)
    head = ("units", "first load", "later load", "prediction", "eight of ten lie in", "Neural Engine ops")
    failures = (f"not measured: {row['error']}" for row in plain["settings"] if row["error"])
    shown = [Table(head, map(_measured, plain["settings"]), ruled=False), *failures, plain["host"]]
    return Outcome(plain, shown=shown, wrote=[place], then=command("learn", place))


def _measured(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the row about one setting of compute units."""
    on = [op["unit"] == "ane" for op in row["ops"] or []]
    share = f"{sum(on)} of {len(on)}" if on else "not said"
    if (timing := row["timing"]) is None:
        return (row["compute_units"], "-", "-", "-", "-", share)
    ms = timing["predictions"]
    loads = (f"{timing[name]:.3g} s" for name in ("first_load", "later_load"))
    spread = f"{ms['low']:.3g} to {ms['high']:.3g} ms"
    return (row["compute_units"], *loads, f"{ms['median']:.3g} ms", spread, share)


@subcommand()
def learn(plans: Plans, out: Rates = None, overwrite: Overwrite = False) -> Outcome:
    """Compare the plans that `measure` recorded with our estimates, and learn from them."""
    from anesurgery.placement.calibration import learn as fit
    from anesurgery.placement.calibration import read_plan

    place = None if out is None else _place(out, overwrite, plans[0])
    read = {str(path): read_plan(path) for path in plans}
    learned = fit(read)
    if place is not None:
        _write(place, learned.corrections.to_json())
    if place is None:
        then = command("learn", *plans, "--out", "rates.json")
    else:
        then = command("see", read[str(plans[0])].get("model", "MODEL"), "--rates", place)
    return Outcome(learned, shown=_report(learned), wrote=[place], then=then)


def _place(out: Path, overwrite: bool, source: Any) -> Path:
    from anesurgery.files.writing import check_place

    place = out.expanduser().absolute()
    check_place(place, overwrite, Path(source).expanduser())
    return place


def _write(place: Path, plain: Any) -> None:
    from anesurgery.files import arrays

    arrays.write_text(place, json.dumps(plain, indent=1) + "\n")


def _report(learned: Any) -> list[Any]:
    plans = [
        (name, f"{learned.agree[name]} of {asked}", "{} of {}".format(*learned.legal[name]))
        for name, asked in learned.asked.items()
    ]
    rates = [
        (op, unit.upper(), f"{c.factor:.3g}", f"{c.off:.3g} times", c.cases)
        for op, units in learned.corrections.rates.items()
        for unit, c in units.items()
    ]
    return [
        Table(("plan", "expected unit", "expected legality"), plans, ruled=False),
        Table(("op", "unit", "factor", "off, each left out", "cases"), rates, ruled=False),
        *(f"not learned: {why}" for why in learned.skipped),
    ]


@subcommand()
def calibrate(folder: Folder, out: Times, overwrite: Overwrite = False) -> Outcome:
    """Fit our time estimates to your measurements, and show what changed."""
    from anesurgery.placement.calibration import calibrate as fit
    from anesurgery.placement.calibration import write_table
    from anesurgery.placement.timing import VARIABLE

    place = _place(out, overwrite, folder)
    calibrated = fit(folder)
    write_table(calibrated.table, place)
    then = f"export {VARIABLE}={shlex.quote(str(place))}"
    return Outcome(calibrated, shown=_changed(calibrated), wrote=[place], then=then)


def _changed(calibrated: Any) -> list[Any]:
    """Report what `calibrate` added, and how factors and errors changed."""
    times = [[one.ms, one.before, one.after] for one in calibrated.added]
    words = (["none" if ms is None else f"{ms:.3g} ms" for ms in row] for row in times)
    rows = [(one.model, one.chip, *row) for one, row in zip(calibrated.added, words, strict=True)]
    numbers = [
        (name, "-" if before is None else f"{before:.3g}", f"{after:.3g}")
        for name, (before, after) in calibrated.numbers.items()
    ]
    return [
        Table(("added", "chip", "measured", "estimated before", "after"), rows, ruled=False),
        Table(("", "before", "after"), numbers, ruled=False),
        *(f"not added: {why}" for why in calibrated.skipped),
    ]
