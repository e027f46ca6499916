"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from anesurgery.mil import Program

CORPUS = Path(__file__).resolve().parents[2] / "shared" / "corpus"


@pytest.fixture(scope="session")
def corpus() -> Path:
    """The folder of real models; tests that need it skip where it is absent."""
    if not CORPUS.is_dir():
        pytest.skip(f"the corpus of real models is not beside this checkout ({CORPUS.name}/ absent)")
    return CORPUS


@pytest.fixture(scope="session")
def settled() -> Callable[[Program], Program]:
    """A copy of a program after coremltools' default pipeline, which must not undo what a pass did."""
    from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager

    from anesurgery.mil import ct, quiet_host
    from anesurgery.program import clone

    def settle(program: Program) -> Program:
        copy = clone(program).program
        pipeline = ct.PassPipeline.DEFAULT
        # The dtypes were chosen when the model was converted; choosing fp16 again would change the numbers.
        pipeline.remove_passes({"common::add_fp16_cast", "common::add_int16_cast"})
        with quiet_host():
            PassPipelineManager.apply_pipeline(copy, pipeline)
        return copy

    return settle
