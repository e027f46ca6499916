"""Fixtures shared by all tests.

Each imports what it needs: the process that hands tests to workers needs neither torch nor coremltools.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from slow_cases import mark_slow

if TYPE_CHECKING:
    from tiny_models import Converted

    from anesurgery.mil import Array, Program, Var

# Scripts of their own processes, which import their neighbours by name.
collect_ignore_glob = ["conformance/[!t]*.py", "benchmarks/*.py", "benchmarks/*/*.py"]

CORPUS = Path(__file__).resolve().parents[2] / "shared" / "corpus"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--write-results` stores what passes make of the cases of their tables."""
    parser.addoption("--write-results", action="store_true", help="store the results of tables of passes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers take whole files: the longest come first, so that both end at nearly the same time."""
    stale = mark_slow(items)
    if stale and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"markers name cases that are not there: {', '.join(stale)}")
    items.sort(key=lambda item: (item.get_closest_marker("first") is None, item.path))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Every other worker goes through folders from the end: each compiles half of the files for both."""
    report = yield
    if isinstance(collector, pytest.Directory) and os.environ.get("PYTEST_XDIST_WORKER", "0")[-1] in "13579":
        report.result.reverse()
    return report


def pytest_collection_finish() -> None:
    """What imports and the collection of tests made stays: no collection of garbage looks at it again."""
    from shortcuts import command_quickly, convert_quickly

    convert_quickly()
    command_quickly()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files are made in a folder of this run: in a shared one others leave what warnings name."""
    folder = str(tmp_path_factory.mktemp("temporary"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr("tempfile.tempdir", folder)
        yield


@pytest.fixture(scope="session")
def corpus() -> Path:
    """The folder of real models; tests that need it skip where it is absent."""
    if not CORPUS.is_dir():
        pytest.skip(f"the corpus of real models is not beside this checkout ({CORPUS.name}/ absent)")
    return CORPUS


@pytest.fixture(scope="session")
def settled() -> Callable[[Program], Program]:
    """A copy of a program after coremltools' default pipeline, which must not undo what a pass did."""
    from surroundings import settled

    return settled


@pytest.fixture(scope="session")
def one_op() -> Callable[..., list[Array]]:
    """Interpret one op on constants; its results must have the shapes that coremltools infers."""
    from anesurgery.interpret import evaluate
    from anesurgery.mil import any_symbolic, ct, mb

    def compute(op_type: str, opset: Any = ct.target.iOS18, /, **inputs: Any) -> list[Array]:
        made: list[Var] = []

        @mb.program(input_specs=[mb.TensorSpec((1,))], opset_version=opset)
        def program(unused: Var) -> Var:
            result = getattr(mb, op_type)(**inputs)
            made.extend(result if isinstance(result, (tuple, list)) else [result])
            return mb.identity(x=unused)

        assert made[0].op is not None
        found = evaluate([made[0].op], {}, made)
        for value, var in zip(found, made, strict=True):
            assert any_symbolic(var.shape) or tuple(value.shape) == tuple(var.shape)
        return [value.numpy() for value in found]

    return compute


LOSSY = (
    *("remainder", "roll", "rms_norm", "atan2", "avg_pool1d", "avg_pool2d", "scaled_dot_product_attention"),
    *("clamp", "div", "diagonal", "index_put", "reciprocal"),
)


@pytest.fixture
def hosts_own_converters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coremltools' own converters; other tests of the process may have registered ours, which lose nothing."""
    from coremltools.converters.mil.frontend.torch import ops

    for name in LOSSY:
        for called in {name, f"{name}_copy"} & ops._TORCH_OPS_REGISTRY.name_to_func_mapping.keys():
            monkeypatch.setitem(ops._TORCH_OPS_REGISTRY.name_to_func_mapping, called, getattr(ops, name))


@pytest.fixture
def converted() -> Callable[..., Converted]:
    """Convert a tiny model from transformers; each variant once for the whole run."""
    from tiny_models import converted as convert_once

    def convert(
        name: str,
        how: str = "trace",
        *,
        attn: str = "eager",
        mask: bool = False,
        target: str = "iOS17",
        precision: str = "fp16",
        cache: bool = False,
    ) -> Converted:
        return convert_once(name, how, attn, mask, target, precision, cache)

    return convert
