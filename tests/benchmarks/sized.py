"""docs/sized-models.md: models of several families at six sizes; `make sized` writes it.

Each is converted with a range of lengths and given to `sizes`. At each size it is compared in fp16 with
the model that is converted at that size, and at every length from 1 to the largest with the model at
that length. A model of one fixed size is made at two others, and compared in the same way. Published
models and the time are measured by the files `sized_corpus.py` and `sized_time.py`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sized_corpus
import sized_forms
import sized_time
import torch
from recipe import spread
from sized_figures import nearness, nearness_in_words, stored, worst
from sized_models import FIXED, LENGTHS, MODELS, MODULES, SHORTER, Sized, seeded
from torch import nn

import anesurgery as ane
from anesurgery.files.size_index import read as sized_file
from anesurgery.shipping.position_tables import SHARE, SMALL_TABLE


def between(model: Sized, ranged: Any, folder: Path) -> str:
    """The worst of every length, against the model of a range, or against it at that one length."""
    every = list[float]()
    multiple = sized_file(folder)[1].multiple
    for length in range(multiple, LENGTHS[-1] + 1, multiple):
        values = model.values(length)
        found = ane.run(folder, model.with_mask(values, length))
        near = nearness(found, ane.run(ranged, values))
        if near < 80:  # what a range computes at run time is rounded in another way than constants are
            fixed = ane.sizes(ranged, {name: [shape] for name, shape in model.shapes(length).items()})
            near = nearness(found, ane.run(next(iter(fixed.models.values())), values))
        every.append(near)
    return worst(every)


def row(name: str, model: Sized, scratch: Path) -> str:
    """A row of the table."""
    module = model.build()
    try:
        ranged = model.convert(module)
    except Exception as error:
        return f"| {name} | not converted with a range | | | {type(error).__name__}: {str(error)[:120]} |"
    every = [model.shapes(length) for length in LENGTHS]
    try:
        sized = ane.sizes(ranged, {key: [one[key] for one in every] for key in model.inputs}, mask=model.mask)
    except ane.SurgeryError as error:
        return f"| {name} | refused | | | {error} |"
    folder = sized.save(scratch / "sized")
    near = list[float]()
    for length in LENGTHS:
        values = model.values(length)
        found = ane.run(folder, model.with_mask(values, length), precision="fp16")
        near.append(nearness(found, ane.run(model.convert(module, length), values, precision="fp16")))
    one = stored(ane.save(sized.models[f"size_{LENGTHS[-1]}"], scratch / "one.mlpackage"))
    filled = "-" if sized.padding.why_not else between(model, ranged, folder)
    more = 100 * (stored(folder) / one - 1)
    return f"| {name} | {nearness_in_words(near)} | {more:+.1f} % | {filled} | {sized.padding} |"


def fixed_row(name: str, model: Sized, scratch: Path) -> str:
    """A row of the table of models of one fixed size."""
    module = model.build()
    every = [model.shapes(length) for length in SHORTER]
    try:
        sized = ane.sizes(
            model.convert(module, LENGTHS[-1]), {key: [one[key] for one in every] for key in model.inputs}
        )
    except ane.SurgeryError as error:
        return f"| {name} | refused | {error} |"
    folder, near = sized.save(scratch / "sized"), list[float]()
    for length in SHORTER:
        values = model.values(length)
        expected = ane.run(model.convert(module, length), values, precision="fp16")
        near.append(nearness(ane.run(folder, values, precision="fp16"), expected))
    return f"| {name} | {nearness_in_words(near)} | {'; '.join(sized.assumed) or '-'} |"


def module_row(name: str, module: nn.Module, shapes: Sequence[tuple[int, ...]], scratch: Path) -> str:
    """A row of the table of modules that are converted at each size."""
    sized = ane.sizes(module.eval(), {"x": shapes})
    folder, near = sized.save(scratch / "sized"), list[float]()
    for shape in shapes:
        values = {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
        with torch.no_grad():
            wanted = {"y": module(torch.from_numpy(values["x"])).numpy()}
        near.append(nearness(ane.run(folder, values), wanted))
    last = list(sized.models)[-1]
    one = stored(ane.save(sized.models[last], scratch / "one.mlpackage"))
    listed = ", ".join("x".join(map(str, shape)) for shape in shapes)
    return f"| {name} | {listed} | {min(near):.0f} dB | {100 * (stored(folder) / one - 1):+.1f} % |"


HEAD = """# Models at six sizes

