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
from anesurgery.errors import UnknownName
from anesurgery.examples.language import GPT2, TOKENS, Bert, Llama
from anesurgery.examples.speech import FRAMES, MELS, Whisper
from anesurgery.examples.speech import TOKENS as SPOKEN
from anesurgery.examples.vision import SIDE, UNet, ViT
from anesurgery.files.package import save
from anesurgery.files.writing import check_target
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
    """

    module: Callable[[], torch.nn.Module]
    inputs: Mapping[str, tuple[tuple[int, ...], Any]]
    output: str
    recipe: str
    words: str


IDS = ((1, TOKENS), np.int32)
EXAMPLES = {
    "gpt2": Example(GPT2, {"input_ids": IDS}, "logits", "gpt2_ane", "a GPT-2 of 4 layers, 64 tokens"),
    "llama": Example(Llama, {"input_ids": IDS}, "logits", "decoder_ane", "a Llama of 4 layers, 64 tokens"),
    "bert": Example(
        Bert,
        {"input_ids": IDS, "attention_mask": IDS},
        "embedding",
        "encoder_ane",
        "a BERT of 4 layers with an attention mask, 64 tokens",
    ),
    "vit": Example(
        ViT,
        {"picture": ((1, 3, SIDE, SIDE), np.float32)},
        "scores",
        "vit_ane",
        "a vision transformer of 4 layers, 224 x 224 pixels",
    ),
    "whisper": Example(
        Whisper,
        {"mel": ((1, MELS, FRAMES), np.float32), "input_ids": ((1, SPOKEN), np.int32)},
        "logits",
        "whisper_ane",
        "a Whisper of 2 and 2 layers, 512 frames, 32 tokens",
    ),
    "unet": Example(
        UNet, {"noisy": ((1, 4, 64, 64), np.float32)}, "noise", "unet_ane", "a UNet, 64 x 64 latents"
    ),
}


def example(name: str, out: str | os.PathLike[str] | None = None, *, overwrite: bool = False) -> Path:
    """Write a small model to try the library on: a real architecture with random weights.

    The same name always gives the same weights.

    Args:
        name: "gpt2", "llama", "bert", "vit", "whisper" or "unet".
        out: the .mlpackage to write; NAME.mlpackage in the current folder when absent.
        overwrite: replace what is there.

    Returns:
        The path of the package.

    Raises:
        UnknownName: there is no such example.
        LoadError: the path exists, or cannot be written.
    """
    if name not in EXAMPLES:
        raise UnknownName("example", name, EXAMPLES)
    path = Path(f"{name}.mlpackage" if out is None else out).expanduser().absolute()
    check_target(None, path, overwrite)
    return save(load(_converted(EXAMPLES[name])), path, overwrite=overwrite)


def _converted(chosen: Example) -> Any:
    """The model of an example, for iOS 16, in fp16 as coremltools computes by default."""
    frontend.register()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), quiet_host(), redirect_stderr(io.StringIO()):
        torch.manual_seed(0)
        module = chosen.module().eval()
        given = tuple(
            torch.zeros(shape, dtype=torch.int64 if kind is np.int32 else torch.float32)
            for shape, kind in chosen.inputs.values()
        )
        trace: Any = torch.jit.trace
        return ct.convert(
            trace(module, given, check_trace=False),
            inputs=[ct.TensorType(n, shape=s, dtype=kind) for n, (s, kind) in chosen.inputs.items()],
            outputs=[ct.TensorType(chosen.output)],
            minimum_deployment_target=ct.target.iOS16,
            skip_model_load=True,
        )
