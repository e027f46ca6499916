"""Change the structure of models at random: all that reads them ends well or with an error in words.

As a program: `python tests/fuzz/structural.py --seed 0 --cases 600`; one case again: `--seed 0 --case 17`.
Each case runs in a process of its own, with a limit of processor time and of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import fuzzing
import psutil
from bad_networks import build as network
from structure import mutate

import anesurgery as ane
from anesurgery.errors import SurgeryError
from anesurgery.files.mil_text import WRITTEN_VERSION, write_mil
from anesurgery.files.package import read_spec
from anesurgery.files.protobuf import literal_values, operations, proto

SECONDS = 20
"""Of processor time, for one case."""
MEMORY = 4 << 30
"""Bytes of addresses beside those of the process that starts the cases."""
SPECIFICATION = Path("Data/com.apple.CoreML/model.mlmodel")


def sources(folder: Path) -> list[Path]:
    """Small models of every kind: ML Programs, networks, and pipelines of each."""
    models = fuzzing.models(folder)
    for name, spec in (("networks", pipeline(network(), second())), ("mixed", pipeline(network(), program()))):
        models.append(folder / f"{name}.mlmodel")
        models[-1].write_bytes(spec.SerializeToString())
    return models


def second() -> Any:
    """A network that reads what the first one gives."""
    from one_layer import floats
    from one_layer import network as one_layer

    spec = one_layer(
        lambda b: b.add_activation("twice", "LINEAR", "x", "z", [2.0, 1.0]), floats(3), outputs=("z",)
    )
    for feature in spec.description.input:
        feature.name = "y"
    spec.neuralNetwork.layers[0].input[:] = ["y"]
    return spec


def program() -> Any:
    """An ML Program that reads what the network gives."""
    import numpy as np

    from anesurgery.files.interface import describe, new_spec
    from anesurgery.files.protobuf import to_proto
    from anesurgery.mil import Var, ct, mb

    @mb.program(input_specs=[mb.TensorSpec((3,))], opset_version=ct.target.iOS16)
    def build(y: Var) -> Any:
        return mb.sub(x=mb.mul(x=y, y=np.float32(2)), y=np.float32(1), name="z")

    spec = new_spec(build, 7)
    describe(spec, build)
    spec.mlProgram.CopyFrom(to_proto(build, 7, lambda var: None, None))
    return spec


def pipeline(*models: Any) -> Any:
    spec = proto.Model_pb2.Model(specificationVersion=max(m.specificationVersion for m in models))
    spec.pipeline.models.extend(models)
    spec.pipeline.names.extend(f"part{i}" for i in range(len(models)))
    spec.description.input.extend(models[0].description.input)
    spec.description.output.extend(models[-1].description.output)
    return spec


def place(model: Path) -> Path:
    """Where the specification of a model is."""
    return model / SPECIFICATION if model.is_dir() else model


def mutated(model: Path, folder: Path, rng: random.Random) -> tuple[Path, Any, str]:
    """A copy of a model with another structure, its specification, and what was done to it."""
    target = folder / f"mutated{model.suffix}"
    if model.is_dir():
        shutil.copytree(model, target)
    spec = read_spec(place(model))
    done = mutate(rng, spec)
    place(target).write_bytes(spec.SerializeToString())
    return target, spec, done


def uses(model: Path, spec: Any, folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """What a user does with a model."""

    def run() -> object:
        predictor = ane.Predictor(model)
        return predictor(predictor.sample(0))

    def decompile() -> object:
        compiled = folder / "mutated.mlmodelc"
        compiled.mkdir()
        for op in operations(spec.mlProgram):
            for value in literal_values(op):
                if value.WhichOneof("value") == "blobFileValue":
                    value.blobFileValue.fileName = "@model_path/weights/weight.bin"
        if (model / SPECIFICATION.parent / "weights").is_dir():
            shutil.copytree(model / SPECIFICATION.parent / "weights", compiled / "weights")
        (compiled / "model.mil").write_text(write_mil(spec.mlProgram, WRITTEN_VERSION), encoding="utf-8")
        return ane.decompile(compiled, folder / "decompiled.mlpackage")

    yield "inspect", lambda: str(ane.inspect(model))
    yield "apply", lambda: str(ane.apply(model, "auto", quiet=True))
    yield "run", run
    if spec.WhichOneof("Type") == "mlProgram":
        yield "decompile", decompile
    else:
        yield "upgrade", lambda: ane.upgrade(model)
    yield "split", lambda: ane.split(model, 2).save(folder / "parts")
    yield "draw", lambda: ane.draw(model)


def warm(model: Path) -> None:
    """Import what the uses import, that not every child does."""
    with tempfile.TemporaryDirectory() as folder:
        for _, use in uses(model, read_spec(place(model)), Path(folder)):
            use()


def content(model: Path) -> dict[str, bytes]:
    """The bytes of all files of a model."""
    files = [p for p in model.rglob("*") if p.is_file()] if model.is_dir() else [model]
    return {str(p): p.read_bytes() for p in files}


def attempt(model: Path, folder: Path, rng: random.Random) -> dict[str, Any]:
    """What came of one case: what was done to the model, and the errors that are not ours."""
    target, spec, done = mutated(model, folder, rng)
    before, raw, refused = content(target), [], 0
    for name, use in uses(target, spec, folder):
        try:
            use()
        except SurgeryError:
            refused += 1
        except BaseException as error:
            trace = "".join(traceback.format_exception(error, limit=-6))
            raw.append(f"{name}: {type(error).__name__}: {error}\n{trace}")
    if content(target) != before:
        raw.append("the model was changed")
    return {"done": f"{model.name}: {done}", "raw": raw, "refused": refused}


def in_a_child(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What some work says, done in a child with limits; where it dies, that is what is said."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(read)
            used = psutil.Process().memory_info().vms
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with os.fdopen(write, "w") as pipe:
                json.dump(work(), pipe)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended == 0:
        return dict(json.loads(said))
    how = f"took more than {SECONDS} s" if ended == -signal.SIGXCPU else f"ended with {ended}"
    return {"done": "", "raw": [f"the process {how}"], "refused": 0}


def generator(seed: int, case: int) -> random.Random:
    """The random numbers of a case."""
    return random.Random(f"{seed} {case}")


def run_case(models: list[Path], seed: int, case: int) -> dict[str, Any]:
    """One case; the same seed and number give the same case."""
    rng = generator(seed, case)
    with tempfile.TemporaryDirectory() as folder:
        said = in_a_child(lambda: attempt(models[case % len(models)], Path(folder), rng))
        left = sorted(p.name for p in Path(folder).iterdir() if p.name.startswith(".anesurgery"))
    if left:
        said["raw"].append(f"left behind: {left}")
    return said


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--cases", type=int, default=600)
    options.add_argument("--case", type=int, help="this one only")
    chosen = options.parse_args()
    numbers = range(chosen.first, chosen.first + chosen.cases) if chosen.case is None else [chosen.case]
    failed = refused = 0
    with tempfile.TemporaryDirectory() as folder:
        models = sources(Path(folder))
        warm(models[0])
        for case in numbers:
            said = run_case(models, chosen.seed, case)
            failed, refused = failed + bool(said["raw"]), refused + bool(said["refused"])
            if said["raw"] or chosen.case is not None:
                again = f"python tests/fuzz/structural.py --seed {chosen.seed} --case {case}"
                print(f"case {case} ({said['done']}): {again}", *said["raw"], sep="\n", flush=True)
    print(f"{len(numbers)} cases of seed {chosen.seed}: {refused} refused in words, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
