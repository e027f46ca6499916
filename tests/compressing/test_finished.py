"""A compression that is killed goes on where it was, and ends with the same bytes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.compressing import compression, finished
from anesurgery.errors import SurgeryError
from anesurgery.files.sharing import Workers
from anesurgery.mil import Program, Var, ct, mb, types

RNG = np.random.default_rng(17)
WEIGHTS = [(RNG.standard_normal((24, 24)) / 5).astype(np.float16) for _ in range(3)]
SAMPLES = [{"x": RNG.standard_normal((8, 24)).astype(np.float16)} for _ in range(8)]
FORMS: dict[str, dict[str, Any]] = {
    "int4": {"bits": 4, "target": "M5"},
    "int8": {"bits": 8},
    "palette": {"bits": 3, "for_": "size", "mixed": False},
    "mixed": {"bits": 4, "for_": "size", "mixed": True},
    "inputs": {"bits": 8, "target": "A17", "activations": "max"},
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    @mb.program(input_specs=[mb.TensorSpec((8, 24), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        for weight in WEIGHTS:
            x = mb.relu(x=mb.linear(x=x, weight=weight))
        return mb.identity(x=x, name="y")

    made: Program = program
    return ane.save(ane.load(made), tmp_path_factory.mktemp("finished") / "three.mlpackage")


def compressed(package: Path, out: Path, work: Path | None, form: str) -> list[bytes]:
    found = ane.compress(package, inputs=SAMPLES, smallest=100, work=work, **FORMS[form])
    path = found.save(out, overwrite=True)
    return [p.read_bytes() for p in sorted(path.rglob("*")) if p.suffix in (".mlmodel", ".bin")]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The forms that weights are really corrected to."""
    calls: list[str] = []
    original = vars(finished)["correct"]

    def correct(one: Any, kind: str, *rest: Any) -> Any:
        calls.append(kind)
        return original(one, kind, *rest)

    monkeypatch.setattr(finished, "correct", correct)
    return calls


def killed(package: Path, out: Path, work: Path, form: str, after: int) -> None:
    """A child that dies as soon as so many weights are finished."""
    child = os.fork()
    if not child:
        count, write = [0], vars(finished)["write_atomically"]

        def dies(*given: Any, **named: Any) -> Path:
            made: Path = write(*given, **named)
            count[0] += 1
            if count[0] == after:
                os.kill(os.getpid(), signal.SIGKILL)
            return made

        vars(finished)["write_atomically"] = dies
        try:
            compressed(package, out, work, form)
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.one_of(5)
@pytest.mark.parametrize("form", FORMS)
def test_a_killed_run_goes_on(
    package: Path, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong version begins anew, or takes a weight that was finished for other inputs."""
    calls, work = counted(monkeypatch), tmp_path / "work"
    whole = compressed(package, tmp_path / "whole.mlpackage", None, form)
    all_of_them = len(calls)
    killed(package, tmp_path / "out.mlpackage", work, form, after=2)
    assert len(list(work.glob("*.npz"))) == 2
    assert not (tmp_path / "out.mlpackage").exists()
    calls.clear()
    assert compressed(package, tmp_path / "out.mlpackage", work, form) == whole
    assert len(calls) == all_of_them - 2
    calls.clear()
    assert compressed(package, tmp_path / "out.mlpackage", work, form) == whole
    assert not calls


@contextmanager
def _threads(*_: Any) -> Iterator[Workers]:
    """Workers that get and give plain data, without processes, which take seconds to begin."""
    with ThreadPoolExecutor(2) as pool:
        yield Workers(pool, 2)


def test_a_killed_run_with_workers_goes_on(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong version keeps what a worker has not finished, or other bytes than one process."""
    whole, work = compressed(package, tmp_path / "whole.mlpackage", None, "int4"), tmp_path / "work"
    monkeypatch.setattr(compression, "workers", _threads)
    killed(package, tmp_path / "out.mlpackage", work, "int4", after=2)
    assert len(list(work.glob("*.npz"))) == 2
    assert compressed(package, tmp_path / "out.mlpackage", work, "int4") == whole
    monkeypatch.undo()
    calls = counted(monkeypatch)
    assert compressed(package, tmp_path / "out.mlpackage", work, "int4") == whole
    assert not calls


RUN = """
import sys
import numpy as np
import anesurgery as ane
if __name__ == "__main__":
    with np.load(sys.argv[2]) as file:
        samples = [{"x": x} for x in file["x"]]
    options = {"for_": "size", "smallest": 100, "work": sys.argv[3], "jobs": int(sys.argv[5])}
    ane.compress(sys.argv[1], 3, inputs=samples, **options).save(sys.argv[4], overwrite=True)
"""


@pytest.mark.slow
def test_ten_kills_at_any_time_with_workers(package: Path, tmp_path: Path) -> None:
    """The times are drawn, the result is one: the bytes of a run that nobody killed."""
    np.savez(tmp_path / "samples.npz", x=np.stack([values["x"] for values in SAMPLES]))
    (tmp_path / "run.py").write_text(RUN)
    out, rng = tmp_path / "out.mlpackage", np.random.default_rng()

    def begun(work: str, jobs: int) -> subprocess.Popen[bytes]:
        given = [package, tmp_path / "samples.npz", tmp_path / work, out, jobs]
        environment = {**os.environ, "PYTHONPATH": str(Path(ane.__file__).resolve().parents[1])}
        return subprocess.Popen([sys.executable, tmp_path / "run.py", *map(str, given)], env=environment)

    def stored() -> list[bytes]:
        return [p.read_bytes() for p in sorted(out.rglob("*")) if p.suffix in (".mlmodel", ".bin")]

    assert begun("alone", 1).wait() == 0
    whole = stored()
    shutil.rmtree(out)
    kills = 0
    while kills < 10:
        one = begun("work", 2)
        try:
            assert one.wait(rng.uniform(2.0, 20.0)) == 0
            assert stored() == whole
            shutil.rmtree(out)
            shutil.rmtree(tmp_path / "work")
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()
            kills += 1
    assert begun("work", 2).wait() == 0
    assert stored() == whole


@pytest.mark.slow
def test_other_settings_take_nothing_from_the_folder(package: Path, tmp_path: Path) -> None:
    """The wrong version names a weight by its name alone."""
    for form in FORMS:
        plain = compressed(package, tmp_path / f"{form}_plain.mlpackage", None, form)
        assert compressed(package, tmp_path / f"{form}.mlpackage", tmp_path / "work", form) == plain


def test_a_broken_file_is_made_again(package: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    whole = compressed(package, tmp_path / "out.mlpackage", work, "int4")
    first, second, third = sorted(work.glob("*.npz"))
    first.write_bytes(first.read_bytes()[:100])
    second.write_bytes(b"")
    np.savez(third, other=np.zeros(3))
    assert compressed(package, tmp_path / "out.mlpackage", work, "int4") == whole


def test_a_file_in_the_place_of_the_folder_is_an_error(package: Path, tmp_path: Path) -> None:
    (tmp_path / "work").write_text("text")
    with pytest.raises(SurgeryError, match="cannot hold the finished weights"):
        compressed(package, tmp_path / "out.mlpackage", tmp_path / "work", "int4")
