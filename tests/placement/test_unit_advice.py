"""Which compute units to ask for: a setting where measurements carry it, else how to measure it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from statement import conv, half, of

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement import unit_advice
from anesurgery.placement.unit_advice import CONVOLUTIONAL, ENGINE, GPU, MEASURED_MODELS, TEXT

ROWS = [
    path
    for folder in ("tests/benchmarks/time_rows.json", "tests/benchmarks/latency_rows.json")
    if (path := Path(__file__).resolve().parents[2] / folder).is_file()
]


def pictures(batch: int) -> Callable[[], Program]:
    def body(x: Var) -> Var:
        return mb.reduce_mean(x=mb.relu(x=conv(16, 3, 3, 3)(x)), axes=[2, 3])

    return of(body, (batch, 3, 32, 32))


def patches(batch: int) -> Callable[[], Program]:
    def body(x: Var) -> Var:
        x = mb.conv(x=x, weight=half(16, 3, 8, 8), strides=[8, 8])
        x = mb.transpose(x=mb.reshape(x=x, shape=[batch, 16, 16]), perm=[0, 2, 1])
        weights = mb.softmax(x=mb.matmul(x=x, y=x, transpose_y=True), axis=-1)
        return mb.linear(x=mb.matmul(x=weights, y=x), weight=half(8, 16))

    return of(body, (batch, 3, 32, 32))


def words(batch: int) -> Callable[[], Program]:
    def build() -> Program:
        @mb.program(input_specs=[mb.TensorSpec((batch, 8), dtype=types.int32)], opset_version=ct.target.iOS17)
        def program(ids: Var) -> Var:
            x = mb.gather(x=half(50, 16), indices=ids, axis=0)
            weights = mb.softmax(x=mb.matmul(x=x, y=x, transpose_y=True), axis=-1)
            return mb.layer_norm(x=mb.matmul(x=weights, y=x), axes=[-1])

        made: Program = program
        return made

    return build


CASES: dict[str, tuple[Callable[[], Program], str, str | None]] = {
    "a vision transformer, M4 Pro": (patches(16), "M4 Pro/macOS 26", ENGINE),
    "the same, M5 Max": (patches(16), "M5 Max", GPU),
    "one picture at a time": (patches(1), "M4 Pro", None),
    "another chip": (patches(16), "M3 Pro", None),
    "several chips": (patches(16), "M4+", None),
    "rows that disagree": (pictures(16), "M4 Pro", None),
    "rows that agree": (pictures(16), "M5 Max", GPU),
    "the batch decides": (pictures(1), "M5 Max", ENGINE),
    "text": (words(16), "M4 Pro", ENGINE),
    "a kind that was not measured": (of(lambda x: mb.relu(x=x), (16, 64)), "M4 Pro", None),
}


@pytest.mark.parametrize("name", CASES)
def test_a_setting_is_advised_where_it_was_measured(name: str) -> None:
    build, target, units = CASES[name]
    found = ane.inspect(build(), target)
    assert (found.advice and found.advice.units) == units
    plain = found.to_json()["advice"]
    assert (plain and plain["units"]) == units
    fallback = [note for note in found.notes if "Core ML's default, ALL" in note]
    assert len(fallback) == (units is None)
    assert all("`anesurgery measure MODEL`" in note for note in fallback)


def test_the_report_shows_the_rows(tmp_path: Path) -> None:
    found = ane.inspect(patches(16)(), "M4 Pro/macOS 26")
    page = found.save_html(tmp_path / "page.html").read_text(encoding="utf-8")
    for shown in (found.details, page):
        assert "SigLIP base: CPU_AND_NE 78.3, CPU_AND_GPU 89.5, ALL 92.9 ms" in " ".join(shown.split())


def test_without_the_engine_nothing_is_said() -> None:
    found = ane.inspect(patches(16)(), "M4 Pro", compute_units="CPU_ONLY")
    assert not any("Core ML's default, ALL" in note for note in found.notes)


def test_no_estimate_of_the_gpu_is_a_number() -> None:
    found = ane.inspect(patches(1)(), "M4 Pro/macOS 26", compute_units="ALL")
    assert all("gpu" not in (row["estimate"] or {}) for row in found.to_json()["ops"])


def test_one_row_that_disagrees_takes_the_advice_away(monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = (row for row in MEASURED_MODELS if (row.kind, row.chip) == (TEXT, "M4 Pro"))
    other = replace(text, ms={ENGINE: 2.0, GPU: 1.0})
    monkeypatch.setattr(unit_advice, "MEASURED_MODELS", (*MEASURED_MODELS, other))
    assert ane.inspect(words(16)(), "M4 Pro").advice is None


def test_the_rows_are_those_of_the_table_of_times() -> None:
    kept = json.loads(ROWS[0].read_text(encoding="utf-8"))
    rows = kept if isinstance(kept, list) else kept["rows"]
    published = {(r["chip"], r["units"], round(r["ms"], 3)) for r in rows if r["source"] == "erwinzhang7"}
    own = [row for row in MEASURED_MODELS if row.source.startswith("erwinzhang7")]
    assert {(row.chip, units, ms) for row in own for units, ms in row.ms.items()} <= published
    assert any(row.kind == CONVOLUTIONAL for row in own)


def test_each_row_has_both_settings() -> None:
    assert all({ENGINE, GPU} <= set(row.ms) and row.fastest() for row in MEASURED_MODELS)
