"""Work shared out over processes, and over a local cluster of Dask: the results are those of one process."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from children import HUNG
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands import app as cli
from anesurgery.errors import LoadError, SurgeryError
from anesurgery.files import sharing
from anesurgery.files.sharing import Workers, workers
from anesurgery.mil import Program, Var, ct, mb, types

dask = pytest.importorskip("dask")
distributed = pytest.importorskip("dask.distributed", reason="the extra `distributed` is not installed")

RNG = np.random.default_rng(23)
WIDTH = 24
WEIGHTS = [(RNG.standard_normal((WIDTH, WIDTH)) / 4).astype(np.float16) for _ in range(4)]
SAMPLES = [{"x": RNG.standard_normal((8, WIDTH)).astype(np.float16)} for _ in range(8)]


def model(opset: Any = ct.target.iOS18) -> Program:
    """Three products of one input, as of an attention, and one of their sum."""

    @mb.program(input_specs=[mb.TensorSpec((8, WIDTH), dtype=types.fp16)], opset_version=opset)
    def program(x: Var) -> Var:
        q, k, v = (mb.linear(x=x, weight=weight) for weight in WEIGHTS[:3])
        return mb.linear(x=mb.tanh(x=mb.add(x=mb.mul(x=q, y=k), y=v)), weight=WEIGHTS[3], name="y")

    return program


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, and one that is broken."""
    path = tmp_path_factory.mktemp("models")
    for name in ("one", "two"):
        ane.save(ane.load(model()), path / f"{name}.mlpackage")
    (path / "broken.mlpackage").mkdir()
    return path


@pytest.fixture(scope="module")
def package(folder: Path) -> Path:
    return folder / "one.mlpackage"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a scheduler with a worker, a process of its own that computes two things at a time."""
    settings = {"distributed.worker.daemon": True, "distributed.logging.distributed": "error"}
    with dask.config.set(settings):
        options: dict[str, Any] = {"n_workers": 1, "threads_per_worker": 2, "dashboard_address": None}
        with distributed.LocalCluster(processes=True, **options) as cluster:
            yield cluster.scheduler_address


def test_sensitivity_over_a_cluster_is_that_of_one_process(package: Path, address: str) -> None:
    modes, told = ("linear-8", "palettize-4-uniform"), list[tuple[int, int]]()
    whole = ane.sensitivity(package, SAMPLES[:2], modes, smallest=256)
    found = ane.sensitivity(
        package, SAMPLES[:2], modes, smallest=256, scheduler=address, progress=lambda *done: told.append(done)
    )
    assert found.rows == whole.rows
    assert found.source == package
    assert told == [(1, 2), (2, 2)]


def test_ranges_over_a_cluster_are_those_of_one_process(package: Path, address: str) -> None:
    assert ane.ranges(package, SAMPLES, scheduler=address).rows == ane.ranges(package, SAMPLES).rows
    one = ane.ranges(package, SAMPLES[0], scheduler=address)  # fewer sets than workers
    assert one.rows == ane.ranges(package, SAMPLES[0]).rows
    with pytest.raises(SurgeryError, match="take the path of a model"):
        ane.ranges(model(), SAMPLES, scheduler=address)


def test_the_models_of_a_folder(folder: Path, address: str) -> None:
    with distributed.Client(address, set_as_default=False) as client:
        found = ane.inspect_folder(folder, "M1/macOS 15", scheduler=client)
        assert client.status == "running"  # what was given stays open
    alone = ane.inspect_folder(folder, "M1/macOS 15")
    assert found.models == alone.models
    assert list(found.models) == ["broken.mlpackage", "one.mlpackage", "two.mlpackage"]
    assert list(found.refused) == ["broken.mlpackage"]
    assert found.models["one.mlpackage"] == ane.inspect(folder / "one.mlpackage", "M1/macOS 15")
    assert "2 models" not in str(found)
    assert "3 models, 1 refused" in str(found)
    both = [ane.ranges_folder(folder, scheduler=where).to_json() for where in (address, None)]
    assert both[0] == both[1]
    assert both[0]["one.mlpackage"]["ok"] is True


@pytest.mark.slow
def test_the_commands_take_a_folder(folder: Path, address: str, tmp_path: Path) -> None:
    run = CliRunner().invoke
    done = run(cli.app, ["inspect", str(folder), "--target", "M1", "--scheduler", address, "--json"])
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    assert set(content) == {"broken.mlpackage", "one.mlpackage", "two.mlpackage"}
    assert "error" in content["broken.mlpackage"]
    done = run(cli.app, ["ranges", str(folder)])
    assert done.exit_code == 1  # one was refused
    assert "refused: " in done.stdout
    error = run(cli.app, ["inspect", str(folder), "--segments"]).exception
    assert "--segments is for one model" in str(error)
    error = run(cli.app, ["inspect", str(folder / "one.mlpackage"), "--jobs", "2"]).exception
    assert "share out the models of a folder" in str(error)
    with pytest.raises(LoadError, match="holds no model"):
        ane.inspect_folder(tmp_path)


def test_what_cannot_be_shared_out_is_said(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    for given, words in (
        ({"jobs": 0}, "it may be 1 or more"),
        ({"jobs": 2, "scheduler": address}, "give one of them"),
        ({"scheduler": "nonsense://"}, "no scheduler of Dask answers"),
    ):
        with pytest.raises(SurgeryError, match=words), workers(**given):
            pass
    monkeypatch.setattr(sharing, "SCHEDULER_TIMEOUT", 1)
    with pytest.raises(SurgeryError, match="no scheduler of Dask answers at"), workers(scheduler="127.0.0.1:9"):
        pass
    here = sharing._versions_and_processor()
    monkeypatch.setattr(sharing, "_versions_and_processor", lambda: ({**here[0], "torch": "0"}, here[1]))
    with distributed.Client(address, set_as_default=False) as client:
        monkeypatch.setattr(client, "run", lambda _: {"tcp://a": here})
        with pytest.raises(SurgeryError, match="the worker tcp://a has .*; install the same"):
            sharing._worker_slots(client)
        monkeypatch.setattr(client, "nthreads", lambda: {})
        with pytest.raises(SurgeryError, match="has no workers"):
            sharing._worker_slots(client)


def test_results_come_in_their_order() -> None:
    told = list[int]()
    with workers() as those:
        assert those.each(math.sqrt, [(4.0,), (9.0,)], told.append) == [2.0, 3.0]
        assert told == [1, 2]
        with pytest.raises(ValueError, match="math domain error"):
            those.submit(math.sqrt, -1.0)


def test_a_process_that_ended_is_said() -> None:
    """What a pool says of it is no word that helps."""

    with workers(2) as pool:
        first = pool.submit(os._exit, 1)
        with pytest.raises(SurgeryError, match="not enough memory"):
            sharing.result(first)
        with pytest.raises(SurgeryError, match="not enough memory"):
            pool.submit(math.sqrt, 4.0)
    assert Workers().count == 1


PROCESSES = """
import math, os, sys
from anesurgery.files.sharing import workers
if __name__ == "__main__":
    with workers(2) as those:
        print(those.each(math.sqrt, [(4.0,), (9.0,), (16.0,)]), flush=True)
        sys.stdin.read()
