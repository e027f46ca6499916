"""What was measured of the Neural Engine's arithmetic: a row for each property, with its source.

`neural_engine` computes the properties whose row has a `modelled` text; the others are known, and left out.
"""

from __future__ import annotations

from dataclasses import dataclass

CHIPS = ("M1", "M2", "M3", "M4", "M5", "M6")
"""The chips that `precision="ane:CHIP"` may name."""


@dataclass(frozen=True)
class Property:
    """One property of the arithmetic."""

    name: str
    what: str
    """The property, as a sentence without a full stop."""
    chips: tuple[str, ...]
    """The chips on which it was measured."""
    grade: str
    """ "measured" (through Core ML or directly) or "reported"."""
    source: str
    modelled: str = ""
    """How `neural_engine` computes it. Empty where it does not: `applies` is then False."""
    everywhere: bool = False
    """Is it computed for every chip, measured there or not, and when no chip is named?"""


STUDY = "751K/Apple-Neural-Engine-Microarchitecture-Study-M6: notes/numerics.md"
GUIDE = "sbryngelson/ane-guide: part-1-machine/03"
FORGE = "sbryngelson/ANEForge: numeric-cliffs"
CADAMCAT = "cadamcat/llms-on-apple-neural-engine"
OMARCHY = "joshuaswarren/omarchy-ane"
ALL_BUT_M3 = ("M1", "M2", "M4", "M5", "M6")
"""The chips on which the properties that all sources share were measured."""

