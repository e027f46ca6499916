"""A pytest plug-in that runs coremltools' own tests off a Mac: `MLModel.predict` answers from the interpreter.

Load it with `-p coreml_on_linux`, before anything imports coremltools: it offers the extension module
`coremltools.libcoremlpython`, which is missing off a Mac, and tells coremltools that this is one.

Options:

* `--sample N`: at most N parameter sets of each test function, evenly spread (0: all).
* `--every N`: of what is left, every N-th test.
* `--report FILE`: one JSON line per test: outcome, reason, largest error of its comparisons.
* `--both-sources`: run the program in memory too; it must agree bit for bit with the saved package.
* `--mutate scale|shift|negate|zero`: spoil every output, to see how many tests notice.
* `--passes NAME,...`: rewrite each program too, and compare (see `rewritten.py`).
* `--passes-every N`: only of every N-th test that runs.
* `--passes-stride N`: of what one test builds, the first twenty and then every N-th.
* `--core-ai FOLDER`: keep the first prediction of each model for Apple's runtime (see `core_ai_judge.py`).
* `--past-xfail`: go on where a test calls `pytest.xfail`, and note how it ends: most of them are about Macs.

ML Programs and neural networks predict, alone or in a pipeline; models of other kinds load, and refuse.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import shutil
import sys
import tempfile
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparing import RECORD, noted, recorded, same_numbers
from networks import for_sequences

MACOS = (15, 5)
SPECIFICATION = 9
"""The newest specification version that such a system reads."""


REWRITING = pytest.StashKey[Any]()
"""The passes to try."""
REWRITTEN = pytest.StashKey[set[Any]]()
"""The tests whose programs they are tried on."""

MUTATIONS: dict[str, Any] = {
    "scale": lambda a: a * 1.01,
    "shift": lambda a: np.roll(a.reshape(-1), 1).reshape(a.shape),
    "negate": lambda a: -a,
    "zero": np.zeros_like,
}


def _narrow(value: Any) -> Any:
    """An input as the binding hands it over: it knows int32, float32 and float64 arrays."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind in "iub":
        return value.astype(np.int32)
    return value


def _fits(value: Any, feature: Any) -> Any:
    """Core ML takes whole numbers in a float array for an integer input."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        kind = feature.type.multiArrayType
        if kind.ArrayDataType.Name(kind.dataType).startswith("INT"):
            return value.astype(np.int32)
    return value


def _out(value: Any) -> Any:
    """An output as the binding hands it over: half floats as floats, a scalar as one element."""
    if not isinstance(value, (np.ndarray, np.generic)):
        return value
    array = np.asarray(value)
    array = array.astype(np.float32) if array.dtype.kind == "f" else array.astype(np.int32)
    return array.reshape(1) if array.ndim == 0 else array


class State:
    """The states of a model, as `MLState` wants them."""

    def __init__(self, boxes: Any) -> None:
        self.boxes = boxes

    def read_state(self, name: str) -> Any:
        """A copy of a state's value."""
        if name not in self.boxes:
            raise RuntimeError(f"no state is named {name!r}")
        return self.boxes[name].value.numpy().copy()

    def write_state(self, name: str, value: Any) -> None:
        """Replace a state's value."""
        import torch

        if name not in self.boxes or tuple(value.shape) != tuple(self.boxes[name].value.shape):
            raise RuntimeError(f"no state {name!r} of shape {tuple(value.shape)}")
        self.boxes[name].value = torch.from_numpy(np.array(value, np.float32))