"""


@pytest.mark.slow
def test_processes_end_with_what_started_them(tmp_path: Path) -> None:
    """The wrong version leaves workers behind that wait for ever."""
    (tmp_path / "script.py").write_text(PROCESSES)
    one = subprocess.Popen(
        [sys.executable, tmp_path / "script.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(ane.__file__).resolve().parents[1])},
    )
    assert one.stdout is not None
    assert one.stdout.readline() == "[2.0, 3.0, 4.0]\n"
    below = psutil.Process(one.pid).children(recursive=True)
    assert below
    one.send_signal(signal.SIGKILL)
    one.communicate()
    _, left = psutil.wait_procs(below, timeout=HUNG)
    assert not left


FORMS: dict[str, dict[str, Any]] = {
    "speed": {"bits": 4, "target": "M5"},
    "size": {"bits": 3, "for_": "size"},
    "mixed": {"bits": 4, "for_": "size", "mixed": True},
}


def written(package: Path, place: Path, **options: Any) -> bytes:
    """The bytes of the weights of a compressed package."""
    compression = ane.compress(package, inputs=SAMPLES, smallest=100, **options)
    return next(compression.save(place, overwrite=True).rglob("weight.bin")).read_bytes()


@pytest.mark.one_of(3)
@pytest.mark.parametrize("form", FORMS)
def test_compression_over_a_cluster_has_the_bytes_of_one_process(
    package: Path, address: str, tmp_path: Path, form: str
) -> None:
    """The wrong version corrects a weight for inputs that others, not compressed yet, have made."""
    whole = written(package, tmp_path / "whole.mlpackage", **FORMS[form])
    options = {"scheduler": address, "work": tmp_path / "work"}
    assert written(package, tmp_path / "shared.mlpackage", **options, **FORMS[form]) == whole
    assert len(list((tmp_path / "work").glob("*.npz"))) >= 4
    assert written(package, tmp_path / "again.mlpackage", work=tmp_path / "work", **FORMS[form]) == whole


class Late:
    """Workers that compute nothing before a result is asked for, and count what waits."""

    def __init__(self) -> None:
        self.waiting = self.most = 0

    def submit(self, function: Any, *rest: Any) -> Any:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        return self.Due(self, lambda: sharing._run_with_threads(*(function, *rest)[1:]))

    class Due:
        def __init__(self, owner: Late, compute: Any) -> None:
            self.owner, self.compute = owner, compute

        def result(self) -> Any:
            self.owner.waiting -= 1
            return self.compute()


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 5])
def test_weights_with_the_same_inputs_are_worked_on_together(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Queries, keys and values: all three at once, and the last, which reads what they make, by itself."""
    from contextlib import contextmanager

    late = Late()

    @contextmanager
    def several(*_: Any) -> Iterator[Workers]:
        yield Workers(late, count)  # type: ignore[arg-type]

    whole = written(package, tmp_path / "whole.mlpackage", bits=4, target="M5")
    monkeypatch.setattr("anesurgery.compressing.compression.workers", several)
    assert written(package, tmp_path / "shared.mlpackage", bits=4, target="M5") == whole
    assert late.most == min(count, 3)


@pytest.mark.slow
def test_processes_give_the_bytes_of_one(package: Path, tmp_path: Path) -> None:
    for form, options in FORMS.items():
        whole = written(package, tmp_path / f"{form}.mlpackage", **options)
        assert written(package, tmp_path / f"{form}_shared.mlpackage", jobs=2, **options) == whole
