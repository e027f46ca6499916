"""Which architectures convert, how exact they are, and what share of each is on the ANE before and after.

Each row is converted by trace and by export and run against torch, in fp32 and in fp16. Its family's recipe, or
`auto`, is applied for each target; no share may fall, and outputs stay within 3 dB of the package as given.
`--real` measures two layers of the width of models in use instead, by trace.
Figures are kept in a folder, a file for each architecture: a run that is cut goes on where it stopped.
docs/architectures.md is written from them, and from nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

import anesurgery as ane
from anesurgery import frontend
from anesurgery.checking.output_comparison import compare_arrays
from anesurgery.files.interface import adapt_inputs, adapt_outputs
from anesurgery.interpret import run
from anesurgery.loading import load
from anesurgery.mil import Array, ct, quiet_host
from anesurgery.passes.rerank import Rerank
from anesurgery.placement.score import Score, placed
from anesurgery.placement.target import Target
from anesurgery.rewriting.host import pass_pipeline

sys.path.append(str(Path(__file__).parent))

from architectures import Architecture
from families import ARCHITECTURES
from matrix_page import page, real_section, with_real_widths
from real_widths import REAL

TARGETS = ("M1/macOS 14", "M4/macOS 15", "A15/iOS 17")
OPSET = "iOS17"
"""The newest that all targets load."""
FOLDER = Path("build/matrix")
REAL_FOLDER = Path("build/matrix_real")
BOTH = ("trace", "export")

Row = dict[str, Any]
Arrays = dict[str, Array]


def torchvision_without_kernels() -> Any:
    """Let torchvision be imported where its compiled ops do not fit the build of torch; none is run here.

    What is returned must be kept: the ops vanish with it.
    """
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return None
    except RuntimeError:
        library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library


def graph_of(module: torch.nn.Module, example: tuple[torch.Tensor, ...], how: str) -> Any:
    """The model as the front end takes it; of a branch on data, the side that the example takes."""
    if how == "trace":
        return torch.jit.trace(module, example, check_trace=False)  # type: ignore[no-untyped-call]
    try:
        exported = torch.export.export(module, example)
    except GuardOnDataDependentSymNode:
        exported = torch.export.draft_export(module, example)
    return exported.run_decompositions({})


def converted(row: Architecture, module: torch.nn.Module, how: str, precision: str) -> Any:
    """The package."""
    with torch.no_grad(), quiet_host():
        return ct.convert(
            graph_of(module, row.example(), how),
            inputs=[ct.TensorType(k, shape=v.shape, dtype=v.dtype) for k, v in row.inputs().items()],
            minimum_deployment_target=getattr(ct.target, OPSET),
            compute_precision=getattr(ct.precision, precision),
            skip_model_load=True,
            pass_pipeline=pass_pipeline((Rerank(),)),
        )


def psnr(expected: Array, found: Array) -> float:
    """In dB; the shapes may differ in axes of one."""
    return compare_arrays("output", expected, np.asarray(found).reshape(expected.shape)).psnr


def one(outputs: Any) -> Array:
    """The only output."""
    (value,) = outputs.values()
    return np.asarray(value)


def measure(row: Architecture, hows: Sequence[str]) -> Row:
    """The figures of one architecture, all at one commit."""
    module = row.module()
    with torch.no_grad():
        expected = module(*row.example()).numpy()
    ways = {how: conversion(row, module, how, expected) for how in hows}
    made: Row = {"recipe": row.recipe, "commit": commit(), "convert": ways, "fp16": None, "targets": {}}
    good = next((how for how, figures in ways.items() if figures["error"] is None), None)
    if good is not None:
        given = Given.of(row, load(converted(row, module, good, "FLOAT16")), expected)
        made["fp16"] = psnr(expected, given.rounded)
        made["targets"] = {target: on(given, target) for target in TARGETS}
    return made


@dataclass(frozen=True)
class Given:
    """A package as converted, and what it gives."""

    row: Architecture
    loaded: Any
    expected: Array
    """What torch gives."""
    exact: Array
    rounded: Array
    """In fp32 and in fp16 arithmetic."""

    @classmethod
    def of(cls, row: Architecture, loaded: Any, expected: Array) -> Given:
        """Run the package in both."""
        found = [one(run(loaded.program, row.inputs(), precision=p)) for p in ("fp32", "fp16")]
        return cls(row, loaded, expected, *found)


def commit() -> str:
    """The commit that is measured; `+` where files differ from it."""
    described = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(described, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()


def attempt(work: Callable[[], Row], failed: Row) -> Row:
    """The figures, with the seconds of the processor that they took, or what went wrong."""
    started = time.process_time()
    try:
        found = work() | {"error": None}
    except Exception as error:
        found = failed | {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    return found | {"seconds": time.process_time() - started}


def conversion(row: Architecture, module: torch.nn.Module, how: str, expected: Array) -> Row:
    """Does it convert, and how far is it from torch in fp32?"""

    def work() -> Row:
        model = converted(row, module, how, "FLOAT32")
        program: Any = model._mil_program
        inputs = dict(zip(program.functions["main"].inputs, row.inputs().values(), strict=True))
        return {"fp32": psnr(expected, one(run(model, inputs)))}

    return attempt(work, {"fp32": None})


def shares(program: Any, target: str) -> Row:
    """The shares of ops and flop on the ANE, and how many ops of each type are off it.

    `most` holds the shares if each op whose unit is not known ran on the ANE.
    """
    (part,) = placed(program, Target.parse(target), advice=True)
    score = Score.of([part])
    off = Counter(op.op_type for op in part.ops if op.preferred not in ("ane", None))
    unknown = Counter(op.op_type for op in part.ops if op.preferred is None)
    most = {"most": part.residency_at_most}
    return score.share | most | {"off": dict(off.most_common()), "unknown": dict(unknown.most_common())}


def method(row: Architecture) -> str:
    """The recipe of the family; `auto` where there is none."""
    return row.recipe or "auto"


def on(given: Given, target: str) -> Row:
    """Before, and after the method."""
    chosen = method(given.row)
    after = attempt(partial(operated, given, chosen, target), {})
    return {"before": shares(given.loaded.program, target), "after": {chosen: after}}


def is_whole(known: Row, hows: Sequence[str]) -> bool:
    """Did it convert in all ways, and are the figures of all targets known? If not, it is measured again."""
    ways = known.get("convert", {})
    return (
        ways.keys() == set(hows)
        and all(figures["error"] is None for figures in ways.values())
        and known["targets"].keys() == set(TARGETS)
    )


def operated(given: Given, recipe: str, target: str) -> Row:
    """What a recipe does to a package."""
    surgery = ane.apply(given.loaded, recipe, target=target, prove=None, quiet=True)
    inputs = given.row.inputs()
    fed = adapt_inputs(surgery.contract, inputs)
    (name,) = surgery.program.functions["main"].outputs

    def wanted(whole: Array) -> Array:
        return np.asarray(adapt_outputs(surgery.contract, {name.name: whole}, inputs)[name.name])

    return shares(surgery.program, target) | {
        "passes": list(dict.fromkeys(change.pass_name for change in surgery.changes)),
        "undone": [f"{name}: {r.reason}" for name, r in surgery.refusals if r.reason.startswith("undone")],
        "agrees": psnr(wanted(given.exact), one(run(surgery.program, fed))),
        "fp16_before": psnr(wanted(given.expected), wanted(given.rounded)),
        "fp16": psnr(wanted(given.expected), one(run(surgery.program, fed, precision="fp16"))),
    }


def measure_missing(
    rows: Mapping[str, Architecture], names: Sequence[str], hows: Sequence[str], folder: Path, again: bool
) -> None:
    """Measure what is missing in a folder, or all that is named."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or rows:
        path, row = folder / f"{name}.json", rows[name]
        known: Row = json.loads(path.read_text()) if path.exists() and not again else {}
        if not is_whole(known, hows):
            found = attempt(partial(measure, row, hows), {"recipe": row.recipe, "commit": commit()})
            print(name, f"{found['seconds']:.0f} s", found["error"] or "", flush=True)
            path.write_text(json.dumps(found, indent=1))


