"""Where a decode step runs, in the shapes of four families: docs/decoder-families.md.

Each model has the widths and heads of one between 0.1 and 1.5 billion weights, fewer layers and a shorter
vocabulary, so that it is converted in little memory. `llm_ane` gives it a cache, with the position as an input
and slices that are written, and as `anesurgery build` has it: a function makes what depends on the position,
and on an M1 products of one row become convolutions. `inspect` says where `decode` runs; nothing is measured.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from pages import fill

import anesurgery as ane
from anesurgery import recipes
from anesurgery.files.package import save
from anesurgery.loading import load
from anesurgery.shipping.converting import convert

CONTEXT, LAYERS, WORDS = 512, 2, 32000
BUILT = "as `build` makes it"
FORMS: dict[str, dict[str, Any]] = {
    'position as an input, `writes="slice"`': {"position_function": False, "writes": "slice"},
    BUILT: {},
}
TARGETS = ("M4/macOS 15", "M1/macOS 15")
OLDER = {"M1/macOS 15"}
"""Targets on which products of one row were seen on the CPU."""


def _sizes(
    width: int, inner: int, heads: int, keys: int, layers: int, words: int, **more: Any
) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_attention_heads": heads}
    return {**sizes, "num_key_value_heads": keys, "num_hidden_layers": layers, "vocab_size": words, **more}


MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama (SmolLM)": ("LlamaConfig", "LlamaForCausalLM", _sizes(576, 1536, 9, 3, 30, 49152)),
    "Llama 3.2": ("LlamaConfig", "LlamaForCausalLM", _sizes(2048, 8192, 32, 8, 16, 128256)),
    "Qwen2.5 small": ("Qwen2Config", "Qwen2ForCausalLM", _sizes(896, 4864, 14, 2, 24, 151936)),
    "Qwen2.5 large": ("Qwen2Config", "Qwen2ForCausalLM", _sizes(1536, 8960, 12, 2, 28, 151936)),
    "Gemma 3 small": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        _sizes(640, 2048, 4, 1, 18, 262144, head_dim=256, sliding_window=256, tie_word_embeddings=True),
    ),
    "Gemma 3 large": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        _sizes(1152, 6912, 4, 1, 26, 262144, head_dim=256, sliding_window=256, tie_word_embeddings=True),
    ),
    "Phi 1.5": (
        "PhiConfig",
        "PhiForCausalLM",
        _sizes(2048, 8192, 32, 32, 24, 51200, partial_rotary_factor=0.5),
    ),
}
"""Name -> its configuration, its class, and the sizes of the published model."""
TIED = {"Llama (SmolLM)", "Llama 3.2", "Qwen2.5 small", "Qwen2.5 large"}
"""Models whose head is the table of their embeddings, where that is not the default."""
WHOLE = ("Llama (SmolLM)",)
"""Models that are looked at with all their layers and words too: to see that fewer are no other structure."""


def decoder(name: str, **fewer: Any) -> Any:
    """Random weights, the same each time; `fewer` sizes than the published model has."""
    config, kind, sizes = MODELS[name]
    tied = {"tie_word_embeddings": True} if name in TIED else {}
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**sizes, **tied, "max_position_embeddings": CONTEXT, **fewer})
    return getattr(transformers, kind)(made).eval()


def weights(name: str) -> int:
    """How many weights the model has with all its layers and words."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in decoder(name).parameters())


def rows(name: str, folder: Path, *, whole: bool = False) -> list[str]:
    """Where a step runs on each target, in each form; of the whole model as `build` makes it alone."""
    layers = 6 if "sliding_window" in MODELS[name][2] else LAYERS  # one of six attends to all
    fewer = {} if whole else {"num_hidden_layers": layers, "vocab_size": WORDS}
    model = save(load(convert(decoder(name, **fewer), CONTEXT)), folder / "model.mlpackage", overwrite=True)
    lines = []
    for target in TARGETS:
        for words, options in {BUILT: FORMS[BUILT]}.items() if whole else FORMS.items():
            recipe = recipes.llm_ane.with_options(context=CONTEXT, **options)
            surgery = ane.apply(model, recipe, target=target, prove=None, quiet=True)
            if words == BUILT and target in OLDER:
                surgery = ane.apply(surgery.program, ["pointwise_convolution"], prove=None, quiet=True)
            report = ane.inspect(surgery.program, target=target, function="decode")
            share = f"{report.residency['ops']:.1%} | {len(report.segments)}"
            size = f"{weights(name) / 1e9:.2f}{', whole' * whole}"
            lines.append(f"| {name}, {size} | {target} | {words} | {share} |")
            print(lines[-1], flush=True)
    return lines


def table() -> str:
    """All models, on each target."""
    lines = [
        "The table shows the share of ops that `inspect` expects on the engine for one decode step. The number "
        "next to a model is its size in billions of weights. Unless a model is marked as whole, it has its "
        f"real width, but only {LAYERS} layers (Gemma: 6) and a vocabulary of {WORDS:,}. Ops whose unit is "
        "unknown count as off the engine. A segment is a run of ops on one unit. "
        "`python tests/benchmarks/decode_switches.py --page docs/decoder-families.md` writes the table.",
        "",
        "| model | target | form | ops on the ANE | segments |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            lines += rows(name, Path(folder))
        for name in WHOLE:
            lines += rows(name, Path(folder), whole=True)
    return "\n".join(lines)


def main() -> None:
    """Print the rows, and write the table into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, help="write the table into this page")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    fill(options.page, "switches", table())


if __name__ == "__main__":
    main()
