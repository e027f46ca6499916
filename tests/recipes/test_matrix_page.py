"""The page of architectures is written from figures, and its summary names each case that misses a bar."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from families import ARCHITECTURES
from matrix_page import page, real_section, with_real_widths

TARGETS = ("M1/macOS 14", "M4/macOS 15", "A15/iOS 17")
MOST = {"ops": 0.99, "flop": 1.0}
NEW = MOST | {"most": MOST, "off": {"gather": 1}, "unknown": {}, "fp16": 75.0, "fp16_before": 75.0}
OLD = {"ops": 0.85, "flop": 0.13}
ROW: dict[str, Any] = {
    "recipe": "decoder_ane",
    "convert": {how: {"fp32": 140.0, "error": None} for how in ("trace", "export")},
    "fp16": 74.0,
    "targets": {
        target: {
            "before": OLD | {"most": OLD, "off": {}, "unknown": {}},
            "after": {"decoder_ane": NEW | {"error": None, "seconds": 1.5}},
        }
        for target in TARGETS
    },
}


def lines(row: dict[str, Any]) -> list[str]:
    return page({"llama": row}, TARGETS).splitlines()


def test_figures_become_a_row() -> None:
    shares = "85.0 → 99.0 | 13.0 → 100"
    cells = f"| `llama` | 140 | 140 | 74 → 75 | `decoder_ane` | {shares} | {shares} | 1 gather | 1.5 |"
    assert cells in lines(ROW)
    assert "* a share drops: none" in lines(ROW)


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (
            ("targets", "A15/iOS 17", "after", "decoder_ane", "ops"),
            0.8,
            "* a share drops: llama (decoder_ane, A15/iOS 17)",
        ),
        (
            ("targets", TARGETS[0], "after", "decoder_ane", "fp16"),
            71.0,
            "* fp16 drops by more than 3 dB: llama",
        ),
        (("convert", "trace", "fp32"), 70.0, "* below 80 dB in fp32 against torch: llama"),
        (("convert", "trace", "fp32"), float("nan"), "* below 80 dB in fp32 against torch: llama"),
        (
            ("convert", "export", "error"),
            "NotImplementedError: histc",
            "* by export, 0 of 1 convert; not llama",
        ),
        (
            ("targets", TARGETS[1], "after", "decoder_ane", "error"),
            "SurgeryError",
            "* the method failed or refused: llama",
        ),
    ],
)
def test_what_misses_a_bar_is_named(where: tuple[str, ...], value: Any, said: str) -> None:
    wrong = copy.deepcopy(ROW)
    place = wrong
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    assert any(line.startswith(said) for line in lines(wrong)), lines(wrong)


def test_an_unknown_unit_makes_a_range_whose_lower_end_decides() -> None:
    known, unknown = copy.deepcopy(ROW), copy.deepcopy(ROW)
    for target in TARGETS:
        new = unknown["targets"][target]["after"]["decoder_ane"]
        new |= {"ops": 0.8, "unknown": {"tile": 2}}
    cells = "| 85.0 → 80.0-99.0 | 13.0 → 100 | 85.0 → 80.0-99.0 | 13.0 → 100 | 1 gather, 2 tile? |"
    assert any(cells in line for line in lines(unknown))
    assert any(line.startswith("* a share drops: llama (decoder_ane, A15/iOS 17)") for line in lines(unknown))
    both = page({"llama": known, "mistral": unknown, "qwen2": unknown}, TARGETS).splitlines()
    assert "* causal language models on M4/macOS 15: median share of ops 80.0-99.0 % (3 models)" in both


def test_there_are_enough_architectures() -> None:
    assert len(ARCHITECTURES) >= 60
    assert {row.recipe for row in ARCHITECTURES.values()} >= {
        "decoder_ane",
        "encoder_ane",
        "whisper_ane",
        "vit_ane",
        "unet_ane",
    }


def test_a_target_that_was_not_measured_has_no_share() -> None:
    partly = copy.deepcopy(ROW)
    del partly["targets"][TARGETS[0]], partly["targets"][TARGETS[2]]
    made = lines(partly)
    shares = "- | - | 85.0 → 99.0 | 13.0 → 100"
    assert f"| `llama` | 140 | 140 | 74 → 75 | `decoder_ane` | {shares} | 1 gather | 1.5 |" in made
    assert any("1 are measured: 0 on M1/macOS 14, 1 on M4/macOS 15, 0 on A15/iOS 17" in line for line in made)


def test_models_of_real_width_have_a_section_of_their_own() -> None:
    whole = page({"llama": ROW}, TARGETS)
    both = with_real_widths(whole, {"llama": ROW, "bert": ROW}, TARGETS)
    assert both.startswith(whole.rstrip())
    (section,) = real_section(both)
    assert both.endswith(section)
    assert section.count("| `llama` | 140 |") == section.count("| `bert` | 140 |") == 1
    assert with_real_widths(both, {"llama": ROW, "bert": ROW}, TARGETS) == both
    assert real_section(whole) == []
    wrong = copy.deepcopy(ROW)
    wrong["targets"][TARGETS[1]]["after"]["decoder_ane"]["fp16"] = 12.0
    named = with_real_widths(whole, {"llama": wrong}, TARGETS)
    assert "* fp16 drops by more than 3 dB: llama (decoder_ane, M4/macOS 15)" in named
