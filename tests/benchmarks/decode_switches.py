"""What a decode step costs in its two forms: docs/decoders.md.

A Llama with layers as of a model with 0.1 billion weights is converted by trace and given a cache by `llm_ane`:
with the position as an input and slices that are written, and with a function that makes what depends on the
position. `inspect` says where `decode` runs; nothing is measured.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import anesurgery as ane
from anesurgery import recipes
from anesurgery.files.package import save
from anesurgery.loading import load
from anesurgery.shipping.converting import convert

BEGIN, END = "<!-- switches: begin -->", "<!-- switches: end -->"
CONTEXT, LAYERS = 512, 4
FORMS: dict[str, dict[str, Any]] = {
    'position as an input, `writes="slice"`': {"position_function": False, "writes": "slice"},
    "`llm_ane` as it is": {},
}
TARGETS = ("M4/macOS 15", "A17/iOS 18")


def decoder() -> Any:
    """Random weights, the same each time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 4}
    made = LlamaConfig(num_hidden_layers=LAYERS, vocab_size=8000, max_position_embeddings=CONTEXT, **sizes)
    return LlamaForCausalLM(made).eval()


def row(model: Path, target: str, words: str, options: dict[str, Any]) -> str:
    """Where a step runs on a target, in one form."""
    recipe = recipes.llm_ane.with_options(context=CONTEXT, **options)
    done = ane.apply(model, recipe, target=target, prove=None, quiet=True)
    found = ane.inspect(done.program, target=target, function="decode")
    time = found.time
    lasts = "not known" if time is None else f"{time.ms:.2f} ms ({time.low:.2f} to {time.high:.2f})"
    return f"| {words} | {target} | {found.residency['ops']:.1%} | {len(found.segments)} | {lasts} |"


def table() -> str:
    """Both forms on each target."""
    head = f"A decode step of {LAYERS} layers of width 768, by `inspect`"
    lines = [f"{head} (`python tests/benchmarks/decode_switches.py --page docs/decoders.md`):", ""]
    lines += ["| form | target | ops on the ANE | segments | time, as estimated |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        model = save(load(convert(decoder(), CONTEXT)), Path(folder) / "llama.mlpackage")
        lines += [row(model, target, words, options) for target in TARGETS for words, options in FORMS.items()]
    return "\n".join(lines)


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, help="write the table into this page")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    made = table()
    print(made)
    if options.page:
        page = options.page.read_text()
        options.page.write_text(
            re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{made}\n{END}", page, flags=re.DOTALL)
        )


if __name__ == "__main__":
    main()
