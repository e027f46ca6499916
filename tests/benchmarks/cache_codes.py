"""What a cache in 8 bits costs by a scale for each head, and for each channel of each head.

The small trained GPT-2, and the same function with keys of which one channel of each head is larger, and its
queries smaller. Texts of 60 letters share none: 24 for `compress_cache`, 12 to judge by.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mixed_bits import ROOT, table

import anesurgery as ane
from anesurgery.compressing.cache_codes import CHANNEL, HEAD, _loss
from anesurgery.mil import ct
from anesurgery.rewriting.ml_program import MLProgram

LENGTH, FOUND, JUDGED, LARGER = 60, 24, 12, (1, 8, 32)


def louder(model: Any, factor: float) -> Any:
    """The same function, with larger keys and smaller queries in one channel of each head."""
    size, heads = model.config.n_embd, model.config.n_head
    with torch.no_grad():
        for block in model.transformer.h:
            for numbers in (block.attn.c_attn.weight, block.attn.c_attn.bias):
                numbers[..., 3 : size : size // heads] /= factor
                numbers[..., size + 3 : 2 * size : size // heads] *= factor
    return model


def main() -> None:
    """Measure and print."""
    sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))
    gpt2: Any = importlib.import_module("trained_gpt2")
    convert = ct.convert
    gpt2.ct.convert = lambda *args, **options: convert(
        *args, **{**options, "minimum_deployment_target": ct.target.iOS18}
    )
    gpt2.BUILD.mkdir(parents=True, exist_ok=True)
    text = gpt2.Text()
    numbers = np.array(text.encode(text.text))
    starts = np.random.default_rng(1).permutation(len(numbers) // LENGTH)[: FOUND + JUDGED] * LENGTH
    texts = [numbers[at : at + LENGTH].tolist() for at in starts]
    rows = []
    for factor in LARGER:
        with tempfile.TemporaryDirectory() as folder:
            package = gpt2.converted(louder(gpt2.trained(text), factor), Path(folder) / "gpt2.mlpackage")
            step = ane.passes.AddCache(context=gpt2.LENGTH, prefill=16, cache="io")
            plain = MLProgram.read(ane.apply(package, step, quiet=True).model)
            options: dict[str, Any] = {"target": "M5/macOS 26"}
            losses = []
            for each in (HEAD, CHANNEL):
                small = ane.compress_cache(plain.loaded, texts[:FOUND], scales=each, **options)
                losses.append(f"{_loss(plain, small.subject, texts[FOUND:]).kl:.2g}")
            taken = ane.compress_cache(plain.loaded, texts[:FOUND], **options).each
            rows.append([f"{factor}", *losses, taken])
    print(table(rows, ("times larger", "KL, for each head", "KL, for each channel", "taken by default")))


if __name__ == "__main__":
    main()
