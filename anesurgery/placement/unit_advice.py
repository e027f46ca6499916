"""Advise a setting of compute units, but only where models of the same kind were measured on the same chip.

No estimate can say which setting is the fastest: by the table below, ResNet-50 is faster on the Neural Engine
of an M4 Pro, but on the GPU of an M5 Max. So `advice` names a setting only if every measured model of the same
kind, chip and batch size was fastest with it. Otherwise `inspect` shows how to measure (`NO_SAFE_DEFAULT`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anesurgery.facts.makeup import Makeup, makeup
from anesurgery.mil import Function, types
from anesurgery.placement.target import Target

FASTEST_WITHIN = 1.05
"""Times up to this multiple of the least count as the fastest: repeated runs differ by as much."""

ENGINE, GPU = "CPU_AND_NE", "CPU_AND_GPU"
ADVISED = (ENGINE, GPU)
"""The settings that may be advised, the preferred one first. ALL is not among them: with it Core ML chooses the
units of each model anew."""

NO_SAFE_DEFAULT = (
    "Time each compute unit on the device (`anesurgery measure MODEL`). Core ML's default, ALL, was up to four "
    "times slower than the best unit in published tests: 79.4 ms against 20.4 (M1 Max), 53.3 against 35.5 and "
    "another token (M2 Ultra, macOS 26.5.2), 4803 against 1592 (M2, macOS 15.7.5; findit-studio/coremlit, "
    "mattmireles/kokoro-coreml)"
)


@dataclass(frozen=True)
class MeasuredModel:
    """Milliseconds of one model with several settings of compute units."""

    kind: str
    """The kind of model, as `kind_of` names it."""
    chip: str
    """The chip as it is sold: "M4 Pro"."""
    batch: int
    """Images or sequences in one prediction."""
    model: str
    """The model in words."""
    ms: Mapping[str, float] = field(hash=False)
    """Setting -> milliseconds of one prediction."""
    source: str
    """Who measured it, with the OS."""

    def fastest(self) -> frozenset[str]:
        """Return the settings among `ADVISED` that take the least time, or nearly the least."""
        least = min(self.ms.values())
        return frozenset(units for units in ADVISED if self.ms[units] <= FASTEST_WITHIN * least)

    def __str__(self) -> str:
        times = ", ".join(f"{units} {ms:.3g}" for units, ms in sorted(self.ms.items(), key=lambda u: u[1]))
        return f"{self.model}: {times} ms ({self.source})"


@dataclass(frozen=True)
class UnitAdvice:
    """A setting of compute units, and the measurements behind it."""

    units: str
    rows: tuple[MeasuredModel, ...]

    def __str__(self) -> str:
        first = self.rows[0]
        batches = f"in batches of {first.batch}" if first.batch > 1 else "one at a time"
        measurements = "; ".join(map(str, self.rows))
        return f"on {first.chip}, {first.kind} {batches} were fastest with {self.units}: {measurements}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"units": self.units, "rows": [vars(row) for row in self.rows]}


CONVOLUTIONAL, VISION_TRANSFORMERS, TEXT, SPEECH, PROMPT = (
    "convolutional networks",
    "vision transformers",
    "text encoders",
    "speech encoders",
    "decoders that read a prompt",
)
EZ = "erwinzhang7/coreml-compute-placement, macOS {}"


def _batches(chip: str, system: str, *rows: tuple[str, str, float, float, float]) -> tuple[MeasuredModel, ...]:
    """Return rows measured in batches of 16, from (kind, model, ms with CPU_AND_NE, CPU_AND_GPU and ALL)."""
    return tuple(
        MeasuredModel(kind, chip, 16, model, {ENGINE: ane, GPU: gpu, "ALL": all_units}, EZ.format(system))
        for kind, model, ane, gpu, all_units in rows
    )


MEASURED_MODELS: tuple[MeasuredModel, ...] = (
    *_batches(
        "M4 Pro",
        "26.5.1",
        (VISION_TRANSFORMERS, "SigLIP base", 78.278, 89.485, 92.915),
        (CONVOLUTIONAL, "ResNet-50", 17.212, 24.261, 41.44),
        (CONVOLUTIONAL, "MobileNetV2", 5.255, 4.431, 5.229),
        (TEXT, "DistilBERT of 128 tokens", 21.128, 28.694, 28.734),
        (SPEECH, "the encoder of Whisper", 284.192, 110.269, 571.429),
    ),
    *_batches(
        "M5 Max",
        "26.6",
        (VISION_TRANSFORMERS, "SigLIP base", 68.699, 14.846, 15.192),
        (CONVOLUTIONAL, "ResNet-50", 14.617, 4.882, 4.909),
        (CONVOLUTIONAL, "MobileNetV2", 4.442, 1.536, 1.593),
        (TEXT, "DistilBERT of 128 tokens", 19.453, 4.549, 4.611),
        (SPEECH, "the encoder of Whisper", 242.792, 26.429, 28.933),
    ),
    MeasuredModel(
        CONVOLUTIONAL, "M5 Max", 1, "MobileNetV2", {ENGINE: 0.295, GPU: 0.665, "ALL": 0.294}, EZ.format("26.6")
    ),
    MeasuredModel(
        CONVOLUTIONAL,
        "M1 Max",
        1,
        "DenseNet-121",
        {ENGINE: 2.05, GPU: 10.8, "CPU_ONLY": 16.7},
        "woolfel/ml-macos-performance, 2021",
    ),
    MeasuredModel(
        VISION_TRANSFORMERS,
        "M1 Max",
        1,
        "SigLIP2 base of 512 patches",
        {ENGINE: 73.9, GPU: 20.4, "ALL": 79.4},
        "findit-studio/coremlit, macOS 26.5; its numbers were wrong with CPU_AND_NE",
    ),
    MeasuredModel(
        TEXT,
        "M1 Max",
        1,
        "EmbeddingGemma of 128 tokens",
        {ENGINE: 7.9, GPU: 11.9, "ALL": 11.9, "CPU_ONLY": 25.1},
        "ironblock/sidekick: docs/DECISIONS.md D17, macOS 26",
    ),
    MeasuredModel(
        PROMPT,
        "M5 Pro",
        1,
        "Qwen3-0.6B, 128 tokens",
        {ENGINE: 12.5, GPU: 9.3, "CPU_ONLY": 46.0},
        "FluidInference/mobius pull request 77",
    ),
)
"""Each row has both settings of `ADVISED`."""


def kind_of(model: Makeup) -> str:
    """Return the kind of a model, as the rows name it; "" for kinds that no row has.

    A model that draws an image, or keeps states, is none of the kinds of images.
    """
    if model.pictures:
        if not model.attentions:
            return CONVOLUTIONAL if model.convolutions and not (model.drawn or model.states) else ""
        return VISION_TRANSFORMERS if model.convolutions <= model.attentions and not model.drawn else ""
    if model.encodes_text:
        return TEXT
    if model.causal and model.head is not None and not model.states:
        return PROMPT
    has_few_convolutions = 0 < model.convolutions <= model.attentions
    reads_tokens = model.lookups or model.ids or model.causal
    return SPEECH if has_few_convolutions and model.signals and not reads_tokens else ""


def advice(function: Function, target: Target) -> UnitAdvice | None:
    """Return the setting that measurements support for a function on one chip; None if they support none.

    Args:
        function: a function with fixed shapes.
        target: a target that names one chip as it is sold ("M4 Pro"); no row fits any other target.
    """
    chips = target.marketed
    on_chip = [row for row in MEASURED_MODELS if (row.chip,) == chips]
    if not on_chip:
        return None
    kind, batch = kind_of(makeup(function)), _batch(function)
    rows = tuple(row for row in on_chip if (row.kind, row.batch) == (kind, batch))
    common = frozenset.intersection(*(row.fastest() for row in rows)) if rows else frozenset()
    return next((UnitAdvice(units, rows) for units in ADVISED if units in common), None)


def _batch(function: Function) -> int | None:
    """Return the length of the first axis of all inputs except states; None where they differ."""
    inputs = [v for v in function.inputs.values() if not types.is_state(v.sym_type) and v.rank]
    lengths = {v.shape[0] for v in inputs if isinstance(v.shape[0], int)}
    return lengths.pop() if len(lengths) == 1 else None
