"""Apple's runtime in a child process: numbers, states, and each death in words."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from core_ai_models import linear_asset, needs_core_ai, rehash, save_asset
from torch_modules import Formula

import anesurgery as ane
from anesurgery.coreai import child, running, toolkit
from anesurgery.errors import InterpretError, LoadError, SurgeryError, UnknownName
from anesurgery.interpret.state import Box

pytestmark = needs_core_ai


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linear_asset(tmp_path_factory.mktemp("linear") / "linear.aimodel")


class Quotient(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.div(x, y, rounding_mode="trunc")


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.total: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x)
        return self.total * 2.0


def test_numbers_are_those_of_the_module(linear: Path) -> None:
    torch.manual_seed(0)
    first, second = torch.nn.Linear(3, 256), torch.nn.Linear(256, 4)
    x = torch.randn(2, 3)
    found = ane.run(linear, {"x": x.numpy()}, engine="coreai")
    assert np.allclose(found["y"], second(first(x)).detach().numpy(), atol=1e-5)


def test_a_state_lives_on(tmp_path: Path) -> None:
    path = save_asset(tmp_path / "c.aimodel", Counter(), [torch.ones(3)], state_names=["total"])
    outputs, states = running.run(path, {"x": np.ones(3)})
    assert outputs["y"].tolist() == [2.0, 2.0, 2.0]
    outputs, states = running.run(path, {"x": np.ones(3)}, states=states)
    assert outputs["y"].tolist() == [4.0, 4.0, 4.0]
    assert states["total"].tolist() == [2.0, 2.0, 2.0]


def test_an_unknown_output_leaves_the_state_as_it_is(tmp_path: Path) -> None:
    path = save_asset(tmp_path / "c.aimodel", Counter(), [torch.ones(3)], state_names=["total"])
    state = {"total": Box(torch.zeros(3))}
    with pytest.raises(UnknownName, match="unknown output 'z'"):
        running.run_model(path, {"x": np.ones(3)}, outputs=["z"], state=state)
    assert not state["total"].written


def test_a_division_by_zero_ends_the_child_and_is_said(tmp_path: Path) -> None:
    ones = [torch.ones(2, dtype=torch.int32) for _ in range(2)]
    path = save_asset(tmp_path / "q.aimodel", Quotient(), ones)
    whole = {"x": np.array([7, 8], np.int32), "x1": np.array([2, 4], np.int32)}
    assert ane.run(path, whole, engine="coreai")["y"].tolist() == [3, 2]
    with pytest.raises(InterpretError, match=r"died \(SIGILL\).*divided by 0"):
        ane.run(path, {**whole, "x1": np.array([0, 4], np.int32)}, engine="coreai")


def test_what_the_frame_does_not_show_ends_the_child_alone(linear: Path, tmp_path: Path) -> None:
    """Apple's reader is given a program that is cut; our own check of the frame is passed by."""
    folder = Path(shutil.copytree(linear, tmp_path / "cut.aimodel"))
    content = (folder / "main.mlirb").read_bytes()
    (folder / "main.mlirb").write_bytes(content[: len(content) // 2])
    with pytest.raises(SurgeryError, match=r"Apple's runtime (died|refuses)"):
        child.ask("read", folder, {})


def test_too_long_is_said(linear: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "PATIENCE", 0.0)
    with pytest.raises(InterpretError, match="was stopped after 0 s"):
        ane.run(linear, {"x": np.ones((2, 3))}, engine="coreai")


def process_of(linear: Path) -> int:
    """The process of the child that waits after a run."""
    ane.run(linear, {"x": np.ones((2, 3))}, engine="coreai")
    (waiting,) = child.IDLE
    return waiting.process.pid


def test_a_child_does_later_tasks_until_it_fails_dies_or_maps_much(
    linear: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = process_of(linear)
    assert process_of(linear) == first
    with pytest.raises(InterpretError, match="missing input"):
        ane.run(linear, {}, engine="coreai")
    second = process_of(linear)
    os.kill(second, signal.SIGKILL)
    third = process_of(linear)
    assert len({first, second, third}) == 3
    monkeypatch.setattr(child, "MOST_MAPPED", 0)
    ane.run(linear, {"x": np.ones((2, 3))}, engine="coreai")
    assert not child.IDLE


def test_threads_and_forks_ask_children_of_their_own(linear: Path) -> None:
    parents = process_of(linear)
    with ThreadPoolExecutor(3) as threads:
        found = list(
            threads.map(lambda value: ane.run(linear, {"x": np.full((2, 3), value)}, engine="coreai"), range(3))
        )
    assert len({values["y"].tobytes() for values in found}) == 3
    read, write = os.pipe()
    forked = os.fork()
    if not forked:
        os.write(write, str(process_of(linear)).encode())
        child.end_idle()
        os._exit(0)
    os.waitpid(forked, 0)
    assert int(os.read(read, 99)) != parents


def test_a_child_that_ends_by_itself_is_quoted(linear: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child.end_idle()
    monkeypatch.setattr(sys, "executable", "/bin/ls")  # which does not know the file -m
    with pytest.raises(InterpretError, match="ended without an answer: .*ls: "):
        ane.run(linear, {"x": np.ones((2, 3))}, engine="coreai")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "missing input 'x'"),
        ({"x": np.ones((3, 3))}, r"input 'x' has shape \(3, 3\), expected \(2, 3\)"),
        ({"x": np.ones((2, 3)), "z": np.ones(1)}, "unknown input 'z'; it takes x"),
    ],
)
def test_inputs_that_do_not_fit_are_said(linear: Path, values: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(InterpretError, match=words):
        ane.run(linear, values, engine="coreai")


def test_what_only_the_interpreter_takes_is_refused(linear: Path) -> None:
    with pytest.raises(InterpretError, match="leave precision= out"):
        ane.run(linear, {"x": np.ones((2, 3))}, engine="coreai", precision="fp16")
    with pytest.raises(UnknownName, match="unknown engine 'corei'; did you mean 'coreai'"):
        ane.run(linear, {"x": np.ones((2, 3))}, engine="corei")
    with pytest.raises(UnknownName, match="unknown output 'z'"):
        ane.run(linear, {"x": np.ones((2, 3))}, engine="coreai", outputs=["z"])
    with pytest.raises(InterpretError, match="has no function 'other', but main"):
        ane.run(linear, {"x": np.ones((2, 3))}, engine="coreai", function="other")


def test_without_the_package_the_error_says_so(linear: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "ABSENT", "No module named 'coreai'")
    with pytest.raises(SurgeryError, match=r"pip install 'anesurgery\[coreai\]'"):
        ane.run(linear, {"x": np.ones((2, 3))}, engine="coreai")


def test_flipped_bytes_kill_nobody(linear: Path, tmp_path: Path) -> None:
    """Each damaged program, with a hash that fits, is run or refused in words."""
    draw, content, refused = random.Random(0), (linear / "main.mlirb").read_bytes(), 0
    for number in range(20):
        folder = Path(shutil.copytree(linear, tmp_path / f"{number}.aimodel"))
        damaged = bytearray(content)
        for _ in range(3):
            damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        (folder / "main.mlirb").write_bytes(damaged)
        rehash(folder)
        try:
            running.run(folder, {"x": np.ones((2, 3))})
        except (LoadError, InterpretError):
            refused += 1
    assert refused > 0


class Constant(torch.nn.Module):
    """One output that no input moves."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, (x - x).abs() + 1


def test_comparing_runs_the_file_as_it_is(linear: Path) -> None:
    comparison = ane.compare(linear, linear, engine="coreai")
    assert comparison.ok
    assert comparison.engine == comparison.to_json()["engine"] == "coreai"


def test_an_output_that_no_input_moves_is_no_success(tmp_path: Path) -> None:
    path = save_asset(tmp_path / "m.aimodel", Constant(), [torch.ones(3)], ["moves", "stays"])
    comparison = ane.compare(path, path, engine="coreai")
    assert not comparison.ok
    assert "no input changes output stays" in comparison.verdict


def test_values_that_are_not_finite_are_no_success(tmp_path: Path) -> None:
    module = Formula(lambda s, x: torch.log(x - x))
    path = save_asset(tmp_path / "m.aimodel", module, [torch.ones(3)])
    assert not ane.compare(path, path, engine="coreai").ok


def test_a_package_is_translated_to_be_run(linear: Path, tmp_path: Path) -> None:
    package = ane.to_coreml(linear, tmp_path / "m.mlpackage").path
    assert ane.compare(package, package, engine="coreai").ok
    assert ane.compare(package, linear, engine="coreai").ok


def test_a_certificate_asks_the_runtime_too(linear: Path, tmp_path: Path) -> None:
    assert ane.certify(linear, engine="coreai").verdict == "holds"
    pool = torch.nn.AvgPool2d(3, 2, 1, count_include_pad=False)  # whose ops count the padding all the same
    path = save_asset(tmp_path / "p.aimodel", pool, [torch.randn(1, 2, 9, 9)])
    certificate = ane.certify(path, engine="coreai")
    assert certificate.verdict == "fails"
    assert "run by coreai: " in certificate.why
