"""Run coremltools' own tests on the interpreter, and write the tables: `make conformance`, `make equivalence`.

python tests/conformance/run.py [--sample N] [--suites ops,torch] [--passes all] [--mutate scale]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import report

HERE = Path(__file__).parent
SUITES = {
    "ops": "converters/mil/mil/ops/tests",
    "passes": "converters/mil/mil/passes/tests",
    "torch": "converters/mil/frontend/torch/test",
    "ml_program": "test/ml_program",
}
"""Name -> folder inside coremltools."""


def coremltools_folder() -> Path:
    """Where coremltools lies, without importing it."""
    spec = importlib.util.find_spec("coremltools")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def run_suite(name: str, out: Path, options: list[str], only: list[str] | None = None) -> Path:
    """Run one suite in a process of its own; the file with a line for each test."""
    folder = coremltools_folder()
    file = out / f"{name}.jsonl"
    file.unlink(missing_ok=True)
    environment = {
        **os.environ, "PYTHONPATH": str(HERE), "PYMIL_TEST_TARGETS": "mlprogram",
        "INCLUDE_MIL_FP32_UNIT_TESTS": "1", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "coreml_on_linux", "-p", "no:cacheprovider",
        "-c", os.devnull,
        f"--rootdir={folder}", "--continue-on-collection-errors", "--report", str(file), "-W", "ignore",
        *options, *(only or [SUITES[name]]),
    ]  # fmt: skip
    with (out / f"{name}.log").open("w") as log:
        subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, check=False)
    if not file.exists():
        raise SystemExit(f"{name}: no test ran; see {out / (name + '.log')}")
    return file


def main() -> None:
    """Run the suites, print the tables, fail when a test of ours failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--sample", type=int, default=12, help="parameter sets of each test function; 0: all"
    )
    parser.add_argument("--suites", default=",".join(SUITES))
    parser.add_argument(
        "--passes", default="", help="rewrite each program too: names of passes, or all"
    )
    parser.add_argument(
        "--mutate", default="", help="spoil the outputs: scale, shift, negate, zero"
    )
    parser.add_argument("--both-sources", action="store_true", help="run the program in memory too")
    parser.add_argument("--out", type=Path, default=Path("build/conformance"))
    given = parser.parse_args()
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    options = ["--sample", str(given.sample), "--mutate", given.mutate, "--passes", given.passes]
    options += ["--both-sources"] if given.both_sources else []
    suites = {name: report.read(run_suite(name, out, options)) for name in given.suites.split(",")}
    table = report.table(suites)
    if given.passes:
        rows = [row for rows in suites.values() for row in rows]
        table += "\n\n" + report.rewriting_table(rows)
    passes = report.pass_table([row for rows in suites.values() for row in rows])
    (out / "report.md").write_text(
        f"{table}\n{report.listing(suites)}\n{passes}\n", encoding="utf-8"
    )
    print(table, f"\nevery test that did not pass: {out / 'report.md'}")


if __name__ == "__main__":
    main()