def write_page(path: Path, folder: Path, real_folder: Path | None) -> None:
    """Write the tables of a folder; those of the other stay as they are on the page."""

    def figures(place: Path) -> dict[str, Row]:
        return {p.stem: json.loads(p.read_text()) for p in place.glob("*.json")}

    old = path.read_text() if path.exists() else ""
    if real_folder is not None:
        path.write_text(with_real_widths(old, figures(real_folder), TARGETS))
    else:
        path.write_text("\n".join([page(figures(folder), TARGETS), *real_section(old)]))


def main() -> None:
    """Measure what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; all by default")
    parser.add_argument("--real", action="store_true", help="two layers as wide as models in use")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where figures are kept")
    parser.add_argument("--real-folder", type=Path, default=REAL_FOLDER, help="where those of --real are kept")
    parser.add_argument("--again", action="store_true", help="measure what was measured before")
    parser.add_argument("--page", type=Path, help="write the page there")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    kernels = torchvision_without_kernels()
    frontend.register()
    frontend.register_experts()
    if chosen.real:
        measure_missing(REAL, chosen.names, BOTH[:1], chosen.real_folder, chosen.again)
    else:
        measure_missing(ARCHITECTURES, chosen.names, BOTH, chosen.folder, chosen.again)
    if chosen.page is not None:
        write_page(chosen.page, chosen.folder, chosen.real_folder if chosen.real else None)
    del kernels


if __name__ == "__main__":
    main()
