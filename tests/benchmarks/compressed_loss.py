"""`ane.compress` against coremltools' data-free modes at equal size, on models that are trained here.

The small trained GPT-2, a convolutional network and a small vision transformer on the digits of scikit-learn,
each trained from several seeds. Losses are those of data that no calibration saw, as means over the seeds; the
last column is ours over the best of coremltools' modes of that size, the least and the largest of the seeds.
`--page FILE` writes the table into a page of the documentation, `--json` and `--plot` write the points, and
`--points` takes those of an earlier run, so that one that was ended goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from mixed_bits import SMALLEST, Trained, cost, digits, language_model, table
from pages import fill

import anesurgery as ane
from anesurgery.compressing.correcting import find_candidates
from anesurgery.compressing.modes import apply_configs, op_name, read_mode
from anesurgery.mil import ct, function_of, quiet_host
from anesurgery.rewriting.newer_opsets import raised

SIZE: dict[str, Any] = {"for_": "size"}
FEWER: dict[str, dict[str, Any]] = {
    "compress": SIZE,
    "compress, even": {**SIZE, "mixed": False},
    "compress, mixed": {**SIZE, "mixed": True},
}
GROUP = "group-16"
"""Tables of so many output channels each take more bytes, so that they are a size of their own."""


def grouped(bits: int) -> tuple[str, ...]:
    """The forms among which weights choose where coremltools takes tables of groups with so many bits."""
    others = [n for n in (2, 3, 4, 6, 8) if n != bits]
    return (
        f"palette{bits}-{GROUP}",
        f"palette{bits}",
        *(f"palette{n}{more}" for n in others for more in ("", f"-{GROUP}")),
    )


VECTORS = tuple(f"palette{bits}-vector-{size}" for bits, size in ((4, 2), (6, 2), (8, 2), (8, 4)))
"""Tables of vectors: 2, 3, 4 and 2 bits for a number."""
SIZES: tuple[tuple[int, tuple[str, ...], dict[str, dict[str, Any]]], ...] = (
    (
        8,
        ("linear-8", "palettize-8"),
        {"compress": SIZE, "compress, W8A8": {"activations": "percentile", "target": "A17"}},
    ),
    (4, (f"palettize-4-{GROUP}",), {"compress, groups": {**SIZE, "forms": grouped(4)}}),
    (4, ("palettize-4", "palettize-4-uniform", "linear-4"), FEWER),
    (
        3,
        (f"palettize-3-{GROUP}",),
        {
            "compress, groups": {**SIZE, "forms": grouped(3)},
            "compress, vectors": {**SIZE, "forms": (*grouped(3), *VECTORS)},
        },
    ),
    (3, ("palettize-3", "palettize-3-uniform"), FEWER),
)
"""Bits, modes of coremltools, and ours of no more bytes than the largest of these.