class Model:
    """What coremltools calls `_MLModelProxy`: a model, ready to predict."""

    def __init__(self, path: Any, units: str, function: str, hints: Any, asset: Any) -> None:
        from anesurgery.errors import SurgeryError
        from anesurgery.files.package import PIPELINES, PROGRAM, locate, read_spec
        from anesurgery.interpret import Predictor
        from anesurgery.neuralnetwork.spec import NETWORKS

        path = Path(path) if asset is None else asset.path
        source = path / "model.mlpackage" if path.suffix == ".mlmodelc" else path
        self.rewritten = self.kept = False  # once is enough, however often it predicts
        self.function = function or None
        self.predictor: Any = None
        self.kind = ""
        try:
            self.spec = read_spec(locate(source)[0])
            self.kind = str(self.spec.WhichOneof("Type"))
            self.refused = f"a {self.kind} has no layers and no ops to run"
            if self.kind in (PROGRAM, *PIPELINES, *NETWORKS):
                self.predictor = Predictor(str(source), precision="fp16", function=function or None)
        except SurgeryError as error:
            self.refused = str(error)
            if self.kind not in NETWORKS:  # a network may be built for the arrays of a call
                raise RuntimeError(self.refused) from error
        described = self.spec.description.input if self.predictor is None else self.predictor.inputs
        self.features = {f.name: f for f in described}
        RECORD.stored = _stored_dtype(self.predictor) if self.predictor else ""

    @staticmethod
    def maximum_supported_specification_version() -> int:
        """Newer models are not loaded."""
        return SPECIFICATION

    @staticmethod
    def auto_set_specification_version(spec: bytes) -> bytes:
        """Left as it is."""
        return spec

    @staticmethod
    def compileModel(path: str) -> str:  # noqa: N802 - the name in the binding
        """A "compiled" model: a folder that holds the package."""
        folder = Path(tempfile.mkdtemp()) / (Path(path).stem + ".mlmodelc")
        copy = shutil.copytree if Path(path).is_dir() else _copy_file
        copy(path, folder / "model.mlpackage")
        return str(folder)

    def newState(self) -> State:  # noqa: N802 - the name in the binding
        """Fresh states."""
        return State(self.predictor.make_state())

    def predict(self, values: dict[str, Any], state: Any = None) -> dict[str, Any]:
        """The outputs by name."""
        from core_ai_judge import keep

        from anesurgery.errors import SurgeryError
        from anesurgery.files.package import PROGRAM
        from anesurgery.interpret import features

        given = {k: _fits(_narrow(v), self.features[k]) if k in self.features else v for k, v in values.items()}
        try:
            predictor = self._predictor(given)
            RECORD.predictions += 1
            if RECORD.rewriting is not None and not self.rewritten:
                self.rewritten = True
                if RECORD.in_stride():
                    RECORD.rewriting.check(self._stated(given), predictor, given)
            if RECORD.core_ai is not None and not self.kept and self.kind == PROGRAM:
                self.kept = True
                test = os.environ["PYTEST_CURRENT_TEST"].removesuffix(" (call)")
                keep(
                    RECORD.core_ai,
                    test,
                    predictor.parts[0],
                    features.bind(predictor.inputs, given),
                    self.function,
                )
            made = predictor(given, state=None if state is None else state.boxes)
        except SurgeryError as error:  # in the words of Core ML
            raise RuntimeError(f"Unable to compute the prediction using ML Program: {error}") from error
        spoil = MUTATIONS.get(RECORD.mutate, lambda a: a)
        return {
            k: spoil(v) if isinstance(v, np.ndarray) else v for k, v in ((k, _out(v)) for k, v in made.items())
        }

    def _stated(self, given: dict[str, Any]) -> Any:
        """The specification, with the shapes of such arrays."""
        return for_sequences(self.spec, given) or self.spec

    def _predictor(self, given: dict[str, Any]) -> Any:
        """What predicts for such arrays."""
        from anesurgery.interpret import Predictor
        from anesurgery.neuralnetwork.importing import import_network

        if (spec := self._stated(given)) is not self.spec:
            return Predictor(import_network(spec, keep_names=True), precision="fp16")
        if self.predictor is None:
            raise RuntimeError(self.refused)
        return self.predictor

    def batchPredict(self, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:  # noqa: N802
        """The outputs of several calls."""
        return [self.predict(values) for values in batch]

    def get_load_duration_in_nano_seconds(self) -> int:
        """Nothing is measured."""
        return 1

    get_last_predict_duration_in_nano_seconds = get_load_duration_in_nano_seconds


def _copy_file(source: str, target: Path) -> None:
    target.parent.mkdir(parents=True)
    shutil.copy(source, target)


def _stored_dtype(predictor: Any) -> str:
    """ "fp16" when any value of the programs is one, else "fp32"."""
    from anesurgery.mil import dtype_name, walk_ops

    for executable in predictor.executables:
        for op in walk_ops(executable.function):
            for v in op.outputs:
                try:
                    if dtype_name(v) == "fp16":
                        return "fp16"
                except Exception:  # lists, states, strings
                    continue
    return "fp32"


def pretend() -> None:
    """Offer the binding, and tell coremltools that this is a Mac."""
    binding = types.ModuleType("coremltools.libcoremlpython")
    binding._MLModelProxy = Model  # type: ignore[attr-defined]
    for name in (
        "_MLModelAssetProxy",
        "_MLComputePlanProxy",
        "_MLCPUComputeDeviceProxy",
        "_MLGPUComputeDeviceProxy",
        "_MLNeuralEngineComputeDeviceProxy",
    ):
        setattr(binding, name, type(name, (), {}))
    assert "coremltools" not in sys.modules, "load this plug-in with -p, before coremltools"
    sys.modules[binding.__name__] = binding
    import coremltools
    from coremltools import _deps
    from coremltools.models import utils

    replaced = {utils._is_macos: lambda: True, utils._macos_version: lambda: MACOS}
    coremltools.libcoremlpython = binding
    _deps._IS_MACOS = True
    for name, module in list(sys.modules.items()):
        if name.startswith("coremltools") and module is not None:
            for key, value in list(vars(module).items()):
                if key == "_IS_MACOS":
                    setattr(module, key, True)
                elif callable(value) and getattr(value, "__hash__", None) and value in replaced:
                    setattr(module, key, replaced[value])
    platform.machine = lambda: "arm64"


pretend()


def _compare_in_memory(predict: Any) -> Any:
    """`MLModel.predict`, the program in memory run beside the saved one."""

    def both(self: Any, data: Any, state: Any = None) -> Any:
        from anesurgery.interpret import Executable, features
        from anesurgery.mil import walk_ops

        copied = dict(data) if isinstance(data, dict) else data
        made = predict(self, data, state)
        program = self._mil_program
        plain = state is None and isinstance(data, dict) and program is not None
        plain = plain and self.__proxy__.kind == "mlProgram"
        plain = plain and not any(op.op_type.startswith("random_") for op in walk_ops(program))
        if RECORD.both_sources and not RECORD.mutate and plain and not self._is_multifunction():
            predictor = self.__proxy__.predictor
            executable = Executable(program, precision="fp16")
            given = {k: _fits(_narrow(v), self.__proxy__.features[k]) for k, v in copied.items()}
            again = executable(features.bind(predictor.inputs, given))
            for name, value in again.items():
                if isinstance(value, np.ndarray) and isinstance(made.get(name), np.ndarray):
                    np.testing.assert_array_equal(_out(value), made[name], err_msg=f"{name}: in memory / saved")
        return made

    return both


def pytest_addoption(parser: Any) -> None:
    """The options above."""
    group = parser.getgroup("coreml_on_linux")
    group.addoption("--sample", type=int, default=0)
    group.addoption("--every", type=int, default=1)
    group.addoption("--report", default=None)
    group.addoption("--both-sources", action="store_true")
    group.addoption("--mutate", choices=["", *MUTATIONS], default="")
    group.addoption("--passes", default="")
    group.addoption("--passes-every", type=int, default=1)
    group.addoption("--passes-stride", type=int, default=1)
    group.addoption("--core-ai", type=Path, default=None)
    group.addoption("--past-xfail", action="store_true")


def pytest_configure(config: Any) -> None:
    """Take the options; put the hooks on coremltools and numpy."""
    import coremltools as ct
    from coremltools.converters.mil import testing_utils

    RECORD.both_sources = config.getoption("--both-sources")
    RECORD.mutate = config.getoption("--mutate")
    RECORD.stride = config.getoption("--passes-stride")
    RECORD.core_ai = config.getoption("--core-ai")
    ct.models.MLModel.predict = _compare_in_memory(ct.models.MLModel.predict)
    testing_utils.apply_pass_and_basic_check = same_numbers(testing_utils.apply_pass_and_basic_check)
    np.testing.assert_allclose = recorded(np.testing.assert_allclose)
    if config.getoption("--past-xfail"):
        pytest.xfail = _note_xfail  # type: ignore[assignment]
    if names := config.getoption("--passes"):
        from rewritten import Rewriting

        config.stash[REWRITING] = Rewriting(names)


def _note_xfail(reason: str = "") -> None:
    RECORD.xfail = reason or "no reason given"


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep an even choice of each test function's parameter sets."""
    functions = defaultdict(list)
    for item in items:
        functions[item.nodeid.split("[")[0]].append(item)
    chosen = []
    for group in functions.values():
        n = min(config.getoption("--sample") or len(group), len(group))
        chosen += [group[(2 * i + 1) * len(group) // (2 * n)] for i in range(n)]
    chosen = chosen[:: config.getoption("--every")]
    kept, config.stash[REWRITTEN] = set(chosen), set(chosen[:: config.getoption("--passes-every")])
    dropped = [item for item in items if item not in kept]
    items[:] = [item for item in items if item in kept]
    config.hook.pytest_deselected(items=dropped)


def pytest_collection_finish(session: Any) -> None:
    """Note what test classes compare by methods of their own.

    And coremltools collects garbage at every conversion: leave out what lives as long as the tests.
    """
    owners = {base for item in session.items for base in getattr(item.cls, "__mro__", ())}
    for owner in owners:
        if "_test_predictions" in vars(owner):
            owner._test_predictions = noted(owner._test_predictions)
    gc.freeze()


@pytest.fixture(autouse=True)
def _fresh_record(request: Any) -> None:
    RECORD.reset()
    stash = request.config.stash
    RECORD.rewriting = stash.get(REWRITING, None) if request.node in stash[REWRITTEN] else None
    np.random.seed(0)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    """Write a line about each test."""
    outcome = yield
    report = outcome.get_result()
    file = item.config.getoption("--report")
    ends = report.when == "call" or (report.when == "setup" and report.outcome != "passed")
    if not file or not ends:
        return
    reason = ""
    if report.outcome == "skipped":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "")
    elif call.excinfo is not None:
        reason = f"{call.excinfo.typename}: {call.excinfo.value}"
    xfail = hasattr(report, "wasxfail") or (bool(RECORD.xfail) and report.outcome != "skipped")
    line = {
        "test": item.nodeid,
        "outcome": report.outcome,
        "xfail": xfail,
        "reason": str(reason or RECORD.xfail)[:500],
        "predictions": RECORD.predictions,
        "compared": RECORD.compared,
        "half": RECORD.half,
        "error": RECORD.error,
        "stored": RECORD.stored,
        "seconds": round(report.duration, 3),
        "passes": RECORD.passes,
        "rewriting": RECORD.rewritten,
    }
    with open(file, "a", encoding="utf-8") as out:
        out.write(json.dumps(line) + "\n")
