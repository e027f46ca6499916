"""Apple's Core AI runtime beside the interpreter, op by op: `make conformance-coreai`.

    python tests/conformance/core_ai_judge.py [--sample N] [--draws N] [--page docs/core-ai-agreement.md]

`coreml_on_linux` keeps what coremltools' own tests predict with, and `random_cases` keeps random ops: a folder
for each case, with the model in Core AI's format (in fp32), the inputs, and what the interpreter makes of them
in fp32. A child runs them all with Apple's runtime; after a case that ends the process another child goes on.
`core_ai_agreement` makes the tables and the page.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
SUITES = ("ops",)
"""The suites of coremltools that are run unless others are named: "torch" takes an hour more."""
CASE, WANTED, MODEL = "case.json", "wanted.npz", "model.aimodel"
SECONDS = 60
"""For one case: none takes a tenth of it that ends at all."""
EQUAL = 100.0
"""PSNR in dB that fp32 reaches if only the order of sums differs."""
ENDED = "Apple's package ends the process that writes it"
NOT_WRITTEN, REFUSED, DIED, DIFFERS, AGREES = "not written", "refused", "died", "differs", "agrees"
"""What became of a case: Core AI has no form for it, Apple's runtime refuses it or dies, or it ran."""


@dataclass(frozen=True)
class Verdict:
    """What became of one case."""

    name: str
    """The test of coremltools, or the random op."""
    ops: tuple[str, ...]
    """Op types of the program, but for constants."""
    result: str
    why: str = ""
    psnr: float | None = None
    """In dB; None where nothing was compared, or all is equal."""


def keep(folder: Path, name: str, loaded: Any, values: Mapping[str, Any], function: str | None = None) -> None:
    """Note a case: the model for Apple's runtime, the inputs, and what the interpreter gives in fp32."""
    from anesurgery.coreai.child import ARRAYS, QUESTION, write_arrays
    from anesurgery.coreai.running import cast_inputs
    from anesurgery.coreai.translating import to_coreai
    from anesurgery.errors import SurgeryError
    from anesurgery.interpret import Predictor
    from anesurgery.mil import walk_ops

    place = folder / f"{len(os.listdir(folder)):06d}"
    place.mkdir()
    case = {"name": name, "ops": sorted({op.op_type for op in walk_ops(loaded.program)} - {"const"}), "why": ""}
    try:
        predictor = Predictor(loaded, precision="fp32", function=function)
        values = cast_inputs(loaded, values, function)
        made = predictor(dict(values), state=predictor.make_state() or None)
        write_arrays(
            place / WANTED, {n: np.asarray(v) for n, v in made.items() if not isinstance(v, (str, dict))}
        )
        write_arrays(place / ARRAYS, {f"input:{n}": np.asarray(v) for n, v in values.items()})
    except SurgeryError as error:
        case["why"] = _words(error)
    (place / CASE).write_text(json.dumps(case))
    if case["why"]:
        return
    question = {"task": "run", "path": str(place / MODEL), "function": function}
    (place / QUESTION).write_text(json.dumps(question))
    if (maker := os.fork()) == 0:  # Apple's package may end the process that writes, too
        try:
            to_coreai(loaded, place / MODEL, mode="check")
        except SurgeryError as error:
            (place / CASE).write_text(json.dumps(case | {"why": _words(error)}))
        finally:
            os._exit(0)
    if code := os.waitstatus_to_exitcode(os.waitpid(maker, 0)[1]):
        words = f"{ENDED} ({signal.Signals(-code).name})"
        (place / CASE).write_text(json.dumps(case | {"why": words}))


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def random_cases(folder: Path, draws: int, op_types: list[str] | None = None) -> None:
    """Keep some random programs of each op, on ordinary numbers and on extreme ones."""
    from random_ops import RECIPES, numbers, plain_numbers, promised, sample

    from anesurgery.loading import load
    from anesurgery.mil import Program

    for op_type in op_types or sorted(RECIPES):
        for draw in range(draws):
            for kind in ("ordinary", "extreme"):
                one = sample(op_type, f"{kind}.{draw}")
                rng = random.Random(draw)
                if kind == "ordinary":
                    held = plain_numbers(one, np.random.default_rng(draw))
                else:
                    within = promised(one, rng)
                    held = {var: numbers(operand, within[var], rng) for var, operand in one.operands.items()}
                program = Program()
                program.add_function("main", one.function)
                values = {var.name: value.numpy() for var, value in held.items()}
                keep(folder, f"{kind} {one}", load(program), values)