coremltools leaves a weight as it is whose channels are no multiple of a group; within the
same bytes ours choose.
"""
BESIDE = 256
"""Bytes of a file that a weight and a bias take beside their numbers: where arrays lie, and the gaps."""
NAMES = {"language_model": "small trained GPT-2", "digits": "digits", "vision": "vision transformer"}
"""Of the models, as the table has them."""
HEADS = ["model", "seeds", "bits", "form", "bytes", "KL, nats", "same top-1"]
HEADS += ["KL relative to the best coremltools mode"]
WIDTH, PATCHES, BATCH = 64, 16, 32


class Vision(torch.nn.Module):
    """Patches of 2x2 pixels, two layers of a transformer, the mean of all places."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(1, WIDTH, 2, stride=2)
        self.places = torch.nn.Parameter(torch.zeros(1, PATCHES, WIDTH))
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images [batch, 1, 8, 8] to logits [batch, 10]."""
        found = self.patches(x).flatten(2).transpose(1, 2) + self.places
        logits: torch.Tensor = self.head(self.layers(found).mean(1))
        return logits


def vision(folder: Path, seed: int = 0) -> Trained:
    """A vision transformer on the digits."""
    from sklearn.datasets import load_digits  # type: ignore[import-not-found,import-untyped,unused-ignore]

    torch.manual_seed(seed)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels)
    order = torch.randperm(len(x))
    train, rest = order[:1400], order[1400:]
    model = Vision()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(500):
        batch = train[torch.randint(len(train), (64,))]
        loss: Any = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)  # type: ignore[no-untyped-call,unused-ignore]
    right = (model(x[rest]).argmax(-1) == y[rest]).float().mean().item()
    print(f"vision transformer: {100 * right:.1f} % of {len(rest)} held out are right")
    with quiet_host(), torch.no_grad():
        made = ct.convert(
            cast(Any, torch.jit.trace)(model, x[:BATCH]),
            inputs=[ct.TensorType("image", (BATCH, 1, 8, 8))],
            minimum_deployment_target=ct.target.iOS18,
        )
        made.save(str(folder / "vision.mlpackage"))
    seen, held = (
        [{"image": part[i : i + BATCH].numpy()} for i in range(0, 384, BATCH)] for part in (x[train], x[rest])
    )
    return Trained("vision transformer", folder / "vision.mlpackage", seen, held)


def newer(model: Trained, folder: Path) -> Trained:
    """The same for iOS 18, which has 3 bits."""
    loaded = ane.load(model.package)
    program = raised(loaded.program, int(ct.target.iOS18.value))
    if program is loaded.program:
        return model
    path = ane.save(replace(loaded, program=program), folder / f"{model.package.stem}_18.mlpackage")
    return replace(model, package=path)


@dataclass(frozen=True)
class Point:
    """One form of a model: its size, and what it loses on data that no calibration saw."""

    model: str
    seed: int
    bits: int
    form: str
    bytes: int
    kl: float
    top1: float
    of_best: float | None
    """KL over the least of coremltools' modes of that size; None for these themselves."""
    seconds: float
    """Of the processor, to compress."""


def cells(seeds: Sequence[Point]) -> list[str]:
    """A row of the table: one form from all seeds."""
    one, count = seeds[0], len(seeds)
    size, kl, top1 = (
        sum(values) / count for values in zip(*((p.bytes, p.kl, p.top1) for p in seeds), strict=True)
    )
    shares = [p.of_best for p in seeds if p.of_best is not None]
    least, largest = (
        f"{pick(shares):.2f}" if shares else "" for pick in (partial(min, default=0), partial(max, default=0))
    )
    share = least if least == largest else f"{least} to {largest}"
    return [
        one.model,
        f"{count}",
        f"{one.bits}",
        one.form,
        f"{size:,.0f}",
        f"{kl:.5f}",
        f"{100 * top1:.1f} %",
        share,
    ]


FORMS = [(bits, name) for bits, modes, ours in SIZES for name in (*modes, *ours)]
"""What is measured of each model."""
Measured = dict[tuple[str, int, int, str], Point]


def points(model: Trained, seed: int, measured: Measured) -> Iterator[Point]:
    """The modes of coremltools and ours, at 8, 4 and 3 bits; those that were measured already as they are."""
    _see_apart(model)
    plain = ct.models.MLModel(str(model.package), skip_model_load=True)
    function = function_of(ane.load(model.package).program, None)
    weights = [op_name(one.var) for one in find_candidates(function, SMALLEST)[0]]
    for bits, modes, ours in SIZES:
        best, size = math.inf, 0
        for name in (*modes, *ours):
            if (point := measured.get((model.name, seed, bits, name))) is not None:
                best, size = (best, size) if name in ours else (min(best, point.kl), max(size, point.bytes))
                yield point
                continue
            started = time.process_time()
            if name in ours:
                how = {"inputs": model.measured, "smallest": SMALLEST, **ours[name]}
                if "forms" in how:
                    how["max_bytes"] = size - BESIDE * len(weights)
                made = ane.compress(model.package, bits, **how).model
            else:
                made = apply_configs(plain, dict.fromkeys(weights, read_mode(name)), SMALLEST)
                size = max(size, weight_bytes(made))
            seconds = time.process_time() - started
            found = cost(model.package, made, model.compared)
            best = best if name in ours else min(best, found.kl)
            share = found.kl / best if name in ours else None
            yield Point(model.name, seed, bits, name, weight_bytes(made), found.kl, found.top1, share, seconds)


