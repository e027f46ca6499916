"""Run coremltools' own tests on the interpreter, and write the tables: `make conformance`, `make equivalence`.

python tests/conformance/run.py [--sample N] [--suites ops,torch] [--passes all] [--mutate scale]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import report

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Suite:
    """Some of the tests of coremltools."""

    folder: str
    """Inside coremltools."""
    backend: str = "mlprogram"
    """What the tests convert to, where they may choose."""
    options: tuple[str, ...] = ()
    """For pytest."""


OPS, TORCH = "converters/mil/mil/ops/tests", "converters/mil/frontend/torch/test"
NETWORKS = ("neuralnetwork", ("-k", "neuralnetwork"))
SUITES = {
    "ops": Suite(OPS),
    "passes": Suite("converters/mil/mil/passes/tests"),
    "torch": Suite(TORCH),
    "ml_program": Suite("test/ml_program"),
    "neural_network": Suite("test/neural_network", options=("--past-xfail", "-m", "not slow")),
    "network_ops": Suite(OPS, *NETWORKS),
    "network_torch": Suite(TORCH, *NETWORKS),
}
"""By name. "network_...": the tests that may choose, converted to the older format and imported again."""


UNSTABLE_SORTS = "AVX2 AVX512F AVX512_SKX"
"""With these numpy sorts equal numbers in another order than on a Mac, and expected indices come from it."""


def coremltools_folder() -> Path:
    """Where coremltools lies, without importing it."""
    spec = importlib.util.find_spec("coremltools")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def run_suite(name: str, out: Path, options: list[str], only: list[str] | None = None) -> Path:
    """Run one suite in a process of its own; the file with a line for each test."""
    folder, suite = coremltools_folder(), SUITES[name]
    file = out / f"{name}.jsonl"
    file.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
        "PYMIL_TEST_TARGETS": suite.backend,
        "INCLUDE_MIL_FP32_UNIT_TESTS": "1",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "NPY_DISABLE_CPU_FEATURES": UNSTABLE_SORTS,
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "coreml_on_linux",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        f"--rootdir={folder}",
        "--continue-on-collection-errors",
        "--report",
        str(file),
        "-W",
        "ignore",
        *suite.options,
        *options,
        *(only or [suite.folder]),
    ]
    with TemporaryDirectory() as models, (out / f"{name}.log").open("w") as log:
        environment["TMPDIR"] = models
        subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, check=False)
    if not file.exists():
        raise SystemExit(f"{name}: no test ran; see {out / (name + '.log')}")
    return file


MUTATIONS = ("scale", "shift", "negate", "zero")


def run_suites(names: list[str], out: Path, options: list[str]) -> dict[str, list[dict[str, Any]]]:
    """The rows of several suites, two running at a time."""
    out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        files = list(pool.map(lambda name: run_suite(name, out, options), names))
    return {name: report.read(file) for name, file in zip(names, files, strict=True)}


def main() -> None:
    """Run the suites and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sample", default="12", help="parameter sets of each test function; 0: all")
    parser.add_argument("--every", default="1", help="of these, every N-th test")
    parser.add_argument("--suites", default=",".join(SUITES))
    parser.add_argument("--passes", default="", help="rewrite each program too: names of passes, or all")
    parser.add_argument("--mutations", action="store_true", help="spoil outputs of a tenth: how many notice?")
    parser.add_argument("--both-sources", action="store_true", help="run the program in memory too")
    parser.add_argument("--out", type=Path, default=Path("build/conformance"))
    given = parser.parse_args()
    out, names = given.out.absolute(), given.suites.split(",")
    sample = ["--sample", given.sample, "--every", given.every]
    options = [*sample, "--passes", given.passes] + ["--both-sources"] * given.both_sources
    suites = run_suites(names, out, options)
    rows = [row for rows in suites.values() for row in rows]
    tables = [report.table(suites)]
    tables += [report.rewriting_table(rows)] if given.passes else []
    if given.mutations:
        few = ["--sample", given.sample, "--every", str(10 * int(given.every))]
        spoiled = {m: run_suites(names, out / m, [*few, "--mutate", m]) for m in MUTATIONS}
        tables.append(report.mutation_table(suites, spoiled))
    text = "\n\n".join(tables)
    details = f"{report.listing(suites)}\n{report.pass_table(rows)}\n"
    (out / "report.md").write_text(f"{text}\n{details}", encoding="utf-8")
    print(f"{text}\n\nevery test that did not pass: {out / 'report.md'}")


if __name__ == "__main__":
    main()