`make sized` writes this page; with `OPTIONS="--sections corpus time"`, it writes only the sections you name.
"""
FROM_RANGES = """## From a range

We convert small models with random weights for a range of lengths. Then [`sizes`](sizes.md) builds each of them
at the lengths {lengths}.

* *At a size*: how many of the six sizes are bit-identical, in fp16, to a model converted at that size.
  If some are not, the worst PSNR.
* *Weights*: how much larger the weights of all six sizes are than those of the largest size alone.
  Minus means smaller, because the package of all sizes stores equal weights once.
* *Worst between*: the worst PSNR at any length from 1 to {largest}; we pad the input and crop the
  output. *Between sizes*: how we pad the input, or why we cannot.

Each size stores its own copy of tables of less than {least} bytes, if the weights grow by at most
{share:.0f} %.

| model | at a size | weights | worst between | between sizes |
|---|---|---|---|---|
{rows}

Some models match at only a few sizes: if converted for a range, they compute rotary positions in fp16 at run
time. For one fixed size, the conversion folds them in fp32, so these models match too.
"""
FROM_FIXED = """## From one fixed size

We convert each model at the length {largest} only, and [`sizes`](sizes.md) builds it at {shorter}.
*Equal*: at how many of these lengths it is bit-identical, in fp16, to a model of that length.
*Assumed*: what `sizes` had to assume, because one fixed size does not show it.

| model | equal | assumed |
|---|---|---|
{rows}
"""
FROM_MODULES = """## From a PyTorch module

`sizes` converts a PyTorch module at each size. *Accuracy*: the PSNR of the worst size, compared with the
module, in fp32 with weights in fp16. Interpolated positions differ from size to size. Each size stores
its own positions. If that would make the weights more than 2 % larger, the model computes them instead.

| module | sizes | accuracy | weights |
|---|---|---|---|
{rows}
"""
FROM_FORMS = """## Forms of common models

We wrote these models for this table. [`sizes`](sizes.md) gets each as a PyTorch module, a model with a range,
a model with a list of shapes (`EnumeratedShapes`), and a model of the largest size.

| form | from | at a size | weights | worst between | between sizes |
|---|---|---|---|---|---|
{rows}
"""
FROM_CORPUS = """## Published models

`sizes` builds each model at the listed sizes (the shapes of its first input).

* *Equal*: how many sizes are bit-identical, in fp16, to a model of this size made without `sizes`. A package
  with a range takes the size from its input. For an `.mlmodel`, we set the size in the specification. For a
  package with one size, we replaced the lengths in the graph by hand.
* *Weights*: how much larger the weights of all sizes are than those of the largest size alone.
* *Between*: the worst PSNR, in fp32, at a length between two sizes.
* *Time*: CPU seconds of `sizes` and `save`.

| model | sizes | equal | weights | between | time | between sizes |
|---|---|---|---|---|---|---|
{rows}

The ranges of the two DTLN models contain only two sizes. `bisenet`, `bge_small`, `fluid_titanet_small`,
`whisper_tiny_decoder` and `kokoro_duration` are real graphs with random weights. We first repaired the mask
of `bge_small` (`padding_mask_tensor`): without this, all its outputs are NaN. `kokoro_duration`, as
converted, does not run at any length, because it computes a repeat count as -1 / 128, which is rounded to 0.
"""
TIME = """## Time

