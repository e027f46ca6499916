"""Fit the table of `inspect`'s times to published measurements, and write the page that shows its errors.

    python tests/benchmarks/latency.py                     # fit to the stored features
    python tests/benchmarks/latency.py --rebuild           # build every model anew first, from its
    configuration python tests/benchmarks/latency.py --rebuild NAME ...  # only these

Rows stand in `time_rows.json`, what each model asks for in `time_features.json`, pairs in
`anesurgery/placement/time_pairs.json`; the fit itself is `time_fit.py`. Building
needs timm, torchvision and transformers (`pip install '.[dev,matrix]'`), 3 GB of memory, and some minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import time_fit as fitting
from latency_page import page

from anesurgery.loading import load
from anesurgery.placement import measured_rows
from anesurgery.placement.calibration import write_table
from anesurgery.placement.target import Target
from anesurgery.placement.timing import TABLE, load_of
from anesurgery.placement.verdicts import choose, judge_shaped

ROOT = Path(__file__).resolve().parents[2]
PAGE, SENT_IN = ROOT / "docs" / "latency.md", ROOT / "docs" / "measurements"


def rebuild(names: Collection[str]) -> None:
    """Build models from their configurations, and store what they ask for on the chips of their rows."""
    from latency_models import MODELS, convert

    stored: dict[str, Any] = json.loads(fitting.FEATURES.read_text(encoding="utf-8"))
    rows = [row for row in fitting.read_json(fitting.ROWS) if fitting.usable(row)]
    for name in dict.fromkeys(row["model"] for row in rows):
        if name not in MODELS or (names and name not in names):
            continue
        with tempfile.TemporaryDirectory() as folder:
            package = Path(folder) / f"{name}.mlpackage"
            convert(name, package)
            for row in rows:
                if row["model"] == name:
                    stored[fitting.key_of(name, row["chip"])] = features(package, row)
        print(name, flush=True)
    lines = (f"{json.dumps(key)}: {json.dumps(stored[key], separators=(',', ':'))}" for key in sorted(stored))
    fitting.FEATURES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def features(package: Path, row: dict[str, Any]) -> dict[str, Any]:
    """What a package asks for on the chip of a row; on the ANE as a whole where the source says that."""
    target = Target.parse(row["chip"])
    judged = judge_shaped(load(package), None, target, ()).judged
    units = ["ane"] * len(judged) if row.get("on") == "ane" else choose(judged, target)[0]
    return measured_rows.load_to(load_of(judged, units))


def main() -> None:
    """Fit, and write the table and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rebuild", nargs="*", metavar="NAME", help="build models anew; all without a name")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    if options.rebuild is not None:
        rebuild(options.rebuild)
    sent_in, skipped = measured_rows.read_folder(SENT_IN) if SENT_IN.is_dir() else ([], [])
    fitted = fitting.fit_all([*fitting.read_rows(), *sent_in])
    write_table(fitted.table, TABLE)
    options.page.write_text(page(fitted, skipped), encoding="utf-8")


if __name__ == "__main__":
    main()
