"""Write one of the example models as a package: `example`."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anesurgery import frontend
from anesurgery.errors import LoadError, UnknownName
from anesurgery.examples.language import GPT2, GPT2_SIZES, TINY, Bert, Llama
from anesurgery.examples.speech import FRAMES, MELS, Whisper
from anesurgery.examples.speech import TOKENS as SPOKEN
from anesurgery.examples.vision import SIDE, OldNetwork, UNet, ViT
from anesurgery.files.package import save
from anesurgery.files.writing import check_target, write_atomically
from anesurgery.loading import load
from anesurgery.mil import ct, quiet_host


@dataclass(frozen=True)
class Example:
    """A model that can be made.

    Attributes:
        module: makes it, with random weights.
        inputs: name -> shape and dtype.
        output: its name.
        recipe: the one for its family.
        words: what it is.
        form: of the model, as coremltools names it: a program, or a network of layers in an .mlmodel.
        target: a device on which its recipe gains something.
    """

    module: Callable[[], torch.nn.Module]
    inputs: Mapping[str, tuple[tuple[int, ...], Any]]
    output: str
    recipe: str
    words: str
    form: str = "mlprogram"
    target: str = "iPhone 13"

    @property
    def suffix(self) -> str:
        """The suffix of its file."""
        return ".mlpackage" if self.form == "mlprogram" else ".mlmodel"


IDS = ((1, GPT2_SIZES.tokens), np.int32)
EXAMPLES = {
    "gpt2": Example(GPT2, {"input_ids": IDS}, "logits", "gpt2_ane", "a GPT-2 with 4 layers, 64 tokens"),
    "llama": Example(Llama, {"input_ids": IDS}, "logits", "decoder_ane", "a Llama with 4 layers, 64 tokens"),
    "bert": Example(
        Bert,
        {"input_ids": IDS, "attention_mask": IDS},
        "embedding",
        "encoder_ane",
        "a BERT with 4 layers and an attention mask, 64 tokens",
    ),
    "vit": Example(
        ViT,
        {"picture": ((1, 3, SIDE, SIDE), np.float32)},
        "scores",
        "vit_ane",
        "a vision transformer with 4 layers, 224 x 224 pixels",
        target="iPhone 12",
    ),
    "whisper": Example(
        Whisper,
        {"mel": ((1, MELS, FRAMES), np.float32), "input_ids": ((1, SPOKEN), np.int32)},
        "logits",
        "whisper_ane",
        "a Whisper with 2 + 2 layers, 512 frames, 32 tokens",
    ),
    "unet": Example(
        UNet,
        {"noisy": ((1, 4, 64, 64), np.float32)},
        "noise",
        "unet_ane",
        "a UNet, 64 x 64 latents",
        target="iPhone 12",
    ),
    "network": Example(
        OldNetwork,
        {"picture": ((1, 3, 64, 64), np.float32)},
        "scores",
        "neuralnetwork_ane",
        "an image network in the old .mlmodel format, 64 x 64 pixels",
        form="neuralnetwork",
    ),
    "tiny": Example(
        lambda: GPT2(TINY),
        {"input_ids": ((1, TINY.tokens), np.int32)},
        "logits",
        "gpt2_ane",
        "a GPT-2 with 1 layer, 16 tokens and 96 words, to try commands on (too small to get faster)",
    ),
}

VERSIONS = (16, 17, 18)
"""The iOS releases for which an example may be made: from the first with fp16 inputs on."""


def example(
    name: str, out: str | os.PathLike[str] | None = None, *, ios: int = 16, overwrite: bool = False
) -> Path:
    """Write a small model to try the library on: a real architecture with random weights.

    The same name always gives the same weights.

    Args:
        name: "gpt2", "llama", "bert", "vit", "whisper" or "unet"; "network", an .mlmodel of layers; or "tiny",
            a GPT-2 that takes a second to make, and is too small to gain anything.
        out: the package to write. Default: NAME.mlpackage (or .mlmodel) in the current folder.
        ios: the first version of iOS that runs it, 16 to 18. Caches need the states of 18.
        overwrite: may what is there be replaced?

    Returns:
        The path of the package.

    Raises:
        UnknownName: there is no such example.
        LoadError: no such version of iOS, or the path exists or cannot be written.
    """
    if name not in EXAMPLES:
        raise UnknownName("example", name, EXAMPLES)
    if ios not in VERSIONS:
        raise LoadError(f"no example is made for iOS {ios}; say one of {', '.join(map(str, VERSIONS))}")
    chosen = EXAMPLES[name]
    path = Path(f"{name}{chosen.suffix}" if out is None else out).expanduser().absolute()
    check_target(None, path, overwrite, chosen.suffix)
    model = _converted(chosen, ios)
    if chosen.form == "mlprogram":
        return save(load(model), path, overwrite=overwrite)
    content = model.get_spec().SerializeToString()
    return write_atomically(path, lambda file: file.write_bytes(content), overwrite)


def _converted(chosen: Example, ios: int) -> Any:
    """The model of an example; a program is in fp16 as coremltools computes by default."""
    frontend.register()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), quiet_host(), redirect_stderr(io.StringIO()):
        torch.manual_seed(0)
        module = chosen.module().eval()
        inputs = tuple(
            torch.zeros(shape, dtype=torch.int64 if kind is np.int32 else torch.float32)
            for shape, kind in chosen.inputs.values()
        )
        trace: Any = torch.jit.trace
        return ct.convert(
            trace(module, inputs, check_trace=False),
            inputs=[ct.TensorType(n, shape=s, dtype=kind) for n, (s, kind) in chosen.inputs.items()],
            outputs=[ct.TensorType(chosen.output)],
            convert_to=chosen.form,
            minimum_deployment_target=ct.target[f"iOS{ios}"] if chosen.form == "mlprogram" else None,
            skip_model_load=True,
        )