def run_all(folder: Path) -> dict[int, str]:
    """Run every case that was written; case -> the signal that ended the process."""
    places, dead, at = sorted(p for p in folder.iterdir() if p.is_dir()), dict[int, str](), 0
    while at < len(places):
        command = [sys.executable, str(Path(__file__)), "--child", str(folder), str(at)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
            at = _followed(child, at)
        if at < len(places):
            code = -(child.returncode or 0)
            dead[at] = signal.Signals(code).name if code > 0 else f"exit code {child.returncode}"
            at += 1
    return dead


def _followed(child: subprocess.Popen[str], at: int) -> int:
    """The case at which a child ended; one that takes too long ends it."""
    assert child.stdout is not None
    for line in child.stdout:
        at = int(line)
    return at


def _child(folder: Path, first: int) -> None:
    """Run the cases from one on; say before each which it is, and at the end how many there are."""
    from anesurgery.coreai import child

    places = sorted(p for p in folder.iterdir() if p.is_dir())
    for number, place in enumerate(places[first:], first):
        print(number, flush=True)
        if (place / MODEL).is_dir():
            signal.alarm(SECONDS)
            child.main(place)
            signal.alarm(0)
    print(len(places), flush=True)
    os._exit(0)


def verdicts(folder: Path, dead: Mapping[int, str]) -> Iterator[Verdict]:
    """What became of each case."""
    from anesurgery.coreai.child import ANSWER, ARRAYS, read_arrays

    for number, place in enumerate(sorted(p for p in folder.iterdir() if p.is_dir())):
        case = json.loads((place / CASE).read_text())
        name, ops = case["name"], tuple(case["ops"])
        if case["why"]:
            yield Verdict(name, ops, DIED if case["why"].startswith(ENDED) else NOT_WRITTEN, case["why"])
        elif number in dead:
            yield Verdict(name, ops, DIED, dead[number])
        elif words := json.loads((place / ANSWER).read_text()).get("error"):
            yield Verdict(name, ops, REFUSED, words)
        else:
            found = {
                n.partition(":")[2]: v for n, v in read_arrays(place / ARRAYS).items() if n[:7] == "output:"
            }
            yield compared(name, ops, read_arrays(place / WANTED), found)


def compared(name: str, ops: tuple[str, ...], wanted: Mapping[str, Any], found: Mapping[str, Any]) -> Verdict:
    """Whether outputs are equal, up to the order of sums; NaN and infinities where the interpreter has them."""
    worst, why = np.inf, ""
    for key, one in wanted.items():
        if key not in found:
            return Verdict(name, ops, DIFFERS, f"no output {key}")
        psnr, words = _distance(np.asarray(one, np.float64), np.asarray(found[key], np.float64))
        if psnr < worst:
            worst, why = psnr, f"{key}: {words}"
    if worst >= EQUAL:
        return Verdict(name, ops, AGREES, "", None if np.isinf(worst) else round(worst, 1))
    return Verdict(name, ops, DIFFERS, why, None if np.isinf(worst) else round(worst, 1))


def _distance(wanted: Any, found: Any) -> tuple[float, str]:
    """PSNR in dB, minus infinity where there is none; and the first number that is off."""
    if wanted.shape != found.shape:
        return -np.inf, f"shape {found.shape}, and {wanted.shape} here"
    same = (wanted == found) | (np.isnan(wanted) & np.isnan(found))
    if same.all():
        return np.inf, ""
    off = np.argmax(np.where(same, 0, np.nan_to_num(np.abs(wanted - found), nan=np.inf)))
    words = f"{found.reshape(-1)[off]:g}, and {wanted.reshape(-1)[off]:g} here"
    finite = np.isfinite(wanted) & np.isfinite(found)
    if (~finite & ~same).any():
        return -np.inf, words
    error, scale = np.where(finite, wanted - found, 0), np.abs(np.where(finite, wanted, 0)).max()
    return float(20 * np.log10(max(scale, 1e-30) / np.sqrt(np.mean(error**2)))), words


def main() -> None:
    """Keep the cases, run them, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sample", default="2", help="parameter sets of each test function; 0: all")
    parser.add_argument("--every", default="1", help="of these, every N-th test")
    parser.add_argument("--suites", default=",".join(SUITES))
    parser.add_argument("--draws", type=int, default=2, help="random programs of each op")
    parser.add_argument("--out", type=Path, default=Path("build/conformance-coreai"))
    parser.add_argument("--page", type=Path, default=None, help="write the page, and the numbers it is made of")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        _child(Path(given.child[0]), int(given.child[1]))
    sys.path.insert(0, str(HERE.parent / "support"))
    import core_ai_agreement
    import run

    found, out = dict[str, list[Verdict]](), given.out.absolute()
    for suite in (*filter(None, given.suites.split(",")), "random"):
        folder = out / suite
        folder.mkdir(parents=True, exist_ok=False)
        if suite == "random":
            random_cases(folder, given.draws)
        else:
            options = ["--sample", given.sample, "--every", given.every, "--core-ai", str(folder)]
            run.run_suite(suite, out, options)
        found[suite] = list(verdicts(folder, run_all(folder)))
        rows = "\n".join(json.dumps(asdict(one)) for one in found[suite])
        (out / f"{suite}.verdicts.jsonl").write_text(rows + "\n", encoding="utf-8")
    print(core_ai_agreement.report(found))
    if given.page:
        core_ai_agreement.write(found, given.page)


if __name__ == "__main__":
    main()
