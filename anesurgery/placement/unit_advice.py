"""Which compute units to ask for: only where models of the same kind were measured on the same chip.

No estimate tells which setting is the fastest: by the rows below, the same ResNet-50 is faster on the Neural
Engine of an M4 Pro and on the GPU of an M5 Max. So a setting is advised where every measured model of the
kind, on the chip and of the batch, was fastest with it; anywhere else a note says how to measure it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anesurgery.facts.makeup import Makeup, makeup
from anesurgery.mil import Function, types
from anesurgery.placement.target import Target

AS_FAST = 1.05
"""How many times the least time still counts as the fastest: repeated runs differ by so much."""

ENGINE, GRAPHICS = "CPU_AND_NE", "CPU_AND_GPU"
ADVISED = (ENGINE, GRAPHICS)
"""The settings that may be advised, the first one where both are as fast. ALL is none of them: it is a
choice that Core ML makes anew for each model."""

NO_SAFE_DEFAULT = (
    "Time each compute unit on the device (`anesurgery measure MODEL`). Core ML's default, ALL, was up to four "
    "times slower than the best unit in published tests: 79.4 ms against 20.4 (M1 Max), 53.3 against 35.5 and "
    "another token (M2 Ultra, macOS 26.5.2), 4803 against 1592 (M2, macOS 15.7.5; findit-studio/coremlit, "
    "mattmireles/kokoro-coreml)"
)


@dataclass(frozen=True)
class Measured:
    """Milliseconds of one model with several settings of compute units.

    Attributes:
        kind: of the model.
        chip: as it is sold.
        batch: images or sequences in one prediction.
        model: in words.
        ms: by setting.
        source: who measured it, with the OS.
    """

    kind: str
    chip: str
    batch: int
    model: str
    ms: Mapping[str, float] = field(hash=False)
    source: str

    def fastest(self) -> frozenset[str]:
        """The settings that may be advised and take the least time, or as little."""
        least = min(self.ms.values())
        return frozenset(units for units in ADVISED if self.ms[units] <= AS_FAST * least)

    def __str__(self) -> str:
        times = ", ".join(f"{units} {ms:.3g}" for units, ms in sorted(self.ms.items(), key=lambda u: u[1]))
        return f"{self.model}: {times} ms ({self.source})"


@dataclass(frozen=True)
class UnitAdvice:
    """A setting, and the measurements that carry it."""

    units: str
    rows: tuple[Measured, ...]

    def __str__(self) -> str:
        first, count = self.rows[0], f"in batches of {self.rows[0].batch}"
        many = count if first.batch > 1 else "one at a time"
        told = "; ".join(map(str, self.rows))
        return f"on {first.chip}, {first.kind} {many} were fastest with {self.units}: {told}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"units": self.units, "rows": [vars(row) for row in self.rows]}


IMAGES, PICTURES, TEXT, SPEECH, PROMPT = (
    "convolutional networks",
    "vision transformers",
    "text encoders",
    "speech encoders",
    "decoders that read a prompt",
)
EZ = "erwinzhang7/coreml-compute-placement, macOS {}"


def _batches(chip: str, system: str, *rows: tuple[str, str, float, float, float]) -> tuple[Measured, ...]:
    """Rows of (kind, model, CPU_AND_NE, CPU_AND_GPU, ALL), in batches of 16."""
    return tuple(
        Measured(kind, chip, 16, model, {ENGINE: ane, GRAPHICS: gpu, "ALL": every}, EZ.format(system))
        for kind, model, ane, gpu, every in rows
    )


MEASURED: tuple[Measured, ...] = (
    *_batches(
        "M4 Pro",
        "26.5.1",
        (PICTURES, "SigLIP base", 78.278, 89.485, 92.915),
        (IMAGES, "ResNet-50", 17.212, 24.261, 41.44),
        (IMAGES, "MobileNetV2", 5.255, 4.431, 5.229),
        (TEXT, "DistilBERT of 128 tokens", 21.128, 28.694, 28.734),
        (SPEECH, "the encoder of Whisper", 284.192, 110.269, 571.429),
    ),
    *_batches(
        "M5 Max",
        "26.6",
        (PICTURES, "SigLIP base", 68.699, 14.846, 15.192),
        (IMAGES, "ResNet-50", 14.617, 4.882, 4.909),
        (IMAGES, "MobileNetV2", 4.442, 1.536, 1.593),
        (TEXT, "DistilBERT of 128 tokens", 19.453, 4.549, 4.611),
        (SPEECH, "the encoder of Whisper", 242.792, 26.429, 28.933),
    ),
    Measured(
        IMAGES, "M5 Max", 1, "MobileNetV2", {ENGINE: 0.295, GRAPHICS: 0.665, "ALL": 0.294}, EZ.format("26.6")
    ),
    Measured(
        IMAGES,
        "M1 Max",
        1,
        "DenseNet-121",
        {ENGINE: 2.05, GRAPHICS: 10.8, "CPU_ONLY": 16.7},
        "woolfel/ml-macos-performance, 2021",
    ),
    Measured(
        PICTURES,
        "M1 Max",
        1,
        "SigLIP2 base of 512 patches",
        {ENGINE: 73.9, GRAPHICS: 20.4, "ALL": 79.4},
        "findit-studio/coremlit, macOS 26.5; its numbers were wrong with CPU_AND_NE",
    ),
    Measured(
        TEXT,
        "M1 Max",
        1,
        "EmbeddingGemma of 128 tokens",
        {ENGINE: 7.9, GRAPHICS: 11.9, "ALL": 11.9, "CPU_ONLY": 25.1},
        "ironblock/sidekick: docs/DECISIONS.md D17, macOS 26",
    ),
    Measured(
        PROMPT,
        "M5 Pro",
        1,
        "Qwen3-0.6B, 128 tokens",
        {ENGINE: 12.5, GRAPHICS: 9.3, "CPU_ONLY": 46.0},
        "FluidInference/mobius pull request 77",
    ),
)
"""Each setting that may be advised is in each row."""


def kind_of(model: Makeup) -> str:
    """The kind of a model, as the rows name them; "" of others."""
    if model.pictures:
        if not model.attentions:
            return IMAGES if model.convolutions and not (model.drawn or model.states) else ""
        return PICTURES if model.convolutions <= model.attentions and not model.drawn else ""
    if model.encodes_text:
        return TEXT
    if model.causal and model.head is not None and not model.states:
        return PROMPT
    few = 0 < model.convolutions <= model.attentions
    return SPEECH if few and model.signals and not (model.lookups or model.ids or model.causal) else ""


def advice(function: Function, target: Target) -> UnitAdvice | None:
    """The setting that measurements carry for a function on one chip; None where they carry none.

    Args:
        function: of fixed shapes.
        target: names one chip as it is sold; others have no rows.
    """
    chips = target.marketed
    on_chip = [row for row in MEASURED if (row.chip,) == chips]
    if not on_chip:
        return None
    kind, batch = kind_of(makeup(function)), _batch(function)
    rows = tuple(row for row in on_chip if (row.kind, row.batch) == (kind, batch))
    common = frozenset.intersection(*(row.fastest() for row in rows)) if rows else frozenset()
    return next((UnitAdvice(units, rows) for units in ADVISED if units in common), None)


def _batch(function: Function) -> int | None:
    """The first length of all inputs that are no states; None where they differ."""
    inputs = [v for v in function.inputs.values() if not types.is_state(v.sym_type) and v.rank]
    lengths = {v.shape[0] for v in inputs if isinstance(v.shape[0], int)}
    return lengths.pop() if len(lengths) == 1 else None
