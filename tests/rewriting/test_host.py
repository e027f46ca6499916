"""Our passes inside `ct.convert`: what they report, the arrays that leave the model, options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close

import anesurgery as ane
from anesurgery.errors import SurgeryError
from anesurgery.mil import ct, quiet_host
from anesurgery.passes.embedding_matmul import EmbeddingMatmul
from anesurgery.passes.negate_subtract import NegateSubtract
from anesurgery.rewriting.host import ReportingPipeline
from anesurgery.surgery import Recipe

TABLE = np.random.default_rng(0).standard_normal((11, 4)).astype(np.float32)


class Lookup(torch.nn.Module):
    """Rows of a table minus one number."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(11, 4, _weight=torch.from_numpy(TABLE))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.table(ids)
        return rows - rows.mean()


def convert(pipeline: Any) -> Any:
    example = torch.zeros((1, 3), dtype=torch.int32)
    traced: Any = torch.jit.trace(Lookup().eval(), example)  # type: ignore[no-untyped-call]
    with quiet_host():
        return ct.convert(
            traced,
            inputs=[ct.TensorType("ids", (1, 3), dtype=np.int32)],
            pass_pipeline=pipeline,
            minimum_deployment_target=ct.target.iOS16,
            compute_precision=ct.precision.FLOAT32,
            skip_model_load=True,
        )


RECIPE = Recipe("own", (EmbeddingMatmul(mode="input"), NegateSubtract()))


def test_what_passes_do_in_a_conversion_is_reported_and_written(tmp_path: Path) -> None:
    pipeline = RECIPE.pipeline()
    model, report = convert(pipeline), pipeline.report
    assert {change.pass_name for change in report.changes} == {"embedding_matmul", "negate_subtract"}
    ((names, words),) = [(change.names, change.words) for change in report.contract]
    assert "ids_embeds" in names
    assert words in " ".join(str(report).split())
    assert report.to_json()["edits"] == {"embedding_matmul": 1, "negate_subtract": 1}
    model.save(str(tmp_path / "m.mlpackage"))
    (written,) = report.save_artifacts(tmp_path / "m.mlpackage")
    assert written == tmp_path / "m.ids_embeds.npy"
    np.testing.assert_array_equal(np.load(written), TABLE)
    rows = TABLE[[[1, 2, 3]]]
    (found,) = ane.run(tmp_path / "m.mlpackage", {"ids_embeds": rows}).values()
    assert_close(found, rows - rows.mean(), rtol=1e-6)
    with pytest.raises(SurgeryError, match="exists"):
        report.save_artifacts(tmp_path / "m.mlpackage")


def test_refusals_are_reported_and_each_conversion_has_a_report_of_its_own() -> None:
    pipeline = Recipe("own", (EmbeddingMatmul(mode="input"),)).pipeline()
    convert(pipeline)
    first = pipeline.report
    convert(pipeline)
    assert len(first.changes) == len(pipeline.report.changes) == 1
    assert first is not pipeline.report
    refusing = Recipe("own", (ane.passes.PadLastAxis(),)).pipeline()
    convert(refusing)
    assert not refusing.report.changes
    assert "nothing was changed" in str(refusing.report)


def test_options_set_later_keep_the_report() -> None:
    pipeline = RECIPE.pipeline()
    pipeline.set_options("anesurgery::embedding_matmul", {"mode": "matmul"})
    convert(pipeline)
    assert not pipeline.report.contract
    assert pipeline.report.changes


def test_a_pipeline_made_from_another_reports_by_itself() -> None:
    inner = Recipe("own", (EmbeddingMatmul(mode="input"),)).pipeline()
    outer = Recipe("other", (NegateSubtract(),)).pipeline(inner)
    assert isinstance(outer, ReportingPipeline)
    convert(outer)
    assert {change.pass_name for change in outer.report.changes} == {"embedding_matmul", "negate_subtract"}
    assert not inner.report.changes
