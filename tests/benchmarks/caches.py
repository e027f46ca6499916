"""Which families of decoders take a cache: docs/decoders.md.

Each decoder of docs/architectures.md is converted by trace in fp32, with few tokens, and given a cache by
`add_cache`; logits are compared with those of the model without one, over the whole context. The lists of the
page are written from what came out, and from nothing else.
"""

from __future__ import annotations

import argparse
import re
import textwrap
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import matrix
from architectures import Architecture, decoder, tokens
from families import ARCHITECTURES

from anesurgery import frontend
from anesurgery.checking.comparison import compare
from anesurgery.errors import PassError
from anesurgery.loading import load
from anesurgery.passes.add_cache import AddCache
from anesurgery.testing import apply_pass

TOKENS, CALL = 24, 7
"""Of the context, and in a call of `prefill`."""
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
NEAR = 80.0
"""PSNR in dB: caches hold fp32 here."""
FURTHER = {
    "gemma3n": decoder(
        "Gemma3n",
        {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 1000}
        | {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "sliding_window": 8}
        | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 1000, "laurel_rank": 8}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 0}
        | {"activation_sparsity_pattern": [0.0] * 4, "altup_num_inputs": 2},
        "Gemma3nTextConfig",
    )
}
"""Decoders that docs/architectures.md does not have."""


@dataclass(frozen=True)
class Found:
    """What came out for one family."""

    name: str
    psnr: float = float("nan")
    refused: str = ""

    @property
    def works(self) -> bool:
        """Does the decoder with a cache write the same?"""
        return self.psnr >= NEAR

    def __str__(self) -> str:
        return self.refused or f"logits agree to {self.psnr:.0f} dB"


def tried(name: str, row: Architecture) -> Found:
    """Convert a decoder, give it a cache, and compare."""
    row = replace(row, inputs=partial(tokens, TOKENS))
    try:
        program = load(matrix.converted(row, row.module(), "trace", "FLOAT32")).program
    except Exception as error:  # of the conversion
        return Found(name, refused=f"not converted by trace ({type(error).__name__})")
    try:
        after, session = apply_pass(AddCache(prefill=CALL, cache="io", required=True), program)
    except PassError as error:
        return Found(name, refused=str(error).splitlines()[0].removeprefix("add_cache: ").split(" (ran")[0])
    return Found(name, compare(program, after, row.inputs(), contract=session.contract, gate=NEAR).psnr)


def written(page: str, found: list[Found]) -> str:
    """The page with the lists of what works and what is refused."""
    good = textwrap.fill(", ".join(f"`{f.name}`" for f in found if f.works), 118)
    bad = "\n".join(f"* `{f.name}`: {f}" for f in found if not f.works)
    lists = f"{good}.\n" + (f"\nNot these:\n\n{bad}\n" if bad else "")
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{lists}{END}", page, flags=re.DOTALL)


def main() -> None:
    """Try all, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--page", type=Path, help="write the lists into this page")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    frontend.register()
    frontend.register_experts()
    matrix.OPSET = "iOS18"
    decoders = {n: r for n, r in ARCHITECTURES.items() if r.recipe == "decoder_ane"} | FURTHER
    found = []
    for name in options.names or decoders:
        found.append(tried(name, decoders[name]))
        print(name, found[-1], flush=True)
    if options.page:
        options.page.write_text(written(options.page.read_text(), found))


if __name__ == "__main__":
    main()
