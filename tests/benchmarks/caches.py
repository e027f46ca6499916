"""Which families of decoders take a cache: docs/decoder-families.md.

Each decoder of docs/architectures.md is converted by trace in fp32, with few tokens, and given a cache by
`add_cache`, in both of its forms. Logits are compared with those of the model without one, over the whole
context; and, for a text of a few tokens, with those of torch, whose numbers may hang on the length of the
text. The lists of the page are written from what came out, and from nothing else.
"""

from __future__ import annotations

import argparse
import json
import textwrap
import warnings
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import matrix
import numpy as np
import torch
from architectures import DECODER, Architecture, Sizes, decoder, tokens
from families import ARCHITECTURES
from matrix import psnr
from pages import filled

from anesurgery import frontend
from anesurgery.checking.comparison import compare
from anesurgery.errors import PassError
from anesurgery.interpret.decoding import Decoder
from anesurgery.loading import load
from anesurgery.passes.add_cache import AddCache
from anesurgery.passes.position_function import PositionFunction
from anesurgery.surgery import apply

TOKENS, CALL, FEW = 24, 7, 5
"""Of the context, in a call of `prefill`, and in a short text."""
FORMS = (
    (AddCache(prefill=CALL, cache="io", required=True),),
    (AddCache(prefill=CALL, cache="io", required=True, writes="blend"), PositionFunction()),
)
"""The passes that add the cache: the position as an input, and a function that makes what depends on it."""
NEAR = 80.0
"""PSNR in dB: caches hold fp32 here."""


def longrope(first: int) -> Sizes:
    """The sizes of a decoder that has other frequencies for texts of more tokens than `first`."""
    pairs = DECODER["head_dim"] // 2
    factors = {"short_factor": [1.0] * pairs, "long_factor": [2.0 + 0.1 * i for i in range(pairs)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": first} | factors
    return DECODER | {"original_max_position_embeddings": first, "rope_parameters": rope}


FURTHER = {
    "gemma3n": decoder(
        "Gemma3n",
        {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 1000}
        | {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "sliding_window": 8}
        | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 1000, "laurel_rank": 8}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 0}
        | {"activation_sparsity_pattern": [0.0] * 4, "altup_num_inputs": 2},
        "Gemma3nTextConfig",
    ),
    "phi3_longrope": decoder("Phi3", longrope(2 * TOKENS)),
    "phi3_longrope_passed": decoder("Phi3", longrope(TOKENS // 2)),
    "llama_dynamic": decoder(
        "Llama",
        DECODER
        | {"max_position_embeddings": TOKENS // 2}
        | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
}
"""Decoders that docs/architectures.md does not have: other forms of positions among them."""


@dataclass(frozen=True)
class Found:
    """What came out for one family."""

    name: str
    psnr: float = float("nan")
    """Of the logits with a cache against those without, over the whole context."""
    few: float = float("nan")
    """Of those of a short text against torch's."""
    refused: str = ""

    @property
    def works(self) -> bool:
        """Does the decoder with a cache write the same?"""
        return min(self.psnr, self.few) >= NEAR

    def __str__(self) -> str:
        agree = f"logits agree to {self.psnr:.0f} dB, those of {FEW} tokens with torch's to {self.few:.0f} dB"
        return self.refused or agree


def tried(name: str, row: Architecture) -> Found:
    """Convert a decoder, give it a cache, and compare."""
    row = replace(row, inputs=partial(tokens, TOKENS))
    module = row.module()
    try:
        program = load(matrix.converted(row, module, "trace", "FLOAT32")).program
    except NotImplementedError as error:
        return Found(
            name, refused=f"not converted by trace: {str(error).splitlines()[0].split(' (converting')[0]}"
        )
    except Exception as error:  # of the conversion
        return Found(name, refused=f"not converted by trace ({type(error).__name__})")
    few = row.inputs()["input_ids"][:, :FEW]
    with torch.no_grad():
        expected = module(torch.from_numpy(few).long())[0].numpy()
    found = Found(name, np.inf, np.inf)
    for steps in FORMS:
        try:
            done = apply(program, list(steps), prove=None, quiet=True)
        except PassError as error:
            words = str(error).splitlines()[0].removeprefix("add_cache: ").split(" (")[0]
            return Found(name, refused=words)
        whole = compare(program, done.program, row.inputs(), contract=done.contract, gate=NEAR).psnr
        short = psnr(expected, Decoder(done.program).feed(few))
        found = Found(name, min(found.psnr, whole), min(found.few, short))
    return found


def written(page: str, found: list[Found]) -> str:
    """The page with the lists of what works and what is refused."""
    good = textwrap.fill(", ".join(f"`{f.name}`" for f in found if f.works), 118)
    bad = "\n".join(f"* `{f.name}`: {f}" for f in found if not f.works)
    lists = f"{good}.\n" + (f"\nThese are refused:\n\n{bad}\n" if bad else "")
    return filled(page, "families", lists.rstrip("\n"))


def main() -> None:
    """Try all, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--page", type=Path, help="write the lists into this page")
    parser.add_argument("--keep", type=Path, help="a file with what came out before, which is not tried again")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    frontend.register()
    frontend.register_experts()
    matrix.OPSET = "iOS18"
    decoders = {n: r for n, r in ARCHITECTURES.items() if r.recipe == "decoder_ane"} | FURTHER
    keep = options.keep
    rows = json.loads(keep.read_text()) if keep and keep.exists() else []
    found = {row["name"]: Found(**row) for row in rows}
    for name in options.names or decoders:
        if name not in found:
            found[name] = tried(name, decoders[name])
            print(name, found[name], flush=True)
        if keep:
            keep.write_text(json.dumps([asdict(one) for one in found.values()]))
    if options.page:
        options.page.write_text(written(options.page.read_text(), [found[n] for n in decoders if n in found]))


if __name__ == "__main__":
    main()
