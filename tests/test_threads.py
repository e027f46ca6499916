"""Several threads at once: the same results as one by one, and every door to coremltools' builder waits."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bad_networks import build

import anesurgery as ane
from anesurgery import mil
from anesurgery.files.package import save
from anesurgery.interpret import Predictor
from anesurgery.loading import clone, load
from anesurgery.placement.inspector import inspect
from anesurgery.registry import make_pass
from anesurgery.rewriting.host import pass_pipeline
from anesurgery.surgery import apply
from anesurgery.text import to_text

THREADS, ROUNDS = 8, 5
EDITED = ("causal_mask_tensor", "pad_last_axis", "negate_subtract")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four models: the examples of three passes, and a network of the older format."""
    folder = tmp_path_factory.mktemp("models")
    found = {
        name: save(load(import_module(f"anesurgery.passes.{name}").example()), folder / f"{name}.mlpackage")
        for name in EDITED
    }
    found["network"] = folder / "network.mlmodel"
    found["network"].write_bytes(build().SerializeToString())
    return found


def operated(path: Path) -> str:
    """What `apply` says and makes: text, numbers of ops and edits, the numbers of its proof."""
    if path.suffix == ".mlmodel":
        network = apply(path, "neuralnetwork_ane", prove="both", quiet=True)
        return repr((network.after, len(network.changes), network.proof))
    surgery = apply(path, path.stem, prove="model", quiet=True)  # a mask ends where scores exceed its fill
    return repr((to_text(surgery.program), surgery.after, len(surgery.changes), surgery.proof))


def inspected(path: Path) -> str:
    return repr(inspect(path, "M1").to_json())


def computed(path: Path) -> str:
    predictor = Predictor(path)
    return repr({k: np.asarray(v).tolist() for k, v in predictor(predictor.sample()).items()})


def upgraded(path: Path) -> str:
    return to_text(load(ane.upgrade(path)).program)


@pytest.mark.one_of(4)
@pytest.mark.parametrize("use", [operated, inspected, computed, upgraded])
def test_eight_threads_give_what_one_gives(use: Callable[[Path], str], models: dict[str, Path]) -> None:
    expected = {path: use(path) for path in models.values()}
    work = [path for k in range(ROUNDS) for path in [*expected][k % 4 :] + [*expected][: k % 4]]
    start = threading.Barrier(THREADS)
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(THREADS, initializer=start.wait) as pool:
            made = list(pool.map(lambda path: (path, use(path)), work))
    finally:
        sys.setswitchinterval(switching)
    assert not [path.name for path, result in made if result != expected[path]]


def test_one_predictor_is_called_by_eight_threads(models: dict[str, Path]) -> None:
    predictor = Predictor(models["network"])
    samples = [predictor.sample(seed) for seed in range(THREADS)]
    expected = [predictor(values) for values in samples]
    with ThreadPoolExecutor(THREADS) as pool:
        made = list(pool.map(predictor, samples))
    for one, other in zip(expected, made, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)


DOORS: dict[str, Callable[[dict[str, Path]], Any]] = {
    "apply": lambda m: apply(m["negate_subtract"], "negate_subtract", quiet=True),
    "apply to layers": lambda m: apply(m["network"], "neuralnetwork_ane", quiet=True),
    "inspect": lambda m: inspect(m["negate_subtract"]),
    "inspect layers": lambda m: inspect(m["network"]),
    "load": lambda m: load(m["negate_subtract"]),
    "load a network": lambda m: load(m["network"]),
    "clone": lambda m: clone(load(m["negate_subtract"])),
    "run": lambda m: Predictor(m["network"]),
    "upgrade": lambda m: ane.upgrade(m["network"]),
    "pass pipeline": lambda m: pass_pipeline([make_pass("negate_subtract")]),
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("door", DOORS)
def test_every_door_waits_for_the_lock(door: str, models: dict[str, Path]) -> None:
    DOORS[door](models)  # imports are done
    thread = threading.Thread(target=DOORS[door], args=(models,))
    with mil.HOST:
        thread.start()
        thread.join(0.3)
        waits = thread.is_alive()
    thread.join(60)
    assert waits
    assert not thread.is_alive()


def test_silence_ends_with_the_last_thread() -> None:
    import warnings

    before = list(warnings.filters)
    first, second = mil.quiet_host(), mil.quiet_host()
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert warnings.filters[0][0] == "ignore"
    second.__exit__()
    assert list(warnings.filters) == before


@pytest.mark.slow
def test_threads_may_be_the_first_to_import(models: dict[str, Path]) -> None:
    """Nothing is imported yet: modules that load each other must not be seen half made."""
    script = (
        "import sys, threading, anesurgery as ane\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        f"paths = {[str(p) for p in models.values()]!r}\n"
        "layers = lambda p: 'neuralnetwork_ane' if p.endswith('.mlmodel') else 'negate_subtract'\n"
        "uses = [lambda p: ane.apply(p, layers(p), quiet=True), ane.inspect, ane.load, ane.Predictor]\n"
        "def use(k):\n"
        "    return 1 if uses[k % 4](paths[k // 2]) is not None else 0\n"
        "with ThreadPoolExecutor(8) as pool:\n"
        "    print(sum(pool.map(use, range(8))))\n"
    )
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (made.returncode, made.stdout.strip()) == (0, "8"), made.stderr