We built six sizes of a {megabytes:.0f} MB model with flexible lengths. This took **{ratio}** times the CPU time
of loading and saving the same package with coremltools (the median of {runs} rounds, with their range).
"""


ONLY: list[str] = []
"""The models whose rows are made anew; all where it is empty."""


def _with_rows(written: str, earlier: str, cells: int) -> str:
    """A section, and the rows of an earlier one that it does not have, in their place.

    Args:
        written: the section of some rows.
        earlier: the same of all.
        cells: how many cells of a row name it.
    """

    def named(text: str) -> dict[str, str]:
        lines = [line for line in text.split("\n") if line.startswith("| ")][1:]
        return {" | ".join(line.split(" | ")[:cells]): line for line in lines}

    fresh = named(written)
    rows = [*(named(earlier) | fresh).values()]
    lines = [line for line in written.split("\n") if line not in fresh.values()]
    rule = next(i for i, line in enumerate(lines) if line.startswith("|---"))
    return "\n".join([*lines[: rule + 1], *rows, *lines[rule + 1 :]])


def _each(rows: Iterator[str]) -> str:
    """Rows below each other, which are shown as they come."""
    listed = list[str]()
    for one in rows:
        print(one, flush=True)
        listed.append(one)
    return "\n".join(listed)


def _in_scratch(of: Callable[[str, Any, Path], str], models: Mapping[str, Any]) -> str:
    """A row of each model, in a folder of its own."""

    def rows() -> Iterator[str]:
        for name, model in models.items():
            if ONLY and name not in ONLY:
                continue
            with tempfile.TemporaryDirectory() as scratch:
                yield of(name, model, Path(scratch))

    return _each(rows())


def ranges_section() -> str:
    """Models of a range."""
    lengths = ", ".join(map(str, LENGTHS))
    rows = _in_scratch(row, MODELS)
    return FROM_RANGES.format(
        lengths=lengths, largest=LENGTHS[-1], least=SMALL_TABLE, share=100 * SHARE, rows=rows
    )


def fixed_section() -> str:
    """Models of one size."""
    shorter = " and ".join(map(str, SHORTER))
    return FROM_FIXED.format(largest=LENGTHS[-1], shorter=shorter, rows=_in_scratch(fixed_row, FIXED))


def modules_section() -> str:
    """PyTorch modules."""

    def of(name: str, chosen: Any, scratch: Path) -> str:
        build, shapes = chosen
        return module_row(name, seeded(build)(), shapes, scratch)

    return FROM_MODULES.format(rows=_in_scratch(of, MODULES))


def forms_section() -> str:
    """Forms of common models, each in four ways."""
    return FROM_FORMS.format(rows=_each(sized_forms.table([n for n in ONLY if n in sized_forms.FORMS])))


def corpus_section() -> str:
    """Published models."""
    with tempfile.TemporaryDirectory() as folder:
        return FROM_CORPUS.format(
            rows=_each(sized_corpus.rows(Path(folder), [n for n in ONLY if n in sized_corpus.MODELS]))
        )


def time_section() -> str:
    """A model of 100 MB."""
    with tempfile.TemporaryDirectory() as folder:
        figures, size = sized_time.ratios(Path(folder), RUNS)
    return TIME.format(megabytes=size / 1e6, runs=RUNS, ratio=spread(figures))


RUNS = 3
SECTIONS = {
    "ranges": ranges_section,
    "fixed": fixed_section,
    "modules": modules_section,
    "forms": forms_section,
    "corpus": corpus_section,
    "time": time_section,
}
TITLES = {
    "ranges": "From a range",
    "fixed": "From one fixed size",
    "modules": "From a PyTorch module",
    "forms": "Forms of common models",
    "corpus": "Published models",
    "time": "Time",
}
"""The headings, by which sections of an earlier page are kept."""


def main() -> None:
    """Write the page, or some sections of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, required=True)
    parser.add_argument("--sections", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--only", nargs="*", help="the first words of rows; the others stay as they are")
    chosen = parser.parse_args()
    page: Path = chosen.page
    by_title = {part.split("\n")[0]: part for part in page.read_text(encoding="utf-8").split("\n## ")[1:]}
    kept = {name: by_title.get(title, "") for name, title in TITLES.items()}
    for name in chosen.sections:
        ONLY[:] = chosen.only or []
        written = SECTIONS[name]().removeprefix("## ")
        kept[name] = _with_rows(written, kept[name], 2 if name == "forms" else 1) if chosen.only else written
    parts = ["## " + part.rstrip() for part in kept.values() if part]
    page.write_text("\n\n".join([HEAD.rstrip(), *parts]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
