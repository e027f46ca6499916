"""Whole models to Core AI and back: `make round-trips-coreai`.

    python tests/conformance/core_ai_whole_models.py [--corpus FOLDER] [--architectures N] [NAME ...]

The models are published packages, the examples, and architectures of Transformers with random weights.
Each becomes an `.aimodel` and an ML Program again, in a process of its own. Two comparisons in fp32: the
program that comes back with the one that was given, bit for bit; and Apple's runtime with the interpreter.
Places of the largest number are compared by the numbers: two that nearly tie may change places.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "support"), str(HERE.parent / "benchmarks")]

CORPUS = HERE.parents[1].parent / "shared" / "corpus"
SECONDS = 900
"""For one model."""
ENOUGH = 60.0
"""PSNR in dB that Apple's runtime and the interpreter must have."""
UNRANKED = ("cast", "reshape", "squeeze", "expand_dims", "transpose", "mul", "add")
"""What may stand between a place of the largest number and an output."""
SUFFIXES = (".mlpackage", ".mlmodel", ".mlmodelc")


def sources(corpus: Path, architectures: int) -> list[str]:
    """The models, as `kind:name`."""
    from families import ARCHITECTURES

    from anesurgery.examples.example_models import EXAMPLES

    folders = [corpus, corpus / "graphs"]
    files = [f for d in folders if d.is_dir() for f in sorted(d.iterdir()) if f.suffix in SUFFIXES]
    step = max(len(ARCHITECTURES) // architectures, 1) if architectures else 0
    rows = list(ARCHITECTURES)[::step][:architectures] if step else []
    return [
        *(f"file:{f}" for f in files),
        *(f"example:{n}" for n in EXAMPLES),
        *(f"architecture:{n}" for n in rows),
    ]


def model_of(source: str, folder: Path) -> tuple[Any, dict[str, Any] | None]:
    """A model, and inputs if its maker has some."""
    import anesurgery as ane
    from anesurgery.examples.example_models import EXAMPLES

    kind, _, name = source.partition(":")
    if kind == "architecture":
        import matrix
        from families import ARCHITECTURES

        from anesurgery import frontend

        kernels = matrix.torchvision_without_kernels()
        frontend.register()
        frontend.register_experts()
        row = ARCHITECTURES[name]
        made = matrix.converted(row, row.module(), "trace", "FLOAT32")
        del kernels
        loaded = ane.load(made)
        names = list(loaded.program.functions["main"].inputs)
        return loaded, dict(zip(names, row.inputs().values(), strict=True))
    path = Path(name) if kind == "file" else ane.example(name, folder / f"example{EXAMPLES[name].suffix}")
    if (filler := path.parent / "fill_weights.py").exists():
        subprocess.run([sys.executable, str(filler), str(path), str(folder / path.name)], check=True)
        path = folder / path.name
    if path.suffix == ".mlmodel":
        return ane.upgrade(path), None
    return ane.load(path), None


def by_logits(model: Any) -> Any:
    """A model whose outputs are the numbers that it ranks, where it returned their places."""
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

    import anesurgery as ane

    program = ane.load(model).program
    ranked = {name: [_ranked(v) for v in f.outputs] for name, f in program.functions.items()}
    if all(ends == list(program.functions[name].outputs) for name, ends in ranked.items()):
        return model
    for name, ends in ranked.items():
        program.functions[name].set_outputs(ends)
    PASS_REGISTRY["common::dead_code_elimination"](program)
    return program


def _ranked(output: Any) -> Any:
    """The value that an output ranks, also where its places are cast, moved or scaled; else the output."""
    from anesurgery.mil import is_stored, operands

    op = output.op
    while op is not None and op.op_type not in ("reduce_argmax", "reduce_argmin"):
        computed = [v for _, v in operands(op) if not is_stored(v)]
        op = computed[0].op if op.op_type in UNRANKED and len(computed) == 1 else None
    return output if op is None else op.x


def check(source: str) -> dict[str, Any]:
    """One model both ways, and through Apple's runtime."""
    import anesurgery as ane
    from anesurgery.interpret import Predictor

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model, values = model_of(source, folder)
        model = by_logits(model)
        made = ane.to_coreai(model, folder / "model.aimodel")
        before = ane.save(ane.load(model), folder / "before.mlpackage")
        after = ane.save(ane.load(made.path), folder / "after.mlpackage")
        found: dict[str, Any] = {"lost": list(made.lost), "functions": {}}
        for function in made.functions:
            old, new = (Predictor(p, precision="fp32", function=function) for p in (before, after))
            given = values or {k: np.asarray(v) for k, v in old.sample(0).items()}
            found["functions"][function] = _compared(old, new, before, given, function)
        return found


def _compared(old: Any, new: Any, before: Path, given: dict[str, Any], function: str) -> dict[str, Any]:
    import anesurgery as ane

    results = []
    for predictor in (old, new):
        state = predictor.make_state() or None
        outputs = {k: v for k, v in predictor(given, state=state).items() if not isinstance(v, (str, dict))}
        results.append(outputs | {n: box.value.numpy() for n, box in (state or {}).items()})
    first, second = ({k: np.asarray(v) for k, v in one.items()} for one in results)
    off = [
        f"{k}: {_distance(v, second[k])}" if k in second else f"{k} is missing"
        for k, v in first.items()
        if k not in second or not np.array_equal(v, second[k], equal_nan=v.dtype.kind == "f")
    ]
    try:
        apples = ane.run(before, given, engine="coreai", function=function)
        psnr = min((_psnr(first[k], v) for k, v in apples.items() if k in first), default=0.0)
        said = f"{psnr:.0f} dB"
    except Exception as error:
        psnr, said = 0.0, " ".join(str(error).split())[:200]
    finite = all(np.isfinite(v).any() for v in first.values() if v.dtype.kind == "f")
    return {"off": off, "apple": said, "agrees": psnr >= ENOUGH, "finite": finite}


def _psnr(wanted: Any, found: Any) -> float:
    from anesurgery.checking.output_comparison import compare_arrays

    return compare_arrays("output", wanted, np.asarray(found).reshape(wanted.shape)).psnr


def _distance(wanted: Any, found: Any) -> str:
    same = wanted.shape == found.shape
    return f"{_psnr(wanted, found):.0f} dB" if same else f"{wanted.shape} became {found.shape}"


def measured(source: str) -> dict[str, Any]:
    """The same in a child process, with the seconds that it took."""
    started = time.time()
    command = [sys.executable, str(Path(__file__)), "--child", source]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=dict(os.environ))
        last = (done.stdout.strip().splitlines() or [""])[-1]
        row = json.loads(last) if last.startswith("{") else {"error": f"it ended with {done.returncode}"}
    except subprocess.TimeoutExpired:
        row = {"error": f"it took more than {SECONDS} s"}
    return {"source": source, "seconds": round(time.time() - started), **row}


def verdict(row: dict[str, Any]) -> str:
    """In a word: how far the model came."""
    if row.get("error"):
        return "refused"
    if not all(one["finite"] for one in row["functions"].values()):
        return "no numbers"
    if any(one["off"] for one in row["functions"].values()):
        return "differs"
    return "agrees" if all(one["agrees"] for one in row["functions"].values()) else "same bits"


def main() -> None:
    """Print a line for each model, and how many there are of each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names; all models by default")
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    parser.add_argument("--architectures", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("build/round-trips-coreai.jsonl"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        try:
            found = check(given.child)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
        print(json.dumps(found), flush=True)
        os._exit(0)
    counts = Counter[tuple[str, str]]()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("w", encoding="utf-8") as file:
        for source in sources(given.corpus, given.architectures):
            if given.names and not any(part in source for part in given.names):
                continue
            row = measured(source)
            counts[source.partition(":")[0], verdict(row)] += 1
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(verdict(row), json.dumps(row), flush=True)
    for (kind, word), count in sorted(counts.items()):
        print(f"{kind}: {count} {word}")


if __name__ == "__main__":
    main()
