"""The JSON of an inspection is what its schema says, in docs/static/inspect.schema.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import anesurgery as ane

SCHEMA = json.loads(
    (Path(__file__).resolve().parents[2] / "docs/static/inspect.schema.json").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A program, and a network of layers."""
    folder = tmp_path_factory.mktemp("schema")
    return {
        "tiny": ane.example("tiny", folder / "m.mlpackage"),
        "network": ane.example("network", folder / "n.mlmodel"),
    }


def plain(found: Any) -> Any:
    return json.loads(json.dumps(found.to_json()))


@pytest.mark.parametrize("target", ["iPhone 13", "M4/macOS 15", "any"])
@pytest.mark.parametrize("name", ["tiny", "network"])
def test_an_inspection_is_what_the_schema_says(name: str, target: str, models: dict[str, Path]) -> None:
    jsonschema.validate(plain(ane.inspect(models[name], target=target)), SCHEMA)


def test_parts_are_inspections_too(models: dict[str, Path]) -> None:
    found = ane.inspect(ane.split(models["tiny"], 2), target="iPhone 13")
    assert found.parts
    jsonschema.validate(plain(found), SCHEMA)


@pytest.mark.parametrize("change", [{"version": 2}, {"status": 3}, {"new_key": 1}, {"ops": [{}]}])
def test_anything_else_is_noticed(change: dict[str, Any], models: dict[str, Path]) -> None:
    wrong = plain(ane.inspect(models["tiny"])) | change
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, SCHEMA)
