"""Inspections to draw: small ones, large ones, odd ones."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from anesurgery.placement import Estimate, Finding, Grade, Inspection, Memory, OpRow, Segment, Target

M1 = Target.parse("M1/macOS 14")


EVIL = "</script><script>document.title='owned'</script>\"'<img src=x onerror=alert(1)>"


def finding(rule: str = "dtype-int32", **changes: Any) -> Finding:
    values: dict[str, Any] = {
        "kind": "legality",
        "message": "casts to int32",
        "because": "int32 stays on the CPU",
        "source": "a table of ops",
        "grade": Grade.MEASURED,
        "scope": "M4",
    }
    return Finding(rule, **(values | changes))


def row(index: int, op_type: str, unit: str | None, legal: bool | None = True, **changes: Any) -> OpRow:
    values: dict[str, Any] = {
        "name": f"{op_type}_{index}",
        "shape": "1x64x8x8",
        "dtype": "fp16",
        "segment": 0,
        "flop": (index * 37) % 101 * 1000,
        "estimate": Estimate(1.5, float(index)),
    } | changes
    return OpRow(index=index, op_type=op_type, legal=legal, preferred=unit, **values)


def inspection(rows: list[OpRow], **changes: Any) -> Inspection:
    runs = [[*g] for _, g in itertools.groupby(rows, key=lambda r: r.preferred)]
    numbered = tuple(replace(r, segment=k) for k, run in enumerate(runs) for r in run)
    segments = tuple(
        Segment(
            k,
            run[0].preferred,
            tuple(r.name for r in run),
            {"x": (1, 64)},
            {"y": (1, 64)},
            tuple(r for r in (k + 1, k + 3) if r < len(runs)),
        )
        for k, run in enumerate(runs)
    )
    values: dict[str, Any] = {"model": "model", "target": M1, "ops": numbered, "segments": segments}
    return Inspection(**(values | changes))


def twenty(**changes: Any) -> Inspection:
    rows = [row(0, "cast", "cpu", False, findings=(finding(remedy="embedding_matmul", op="cast_0"),))]
    rows += [row(k, "conv", "ane") for k in range(1, 18)]
    rows += [row(18, "norm", None, None), row(19, "linear", "cpu")]
    return inspection(rows, **changes)


def large(count: int = 2000, every: int = 60) -> Inspection:
    def one(k: int) -> OpRow:
        if k % every:
            return row(k, "conv", "ane", name=f"a_rather_long_name_of_a_layer_{k}")
        cut = finding("cut", message=f"stride -{k} on axis 3", advice="flip it before", because="slow " * 30)
        return row(k, "slice", "cpu", False, findings=(cut,))

    return inspection([one(k) for k in range(count)], memory=Memory(10**9, 10**8, 10**7, None, 1))


ODD = {
    "empty": Inspection("nothing", M1, ()),
    "unknown": inspection([row(k, "x", None, None, estimate=None, flop=0) for k in range(70)]),
    "parts": Inspection("pipeline", M1, (), parts={"embed": twenty(), 'he"ad<b>': twenty()}),
    "evil": inspection(
        [
            row(
                0,
                EVIL,
                "cpu",
                False,
                name=EVIL,
                shape=EVIL,
                dtype=EVIL,
                findings=(finding(EVIL, message=EVIL, because=EVIL, source=EVIL, advice=EVIL),),
            )
        ],
        model=EVIL,
        notes=(EVIL,),
    ),
    "measured": inspection(
        [row(0, "mul", "ane", measured="cpu"), row(1, "add", "ane", measured="ane")], measured=True
    ),
    "infinite": inspection([row(0, "x", "ane", estimate=Estimate(float("nan"), float("inf")))]),
    "ragged": inspection([row(k, "x", "ane" if k % 2 else "cpu") for k in range(1200)]),
    "twenty": twenty(),
    "large": large(),
}