def _see_apart(model: Trained) -> None:
    """See that no sample of the calibration is judged by."""
    seen = {value.tobytes() for values in model.measured for value in values.values()}
    held = {value.tobytes() for values in model.compared for value in values.values()}
    if seen & held:
        raise SystemExit(f"{model.name}: {len(seen & held)} samples are both calibrated with and judged by")


def draw(found: Sequence[Point], path: Path) -> None:
    """Size against loss, a plot for each model."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(point.model for point in found))
    figure = Figure(figsize=(4.5 * len(names), 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        mine = [point for point in found if point.model == name]
        for marker, label, ours in (("o", "coremltools, no data", False), ("*", "anesurgery.compress", True)):
            part = [point for point in mine if (point.of_best is not None) == ours]
            sizes, losses = [point.bytes / 1e3 for point in part], [max(point.kl, 1e-6) for point in part]
            axes.scatter(sizes, losses, marker=marker, s=60, label=label)
        axes.set(
            title=name, xlabel="kB of weights", ylabel="KL, nats, on data not calibrated with", yscale="log"
        )
        axes.legend()
    figure.savefig(path)


def weight_bytes(model: Any) -> int:
    """Of the weight file of an MLModel."""
    return sum(p.stat().st_size for p in Path(model.package_path).rglob("weight.bin"))


def _write(path: Path | None, found: Sequence[Point]) -> None:
    """Write the points as JSON, if anywhere."""
    if path is not None:
        path.write_text(json.dumps([asdict(point) for point in found], indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, help="a page between whose marks the table is written")
    parser.add_argument("--model", choices=tuple(NAMES), action="append")
    parser.add_argument("--seeds", type=int, default=3, help="from how many each model is trained")
    parser.add_argument(
        "--points", type=Path, nargs="+", default=[], help="read them, and measure what they lack"
    )
    parser.add_argument("--json", type=Path, help="where the points are written")
    parser.add_argument("--plot", type=Path, help="where size against loss is drawn, by matplotlib")
    chosen = parser.parse_args()
    made: dict[str, Callable[[Path, int], Trained]] = {
        "language_model": lambda at, seed: language_model(at, 32, seed),
        "digits": lambda at, seed: digits(at, 12, seed),
        "vision": vision,
    }
    read = [Point(**point) for path in chosen.points for point in json.loads(path.read_text(encoding="utf-8"))]
    measured: Measured = {(point.model, point.seed, point.bits, point.form): point for point in read}
    found: list[Point] = []
    for one in chosen.model or made:
        for seed in range(chosen.seeds):
            of_model = [measured.get((NAMES[one], seed, *form)) for form in FORMS]
            if None in of_model:
                with tempfile.TemporaryDirectory() as name:
                    found += points(newer(made[one](Path(name), seed), Path(name)), seed, measured)
            else:
                found += [point for point in of_model if point is not None]
            _write(chosen.json, found)
    rows: dict[tuple[Any, ...], list[Point]] = {}
    for point in found:
        rows.setdefault((point.model, point.bits, point.form), []).append(point)
    text = table([cells(seeds) for seeds in rows.values()], HEADS)
    print(text)
    _write(chosen.json, found)
    if chosen.plot is not None:
        draw(found, chosen.plot)
    fill(chosen.page, "losses", text)


if __name__ == "__main__":
    main()
