"""docs/gallery.md: each recipe on one small model, before and after; `make gallery` writes it.

Each model is measured in a process of its own, so that the memory is its own. Times and memory are those of
this machine; all else is the same on every run.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hand_written
import numpy as np
import small_models
import torch

import anesurgery as ane
from anesurgery.neuralnetwork.making import make_layer, make_network, weights

TARGETS = ("M1/macOS 14", "M4/macOS 15", "A15/iOS 17")
Make = Callable[[Path], Path]


@dataclass(frozen=True)
class Piece:
    """A recipe, and the model that shows it."""

    recipe: str
    words: str
    make: Make


def small(name: str) -> Make:
    """A transformers model with random weights."""
    return lambda folder: small_models.package(name, folder)


def mirrored_unet(folder: Path) -> Path:
    """A UNet that mirrors the edges of each picture before it makes it larger."""

    def larger(channels: int, fewer: int) -> torch.nn.Module:
        mirror, conv = torch.nn.ReflectionPad2d(1), torch.nn.Conv2d(channels, fewer, 3)
        return torch.nn.Sequential(mirror, conv, torch.nn.Upsample(scale_factor=2))

    hand_written.MODELS["unet_mirror"] = (lambda: hand_written.unet(larger), [hand_written.PICTURE])
    return hand_written.package("unet_mirror", folder)


def old_network(folder: Path) -> Path:
    """An .mlmodel with layers of iOS 13: constants, broadcasting, a clip in two layers."""
    rng = np.random.default_rng(0)
    layers = []
    value = "x"
    for k in range(4):
        scale, shift = (rng.standard_normal((16, 1, 1)).astype(np.float32) for _ in range(2))
        for kind, held, name in (("multiply", scale, f"s{k}"), ("add", shift, f"a{k}")):
            layers.append(make_layer("loadConstantND", [], [f"{name}_c"], shape=[16, 1, 1], data=weights(held)))
            layers.append(make_layer(f"{kind}Broadcastable", [value, f"{name}_c"], [name]))
            value = name
    path = folder / "network.mlmodel"
    path.write_bytes(make_network({"x": (16, 32, 32)}, layers, [value]).SerializeToString())
    return path


PIECES = {
    "gpt2": Piece("gpt2_ane", "GPT-2, 2 layers, 64 tokens", small("gpt2")),
    "llama": Piece("decoder_ane", "Llama, 2 layers, 64 tokens", small("llama")),
    "bert": Piece("encoder_ane", "BERT with a mask, 2 layers, 64 tokens", small("bert-mask")),
    "t5": Piece("seq2seq_ane", "T5, 2 and 2 layers, 64 and 8 tokens", small("t5")),
    "whisper": Piece("whisper_ane", "Whisper, 2 and 2 layers", small("whisper")),
    "vit": Piece("vit_ane", "ViT, 2 layers, 224 x 224", small("vit")),
    "unet": Piece("unet_ane", "a UNet with mirrored edges, 256 x 256", mirrored_unet),
    "network": Piece("neuralnetwork_ane", "an .mlmodel with iOS 13 layers", old_network),
    "swin": Piece("auto", "Swin, 2 stages, 224 x 224", small("swin")),
}


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Apply the recipe for each target, compare the outputs, inspect before and after."""
    piece = PIECES[name]
    path = piece.make(folder)
    made: dict[str, Any] = {"targets": {}}
    for target in TARGETS:
        start = time.perf_counter()
        surgery = ane.apply(path, piece.recipe, target=target, prove="model", quiet=True)
        seconds = time.perf_counter() - start
        after = surgery.save(folder / f"{name}_after{path.suffix}", overwrite=True)
        standings = [standing(ane.inspect(p, target=target)) for p in (path, after)]
        psnr = surgery.proof.psnr if surgery.proof else float("inf")
        made["targets"][target] = {"standings": standings, "seconds": seconds, "psnr": psnr}
        made["targets"][target]["passes"] = len({change.pass_name for change in surgery.changes})
        made["targets"][target]["edits"] = len(surgery.changes)
    made["mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return made


def standing(found: ane.Inspection) -> dict[str, Any]:
    """The numbers of an inspection that the page shows."""
    return {"ops": len(found.ops), **{f"of_{k}": v for k, v in found.residency.items()}, "us": found.cost}


HEAD = """# Gallery

Here we apply each recipe to one small model with random weights. `make gallery` builds the models, applies
the recipes and writes this page.

* **ops**: the number of operations, without constants. **on the ANE**: the share of the ops, and of the work
  (flop), that `inspect` expects on the ANE. We did not measure this on a device.
* **estimate**: Core ML's own estimate in microseconds, from the part of its formula that we know. It is not a
  run time. Sometimes this estimate drops, and the share on the ANE drops too. Then so little work is left that
  the CPU is faster than a switch to the engine and back. For example, `gpt2_ane` computes the head at one
  position.
* **PSNR**: for the worst output, compared with the original model; both in fp16 as stored.
* **s**, **MB**: the seconds that `apply` takes with `prove="model"`, and the peak memory of the process,
  including PyTorch. They vary from run to run.
"""


COLUMNS = (
    "recipe",
    "model",
    "passes / edits",
    "ops",
    "ops on the ANE",
    "flop on the ANE",
    "estimate",
    "PSNR",
    "s",
    "MB",
)


def table(rows: dict[str, dict[str, Any]], target: str) -> str:
    """The rows of one target."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for name, row in rows.items():
        found = row["targets"][target]
        old, new = found["standings"]
        shares = [f"{old[k]:.1%} → {new[k]:.1%}" for k in ("of_ops", "of_flop")]
        known = old["us"] is not None and new["us"] is not None
        cells = [
            f"`{PIECES[name].recipe}`",
            PIECES[name].words,
            f"{found['passes']} / {found['edits']}",
            f"{old['ops']} → {new['ops']}",
            *shares,
            f"{old['us']:.0f} → {new['us']:.0f} µs" if known else "not known",
            "exact" if found["psnr"] == float("inf") else f"{found['psnr']:.0f} dB",
            f"{found['seconds']:.1f}",
            f"{row['mb']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page(rows: dict[str, dict[str, Any]]) -> str:
    """The whole page."""
    return "\n\n".join([HEAD.strip(), *(f"## {t}\n\n{table(rows, t)}" for t in TARGETS)]) + "\n"


def main() -> None:
    """Measure the pieces and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(PIECES), help=f"of {', '.join(PIECES)}")
    parser.add_argument("--folder", type=Path, default=Path("build/gallery"), help="where models are kept")
    parser.add_argument("--page", type=Path, help="the page to write; printed when absent")
    parser.add_argument("--one", action="store_true", help="measure in this process and print JSON")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.one:
        print(json.dumps(measure(given.names[0], given.folder)))
        return
    rows = {}
    for name in given.names:
        command = [sys.executable, __file__, name, "--one", "--folder", str(given.folder)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows[name] = json.loads(done.stdout.splitlines()[-1])
        print(f"{name}: {sum(t['seconds'] for t in rows[name]['targets'].values()):.1f} s", file=sys.stderr)
    text = page(rows)
    if given.page is None:
        print(text)
    else:
        given.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