PROPERTIES: tuple[Property, ...] = (
    Property(
        "ceiling",
        "a result or partial sum of products with magnitude 32768 or more becomes infinite, and stays so",
        chips=ALL_BUT_M3,
        grade="measured",
        source=f"{GUIDE}; {FORGE}; {STUDY}",
        modelled="matmul, linear, conv: partial sums in the order of the indices (the device's order is not "
        "known); conv_transpose, conv_quantized, einsum: the result only",
        everywhere=True,
    ),
    Property(
        "one_term",
        "a 1x1 convolution of one channel keeps the range of fp16",
        chips=ALL_BUT_M3,
        grade="measured",
        source=f"{GUIDE}; {STUDY}",
        modelled="no ceiling where a sum has one term",
        everywhere=True,
    ),
    Property(
        "accumulator",
        "sums are kept wider than fp16 between products",
        chips=("M4", "M6"),
        grade="measured",
        source=STUDY,
        modelled="sums in fp32",
        everywhere=True,
    ),
    Property(
        "fixed_point",
        "the accumulator has 16 bits after the binary point: products below about 2^-17 vanish",
        chips=("M4", "M6"),
        grade="measured",
        source=STUDY,
    ),
    Property(
        "grid",
        "results of a matmul of two activations are multiples of 2^-16, and 0 below 2^-17; how the terms "
        "are added is not known",
        chips=("M2",),
        grade="measured",
        source=f"{OMARCHY}: receipts/2026-09-30-t6021-accumulator (Linux driver)",
        modelled="results of matmul, halves away from zero",
    ),
    Property(
        "first_stage",
        "tiles of four products are rounded to fp16 first",
        chips=("M1",),
        grade="measured",
        source=GUIDE,
    ),
    Property(
        "rounding",
        "results are numbers of fp16; beyond 65504 they are infinite",
        chips=ALL_BUT_M3,
        grade="measured",
        source=f"{STUDY}; {FORGE}",
        modelled="after every op, whatever dtype the program says; but where a program computes in fp16, its "
        "ops of fp32 run on the CPU or GPU, and are exact",
        everywhere=True,
    ),
    Property(
        "ties",
        "half-way cases are rounded up (2049 becomes 2050); to even on M1 (2048); on M2 add and mul were "
        "measured",
        chips=("M2", "M4", "M5", "M6"),
        grade="measured",
        source=f"{GUIDE}; {STUDY}; {OMARCHY}: receipts/2026-09-29 (M2, Linux driver)",
        modelled="away from zero on these chips (for negative numbers a guess), to even on all others",
    ),
    Property(
        "cast_ties",
        "a conversion from fp32 to fp16 rounds half-way cases to even",
        chips=("M5",),
        grade="measured",
        source=f"{CADAMCAT}: articles/03 (M5 Pro, macOS 27.0)",
        modelled="cast",
    ),
    Property(
        "non_finite",
        "infinities and NaN among the inputs count as large numbers; no NaN comes out",
        chips=ALL_BUT_M3,
        grade="measured",
        source=f"{STUDY}; {FORGE}",
        modelled="they count as 65536 (which number it is, is a guess)",
        everywhere=True,
    ),
    Property(
        "sqrt_negative",
        "the square root of a negative number is 0",
        chips=("M1", "M5"),
        grade="measured",
        source=GUIDE,
        modelled="sqrt",
        everywhere=True,
    ),
    Property(
        "tables",
        "activations are looked up in tables of 33 points; largest absolute errors: sigmoid 3.4e-3, "
        "tanh 1.6e-3 to 1.7e-3, gelu in every mode 5.9e-3 to 6.2e-3, silu 1.5e-2, erf 8.6e-4",
        chips=("M1", "M4", "M6"),
        grade="measured",
        source=f"{STUDY}; {GUIDE}",
        modelled="straight lines between 33 points with the largest error measured; where the points lie is a "
        "guess",
        everywhere=True,
    ),
    Property(
        "measured_tables",
        "sigmoid and tanh bit for bit: sigmoid between 33 points from -8 to 8, tanh of the magnitude "
        "between 33 points from 0 to 4; 1536 of 1536 values of tanh and 1533 of 1536 of sigmoid agree (not -8, "
        "8.3125 and -9.93)",
        chips=("M1",),
        grade="measured",
        source="joshuaswarren/mlx-omarchy: receipts/2026-09-14-decoder-activations-on-ane.md (T8103, Linux "
        "driver); the lstm that Core ML runs does not use these tables",
        modelled="sigmoid and tanh: product and sum are rounded to fp16, ties away from zero",
    ),
    Property(
        "other_functions",
        "errors in units of the last place: exp 9, log 91, sqrt 1.2, rsqrt 2.1; sin 6.3e-4 absolute",
        chips=("M4", "M6"),
        grade="measured",
        source=STUDY,
    ),
    Property(
        "width_slice",
        "a slice of the last axis that does not begin at 0 makes magnitudes of 4095 or more infinite",
        chips=("M1", "M2"),
        grade="measured",
        source=f"{GUIDE}; {FORGE}",
        modelled="slice_by_index, slice_by_size, split on these chips; absent on M5, not measured on M3",
    ),
    Property(
        "width_concat",
        "a concat of several such slices gives wrong elements",
        chips=("M2",),
        grade="measured",
        source=FORGE,
    ),
    Property(
        "flush",
        "products flush numbers below 2^-14 to zero",
        chips=("M1",),
        grade="measured",
        source=f"{STUDY}; {FORGE}",
        modelled="operands of matmul, linear, conv",
    ),
    Property(
        "code_ties",
        "quantize rounds half-way cases away from zero; all 63,488 finite values of fp16 at scale 1",
        chips=("M5",),
        grade="measured",
        source=f"{CADAMCAT}: articles/03 (M5 Pro, macOS 27.0)",
        modelled="quantize",
    ),
    Property(
        "code_scale",
        "a product that is quantized takes the code of a dequantized factor times the scale of the result: 1, "
        "2, 4, 8 where 1 is right, for a code of scale 1/16 and results of scale 1/16 to 1/2; a clip of the "
        "product repairs it",
        chips=("M5",),
        grade="measured",
        source=f"{CADAMCAT}: coreai-qdq-multiply-scale (M5 Pro, macOS 27.0)",
        modelled="mul of one dequantized factor that only a quantize reads, scales of one number; two such "
        "factors, of which the branch built first counts, are not modelled",
    ),
    Property("log_zero", "log(0) is -45440", chips=("M1",), grade="measured", source=GUIDE, modelled="log"),
    Property(
        "narrow_sums",
        "reduce_sum has the range of fp16, but a narrow running sum",
        chips=("M1", "M5"),
        grade="measured",
        source=FORGE,
    ),
    Property(
        "inside_ops",
        "what happens inside layer_norm, softmax, attention and other composed ops",
        chips=(),
        grade="reported",
        source="no measurement was found",
    ),
)


def applies(name: str, chip: str | None) -> bool:
    """Is a property computed for a chip? With None, when no chip is named."""
    (row,) = (row for row in PROPERTIES if row.name == name)
    return bool(row.modelled) and (row.everywhere or chip in row.chips)


def describe() -> str:
    """Return what is modelled and what is not as text, one paragraph for each row."""
    lines = ["An estimate of the Neural Engine's arithmetic, not a promise."]
    for row in PROPERTIES:
        scope = f"{', '.join(row.chips) or 'no chip'}; {row.grade}"
        how = f"Modelled: {row.modelled}" if row.modelled else "Not modelled"
        lines.append(f"{row.name} ({scope}): {row.what}. {how}. Source: {row.source}.")
    return "\n".join(lines)
